"""bitsandbytes imported without its two side effects: torch's compiler is not loaded, and CUDA is
not initialised, so that a process may import it and fork. Its operators
(`torch.ops.bitsandbytes.*`) quantise and dequantise NF4 on CPU and CUDA.

bitsandbytes compiles one of its operators, which loads torch's compiler: 0.9 s at every start of a
rank, for an operator that is not used here. And it asks every GPU for its capability, which
initialises CUDA, although the library that it loads depends on CUDA's version alone.

Replaces: `torch.compile` and `torch.cuda.get_device_capability`, while bitsandbytes is imported.
Written for: bitsandbytes 0.50
Fails when upstream changes: tests/workers/patches/test_bitsandbytes_import.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A stand-in for `torch.compile`, called or used as a decorator with options."""
    return _as_it_is if function is None else function


def _unknown_capability(device: Any = None) -> tuple[int, int]:
    """A stand-in for `torch.cuda.get_device_capability`."""
    return (0, 0)


_compile = torch.compile  # pyright: ignore[reportAttributeAccessIssue]
torch.compile = _as_it_is  # pyright: ignore[reportAttributeAccessIssue]
_capability = torch.cuda.get_device_capability
torch.cuda.get_device_capability = _unknown_capability
try:
    import bitsandbytes as bitsandbytes
finally:
    torch.compile = _compile
    torch.cuda.get_device_capability = _capability
