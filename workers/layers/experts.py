"""Mixtures of experts: our own module in place of transformers', on frozen weights that can be
split by rows.

transformers stacks the matrices of all experts in 3-D parameters [experts, rows, cols] and indexes
them; some architectures stack them transposed. Here each stack is a 2-D weight [experts · out, in]
in any storage format: every split by rows is valid, whatever the number of experts, and a rank
reads only the rows that it owns. Routers are small and decide which expert is met, so they stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ft_service.errors import SpecError
from workers.quant.grouped_linear import PLAIN, grouped_linear, grouped_matrices
from workers.quant.rowwise import RowQuantized

GATED = ("gate_up_proj", "down_proj")
"""The stacks of a gated mixture; of the rows of the first, half are the gate's: the upper half, or
every other one.
"""
UNGATED = ("up_proj", "down_proj")
_BIAS = "_bias"
SCALES_INPUT = "scales_input"
"""Attribute of experts whose shares multiply what goes into them; transformers' module takes all
tokens through all experts.
"""


class ExpertsLinear(nn.Module):
    """The frozen matrices of all experts, one above the other: weight [num_experts · out_features,
    in_features].
    """

    def __init__(
        self, stacked: Tensor, weight_class: type[RowQuantized] | None, *, transposed: bool = False
    ) -> None:
        """A layer on meta from a stack [experts, out, in], or `transposed` [experts, in, out], as
        its base's files hold it.

        Without a weight class it is stored in the dtype of `stacked`.
        """
        super().__init__()
        self.transposed = transposed
        self.num_experts, self.out_features, self.in_features = (
            stacked.mT if transposed else stacked
        ).shape
        shape = (self.num_experts * self.out_features, self.in_features)
        if weight_class is None:
            storage = torch.empty(shape, dtype=stacked.dtype, device="meta")
        else:
            storage = weight_class.empty(shape, stacked.dtype, "meta")
        self.weight = nn.Parameter(storage, requires_grad=False)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, in_features], sorted by expert, with `counts` [num_experts] rows each → [n,
        out_features], in x's dtype.
        """
        weight: Any = self.weight
        quantized = isinstance(weight, RowQuantized)
        parts = list(weight.parts) if quantized else [weight]
        name = weight.NUMERICS.name if quantized else PLAIN  # pyright: ignore[reportAttributeAccessIssue]
        return grouped_linear(x, counts, parts, name, self.out_features, self.in_features)


