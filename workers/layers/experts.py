"""Mixtures of experts: our own module in place of transformers', on frozen weights that can be split by rows.

transformers stacks the matrices of all experts in 3-D parameters [experts, rows, cols] and indexes them; some architectures
stack them transposed. Here each stack is a 2-D weight [experts · out, in] in any storage format: every split by rows is valid,
whatever the number of experts, and a rank reads only the rows that it owns. Routers are small and decide which expert is met,
so they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ft_service.errors import SpecError
from workers.quant.grouped_linear import PLAIN, grouped_linear
from workers.quant.rowwise import RowQuantized

GATED = ("gate_up_proj", "down_proj")
"""The stacks of a gated mixture; of the rows of the first, half are the gate's: the upper half, or every other one."""
UNGATED = ("up_proj", "down_proj")
_BIAS = "_bias"
_INPUT_SCALED = "Llama4TextExperts"
"""Experts whose shares multiply what goes into them; transformers' module takes every token through every expert."""


class ExpertsLinear(nn.Module):
    """The frozen matrices of all experts, one above the other: weight [num_experts · out_features, in_features]."""

    def __init__(self, stacked: Tensor, weight_class: type[RowQuantized] | None, *, transposed: bool = False) -> None:
        """A layer on meta from a stack [experts, out, in], or `transposed` [experts, in, out], as its base's files hold it.

        Without a weight class it is stored in the dtype of `stacked`.
        """
        super().__init__()
        self.transposed = transposed
        self.num_experts, self.out_features, self.in_features = (stacked.mT if transposed else stacked).shape
        shape = (self.num_experts * self.out_features, self.in_features)
        if weight_class is None:
            storage = torch.empty(shape, dtype=stacked.dtype, device="meta")
        else:
            storage = weight_class.empty(shape, stacked.dtype, "meta")
        self.weight = nn.Parameter(storage, requires_grad=False)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, in_features], sorted by expert, with `counts` [num_experts] rows each → [n, out_features], in x's dtype."""
        weight: Any = self.weight
        quantized = isinstance(weight, RowQuantized)
        parts = list(weight.parts) if quantized else [weight]
        name = weight.NUMERICS.name if quantized else PLAIN  # pyright: ignore[reportAttributeAccessIssue]
        return grouped_linear(x, counts, parts, name, self.out_features, self.in_features)


class FrozenExperts(nn.Module):
    """Experts, each on the tokens that the router sends to it; stands where transformers' module stood."""

    def __init__(self, stock: nn.Module, weight_classes: Mapping[str, type[RowQuantized] | None]) -> None:
        super().__init__()
        said: Any = stock
        self.projections = projections_of(stock)
        for projection in self.projections:
            stacked, bias = stock._parameters[projection], stock._parameters.get(projection + _BIAS)
            assert stacked is not None
            layer = ExpertsLinear(stacked, weight_classes[projection], transposed=_is_transposed(stock))
            setattr(self, projection, layer)
            stock._parameters[projection] = None
            if bias is not None:
                setattr(self, projection + _BIAS, bias)
                stock._parameters[projection + _BIAS] = None
        gate = getattr(said, "_apply_gate", None) or _halves(said.act_fn)
        self._activate: Callable[[Tensor], Tensor] = gate if self.projections == GATED else said.act_fn.forward
        self.post_expert_norm = said.post_expert_norm if getattr(said, "has_post_expert_norm", False) else None
        self._scales_input = type(stock).__name__ == _INPUT_SCALED
        self.adapters: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
        """Stack → what is added to its product."""
        self.seen_turned = _is_transposed(stock) and not hasattr(stock, "is_transposed")
        """Whether PEFT, which asks the module, takes the stacks' inputs for their outputs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [tokens, hidden], chosen experts and their shares [tokens, k] → [tokens, hidden]."""
        first, second = self.projections
        k = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        experts = chosen[order]
        counts = chosen.new_zeros(getattr(self, first).num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        shares = top_k_weights.reshape(-1)[order].unsqueeze(1)
        x = hidden_states[order // k]
        x = self._project(first, x * shares if self._scales_input else x, counts, experts)
        y = self._project(second, self._activate(x), counts, experts)
        y = y if self.post_expert_norm is None else self.post_expert_norm(y)
        y = y if self._scales_input else y * shares
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y[back].unflatten(0, (-1, k)).sum(dim=1).to(hidden_states.dtype)

    def _project(self, projection: str, x: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        """x [n, in], sorted by expert → [n, out]. `experts`: the expert of each row."""
        y = getattr(self, projection)(x, counts)
        adapter = self.adapters.get(projection)
        y = y if adapter is None else y + adapter(x, counts)
        bias: Tensor | None = getattr(self, projection + _BIAS, None)
        return y if bias is None else y + bias[experts].to(y.dtype)


def _halves(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A gate in the upper half of the rows, by an architecture's activation."""

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def put_experts(block: nn.Module, name: str, experts: FrozenExperts) -> None:
    """Set experts in place of the child `name` of the module that calls them, which may have to call them otherwise."""
    setattr(block, name, experts)
    if experts._scales_input:
        block.forward = MethodType(_only_the_chosen, block)


def _only_the_chosen(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's mixture, in which a token meets the experts that it chose and no others → (hidden, router's logits).

    transformers takes every token through every expert, multiplied by zero for those that were not chosen.
    """
    hidden = hidden_states.reshape(-1, block.hidden_dim)
    logits = nn.functional.linear(hidden, block.router.weight)
    best, chosen = torch.topk(logits, block.top_k, dim=1)
    routed = block.experts(hidden, chosen, torch.sigmoid(best.float()).to(hidden.dtype))
    return block.shared_expert(hidden) + routed, logits


def experts_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules inside decoder layers that hold stacked experts. Raises SpecError naming one that is not known here."""
    stacks = []
    for layer in layers:
        for name, module in layer.named_modules():
            if not _holds_stacks(module):
                continue
            reason = _unsupported(module)
            if reason is not None:
                raise SpecError(
                    f"The experts of this base ({type(module).__name__}, {name} in each decoder layer) are not supported: "
                    f"{reason}. Supported are experts with stacks {' and '.join(GATED)}, or {' and '.join(UNGATED)}.",
                    param="model",
                )
            stacks.append(module)
    return stacks


def projections_of(module: nn.Module) -> tuple[str, str]:
    """The names of a module's two stacks of experts, in the order in which a token meets them."""
    return GATED if GATED[0] in module._parameters or hasattr(module, GATED[0]) else UNGATED


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module of transformers stacks its matrices [in, out]."""
    return bool(getattr(module, "is_transposed", type(module).__name__ == _INPUT_SCALED))


def _holds_stacks(module: nn.Module) -> bool:
    """Whether a module holds stacks of experts. Convolutions have 3-D weights too, and are read and gathered as any small
    tensor.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    stacks = [p for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and not name.startswith("conv")]
    return bool(stacks)


def _unsupported(module: nn.Module) -> str | None:
    found = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
    names = projections_of(module)
    stacks, biases = dict.fromkeys(names, 3), {name + _BIAS: 2 for name in names}
    if found not in (stacks, stacks | biases):
        return "their parameters are " + ", ".join(sorted(found))
    known = type(module).__name__ == _INPUT_SCALED or hasattr(module, "has_gate")
    if not known or not (hasattr(module, "_apply_gate") or hasattr(module, "act_fn")):
        return "they say nothing of their gate"
    return None
