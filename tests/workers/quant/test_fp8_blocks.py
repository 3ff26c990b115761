"""FP8 with scales of blocks: values rounded once, rows independent of each other, the bytes."""

from __future__ import annotations

import pytest
import torch

from tests.support.training.allocations import Allocations
from workers.quant import fp8, fp8_blocks
from workers.quant.fp8_blocks import FP8BlocksParts


def published(rows: int, cols: int) -> tuple[FP8BlocksParts, torch.Tensor]:
    """Codes with scales that the rows of 128 x 128 blocks share, far apart; and the exact values in
    fp64.
    """
    random = torch.Generator().manual_seed(rows + cols)
    codes = (
        torch.randn(rows, cols, generator=random).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    )
    of_blocks = torch.logspace(-9, 3, -(-rows // 128) * -(-cols // 128))[
        torch.randperm(-(-rows // 128) * -(-cols // 128))
    ]
    scales = of_blocks.view(-(-rows // 128), -1)[torch.arange(rows) // 128]
    return FP8BlocksParts(codes, scales), codes.double() * scales.double()[
        :, torch.arange(cols) // 128
    ]


@pytest.mark.parametrize(
    ("rows", "cols"), [(300, 384), (300, 200), (7, 128), (5, 100), (900, 1000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantising_rounds_the_exact_product_once(
    rows: int, cols: int, dtype: torch.dtype
) -> None:
    parts, exact = published(rows, cols)
    assert torch.equal(fp8_blocks.dequantize(parts, cols, dtype), exact.float().to(dtype))
    for start, end in [(0, 1), (rows // 2, rows), (3, 3)]:
        some = FP8BlocksParts(parts.codes[start:end], parts.scales[start:end])
        assert torch.equal(
            fp8_blocks.dequantize(some, cols, dtype), exact[start:end].float().to(dtype)
        )


def test_no_fp32_copy_is_made() -> None:
    parts, _ = published(900, 1000)
    with Allocations() as seen:
        fp8_blocks.dequantize(parts, 1000, torch.bfloat16)
    assert seen.made == {torch.bfloat16}


@pytest.mark.parametrize(
    ("cols", "bytes_of_row"), [(4096, 4096 + 4 * 32), (4097, 4097 + 4 * 33), (100, 104)]
)
def test_bytes_of_a_row(cols: int, bytes_of_row: int) -> None:
    made = fp8_blocks.quantize(torch.randn(3, cols))
    planned = fp8_blocks.empty_parts(3, cols, "cpu")
    for part, same in zip(made, planned, strict=True):
        assert (part.shape, part.dtype) == (same.shape, same.dtype)
    assert sum(part.nbytes for part in made) == 3 * bytes_of_row


@pytest.mark.parametrize("cols", [384, 200])
def test_a_weight_that_is_quantised_here_has_a_scale_for_every_128_columns_of_each_row(
    cols: int,
) -> None:
    weight = torch.randn(13, cols, generator=torch.Generator().manual_seed(1))
    weight[:, 128:] *= 1e6
    weight[3] = 0
    whole = fp8_blocks.quantize(weight)
    back = fp8_blocks.dequantize(whole, cols, torch.float32)
    for columns in (slice(0, 128), slice(128, cols)):
        assert ((back - weight)[:, columns].norm() / weight[:, columns].norm()) < 0.03
    by_rows = fp8.dequantize(fp8.quantize(weight), cols, torch.float32)
    assert (by_rows - weight)[:, :128].norm() > 2 * (back - weight)[:, :128].norm(), (
        "one scale would be the largest column's"
    )
    assert not back[3].any()
    for start, end in [(0, 5), (5, 13), (4, 4)]:
        part = fp8_blocks.quantize(weight[start:end])
        assert torch.equal(part.codes.view(torch.uint8), whole.codes[start:end].view(torch.uint8))
        assert torch.equal(part.scales, whole.scales[start:end])
