"""Kernels for GPUs, our own in Triton and other packages', used where they compute what they are
compared with.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

AS_WRITTEN = {"enable_fp_fusion": False}
"""Options of a launch by which a product and a sum are rounded one after the other, as PyTorch's
separate operations do. Triton otherwise makes one instruction of them, in bf16 too, and leaves out
the rounding between.
"""

_ALIGNMENT = 16
"""Bytes: Triton compiles a kernel anew for a tensor whose address is no multiple of it."""

_WARM_UP = 20
"""Runs of each before anything is timed: the first compile, and a GPU that had nothing to do takes
some time to be fast.
"""
_RUNS = 10
"""Of what is timed."""

_MOST_COMPILED = 4096
"""Launches that a launcher remembers before it begins again.

Numbers of tokens differ from one micro-batch to the next.
"""

Compare = Callable[[Any, torch.device], None]
"""Raises AssertionError if the kernels of a module compute something else than plain operations."""


class KernelLauncher:
    """Launches a kernel of Triton's, whose parameters are tensors, then numbers, then constants, in
    this order.

    At every launch Triton looks at each argument for what the kernel has to be compiled for, which
    takes the host four times as long as everything else about it. It does so here once for each
    device, types and alignments of tensors, numbers and constants: a launch that was made before is
    made again with the compiled kernel that Triton returned.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: made by `triton.jit`."""
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[float, ...],
        *constants: int,
        num_warps: int = 4,
    ) -> None:
        """Launch it. A number's type is the same at every launch."""
        placed = [(tensor.dtype, tensor.data_ptr() % _ALIGNMENT) for tensor in tensors]
        key = (tensors[0].device, num_warps, numbers, constants, *placed)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants)
            return
        compiled = self._kernel[grid](
            *tensors, *numbers, *constants, num_warps=num_warps, **AS_WRITTEN
        )
        if (
            compiled is None or torch.version.hip is not None
        ):  # its interpreter; and for AMD's GPUs Triton looks at sizes too
            return
        if len(self._compiled) >= _MOST_COMPILED:
            self._compiled.clear()
        self._compiled[key] = compiled


def assert_faster(ours: Callable[[], Any], theirs: Callable[[], Any], device: torch.device) -> None:
    """Raise AssertionError if `ours` takes longer than `theirs` on a GPU, the best of several runs
    that it has to itself.
    """
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


def is_gpu(device: torch.device) -> bool:
    """Whether kernels are made for a device."""
    return device.type == "cuda"


@dataclass(eq=False)
class CheckedKernel:
    """A module's kernels, used on the devices that they are made for where they compute what plain
    operations do."""

    module: str
    """Imported where it is first asked for: of our own one that imports Triton, or a package."""
    compare: Compare
    suits: Callable[[torch.device], bool] = is_gpu
    """Whether they are made for a device, so that it is a fault if it goes without them."""

    def on(self, device: torch.device) -> Any:
        """The module, if a device uses its kernels; else None."""
        return checked(self.module, self.compare, device)[0] if self.suits(device) else None

    def fault(self, device: torch.device) -> str | None:
        """Why a device goes without them. None: it uses them, or they are not made for it."""
        return checked(self.module, self.compare, device)[1] if self.suits(device) else None


@functools.cache
def checked(module: str, compare: Compare, device: torch.device) -> tuple[Any, str | None]:
    """The kernels in a module, where it can be imported and they compute on the device what they
    are compared with; else None, and why.
    """
    try:
        # here: Triton takes a second to import, and is not everywhere.
        kernels = importlib.import_module(module)
        for _ in range(2):  # what launchers remember of the first time is launched the second
            compare(kernels, device)
    except Exception as error:  # without a C compiler, to name one, Triton raises what it likes
        log.warning("the kernels of %s are not used", module, exc_info=error)
        return None, f"{type(error).__name__}: {str(error).strip()[:300]}"
    return kernels, None