class FrozenExperts(nn.Module):
    """Experts, each on the tokens that the router sends to it; stands where transformers' module
    stood.
    """

    def __init__(
        self, stock: nn.Module, weight_classes: Mapping[str, type[RowQuantized] | None]
    ) -> None:
        super().__init__()
        said: Any = stock
        self.projections = projections_of(stock)
        for projection in self.projections:
            stacked = stock._parameters[projection]
            bias = stock._parameters.get(projection + _BIAS)
            assert stacked is not None
            layer = ExpertsLinear(
                stacked, weight_classes[projection], transposed=_is_transposed(stock)
            )
            setattr(self, projection, layer)
            stock._parameters[projection] = None
            if bias is not None:
                setattr(self, projection + _BIAS, bias)
                stock._parameters[projection + _BIAS] = None
        gate = getattr(said, "_apply_gate", None) or _halves(said.act_fn)
        self._activate: Callable[[Tensor], Tensor] = (
            gate if self.projections == GATED else said.act_fn.forward
        )
        self.post_expert_norm = (
            said.post_expert_norm if getattr(said, "has_post_expert_norm", False) else None
        )
        self.scales_input = getattr(stock, SCALES_INPUT, False)
        self.adapters: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
        """Stack → what is added to its product."""
        self.seen_turned = self.scales_input
        """Whether PEFT, which asks the module, takes the stacks' inputs for their outputs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [tokens, hidden], chosen experts and their shares [tokens, k] → [tokens,
        hidden].
        """
        first, second = self.projections
        k = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        experts = chosen[order]
        counts = chosen.new_zeros(getattr(self, first).num_experts).scatter_add_(
            0, chosen, torch.ones_like(chosen)
        )
        shares = top_k_weights.reshape(-1)[order].unsqueeze(1)
        x = hidden_states[order // k]
        x = self._project(first, x * shares if self.scales_input else x, counts, experts)
        y = self._project(second, self._activate(x), counts, experts)
        y = y if self.post_expert_norm is None else self.post_expert_norm(y)
        y = y if self.scales_input else y * shares
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
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


def declare_input_scaled(experts: Any) -> None:
    """Say of gated experts whose shares multiply what goes into them what other classes of experts
    say of themselves.
    """
    experts.has_gate = experts.is_transposed = experts.scales_input = True


def experts_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules inside decoder layers that hold stacked experts.

    Raises SpecError naming one that is not known here.
    """
    stacks = []
    for layer in layers:
        for name, module in layer.named_modules():
            if not _holds_stacks(module):
                continue
            reason = _unsupported(module)
            if reason is not None:
                raise SpecError(
                    f"The experts of this base ({type(module).__name__}, {name} in each decoder "
                    "layer) are not supported: "
                    f"{reason}. Supported are experts with stacks {' and '.join(GATED)}, or "
                    f"{' and '.join(UNGATED)}.",
                    param="model",
                )
            stacks.append(module)
    return stacks


def projections_of(module: nn.Module) -> tuple[str, str]:
    """The names of a module's two stacks of experts, in the order in which a token meets them."""
    return GATED if GATED[0] in module._parameters or hasattr(module, GATED[0]) else UNGATED


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module of transformers stacks its matrices [in, out]."""
    return bool(getattr(module, "is_transposed", False))


def _holds_stacks(module: nn.Module) -> bool:
    """Whether a module holds stacks of experts.

    Convolutions have 3-D weights too, and are read and gathered as any small tensor.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    stacks = [
        p
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and not name.startswith("conv")
    ]
    return bool(stacks)


def _unsupported(module: nn.Module) -> str | None:
    dimensions = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
    names = projections_of(module)
    stacks = dict.fromkeys(names, 3)
    biases = {name + _BIAS: 2 for name in names}
    if dimensions not in (stacks, stacks | biases):
        return "their parameters are " + ", ".join(sorted(dimensions))
    if not hasattr(module, "_apply_gate") and not (
        hasattr(module, "has_gate") and hasattr(module, "act_fn")
    ):
        return "they say nothing of their gate"
    return None


ADAPTER = "default"


class _Wrapper(nn.Module):
    """Where PEFT has a wrapper inside another."""


def adapt_experts(
    experts: FrozenExperts, ranks: Mapping[str, int], scales: Mapping[str, float]
) -> None:
    """Put adapters, on meta and in fp32, on stacks of one module.

    `ranks`, `scales`: by the name of the stack.
    """
    *inner, outer = [projection for projection in experts.projections if projection in ranks]
    for projection in (*inner, outer):
        holder: Any = experts if projection == outer else _Wrapper()
        if holder is not experts:
            experts.base_layer = holder
        _add_matrices(holder, getattr(experts, projection), ranks[projection], experts.seen_turned)
        # Not registered once more: its parameters have one name.
        experts.adapters[projection] = _ExpertsLora(holder, experts.seen_turned, scales[projection])


def _add_matrices(holder: nn.Module, layer: ExpertsLinear, r: int, turned: bool) -> None:
    """`turned`: PEFT takes the stack's inputs for its outputs."""
    wide, high = (
        (layer.out_features, layer.in_features)
        if turned
        else (layer.in_features, layer.out_features)
    )
    with torch.device("meta"):
        a = nn.Linear(wide, r * layer.num_experts, bias=False, dtype=torch.float32)
        b = nn.Linear(r * layer.num_experts, high, bias=False, dtype=torch.float32)
    holder.lora_A, holder.lora_B = nn.ModuleDict({ADAPTER: a}), nn.ModuleDict({ADAPTER: b})


class _ExpertsLora:
    """What the adapter of one stack adds to its product.

    No module: that which holds the matrices is one.
    """

    def __init__(self, holder: Any, turned: bool, scale: float) -> None:
        self._holder = holder
        self._turned = turned
        self.scale = scale

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, in], sorted by expert → [n, out]."""
        experts = counts.shape[0]
        a = self._holder.lora_A[ADAPTER].weight.to(x.dtype)
        b = self._holder.lora_B[ADAPTER].weight.to(x.dtype)
        a = a.unflatten(0, (experts, -1))  # [experts, r, wide]
        b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, high, r]
        first, second = (b.mT, a.mT) if self._turned else (a, b)
        return (
            grouped_matrices(
                grouped_matrices(x, first.contiguous(), counts), second.contiguous(), counts
            )
            * self.scale
        )
