"""Lanes of work that reads data files: a short one, and a few long ones, each a thread with a process beside this one.

How long a file takes is not known before, so what is not done within seconds steps aside: its lane becomes a long one, with the
process that is reading, and the short lane gets a new one. Where there are as many long lanes as may be, it is begun anew once
one of them is free. The shortest goes first, and what has waited long enough before it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from ft_service.data.examiner import Examiner, ExaminerLost, Known

SHORT_SECONDS = 2.0
"""What takes longer steps aside. The start of its process does not count."""
LONG_LANES = 2
IDLE_SECONDS = 600.0
"""Without work for so long, the short lane's process is let go."""
BYTES_PER_SECOND = 4 * 1024**2
"""About what is read of a file. For the order alone."""
LEAST_SECONDS = 0.1
"""What the smallest file is taken to need."""


class Work(Protocol):
    """What a lane does. `bytes`: to be read. `is_long`: it need not be tried in the short lane."""

    bytes: int
    is_long: bool

    def run(self, examiner: Examiner) -> None:
        """Raises ExaminerLost if the examiner was closed meanwhile, and is then run again unless it was dropped."""
        ...


class Lanes:
    """`put`, `drop`, `make_way` and `close` belong to one thread."""

    def __init__(self, tokens: Path | None = None) -> None:
        """`tokens`: the folder in which the tokens of files are kept; None: they are not."""
        self._known = Known()
        self._tokens = tokens
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._lanes: list[_Lane] = []
        self._closed = False

    def warm(self) -> None:
        """Start the short lane's process before there is any work."""
        with self._changed:
            self._lane(is_long=False, warm=True)

    def put(self, work: Work) -> None:
        with self._changed:
            self._wait(_Waiting(work))

    def under_way(self) -> list[Work]:
        with self._changed:
            return [lane.current.work for lane in self._lanes if lane.current is not None]

    def drop(self, work: Work) -> None:
        """End it, or have it not begin."""
        with self._changed:
            self._waiting = [waiting for waiting in self._waiting if waiting.work is not work]
            for lane in self._lanes:
                if lane.current is not None and lane.current.work is work:
                    lane.current.dropped = True
                    lane.examiner.stop(for_good=True)

    def make_way(self) -> None:
        """Have what holds the short lane up step aside."""
        with self._changed:
            for lane in tuple(self._lanes):
                current = lane.current
                if not lane.is_long and current is not None and lane.seconds() > SHORT_SECONDS:
                    current.work.is_long = True
                    if self._long_lanes() < LONG_LANES:
                        lane.is_long = True
                        self._lane(is_long=False, warm=True)
                    else:
                        lane.examiner.stop(for_good=True)

    def close(self) -> None:
        """Nothing further begins, and what is under way is ended."""
        with self._changed:
            self._closed = True
            for lane in self._lanes:
                lane.examiner.stop(for_good=True)
            self._changed.notify_all()

    def next(self, lane: _Lane) -> _Waiting | None:
        """What a lane is to do; None: to end. Waits, which a long lane does not: it ends when there is nothing."""
        with self._changed:
            lane.current = None
            while not self._closed:
                mine = [waiting for waiting in self._waiting if waiting.work.is_long == lane.is_long]
                if mine:
                    chosen = max(mine, key=_Waiting.urgency)
                    self._waiting.remove(chosen)
                    lane.begin(chosen)
                    return chosen
                if lane.is_long:
                    break
                if not self._changed.wait(IDLE_SECONDS):
                    lane.examiner.stop()
            self._lanes.remove(lane)
            return None

    def renew(self, lane: _Lane) -> None:
        """The lane's process was ended for good. What it was at waits, unless it was dropped; the lane gets another process."""
        with self._changed:
            assert lane.current is not None
            if not lane.current.dropped and not self._closed:
                self._wait(lane.current)
            lane.examiner.close()
            lane.examiner = Examiner(self._known, tokens=self._tokens)
            if self._closed:
                lane.examiner.stop(for_good=True)

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._lane(is_long=waiting.work.is_long)
        self._changed.notify_all()

    def _lane(self, *, is_long: bool, warm: bool = False) -> None:
        """Have one of the kind."""
        most = LONG_LANES if is_long else 1
        there = self._long_lanes() if is_long else len(self._lanes) - self._long_lanes()
        idle = any(lane.is_long == is_long and lane.current is None for lane in self._lanes)
        if there < most and not idle and not self._closed:
            lane = _Lane(self, Examiner(self._known, tokens=self._tokens), is_long=is_long, warm=warm)
            self._lanes.append(lane)
            lane.start()

    def _long_lanes(self) -> int:
        return sum(lane.is_long for lane in self._lanes)


class _Waiting:
    """Work that waits for its turn, or is done."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.since = time.monotonic()
        self.dropped = False

    def urgency(self) -> float:
        """How many times what it takes it has waited: the shortest goes first, and the longest cannot wait for ever."""
        return (time.monotonic() - self.since) / (LEAST_SECONDS + self.work.bytes / BYTES_PER_SECOND)


class _Lane(threading.Thread):
    """One after the other. A daemon, which an executor's threads are not: a service that ends need not wait for it."""

    def __init__(self, lanes: Lanes, examiner: Examiner, *, is_long: bool, warm: bool) -> None:
        super().__init__(name="data-check", daemon=True)
        self._of = lanes
        self._warm = warm
        self.examiner = examiner
        self.is_long = is_long
        self.current: _Waiting | None = None
        self._begun = 0.0

    def begin(self, waiting: _Waiting) -> None:
        self.current = waiting
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """That it has been at its work. The start of the process does not count."""
        if self.examiner.is_starting:
            self._begun = time.monotonic()
        return time.monotonic() - self._begun

    def run(self) -> None:
        try:
            if self._warm:
                self.examiner.start()
            while (waiting := self._of.next(self)) is not None:
                self._work(waiting)
        except ExaminerLost:  # closed before it began
            pass
        finally:
            self.examiner.close()

    def _work(self, waiting: _Waiting) -> None:
        try:
            waiting.work.run(self.examiner)
        except ExaminerLost:
            self._of.renew(self)
            self.examiner.start()
