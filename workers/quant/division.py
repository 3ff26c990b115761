"""Division by a number, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded to the nearest, in x's dtype, or in fp32 if x holds whole numbers.

    By a number, PyTorch multiplies with its reciprocal on GPUs: what lies between two codes of a
    format would become the one on a GPU and the other on a processor.
    """
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return x / torch.full((), by, dtype=dtype, device=x.device)
