"""The forms in which merged models are served: rounding to them, row by row.

    fp8     codes e4m3 [rows, cols], a scale bf16 for each row
    int4    codes from -8 to 7 [rows, cols], a scale bf16 for each group of columns
    8da4w   the same, with torchao's arithmetic; inputs of the layer are rounded too
    int8    codes from -128 to 127 [rows, cols], a scale fp32 for each row; torchao's arithmetic
    nvfp4   codes E2M1, two in a byte [rows, cols / 2], a scale e4m3 for 16 columns, and one fp32
            of the whole weight, a power of two
    mxfp4   codes E2M1, two in a byte [rows, cols / 2], an exponent of two for 32 columns

A row's codes depend on that row alone, and in NVFP4 on the largest magnitude of the whole weight.
`ft merge` writes what these functions give, in the layouts of `workers.exports.compressed_tensors`,
and the exports of torchao hold it in torchao's; a job with `precision.served_as` multiplies by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ft_service.kernel_limits import SERVED_BLOCK
from ft_service.spec import SERVED_FORMS, ServedAs
from workers.quant import e2m1, frozen_linear, mxfp4
from workers.quant.division import divided
from workers.quant.fp8 import LARGEST

_INT4 = -8, 7
_INT4_HALF = 7.5
"""Half of the span of the codes, which a group's largest magnitude becomes."""
_INT8 = -128, 127
_INT8_HALF = 127.5
_INT8_LEAST = torch.finfo(torch.float32).eps
"""torchao's smallest scale in INT8 by rows."""
SHRINKS = tuple(torch.linspace(1.0, 0.7, 13).tolist())
"""Shares of a group's largest magnitude that are tried as its scale: the one with the least squared
error is taken.
"""
_LEAST = torch.finfo(torch.bfloat16).tiny
_MOST_MXFP4_EXPONENT = 2 * mxfp4.BIAS - 2
"""The specification's for fp32, whose largest power is 2 ** 127: that less 2, as 6 = 1.5 · 2². Above
it the largest codes would be infinite.
"""
_LEAST_E4M3 = torch.finfo(torch.float8_e4m3fn).tiny
"""torchao's smallest scale of a block in NVFP4: all are normal numbers."""


class AdapterFactors(NamedTuple):
    """What an adapter adds to a weight [rows, cols]: scale · B A."""

    a: Tensor
    """[r, cols]"""
    b: Tensor
    """[rows, r]"""
    scale: float


class Codes(NamedTuple):
    """Some rows of a weight in a form, as the head of this module says."""

    codes: Tensor
    scales: Tensor
    whole: Tensor | None = None
    """In NVFP4 the scale of the whole weight, fp32 []."""


