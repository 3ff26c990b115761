"""The kernel that dequantises NF4 without a GPU: compiled for those that are in use, and computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.support.triton_programs import run_with_triton

COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.quant.nf4_kernels import _dequantised

types = {"codes": "*u8", "scales": "*u8", "row_max": "*fp32", "values": "*fp32", "weight": "*bf16"}
types |= {"width": "i32", "blocks": "i32", "cols": "i32", "largest": "fp32", "block": "constexpr"}
for capability in (80, 89, 90, 100):
    source = ASTSource(fn=_dequantised, signature=types, constexprs={(9,): 1024})
    asm = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
    assert asm["cubin"] and "div.rn.f32" in asm["ptx"]
"""
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


def test_the_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    run_with_triton(COMPILES, tmp_path)


def test_the_kernel_gives_bitsandbytes_weights(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")
