"""Weights in FP8, NVFP4 and MXFP4 dequantised by one kernel, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.triton_programs import run_with_triton
from workers.quant import decoding

COMPUTES = """
import torch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from unittest.mock import patch
from workers.quant import code_kernels, decoding, fp8, fp8_blocks, mxfp4, nvfp4

decoding._compare(code_kernels, torch.device("cpu"))
generator = torch.Generator().manual_seed(1)
for format in (fp8, fp8_blocks, mxfp4, nvfp4):
    for rows, cols in ((3, 32), (7, 200), (2, 2500), (0, 64)):
        weight = torch.randn(rows, cols, generator=generator)
        parts = format.quantize(weight)
        for dtype in (torch.bfloat16, torch.float32):
            expected = format.dequantize(parts, cols, dtype)
            with patch.object(decoding.KERNEL, "on", lambda device: code_kernels):
                found = format.dequantize(parts, cols, dtype)
            assert torch.equal(found, expected), (format.__name__, rows, cols, dtype)
"""


def test_every_format_has_the_bits_of_several_operations(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("changed", [1.01, -1.0])
def test_a_kernel_that_gives_other_weights_is_not_used(changed: float) -> None:
    def decoded(codes: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(codes), 100), changed, dtype=torch.bfloat16)

    with pytest.raises(AssertionError, match="other weights"):
        decoding._compare(SimpleNamespace(decoded=decoded), torch.device("cpu"))