def to_fp8(rows: Tensor) -> Codes:
    """The form fp8 of fp32 rows. The codes belong to the scale as stored."""
    scale = divided(rows.abs().amax(dim=1, keepdim=True), LARGEST).clamp(min=_LEAST).bfloat16()
    return Codes((rows / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale)


def to_int4(rows: Tensor, group: int, shrinks: Sequence[float] = SHRINKS) -> Codes:
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
            return Codes(codes.flatten(1), scale.squeeze(2))
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
    return Codes(best[1].flatten(1), best[2].squeeze(2))


def to_8da4w(rows: Tensor, group: int) -> Codes:
    """The form 8da4w of fp32 rows: codes fp32, whole numbers, and scales [rows, cols / group] bf16,
    as ExecuTorch has them.
    """
    grouped = rows.unflatten(1, (-1, group))
    largest = grouped.abs().amax(dim=2, keepdim=True)
    scale = divided(largest, _INT4_HALF).clamp(min=_LEAST).bfloat16()
    codes = (grouped * scale.float().reciprocal()).round_().clamp_(*_INT4)
    return Codes(codes.flatten(1), scale.squeeze(2))


def to_int8(rows: Tensor) -> Codes:
    """The form int8 of fp32 rows: codes fp32, whole numbers, and scales [rows, 1] fp32."""
    scale = divided(rows.abs().amax(dim=1, keepdim=True), _INT8_HALF).clamp(min=_INT8_LEAST)
    return Codes((rows * scale.reciprocal()).round_().clamp_(*_INT8), scale)


def whole_scale(largest: Tensor) -> Tensor:
    """The scale of a whole weight in NVFP4, fp32 [], of its largest magnitude: the power of two by
    which no scale of a block is above 448.

    Products with a power of two are exact, so that all who multiply or divide by this scale, or by
    its inverse, get the same values, and these are numbers of bf16.
    """
    exponent = torch.frexp(divided(largest, LARGEST * e2m1.LARGEST))[1]  # 2 ** exponent is above it
    return mxfp4.powers((exponent + mxfp4.BIAS).clamp(1, mxfp4.NO_NUMBER - 1).to(torch.uint8))


def to_nvfp4(rows: Tensor, whole: Tensor) -> Codes:
    """The form nvfp4 of fp32 rows of a weight whose `whole_scale` is `whole`: scales [rows, cols /
    16] e4m3.
    """
    scaled, scales = _nvfp4_scaled(rows, whole)
    return Codes(e2m1.encode(scaled.flatten(1)), scales, whole)


def _nvfp4_scaled(rows: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of their block's scale [rows, blocks, 16], at most 6, and the scales."""
    grouped = rows.unflatten(1, (-1, SERVED_FORMS["nvfp4"].group))
    largest = divided(grouped.abs().amax(dim=2), e2m1.LARGEST)
    scales = (largest / whole).clamp(_LEAST_E4M3, LARGEST).to(torch.float8_e4m3fn)
    inverse = whole.reciprocal() / scales.float()
    return (grouped * inverse[:, :, None]).clamp_(-e2m1.LARGEST, e2m1.LARGEST), scales


def to_mxfp4(rows: Tensor) -> Codes:
    """The form mxfp4 of fp32 rows: exponents [rows, cols / 32] u8, chosen by the largest magnitude
    of a block alone.

    It is rounded to one bit behind the first before its power of two is taken (compressed-tensors'
    rule, and `ScaleCalculationMode.EVEN` of torchao): a block is cut at six times its scale only
    where rounding to the nearest code cuts it anyway.
    """
    scaled, exponents = _mxfp4_scaled(rows)
    return Codes(e2m1.encode(scaled.flatten(1)), exponents)


def _mxfp4_scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of their block's scale [rows, blocks, 32], at most 6, and the exponents."""
    grouped = rows.unflatten(1, (-1, SERVED_FORMS["mxfp4"].group))
    largest = grouped.abs().amax(dim=2)
    mantissa, exponent = torch.frexp(largest)  # of which 0.875 = 1.75 / 2 is the first to round up
    exponent = exponent + (mantissa >= 0.875).int() - 3
    exponents = (exponent + mxfp4.BIAS).clamp(1, _MOST_MXFP4_EXPONENT)
    exponents = torch.where(largest == 0, 0, exponents).to(torch.uint8)
    # A zero block has the smallest exponent, and zeros by any.
    scales = mxfp4.powers(exponents.clamp(min=1))
    return (grouped / scales[:, :, None]).clamp_(-e2m1.LARGEST, e2m1.LARGEST), exponents


def rounded(rows: Tensor, form: ServedAs, whole: Tensor | None = None) -> Codes:
    """fp32 rows in a form as a job is trained with it, in one pass: in INT4 and MXFP4 a group's
    largest magnitude alone makes its scale, which training gets used to.

    `whole`: in NVFP4 the scale of the whole weight; None: the rows are the whole.
    """
    if form == "nvfp4":
        return to_nvfp4(rows, whole_scale(rows.abs().amax()) if whole is None else whole)
    if form == "mxfp4":
        return to_mxfp4(rows)
    if form == "fp8":
        return to_fp8(rows)
    if form == "int8":
        return to_int8(rows)
    group = SERVED_FORMS[form].group
    return to_8da4w(rows, group) if form == "8da4w" else to_int4(rows, group, SHRINKS[:1])


def values_of(codes: Tensor, scales: Tensor, whole: Tensor | None = None) -> Tensor:
    """What `Codes` stand for, fp32 [rows, cols]: products that are exact, but in INT8."""
    if codes.dtype == torch.uint8:
        if scales.dtype == torch.uint8:
            each = mxfp4.powers(scales)
        else:
            assert whole is not None
            each = scales.float() * whole
        cols = 2 * codes.shape[1]
        return e2m1.decode(codes, each, cols // scales.shape[1], cols, torch.float32)
    grouped = codes.float().unflatten(1, (scales.shape[1], -1))
    return (grouped * scales.float()[:, :, None]).flatten(1)


def _rounded_values(rows: Tensor, form: ServedAs, whole: Tensor | None) -> Tensor:
    """`values_of` of `rounded`, without packing codes that are unpacked at once."""
    if form == "nvfp4":
        assert whole is not None
        scaled, scales = _nvfp4_scaled(rows, whole)
        return e2m1.nearest_(scaled).mul_((scales.float() * whole)[:, :, None]).flatten(1)
    if form == "mxfp4":
        scaled, exponents = _mxfp4_scaled(rows)
        return e2m1.nearest_(scaled).mul_(mxfp4.powers(exponents)[:, :, None]).flatten(1)
    return values_of(*rounded(rows, form))


class RoundedRows(NamedTuple):
    """Some rows of a weight that is served."""

    rows: slice
    sums: Tensor
    """W + scale · B A, fp32."""
    codes: Codes


def _sums(
    parts: Sequence[Tensor], stored_as: str, adapter: AdapterFactors
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of W + scale · B A, in their order, fp32. `parts`, `stored_as`: the storage of W
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
        yield rows, weight.addmm_(b[rows], a, alpha=adapter.scale).float()


def _sums_and_scale(
    parts: Sequence[Tensor], stored_as: str, adapter: AdapterFactors, form: ServedAs
) -> tuple[Iterator[tuple[slice, Tensor]], Tensor | None]:
    """`_sums`, and in NVFP4 the scale of the whole weight, for which all sums are made first, and
    kept.
    """
    sums = _sums(parts, stored_as, adapter)
    if form != "nvfp4":
        return sums, None
    kept = list(sums)
    return iter(kept), _scale_of(kept)


def _scale_of(sums: Iterable[tuple[slice, Tensor]]) -> Tensor:
    return whole_scale(torch.stack([own.abs().amax() for _, own in sums]).amax())


def scale_of_whole(parts: Sequence[Tensor], stored_as: str, adapter: AdapterFactors) -> Tensor:
    """The scale of the whole of W + scale · B A in NVFP4, fp32 []."""
    return _scale_of(_sums(parts, stored_as, adapter))


def rounded_rows(
    parts: Sequence[Tensor], stored_as: str, adapter: AdapterFactors, form: ServedAs
) -> Iterator[RoundedRows]:
    """The rows of W + scale · B A, in their order, rounded. `parts`, `stored_as`: the storage of
    the whole W [rows, cols], as `workers.quant.frozen_linear` has it.
    """
    sums, whole = _sums_and_scale(parts, stored_as, adapter, form)
    for rows, own in sums:
        yield RoundedRows(rows, own, rounded(own, form, whole))


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
    sums, whole = _sums_and_scale(parts, stored_as, adapter, form)
    for rows, own in sums:
        weight[rows] = _rounded_values(own, form, whole)
    return weight


def served_inputs(x: Tensor, form: ServedAs) -> Tensor:
    """Inputs [.., cols] as the form's reader multiplies them, in x's dtype: in 8da4w rounded token
    by token to codes from -128 to 127 between the token's smallest and largest number, computed in
    fp32 by torchao's rule (`int8_asym_per_token`).
    """
    if not SERVED_FORMS[form].rounds_inputs:
        return x
    low, high = _INT8
    values = x.float()
    least = values.amin(-1, keepdim=True).clamp(max=0)
    most = values.amax(-1, keepdim=True).clamp(min=0)
    scale = divided(most - least, high - low).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (low - (least / scale).round_()).clamp_(low, high)
    codes = (values * scale.reciprocal()).round_().add_(zero).clamp_(low, high)
    return codes.sub_(zero).mul_(scale).to(x.dtype)
