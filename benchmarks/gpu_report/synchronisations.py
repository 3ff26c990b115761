"""Calls in the middle of a step for which the host waits for the device, each with the line of ours
that makes it.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_report.jobs import alone, built_once, prepare, steps_alone, train_on
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed_job import job, shapes_of

ROOT = Path(__file__).parents[2]
WATCHED = range(3, 6)
"""Steps behind which synchronisations of the next are counted."""
WAITING = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.is_nonzero.default",
}
"""What a processor's tensors show of it: operators whose result depends on values."""

BETWEEN = ("/warnings.py", "/_python_dispatch.py", "/_dynamo/eval_frame.py")
"""Files whose frames are only on the way to this module."""


class Found:
    """Counts by line."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, what: str) -> None:
        self.counts[f"{what} {line_of_ours()}"] += 1


class Dispatched(TorchDispatchMode):
    """Sees operators that read values of tensors."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITING:
            self.found.add(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


class Watch:
    """Counts from one step's report to another's: by CUDA's own warnings, or without CUDA by
    watching operators.
    """

    def __init__(self, found: Found, on_gpu: bool) -> None:
        self._found = found
        self._on_gpu = on_gpu
        self._mode = Dispatched(found)
        self._watching = False
        self.watched = False
        """Whether it has begun to count, and sees what there is to see."""

    def on_step(self, step: int) -> None:
        if (step in WATCHED) == self._watching:
            return
        self._watching = not self._watching
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("warn" if self._watching else "default")
        elif self._watching:
            self._mode.__enter__()
        else:
            self._mode.__exit__(None, None, None)
        if self._watching:
            self._see_one_of_its_own()

    def _see_one_of_its_own(self) -> None:
        """Raises RuntimeError if a synchronisation is not seen: none found would say nothing."""
        torch.zeros(1, device="cuda" if self._on_gpu else "cpu").item()
        if not self._found.counts:
            raise RuntimeError("a synchronisation that was made on purpose was not seen")
        self._found.counts.clear()
        self.watched = True

    def show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            self._found.add("")


def measure(context: Context) -> None:
    for shape in shapes_of(context):
        for precision in ("nf4",):
            with context.rows.case(f"{precision}, {shape}") as numbers:
                found = counted(context, precision, shape)
                steps = len(WATCHED)
                numbers["a_step"] = sum(found.counts.values()) / steps
                numbers["micro_batches"] = shape.micro_batches
            for line, count in found.counts.most_common():
                context.rows.add(f"{precision}, {shape}: {line}", a_step=count / steps)


def counted(context: Context, precision: str, shape: Any) -> Found:
    found = Found()
    watch = Watch(found, context.on_gpu)
    spec = job(context, shape, precision, WATCHED.stop + 1)
    run = prepare(context.scratch / "runs" / f"sync-{precision}-{shape.tokens}", spec)
    with alone(), steps_alone(), built_once(lambda: None), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = watch.show
        train_on(context.place, run, on_step=watch.on_step)
    assert watch.watched, "no step was watched"
    return found


def line_of_ours() -> str:
    """The innermost line of the workers that this thread is in, and the innermost of all."""
    stack = [
        frame
        for frame in traceback.extract_stack(sys._getframe(1))
        if "/gpu_report/" not in frame.filename
    ]
    stack = [frame for frame in stack if not frame.filename.endswith(BETWEEN)]
    ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT / "workers")]
    shown = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.line}"
        for frame in ours[-1:]
    ]
    inner = stack[-1] if stack else None
    if inner is not None and (not ours or inner is not ours[-1]):
        shown.append(f"by {'/'.join(Path(inner.filename).parts[-2:])}:{inner.lineno}")
    thread = (
        ""
        if threading.current_thread() is threading.main_thread()
        else f" (thread {threading.current_thread().name})"
    )
    return " ".join(shown) + thread
