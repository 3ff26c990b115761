"""Triton's kernels without a GPU: compiled for those that are in use, and computed by Triton's interpreter."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.triton_programs import run_with_triton

ROOT = Path(__file__).parents[3]
COMPILES = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.layers.mask_kernel import _kept

types = {"tokens": "*i32", "channels": "*i32", "kept": "*i1", "width": "i32", "lowest": "i32", "block": "constexpr"}
for capability in (80, 89, 90, 100):
    source = ASTSource(fn=_kept, signature=types, constexprs={(5,): 1024})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
"""
COMPUTES = """
import torch
from workers.layers.dropout import _kept_by_parts
from workers.layers.mask_kernel import kept_mask

generator = torch.Generator().manual_seed(0)
for tokens, channels in ((1, 1), (7, 100), (5, 1024), (3, 1025)):
    keys = [torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, generator=generator) for n in (tokens, channels)]
    for lowest in (-(2**31), -(2**31) + round(0.05 * 2**32), 0, 2**31 - 6):
        assert torch.equal(kept_mask(*keys, lowest), _kept_by_parts(*keys, lowest)), (tokens, channels, lowest)
"""


def test_the_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    run_with_triton(COMPILES, tmp_path)


def test_the_kernel_makes_the_masks_of_the_processor(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def test_no_other_module_has_a_kernel() -> None:
    """One that is added is to be compiled in a test, as here, in others of this folder, and in tests/workers/quant."""
    found = set()
    for path in (ROOT / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                found.add((path.stem, node.name))
    of_fp8 = {("fp8_kernels", name) for name in ("_quantised", "_representable", "_scaled", "_turned")}
    of_layers = {
        ("fused_kernels", f"_{name}") for name in ["normed", "normed_grad", "turned_heads", "rotated", "gated", "gated_grad"]
    }
    assert found == {
        ("mask_kernel", "_kept"),
        ("loss_kernel", "_cross_entropy"),
        ("low_rank_kernel", "_added"),
        ("nf4_kernels", "_dequantised"),
        *of_fp8,
        *of_layers,
    }
