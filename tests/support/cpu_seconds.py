"""CPU seconds of each test file, its processes included: what `make test` costs, whatever else the
machine does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """Seconds by file. Those of a fixture that several tests share go to the first of them;
    processes that a test does not wait for are missing.
    """

    def __init__(self) -> None:
        self.of_file: Counter[str] = Counter()

    @contextmanager
    def counted(self, file: str) -> Iterator[None]:
        """Count the block's seconds for a file."""
        begun = _used()
        yield
        self.of_file[file] += max(0.0, _used() - begun)  # type: ignore[assignment]  # counts may be fractions

    def report(self, shown: int) -> str:
        """Return the sum, and the files that took most."""
        lines = [f"{seconds:8.1f}  {file}" for file, seconds in self.of_file.most_common(shown)]
        total = (
            f"CPU seconds of {len(self.of_file)} test files: {self.of_file.total():.0f}. "
            "Those that took most:"
        )
        return "\n".join([total, *lines])


def _used() -> float:
    """CPU seconds of this process, of its children that have ended, and of ranks, which the
    forkserver has forked.
    """
    times = os.times()
    return (
        times.user + times.system + times.children_user + times.children_system + _of_forkserver()
    )


def _of_forkserver() -> float:
    pid = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    if pid is None:
        return 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS
