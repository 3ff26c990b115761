"""The forms of merged models, by numbers that were worked out by hand: scales, ties, clamps, zeros
and blocks of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ft_service import kernel_limits
from ft_service.spec import SERVED_FORMS, ServedAs
from workers.quant import e2m1
from workers.quant.served_forms import (
    SHRINKS,
    AdapterFactors,
    rounded,
    rounded_rows,
    scale_of_whole,
    served_inputs,
    served_weight,
    to_8da4w,
    to_fp8,
    to_int4,
    to_int8,
    to_mxfp4,
    to_nvfp4,
    values_of,
    whole_scale,
)

FORMS: tuple[ServedAs, ...] = get_args(ServedAs)


def row(*values: float, cols: int = 0) -> Tensor:
    """One row, filled up with zeros."""
    return torch.tensor([[*values, *[0.0] * (cols - len(values))]])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_fp8_spans_each_row_up_to_448() -> None:
    codes, scales, whole = to_fp8(torch.cat([row(448, -1, 17), row(2, 1, 0), row(0, 0, 0)]))
    assert (scales.shape, scales.dtype, whole) == ((3, 1), torch.bfloat16, None)
    assert codes[0].float().tolist() == [448, -1, 16]
    assert codes[1].float().tolist() == [448, 224, 0]
    assert codes[2].float().tolist() == [0, 0, 0]
    assert float(scales[2]) == torch.finfo(torch.bfloat16).tiny
    assert float(scales[0]) == 1


def test_int8_spans_each_row_over_its_255_steps() -> None:
    codes, scales, _ = to_int8(torch.cat([row(127.5, 0.5, 1.5, -127.5), row(0, 0, 0, 0)]))
    assert codes.tolist() == [[127, 0, 2, -128], [0, 0, 0, 0]]
    assert scales[0].tolist() == [1]
    assert scales[1].tolist() == [torch.finfo(torch.float32).eps]


@pytest.mark.parametrize("to_codes", [partial(to_int4, shrinks=SHRINKS[:1]), to_8da4w])
def test_int4_spans_each_group_over_its_15_steps(to_codes: Any) -> None:
    rows = torch.cat([row(7.5, 0.5, 15, -1), row(-7.5, 1.5, 0, 0)])
    codes, scales, _ = to_codes(rows, 2)
    assert scales[0].tolist() == [1, 2]
    assert 0 < float(scales[1, 1]) < 1e-37
    assert codes.tolist() == [[7, 0, 7, 0], [-8, 2, 0, 0]]
    assert scales.dtype == torch.bfloat16


def test_of_the_shares_of_the_largest_that_with_the_least_error_is_taken() -> None:
    assert (SHRINKS[0], SHRINKS[-1], len(SHRINKS)) == (1, pytest.approx(0.7), 13)
    rows = drawn(8, 256)
    codes, scales, _ = to_int4(rows, 32)
    errors = []
    for shrink in SHRINKS:
        own_codes, own_scales, _ = to_int4(rows, 32, (shrink,))
        errors.append((values_of(own_codes, own_scales) - rows).view(8, -1, 32).square().sum(2))
    found = (values_of(codes, scales) - rows).view(8, -1, 32).square().sum(2)
    assert torch.equal(found, torch.stack(errors).amin(0))
    assert (found < errors[0]).any()
    tie = row(*[1.0] * 32)  # by the whole of the largest and by less of it
    assert float(to_int4(tie, 32).scales.float()) <= 1 / 7
    assert torch.equal(to_int4(torch.zeros(1, 32), 32).codes, torch.zeros(1, 32))


def test_the_scale_of_a_whole_weight_is_the_power_of_two_above() -> None:
    span = 448 * 6
    for largest, expected in (
        (span * 0.999, 1.0),
        (span, 2.0),
        (span * 1.999, 2.0),
        (span / 4, 0.5),
        (0.0, 1.0),
        (1e-36, 2.0**-126),
        (3e38, 2.0**117),
    ):
        assert float(whole_scale(torch.tensor(largest))) == expected, largest


def test_nvfp4_has_a_scale_for_sixteen_columns() -> None:
    rows = row(6, 5, -0.25, 0.75, *[0] * 12, 12, 1, cols=32)
    codes, scales, whole = to_nvfp4(rows, torch.tensor(1.0))
    assert scales.float().tolist() == [[1, 2]]
    assert codes.shape == (1, 16)
    assert values_of(codes, scales, whole)[0, :18].tolist() == [6, 4, 0, 1, *[0] * 12, 12, 1]
    least = torch.finfo(torch.float8_e4m3fn).tiny
    _, scales, _ = to_nvfp4(row(1e-9, cols=16), torch.tensor(1.0))
    assert float(scales.float()) == least
    codes, scales, whole = to_nvfp4(row(1e6, cols=16), torch.tensor(1.0))
    assert float(scales.float()) == 448
    assert values_of(codes, scales, whole).amax() == 448 * 6


def test_mxfp4_goes_to_the_next_power_where_seven_would_be_cut() -> None:
    """A block's largest of 7 is 8 there; what is just below it is 6."""
    for largest, exponent, value in (
        (6.0, 127, 6.0),
        (6.99, 127, 6.0),
        (7.0, 128, 8.0),
        (4.0, 127, 4.0),
        (3.99, 127, 4.0),
        (3.49, 126, 3.0),
        (2.0**-140, 1, 0.0),
    ):
        codes, scales, whole = to_mxfp4(row(largest, cols=32))
        assert (scales.dtype, scales.tolist()) == (torch.uint8, [[exponent]]), largest
        assert float(values_of(codes, scales, whole)[0, 0]) == value
    zeros = to_mxfp4(torch.zeros(2, 64))
    assert zeros.scales.tolist() == [[0, 0], [0, 0]]
    assert not values_of(*zeros).any()
    for huge in (2.9e38, 3e38, torch.finfo(torch.float32).max):
        values = values_of(*to_mxfp4(row(huge, -huge, cols=32)))
        assert values[0, :2].tolist() == [1.5 * 2.0**127, -1.5 * 2.0**127], huge


