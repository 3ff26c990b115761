"""A mask function in transformers' registry for as long as a trial lasts: no public method takes
one out again.

Replaces: an entry of `transformers.AttentionMaskInterface`, which is gone afterwards.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_mask_interface.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionMaskInterface


@contextmanager
def masks_made_by(function: Callable[..., Any], name: str) -> Iterator[None]:
    """While it is entered, models whose attention is `name` have their masks made by a function."""
    AttentionMaskInterface.register(name, function)
    try:
        yield
    finally:
        AttentionMaskInterface._global_mapping.pop(name)
