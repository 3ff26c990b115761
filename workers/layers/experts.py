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
from workers.layers.expert_rows import (
    Route,
    gated_halves,
    kernels_for,
    rows_of_tokens,
    sums_by_token,
)
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
        self.gated_by_silu = self.projections == GATED and _is_silu_of_halves(self._activate)
        """Whether rows are gated by `gated_halves`, which does not keep the activation."""
        self.by_kernels = False
        """Whether kernels compute what happens to rows around the products, where they can."""
        self.post_expert_norm = (
            said.post_expert_norm if getattr(said, "has_post_expert_norm", False) else None
        )
        self.scales_input = getattr(stock, SCALES_INPUT, False)
        self.adapters: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        """Stack → what adds the adapter's part to its product."""
        self.seen_turned = self.scales_input
        """Whether PEFT, which asks the module, takes the stacks' inputs for their outputs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [tokens, hidden], chosen experts and their shares [tokens, k] → [tokens,
        hidden].
        """
        first, second = self.projections
        chosen = top_k_index.reshape(-1, top_k_index.shape[-1])
        shares = top_k_weights.reshape(chosen.shape)
        route = Route.of(chosen, getattr(self, first).num_experts)
        by = kernels_for(hidden_states) if self.by_kernels else None
        x = rows_of_tokens(hidden_states, route, by)
        if self.scales_input:
            x = x * shares.reshape(-1)[route.choices].unsqueeze(1)
        x = self._project(first, x, route, chosen)
        y = self._project(second, self._gated(x, by), route, chosen)
        y = y if self.post_expert_norm is None else self.post_expert_norm(y)
        scales = None if self.scales_input else shares
        return sums_by_token(y, scales, route, hidden_states.dtype, by)

    def _gated(self, x: Tensor, by: Any) -> Tensor:
        return gated_halves(x, by) if self.gated_by_silu else self._activate(x)

    def _project(self, projection: str, x: Tensor, route: Route, chosen: Tensor) -> Tensor:
        """x [n, in], sorted by expert → [n, out]. `chosen` [tokens, k]: experts."""
        y = getattr(self, projection)(x, route.counts)
        adapter = self.adapters.get(projection)
        if adapter is not None:
            y = adapter(x, route.counts, y)
        bias: Tensor | None = getattr(self, projection + _BIAS, None)
        if bias is not None:
            y.add_(bias[chosen.reshape(-1)[route.choices]].to(y.dtype))
        return y


def _halves(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A gate in the upper half of the rows, by an architecture's activation."""

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def _is_silu_of_halves(activate: Callable[[Tensor], Tensor]) -> bool:
    """Whether a gate is SiLU of the first half of the columns times the second, found by calling it
    on numbers beyond any limit at which others cut them.
    """
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(64, 32, generator=generator, device="cpu")
    both = both.mul_(torch.logspace(-3, 4, 64, device="cpu")[:, None]).bfloat16()
    gate, up = both.chunk(2, dim=-1)
    try:
        with torch.no_grad():
            found = activate(both)
    except Exception:  # it has tensors, which are on meta
        return False
    return found.shape == gate.shape and torch.equal(found, nn.functional.silu(gate) * up)


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

    def __call__(self, x: Tensor, counts: Tensor, y: Tensor) -> Tensor:
        """Add what it makes of x [n, in], sorted by expert, to y [n, out], in place."""
        experts = counts.shape[0]
        a = self._holder.lora_A[ADAPTER].weight.to(x.dtype)
        b = (self._holder.lora_B[ADAPTER].weight * self.scale).to(x.dtype)
        a = a.unflatten(0, (experts, -1))  # [experts, r, wide]
        b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, high, r]
        first, second = (b.mT, a.mT) if self._turned else (a, b)
        down = grouped_matrices(x, first.contiguous(), counts)
        return grouped_matrices(down, second.contiguous(), counts, onto=y)
