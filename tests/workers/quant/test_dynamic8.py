"""Dynamic 8-bit codes: their values, the nearest of them, and scales of blocks."""

from __future__ import annotations

import pytest
import torch

from ft_service.kernel_limits import MOMENT_BLOCK
from workers.quant.dynamic8 import blocks_of, decode, encode, table, zero_code

CPU = torch.device("cpu")
SIGNS = pytest.mark.parametrize("signed", [True, False])


@SIGNS
def test_values_lie_between_a_ten_millionth_and_one_and_are_denser_the_larger(signed: bool) -> None:
    values = table(signed, CPU)
    above = values[values > 0]
    assert (len(values), values.dtype) == (256, torch.float32)
    assert torch.equal(values, values.unique())
    assert len(above) == (128 if signed else 255)
    assert len(values[values < 0]) == (127 if signed else 0)
    assert float(values[zero_code(signed)]) == 0
    assert zero_code(signed) == (127 if signed else 0)
    assert float(above[-1]) == 1
    counts = [int(((above > 10.0**-i) & (above < 10.0 ** (1 - i))).sum()) for i in range(7, 0, -1)]
    assert counts == [2**i if signed else 2 ** (i + 1) for i in range(7)]
    assert float(above[0]) == pytest.approx(5.5e-7 if signed else 3.25e-7)
    assert float(above[-2]) == pytest.approx(1 - 0.9 / (128 if signed else 256))


@SIGNS
def test_every_value_has_the_nearest_code_and_a_block_its_largest_magnitude(signed: bool) -> None:
    values = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.abs()
    values[1] *= 1e-30
    values[2, 140:] = 0
    values[3] = 0
    codes, scales = encode(values, signed=signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, values.shape)
    assert blocks_of(300) == 3 == scales.shape[1]
    for block in range(3):
        cols = slice(block * MOMENT_BLOCK, (block + 1) * MOMENT_BLOCK)
        largest = values[:, cols].abs().amax(1)
        assert torch.equal(scales[:, block], largest)
        shares = values[:, cols] / largest.clamp(min=1e-38)[:, None]
        apart = (shares[..., None] - table(signed, CPU)).abs()
        found = (shares - table(signed, CPU)[codes[:, cols].int()]).abs()
        assert torch.allclose(found, apart.amin(-1), atol=1e-7)
    back = decode(codes, scales, signed=signed)
    assert torch.equal(back[:, :1], scales[:, :1] * table(signed, CPU)[codes[:, :1].int()])
    assert float((back[0] - values[0]).norm() / values[0].norm()) < 0.02
    assert not back[3].any()
    assert not back[2, 2 * MOMENT_BLOCK :].any()
    again, of_again = encode(values[1:2], signed=signed)
    assert torch.equal(again, codes[1:2])
    assert torch.equal(of_again, scales[1:2])


@SIGNS
def test_what_is_halfway_between_two_values_has_the_lower_code(signed: bool) -> None:
    values = table(signed, CPU)
    halfway = (values[:-1] + values[1:]) / 2
    rows = torch.ones(255, 2)
    rows[:, 1] = halfway
    codes, _ = encode(rows, signed=signed)
    assert torch.equal(codes[:, 1].int(), torch.arange(255, dtype=torch.int32))
    assert torch.equal(codes[:, 0].int(), torch.full((255,), 255, dtype=torch.int32))


@pytest.mark.parametrize(("cols", "blocks"), [(1, 1), (128, 1), (129, 2), (256, 2)])
def test_a_block_that_is_begun_has_a_scale(cols: int, blocks: int) -> None:
    values = torch.ones(2, cols)
    codes, scales = encode(values, signed=True)
    assert (blocks_of(cols), tuple(scales.shape)) == (blocks, (2, blocks))
    assert torch.equal(decode(codes, scales, signed=True), values)
