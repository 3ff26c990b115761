"""The largest anonymous memory of processes, watched from outside: files that are mapped do not
count.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_SECONDS = 0.01
FAMILY_SECONDS = 0.5
"""Between two looks for new children, which take longer."""


class PeakMemory:
    """While entered, watches a process and all below it."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[int, int] = {}
        """pid → bytes."""
        self._root = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def largest(self, count: int) -> list[int]:
        """Bytes of the `count` processes that had most: the ranks, whose parents are small."""
        return sorted(self.peaks.values(), reverse=True)[:count]

    def _watch(self) -> None:
        found_at = float("-inf")
        pids = [self._root]
        while not self._done.wait(LOOK_SECONDS):
            if time.monotonic() - found_at > FAMILY_SECONDS:
                found_at = time.monotonic()
                pids = family(self._root)
            for pid in pids:
                self.peaks[pid] = max(self.peaks.get(pid, 0), anonymous(pid))


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").glob("*"):
            found += [int(child) for child in _read(thread / "children").split()]
    return found


def anonymous(pid: int) -> int:
    """Bytes of a process in memory that belong to no file; 0 if it has ended."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
