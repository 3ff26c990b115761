"""Bytes of live tensors, from what PyTorch's allocator reports to its profiler: every block, from
every caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that `work` had allocated at any moment, besides those that were there
    before.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    results: Any = recorded.profiler
    memory = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
