"""Dropout's mask as one kernel for CUDA, in Triton; import it only there: Triton comes with torch
for CUDA and not with others.

The arithmetic is `workers.layers.dropout`'s: one number is made of its token's key and its
channel's, hashed, and compared, all in registers; of the mask one byte an element is written and
nothing read but the keys.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 1024
"""Channels of one program."""


@triton.jit
def _kept(
    tokens, channels, kept, width, lowest, block: tl.constexpr
):  # Triton takes other annotations for types of its own
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    key = tl.load(channels + column, mask=inside, other=0) ^ tl.load(tokens + row)
    number = key.to(tl.uint32, bitcast=True)
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15)) * 0x846CA68B
    number = number ^ (number >> 16)
    above = number.to(tl.int32, bitcast=True) >= lowest
    tl.store(kept + row.to(tl.int64) * width + column, above, mask=inside)


def kept_mask(tokens: Tensor, channels: Tensor, lowest: int) -> Tensor:
    """bool [tokens, channels]: whether the hash of two keys is at least `lowest`.

    `tokens`, `channels`: int32 keys on CUDA.
    """
    kept = torch.empty(len(tokens), len(channels), dtype=torch.bool, device=tokens.device)
    if kept.numel():
        grid = (len(tokens), triton.cdiv(len(channels), _BLOCK))
        _kept[grid](tokens, channels, kept, len(channels), lowest, block=_BLOCK)  # pyright: ignore[reportIndexIssue]
    return kept
