"""The kernel of dropout's masks without a GPU, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.support.triton_programs import run_with_triton

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


def test_the_kernel_makes_the_masks_of_the_processor(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")
