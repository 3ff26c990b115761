"""Adapters on stacks of experts, as PEFT puts them on parameters (`target_parameters`): the same matrices under the same names.

PEFT wraps the module that holds the parameters, once for each of them. So the adapter of the last stack is the module's own,
`experts.lora_A`, and that of one before it lies inside, `experts.base_layer.lora_A`. Rows of A [experts · r, in] are expert by
expert; columns of B [out, r · experts] are not: every expert has one in each `experts` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.experts import ExpertsLinear, FrozenExperts
from workers.quant.grouped_adapter import grouped_matrices

ADAPTER = "default"


class _Wrapper(nn.Module):
    """Where PEFT has a wrapper inside another."""


def adapt_experts(experts: FrozenExperts, ranks: Mapping[str, int], scales: Mapping[str, float]) -> None:
    """Put adapters, on meta and in fp32, on stacks of one module. `ranks`, `scales`: by the name of the stack."""
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
    wide, high = (layer.out_features, layer.in_features) if turned else (layer.in_features, layer.out_features)
    with torch.device("meta"):
        a = nn.Linear(wide, r * layer.num_experts, bias=False, dtype=torch.float32)
        b = nn.Linear(r * layer.num_experts, high, bias=False, dtype=torch.float32)
    holder.lora_A, holder.lora_B = nn.ModuleDict({ADAPTER: a}), nn.ModuleDict({ADAPTER: b})


class _ExpertsLora:
    """What the adapter of one stack adds to its product. No module: that which holds the matrices is one."""

    def __init__(self, holder: Any, turned: bool, scale: float) -> None:
        self._holder, self._turned, self.scale = holder, turned, scale

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, in], sorted by expert → [n, out]."""
        experts = counts.shape[0]
        a = self._holder.lora_A[ADAPTER].weight.to(x.dtype)
        b = self._holder.lora_B[ADAPTER].weight.to(x.dtype)
        a = a.unflatten(0, (experts, -1))  # [experts, r, wide]
        b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, high, r]
        first, second = (b.mT, a.mT) if self._turned else (a, b)
        return grouped_matrices(grouped_matrices(x, first.contiguous(), counts), second.contiguous(), counts) * self.scale
