"""Groups of modules that are gathered together: by decoder layers, by size, or all at once.

Embedding and head are groups of their own because they are the largest tensors there are: in the
root's group every rank would hold both for the whole step. Tied, they are one tensor and so one
group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ft_service.bases.module_rules import kept_plain
from ft_service.spec import DistributedOptions, WrapBySize
from workers.layers.experts import FrozenExperts
from workers.layers.linear import FrozenLinear


@dataclass(frozen=True)
class ShardGroup:
    """Modules that are gathered together."""

    modules: list[nn.Module]
    reshard_after_forward: bool | int
    in_backward: bool = True
    """Whether backward needs the weights: that of an embedding does not, not even to train it."""

    @property
    def handle(self) -> FSDPModule:
        """The group's FSDP module once it is sharded: any of its modules, since they share their
        state.
        """
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module

    def shares_with(self, other: ShardGroup) -> bool:
        mine = {id(p) for module in self.modules for p in module.parameters()}
        return any(id(p) in mine for module in other.modules for p in module.parameters())


def grouped(
    model: PreTrainedModel | PeftModel, layers: Sequence[nn.Module], options: DistributedOptions
) -> list[ShardGroup]:
    """All groups but the root's, in the order of the forward; an outer group before those inside
    it.
    """
    if options.wrap == "none":
        return []
    if isinstance(options.wrap, WrapBySize):
        return _by_size(model, options.wrap.min_params, options.reshard_after_forward)
    return _by_layers(model, layers, options.reshard_after_forward)


def _by_layers(
    model: nn.Module, layers: Sequence[nn.Module], reshard_after_forward: bool | int
) -> list[ShardGroup]:
    """Embeddings, every decoder layer, and the rest (norm and head), which backward begins with and
    which is kept for it.
    """
    outer = list(_outer_modules(model, {id(layer) for layer in layers}))
    embeddings: list[nn.Module] = [module for module in outer if isinstance(module, nn.Embedding)]
    first = ShardGroup(embeddings, reshard_after_forward=True, in_backward=False)
    last = ShardGroup(
        [module for module in outer if not isinstance(module, nn.Embedding)],
        reshard_after_forward=False,
    )
    if first.shares_with(last):
        first = ShardGroup(first.modules + last.modules, reshard_after_forward=False)
        last = ShardGroup([], False)
    middle = [ShardGroup([layer], reshard_after_forward) for layer in layers]
    return [group for group in (first, *middle, last) if group.modules]


def _outer_modules(module: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    """The outermost modules outside the decoder layers that hold parameters and contain no
    layer.
    """
    if id(module) in layers:
        return
    holds = isinstance(module, BaseTunerLayer) or any(
        True for _ in module.parameters(recurse=False)
    )
    if holds and not any(id(inner) in layers for inner in module.modules()):
        yield module
        return
    for child in module.children():
        yield from _outer_modules(child, layers)


def _by_size(
    model: PreTrainedModel | PeftModel, min_params: int, reshard_after_forward: bool | int
) -> list[ShardGroup]:
    """Modules whose forward is called and that hold `min_params` not counting inner groups.

    Tied weights stay with the root.
    """
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    places = Counter(id(p) for m in base.modules() for p in m.parameters(recurse=False))
    tied = {key for key, count in places.items() if count > 1}
    chosen: set[int] = set()
    for child in base.children():  # not the model itself: PEFT calls its forward past all hooks
        _choose(child, min_params, tied, chosen)
    called = [module for module in base.modules() if id(module) in chosen]
    return [
        ShardGroup(
            [module], reshard_after_forward, in_backward=not isinstance(module, nn.Embedding)
        )
        for module in called
    ]


def _choose(
    module: nn.Module, min_params: int, tied: set[int], chosen: set[int]
) -> list[nn.Parameter]:
    """Add to `chosen`, inner modules first. Returns the parameters that are outside all of them."""
    # Two use their adapters' weights without calling them, the other calls what is in it for each
    # sample.
    whole = isinstance(module, BaseTunerLayer | FrozenExperts) or getattr(
        module, "by_sample", False
    )
    left = list(module.parameters(recurse=whole))
    if not whole:
        for name, child in module.named_children():
            left += (
                list(child.parameters())
                if kept_plain(name)
                else _choose(child, min_params, tied, chosen)
            )
    # A group that held one place of a tied weight, and not the other, would part them.
    if (
        sum(p.numel() for p in left) < min_params
        or not _is_called(module)
        or any(id(p) in tied for p in left)
    ):
        return left
    chosen.add(id(module))
    return []


def _is_called(module: nn.Module) -> bool:
    """Whether the weights of a module are used by its own forward alone, for which FSDP2 gathers
    them.

    Containers have no forward. A convolution's weight is given to functions that scan, and the
    module around others that hold matrices of their own, such as routers and some experts, may use
    these without calling them.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    calls = isinstance(module, BaseTunerLayer | FrozenExperts | nn.Embedding) or type(module) in (
        nn.Linear,
        FrozenLinear,
    )
    return calls or all(p.ndim < 2 for p in module.parameters(recurse=False))
