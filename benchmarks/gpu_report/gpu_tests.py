"""The tests that need a GPU (tests/gpu), a row each as soon as it is done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.gpu_report.rows import Rows, Status
from benchmarks.gpu_report.sections import Context

TESTS = Path(__file__).parents[2] / "tests/gpu"
OPTIONS = ("-p", "pytest_timeout", "-p", "no:cacheprovider", "-q")
STATUS: dict[str, Status] = {"passed": "ok", "failed": "failed", "skipped": "skipped"}


def measure(context: Context) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of others, whose imports take seconds
    if code := pytest.main([*OPTIONS, str(TESTS)], plugins=[RowPlugin(context.rows)]):
        context.rows.add(
            "pytest", "failed", f"exit code {int(code)}; what it printed is in the log"
        )


@dataclass(frozen=True)
class RowPlugin:
    """A plugin of pytest's that adds a row for each test, and for what failed around one."""

    rows: Rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            name = report.nodeid.rpartition("/")[2]
            # Of a skipped test: file, line and reason.
            why = report.longrepr
            note = str(why[-1]) if isinstance(why, tuple) else report.longreprtext
            self.rows.add(name, STATUS[report.outcome], note, seconds=report.duration)
