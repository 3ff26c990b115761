"""Triton's kernels without a GPU: compiled for those that are in use, and computed by Triton's interpreter."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRITON = Path(sys.prefix, "triton")
"""Where `make test` puts Triton if PyTorch has brought none."""
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


def run(program: str, tmp_path: Path, **environment: str) -> None:
    """Run a program beside Triton, in a process of its own: its interpreter is chosen when it is imported."""
    if importlib.util.find_spec("triton") is None and not (TRITON / "triton").is_dir():
        pytest.skip("Triton is not installed")
    paths = os.pathsep.join([str(ROOT), str(TRITON)])
    variables = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    run(COMPILES, tmp_path)


def test_the_kernel_makes_the_masks_of_the_processor(tmp_path: Path) -> None:
    run(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def test_no_other_module_has_a_kernel() -> None:
    """One that is added is to be compiled here too."""
    found = set()
    for path in (ROOT / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                found.add((path.stem, node.name))
    assert found == {("mask_kernel", "_kept")}
