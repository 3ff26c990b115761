"""The forms in which merged models are served: rounding to them, row by row.

    fp8     codes e4m3 [rows, cols], a scale bf16 for each row
    int4    codes from -8 to 7 [rows, cols], a scale bf16 for each group of columns

A row's codes depend on that row alone. `ft merge` writes what these functions give, in the layouts
of `workers.exports.compressed_tensors`; a job with `precision.served_as` multiplies by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ft_service.kernel_limits import SERVED_BLOCK
from ft_service.spec import SERVED_FORMS, ServedAs
from workers.quant import frozen_linear
from workers.quant.division import divided
from workers.quant.fp8 import LARGEST

_INT4 = -8, 7
_INT4_HALF = 7.5
"""Half of the span of the codes, which a group's largest magnitude becomes."""
SHRINKS = tuple(torch.linspace(1.0, 0.7, 13).tolist())
"""Shares of a group's largest magnitude that are tried as its scale: the one with the least squared
error is taken.
"""
_LEAST = torch.finfo(torch.bfloat16).tiny


class AdapterFactors(NamedTuple):
    """What an adapter adds to a weight [rows, cols]: scale · B A."""

    a: Tensor
    """[r, cols]"""
    b: Tensor
    """[rows, r]"""
    scale: float


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] e4m3 and scales [rows, 1] bf16 of fp32 rows.

    The codes belong to the scale as stored.
    """
    scale = divided(rows.abs().amax(dim=1, keepdim=True), LARGEST).clamp(min=_LEAST).bfloat16()
    return (rows / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def to_int4(rows: Tensor, group: int, shrinks: Sequence[float] = SHRINKS) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] fp32, whole numbers, and scales [rows, cols / group] bf16 of fp32 rows.

    `shrinks`: as `SHRINKS`.
    """
    grouped = rows.unflatten(1, (-1, group))
    largest = grouped.abs().amax(dim=2, keepdim=True).clamp(min=_LEAST)
    best: tuple[Tensor, ...] | None = None
    for shrink in shrinks:
        scale = divided(largest * shrink, _INT4_HALF).bfloat16()
        codes = (grouped / scale.float()).round_().clamp_(*_INT4)
        if len(shrinks) == 1:
            return codes.flatten(1), scale.squeeze(2)
        error = (codes * scale.float() - grouped).square().sum(dim=2, keepdim=True)
        if best is None:
            best = error, codes, scale
            continue
        better = error < best[0]
        best = tuple(
            torch.where(better, new, old)
            for new, old in zip((error, codes, scale), best, strict=True)
        )
    assert best is not None
    return best[1].flatten(1), best[2].squeeze(2)


def rounded(rows: Tensor, form: ServedAs) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 rows as a job is trained with, in one pass: in INT4 a group's
    largest magnitude alone makes its scale, which training gets used to.
    """
    group = SERVED_FORMS[form].group
    return to_int4(rows, group, SHRINKS[:1]) if group else to_fp8(rows)


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes [rows, cols] and scales [rows, groups] stand for, fp32 [rows, cols]: exact
    products.
    """
    grouped = codes.float().unflatten(1, (scales.shape[1], -1))
    return (grouped * scales.float()[:, :, None]).flatten(1)


class RoundedRows(NamedTuple):
    """Some rows of a weight that is served."""

    rows: slice
    sums: Tensor
    """W + scale · B A, fp32."""
    codes: Tensor
    scales: Tensor


def rounded_rows(
    parts: Sequence[Tensor], stored_as: str, adapter: AdapterFactors, form: ServedAs
) -> Iterator[RoundedRows]:
    """The rows of W + scale · B A, in their order, rounded. `parts`, `stored_as`: the storage of W
    [rows, cols], as `workers.quant.frozen_linear` has it.

    Summed up in fp64, so that the order in which a device adds r products is not seen in fp32, but
    for one sum in many millions: training on a GPU, and merging on a processor, in blocks of other
    sizes, round the same numbers.
    """
    a, b = adapter.a.double(), adapter.b.double()
    cols = a.shape[1]
    height = max(1, SERVED_BLOCK[a.device.type] // max(1, cols))
    for start in range(0, len(b), height):
        rows = slice(start, min(start + height, len(b)))
        weight = frozen_linear.rows_of(parts, stored_as, cols, rows).double()
        sums = weight.addmm_(b[rows], a, alpha=adapter.scale).float()
        yield RoundedRows(rows, sums, *rounded(sums, form))


def served_weight(
    parts: Sequence[Tensor],
    stored_as: str,
    adapter: AdapterFactors,
    form: ServedAs,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [rows, cols] in `dtype` that is served: `rounded_rows`, as the values that they
    stand for.
    """
    a, b, _ = adapter
    weight = torch.empty(b.shape[0], a.shape[1], dtype=dtype, device=b.device)
    for some in rounded_rows(parts, stored_as, adapter, form):
        weight[some.rows] = values_of(some.codes, some.scales)
    return weight
