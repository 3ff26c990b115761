"""CPU seconds that a test file may take: a budget for each, on the processor that the budgets were
measured on.

A run is compared with them by a loop that it times itself, in CPU seconds: a slower processor makes
no file dearer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

BUDGET = 8
"""CPU seconds of a file that `ABOVE` does not name."""
ABOVE = {
    "tests/api/page/test_browser.py": 76,
    "tests/e2e/test_storm.py": 42,
    "tests/e2e/test_upgrade.py": 37,
    "tests/ft_service/launcher/kubernetes/test_kubernetes_launcher.py": 52,
    "tests/workers/base/test_quantized_rows.py": 40,
    "tests/workers/ranks/test_sharding.py": 39,
    "tests/workers/test_plan.py": 37,
    "tests/workers/test_train.py": 54,
    "tests/workers/tinker/test_command_loop.py": 51,
    "tests/workers/tinker/test_reinforcement.py": 44,
}
"""File → CPU seconds, of those above `BUDGET`. Numbers here only become smaller, and no row is
added.
"""
ALLOWED = 1.5
"""Times its budget that a file may take before a run that holds budgets has failed."""
LOOPS = 1_000_000
REFERENCE_SECONDS = 0.045
"""CPU seconds of `LOOPS` where the budgets were measured, while that machine did nothing else."""


def budget_of(file: str) -> int:
    """Return a file's CPU seconds."""
    return ABOVE.get(file, BUDGET)


def over_budget(seconds: Mapping[str, float], slowness: float) -> dict[str, float]:
    """Return the files that took more than `ALLOWED` times their budget, and how many times.

    Args:
        seconds: CPU seconds by file.
        slowness: As of `slowness`.
    """
    times = {file: used / budget_of(file) / slowness for file, used in seconds.items()}
    return {file: factor for file, factor in times.items() if factor > ALLOWED}


def slowness() -> float:
    """Return how many times slower than where the budgets were measured this processor is, at
    least 1.
    """
    begun = time.process_time()
    total = 0
    for number in range(LOOPS):
        total += number % 7
    return max(1.0, (time.process_time() - begun) / REFERENCE_SECONDS)
