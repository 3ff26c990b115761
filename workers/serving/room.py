"""Memory of a host for what layers know of sequences.

A GPU refuses what it has no room for; a host has processes killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIRST_CAPACITY = 64
"""Tokens that keys and values have room for from the beginning (cached_attention.py)."""
SPARE = 0.5
"""Share of spare capacity that they may have."""


@dataclass(frozen=True)
class Room:
    """Bytes for what is known of all sequences together, and what one of them takes."""

    bytes: int
    fixed: int = 0
    """Bytes of a sequence, whatever its length."""
    of_token: float = 0.0
    """Bytes of each of its tokens."""

    @classmethod
    def measured(cls, room: int, shorter: tuple[int, int], longer: tuple[int, int]) -> Room:
        """`shorter`, `longer`: tokens of a sequence, and bytes that are known of it."""
        (few, less), (many, more) = shorter, longer
        of_token = max(0.0, (more - less) / (many - few))
        return cls(room, max(0, round(less - few * of_token)), of_token * (1 + SPARE))

    def taken(self, tokens: int) -> int:
        """Bytes of a sequence of this many tokens, at most."""
        return self.fixed + round(self.of_token * max(tokens, FIRST_CAPACITY))

    @property
    def most_tokens(self) -> int:
        """Tokens that a sequence alone may have."""
        return int(max(0, self.bytes - self.fixed) / self.of_token) if self.of_token else 2**31


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in what an architecture keeps of a sequence, each once: its classes differ."""
    seen = set[int]() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner = (
        value
        if isinstance(value, (list, tuple))
        else [*(value.values() if isinstance(value, dict) else ())]
    )
    for part in (*inner, *vars(value).values()) if hasattr(value, "__dict__") else inner:
        yield from tensors_in(part, seen)


@contextmanager
def same_errors() -> Iterator[None]:
    """While it is entered, a tensor for which a host has no memory is torch.OutOfMemoryError, as it
    is on a GPU: PyTorch tells it by the text alone.
    """
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
