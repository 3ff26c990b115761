"""Cross entropy and its gradient as one kernel for CUDA in Triton; import it only there.

Logits are read twice and overwritten by their gradient: 6 bytes a logit in bf16, in place of 24.
`workers.model.head` says what is computed.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_WORDS = 8192
"""Logits that a program has at a time."""


@triton.jit
def _cross_entropy(
    logits,
    targets,
    factors,
    logs,
    correct,
    words,
    graded: tl.constexpr,
    weighted: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * words
    target = tl.load(targets + row)
    largest = float("-inf")
    place = target * 0
    others = 0.0
    for step in range(0, steps):
        column = step * block + tl.arange(0, block)
        value = tl.load(own + column, mask=column < words, other=float("-inf")).to(tl.float32)
        highest = tl.max(value, axis=0)
        place = tl.where(highest > largest, step * block + tl.argmax(value, axis=0), place)
        highest = tl.maximum(highest, largest)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        shares = tl.where(column == target, 0.0, tl.exp(value - shift))
        others = others * tl.exp(largest - shift) + tl.sum(shares, axis=0)
        largest = highest
    right = tl.load(own + target).to(tl.float32) - largest
    tl.debug_barrier()  # all of the program have read it before any of it writes the gradient there
    total = others + tl.exp(right)
    log_total = tl.log(total)
    tl.store(logs + row, right - log_total)
    tl.store(correct + row, place == target)
    if graded:
        factor = tl.load(factors + row) if weighted else 1.0
        for step in range(0, steps):
            column = step * block + tl.arange(0, block)
            value = tl.load(own + column, mask=column < words, other=float("-inf")).to(tl.float32)
            # What is missing to a probability near 1 is the sum of the others, and not a
            # difference, which would be rounded.
            share = tl.where(
                column == target, -tl.div_rn(others, total), tl.exp(value - largest - log_total)
            )
            tl.store(
                own + column, (share * factor).to(logits.dtype.element_ty), mask=column < words
            )


def cross_entropy(
    logits: Tensor, targets: Tensor, factors: Tensor | None, *, graded: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, fp32 [rows], and whether each is the first of the most
    likely words, bool [rows].

    logits [rows, words], contiguous; targets int64 [rows]. `graded`: the logits become the gradient
    of the sum of minus the log-probabilities, each times its factor, fp32 [rows]; None: 1.
    """
    rows, words = logits.shape
    logs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        given = logs if factors is None else factors
        block = min(_WORDS, triton.next_power_of_2(words))
        _cross_entropy[(rows,)](  # pyright: ignore[reportIndexIssue]
            logits, targets, given, logs, correct, words, graded=graded, weighted=factors is not None,
            steps=triton.cdiv(words, block), block=block, num_warps=16,
        )  # fmt: skip
    return logs, correct
