"""CPU seconds that a test file may take: a budget for each, on the processor that the budgets were
measured on.

A run is compared with them by a loop that it times itself, in CPU seconds: a slower processor makes
no file dearer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

BUDGET = 8
"""CPU seconds of a file that `ABOVE` does not name."""
ABOVE = {
    "tests/api/page/test_browser.py": 23,
    "tests/api/page/test_every_view.py": 13,
    "tests/api/page/test_new_job_form.py": 14,
    "tests/api/page/test_sign_on.py": 14,
    "tests/api/routes/test_organization.py": 10,
    "tests/api/test_one_number.py": 9,
    "tests/api/test_walk_of_routes.py": 9,
    "tests/api/transfer/test_chat_answer.py": 14,
    "tests/api/wire/test_data_views.py": 10,
    "tests/e2e/test_reinforcement.py": 11,
    "tests/e2e/test_service.py": 11,
    "tests/e2e/test_storm.py": 19,
    "tests/e2e/test_tinker.py": 20,
    "tests/e2e/test_upgrade.py": 18,
    "tests/ft_service/bases/test_describing.py": 10,
    "tests/ft_service/cli/local/test_plan_command.py": 13,
    "tests/ft_service/control/bases/test_pull_runner.py": 10,
    "tests/ft_service/data/test_template_process.py": 12,
    "tests/ft_service/launcher/kubernetes/test_kubernetes_launcher.py": 15,
    "tests/ft_service/supervisor/test_supervisor.py": 9,
    "tests/test_leftovers.py": 10,
    "tests/workers/base/test_quantized_rows.py": 14,
    "tests/workers/ranks/test_sharding.py": 13,
    "tests/workers/test_plan.py": 13,
    "tests/workers/test_train.py": 13,
    "tests/workers/tinker/test_command_loop.py": 14,
    "tests/workers/tinker/test_reinforcement.py": 11,
}
"""File → CPU seconds, of those above `BUDGET`. Numbers here only become smaller, and no row is
added.
"""
ALLOWED = 1.5
"""Times its budget that a file may take before a run names it."""
HELD = 3.0
"""Times its budget that a file may take before a run that holds budgets has failed. On machines of
one kind the same file differs by a factor of two, with what else the caches are used for.
"""
MOST_LOAD = 4.0
"""Load average for each processor above which budgets are not held. At 2.5 a file took 11 CPU
seconds that took 57 at 15.
"""
LOOPS = 1_000_000
REFERENCE_SECONDS = 0.045
"""CPU seconds of `LOOPS` where the budgets were measured, while that machine did nothing else."""


def budget_of(file: str) -> int:
    """Return a file's CPU seconds."""
    return ABOVE.get(file, BUDGET)


def over_budget(
    seconds: Mapping[str, float], slowness: float, allowed: float = ALLOWED
) -> dict[str, float]:
    """Return the files that took more than `allowed` times their budget, and how many times.

    Args:
        seconds: CPU seconds by file.
        slowness: As of `slowness`.
        allowed: `ALLOWED` or `HELD`.
    """
    times = {file: used / budget_of(file) / slowness for file, used in seconds.items()}
    return {file: factor for file, factor in times.items() if factor > allowed}


def can_hold(crowding: float) -> bool:
    """Return whether CPU seconds tell enough of a file that a run may fail by them.

    Args:
        crowding: As of `crowding`, the largest of the run.
    """
    return crowding <= MOST_LOAD


def crowding() -> float:
    """Return the load average for each processor: the largest of the last 1, 5 and 15 minutes."""
    return max(os.getloadavg()) / (os.cpu_count() or 1)


def slowness() -> float:
    """Return how many times slower than where the budgets were measured this processor is, at
    least 1.
    """
    begun = time.process_time()
    total = 0
    for number in range(LOOPS):
        total += number % 7
    return max(1.0, (time.process_time() - begun) / REFERENCE_SECONDS)
