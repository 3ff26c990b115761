"""Kernels for GPUs, our own in Triton and other packages', used where they compute what they are compared with."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

AS_WRITTEN = {"enable_fp_fusion": False}
"""Options of a launch by which a product and a sum are rounded one after the other, as PyTorch's separate operations do. Triton
otherwise makes one instruction of them, in bf16 too, and leaves out the rounding between."""

_WARM_UP = 20
"""Runs of each before anything is timed: the first compile, and a GPU that had nothing to do takes some time to be fast."""
_RUNS = 10
"""Of what is timed."""

Compare = Callable[[Any, torch.device], None]
"""Raises AssertionError if the kernels of a module compute something else than plain operations."""


def assert_faster(ours: Callable[[], Any], theirs: Callable[[], Any], device: torch.device) -> None:
    """Raise AssertionError if `ours` takes longer than `theirs` on a GPU, the best of several runs that it has to itself."""
    best = [float("inf"), float("inf")]
    for _ in range(_WARM_UP):
        ours()
        theirs()
    for _ in range(_RUNS):
        for number, act in enumerate((ours, theirs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            act()
            end.record()
            torch.cuda.synchronize(device)
            best[number] = min(best[number], begin.elapsed_time(end))
    assert best[0] <= best[1], f"it takes {best[0]:.3f} ms instead of {best[1]:.3f}"


@functools.cache
def checked(module: str, compare: Compare, device: torch.device) -> tuple[Any, str | None]:
    """The kernels in a module, where it can be imported and they compute on the device what they are compared with; else None,
    and why.
    """
    try:
        kernels = importlib.import_module(module)  # here: Triton takes a second to import, and is not everywhere
        compare(kernels, device)
    except Exception as error:  # without a C compiler, to name one, Triton raises what it likes
        log.warning("the kernels of %s are not used", module, exc_info=error)
        return None, f"{type(error).__name__}: {str(error).strip()[:300]}"
    return kernels, None
