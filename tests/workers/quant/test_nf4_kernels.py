"""The kernel that dequantises NF4 without a GPU, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.support.triton_programs import run_with_triton

COMPUTES = """
import torch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from workers.quant import nf4, nf4_kernels

generator = torch.Generator().manual_seed(0)
values = nf4.values(torch.device("cpu"))
assert len(values) == 16 and values[0] == -1 and values[15] == 1 and values.diff().min() > 0
for rows, cols in ((1, 64), (3, 100), (2, 4096), (5, 33), (0, 64)):
    for dtype in (torch.bfloat16, torch.float32):
        spread = torch.logspace(-20, 20, max(1, rows))[:rows, None]
        parts = nf4.quantize(torch.randn(rows, cols, generator=generator).pow(3) * spread)
        found = nf4_kernels.dequantised(*parts, values, cols, dtype)
        assert torch.equal(found, nf4._dequantize_by_parts(parts, cols, dtype)), (rows, cols, dtype)
"""


def test_the_kernel_gives_bitsandbytes_weights(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")