@pytest.mark.parametrize("form", FORMS)
def test_a_job_is_trained_with_one_rounding_of_each_form(form: ServedAs) -> None:
    rows = drawn(4, 256)
    codes, scales, whole = rounded(rows, form)
    group = SERVED_FORMS[form].group
    assert scales.shape == (4, 256 // group if group else 1)
    assert (whole is not None) == (form == "nvfp4")
    error = float((values_of(codes, scales, whole) - rows).norm() / rows.norm())
    bits = 8 if form in ("fp8", "int8") else 4
    assert (0.004 if bits == 8 else 0.05) < error < (0.04 if bits == 8 else 0.16)
    if form == "nvfp4":
        _, _, given = rounded(rows, form, torch.tensor(1.0))
        assert given == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("height", [1, 3, 8])
def test_base_and_adapter_are_rounded_together_in_blocks_of_rows(
    form: ServedAs, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = drawn(8, 128).bfloat16()
    adapter = AdapterFactors(drawn(2, 128, seed=1), drawn(8, 2, seed=2), 0.5)
    sums = (base.double() + 0.5 * adapter.b.double() @ adapter.a.double()).float()
    monkeypatch.setitem(kernel_limits.SERVED_BLOCK, "cpu", height * 128 + 100)
    found = list(rounded_rows([base], "", adapter, form))
    assert [own.rows for own in found] == [
        slice(start, min(start + height, 8)) for start in range(0, 8, height)
    ]
    assert torch.equal(torch.cat([own.sums for own in found]), sums)
    whole = rounded(sums, form)
    assert torch.equal(torch.cat([own.codes.codes.float() for own in found]), whole.codes.float())
    served = served_weight([base], "", adapter, form, torch.bfloat16)
    assert (served.dtype, served.shape) == (torch.bfloat16, (8, 128))
    assert torch.equal(served, values_of(*whole).bfloat16())
    if whole.whole is not None:
        assert torch.equal(scale_of_whole([base], "", adapter), whole.whole)


def test_a_row_wider_than_a_block_is_rounded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_limits.SERVED_BLOCK, "cpu", 16)
    adapter = AdapterFactors(torch.zeros(1, 64), torch.zeros(3, 1), 1.0)
    rows = [own.rows for own in rounded_rows([drawn(3, 64)], "", adapter, "fp8")]
    assert rows == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_inputs_are_rounded_token_by_token_where_the_form_s_reader_rounds_them() -> None:
    x = torch.tensor([[-1.0, 0.0, 254.0, 2.4], [2.0, 4.0, 255.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    expected = [[-1.0, 0.0, 254.0, 2.0], [2.0, 4.0, 255.0, 0.0], [0.0] * 4]
    assert served_inputs(x, "8da4w").tolist() == expected
    assert served_inputs(-x, "8da4w").tolist() == [[-value for value in one] for one in expected]
    low = served_inputs(x.bfloat16(), "8da4w")
    assert low.dtype == torch.bfloat16
    above = torch.tensor([[1.0, 2.0, 2.55]])  # 0 is a number of every token
    assert torch.allclose(served_inputs(above, "8da4w"), above, atol=1e-6)
    for form in FORMS:
        if form != "8da4w":
            assert served_inputs(x, form) is x


def test_codes_of_four_bits_are_decoded_as_they_were_packed() -> None:
    codes = e2m1.encode(row(6, -0.5, 3, 1))
    scales = torch.tensor([[1.0]]).to(torch.float8_e4m3fn)
    values = values_of(codes, scales, torch.tensor(2.0))
    assert values.tolist() == [[12, -1, 6, 2]]
