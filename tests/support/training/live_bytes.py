"""Bytes of live tensors, from what PyTorch's allocator reports to its profiler: every block, from
every caller.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that `work` had allocated at any moment, besides those that were there
    before.

    By the allocator's own sum: a block that a thread of gloo frees, which may be the last to hold
    what a collective was given, is in no event of the profiler.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with (
        _sum_of_all_threads(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        work()
    results: Any = recorded.profiler
    tree = results.kineto_results.experimental_event_tree()
    memory = sorted(_memory_events(tree), key=lambda event: event.start_time_ns)
    if not memory:
        return 0
    sums = [event.extra_fields.total_allocated for event in memory]
    before = sums[0] - memory[0].extra_fields.alloc_size
    return max(before, *sums) - before


@contextmanager
def _sum_of_all_threads() -> Iterator[None]:
    """The allocator adds up blocks of every thread, not only of those that are profiled."""
    library = ctypes.CDLL(torch._C.__file__)
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def _memory_events(tree: list[Any]) -> Iterator[Any]:
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            yield event
