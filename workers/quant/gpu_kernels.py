"""Kernels of our own for GPUs: the modules in Triton, used on a device on which they compute what they are compared with."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

Compare = Callable[[Any, torch.device], None]
"""Raises AssertionError if the kernels of a module compute something else than plain operations."""


@functools.cache
def checked(module: str, compare: Compare, device: torch.device) -> tuple[Any, str | None]:
    """The kernels in a module, where Triton is there and they compute on the device what they are compared with; else None, and
    why.
    """
    try:
        kernels = importlib.import_module(module)  # here: Triton takes a second to import, and is not everywhere
        compare(kernels, device)
    except Exception as error:  # without a C compiler, to name one, Triton raises what it likes
        log.warning("the kernels of %s are not used", module, exc_info=error)
        return None, f"{type(error).__name__}: {str(error).strip()[:300]}"
    return kernels, None
