"""Embedding and output head trained whole (`lora.modules_to_save`), beside the adapters.

The module's own parameters become fp32 masters; there is no second copy as PEFT has one. Tied,
embedding and head stay one parameter. What the base had is kept in the host's memory, each rank's
rows, to compare the tuned model with its base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.adapter_names import is_lora
from ft_service.bases.module_rules import OuterModules
from workers.base.frozen_weights import original_of
from workers.base.load import plain_name, rows_of
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized
from workers.ranks.sharding import reshard


def outer_modules(model: PreTrainedModel) -> OuterModules:
    """The names of a model's embedding and output head."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    return OuterModules(names[id(embedding)], names[id(head)], head.weight is embedding.weight)


def modules_trained_whole(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Full names. `wanted`: lora.modules_to_save.

    Raises SpecError as `OuterModules.chosen` does.
    """
    outer = outer_modules(model)
    held: dict[str, str] = {}
    for name in (outer.embedding, outer.head):
        weight: Any = model.get_submodule(name).weight
        if isinstance(weight.data, RowQuantized):
            held[name] = weight.data.NUMERICS.name
    return outer.chosen(wanted, held)


def train_whole(model: PreTrainedModel, chosen: Sequence[str]) -> dict[str, str]:
    """Let the chosen modules of a model on meta be trained, in fp32.

    Returns PEFT's second name of each parameter that two of them have, with its first.
    """
    made: dict[int, tuple[str, nn.Parameter]] = {}
    tied: dict[str, str] = {}
    for name in chosen:
        module = model.get_submodule(name)
        for own, parameter in module.named_parameters(recurse=False):
            full = f"base_model.model.{name}.{own}"
            master = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            first, module._parameters[own] = made.setdefault(id(parameter), (full, master))
            if first != full:
                tied[full] = first
    return tied


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules that are trained whole compute in `dtype` as FSDP2 lets sharded ones: by copies
    of their masters.
    """

    def cast(module: nn.Module, _inputs: Any) -> None:
        masters = {
            name: p for name, p in module._parameters.items() if p is not None and p.dtype != dtype
        }
        vars(module)["_ft_masters"] = masters
        for name, parameter in masters.items():
            module._parameters[name] = parameter.to(dtype)  # pyright: ignore[reportArgumentType]

    def put_back(module: nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(vars(module).pop("_ft_masters"))

    for module in {id(module): module for module, _ in _trained(model)}.values():
        module.register_forward_pre_hook(cast)
        module.register_forward_hook(put_back, always_call=True)


class EmbeddedRows:
    """The rows of an embedding for which gradients have come, of any rank: the others are not
    trained by the tokens so far.
    """

    def __init__(self, name: str, embedding: nn.Embedding, device: torch.device) -> None:
        """`name`: of the weight. `device`: for collectives."""
        self.name = name
        self._padding = embedding.padding_idx
        self._rows = torch.zeros(embedding.num_embeddings, dtype=torch.int32, device=device)
        self._hook = embedding.register_forward_hook(self._expect)

    @classmethod
    def of(cls, model: PeftModel) -> EmbeddedRows | None:
        """Those of a model whose embedding is trained whole.

        None: it is not, or is the head too.
        """
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        weight = embedding.weight
        if not weight.requires_grad or head.weight is weight:
            return None
        name = next(name for name, module in model.named_modules() if module is embedding)
        return cls(f"{plain_name(name)}.weight", embedding, weight.device)

    def _expect(self, _embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._mark, inputs[0]))

    def _mark(self, ids: Tensor, gradient: Tensor) -> None:
        came = gradient.ne(0).any(dim=-1).flatten().to(self._rows)
        self._rows.scatter_reduce_(0, ids.flatten().to(self._rows.device), came, "amax")

    def reached(self, parameter: nn.Parameter) -> bool:
        """Whether gradients have come for rows of this rank's shard.

        Called by all ranks together.
        """
        rows = self._rows.clone()
        dist.all_reduce(rows, dist.ReduceOp.MAX)
        if self._padding is not None:
            rows[self._padding] = 0  # which the embedding never trains
        start, end = rows_of(parameter)
        return bool(rows[start:end].any())

    def close(self) -> None:
        """Look no longer."""
        self._hook.remove()


@contextmanager
def original_modules(model: nn.Module) -> Iterator[None]:
    """While it is entered, modules that are trained whole have the base's values."""
    if not _trained(model):
        yield
        return
    reshard(model)  # the shards are changed, and what is gathered has other values
    swapped = [
        (local_rows(module.get_parameter(name).detach()), original_of(module, name))
        for module, name in _trained(model)
    ]
    once = list({id(original): (local, original) for local, original in swapped}.values())
    with torch.no_grad():
        kept = [local.clone() for local, _ in once]
        for local, original in once:
            local.copy_(original)
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for (local, _), before in zip(once, kept, strict=True):
                local.copy_(before)


def _trained(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules with the names of their parameters that are trained whole; tied ones in every
    place.
    """
    return [
        (module, own)
        for name, module in model.named_modules()
        for own, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and not is_lora(f"{name}.{own}")
    ]
