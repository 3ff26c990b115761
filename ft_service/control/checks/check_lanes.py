"""Workers that read data files: a short lane and a few long ones, each a thread with a process of its own.

The duration of a check is unknown beforehand. A check that takes more than seconds turns its lane, with its process, into a
long one, and the short lane gets a new process. If there are as many long lanes as allowed, the check is restarted once one is
free. The shortest check goes first, unless another has waited long enough.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from ft_service.data.examiner import Examiner, ExaminerLost, ReportCache

SHORT_SECONDS = 2.0
"""Limit of a check in the short lane, without the start of its process."""
LONG_LANES = 2
IDLE_SECONDS = 600.0
"""Idle time after which the short lane's process is ended."""
BYTES_PER_SECOND = 4 * 1024**2
"""Rough reading speed, used only for the order."""
LEAST_SECONDS = 0.1
"""Assumed duration of the smallest check."""


class LaneWork(Protocol):
    """Work of a lane. `bytes`: to read. `is_long`: whether it skips the short lane."""

    bytes: int
    is_long: bool

    def run(self, examiner: Examiner) -> None:
        """Do the work. Raises ExaminerLost if the examiner was closed; it is then run again unless it was dropped."""
        ...


class Lanes:
    """`put`, `drop`, `demote_slow` and `close` belong to one thread."""

    def __init__(self, tokens: Path | None = None) -> None:
        """`tokens`: folder for the tokens of files; None: they are not kept."""
        self._known = ReportCache()
        self._tokens = tokens
        self._changed = threading.Condition()
        self._queue: list[_Entry] = []
        self._lanes: list[_Lane] = []
        self._closed = False

    def warm(self) -> None:
        """Start the short lane's process before there is any work."""
        with self._changed:
            self._lane(is_long=False, warm=True)

    def put(self, work: LaneWork) -> None:
        with self._changed:
            self._enqueue(_Entry(work))

    def under_way(self) -> list[LaneWork]:
        with self._changed:
            return [lane.current.work for lane in self._lanes if lane.current is not None]

    def drop(self, work: LaneWork) -> None:
        """End the work, or remove it from the queue."""
        with self._changed:
            self._queue = [waiting for waiting in self._queue if waiting.work is not work]
            for lane in self._lanes:
                if lane.current is not None and lane.current.work is work:
                    lane.current.dropped = True
                    lane.examiner.stop(for_good=True)

    def demote_slow(self) -> None:
        """Move work that takes too long out of the short lane."""
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
        """End all work; no more begins."""
        with self._changed:
            self._closed = True
            for lane in self._lanes:
                lane.examiner.stop(for_good=True)
            self._changed.notify_all()

    def next(self, lane: _Lane) -> _Entry | None:
        """The next work of a lane; None: the lane ends. The short lane waits for work; a long lane ends when there is none."""
        with self._changed:
            lane.current = None
            while not self._closed:
                mine = [waiting for waiting in self._queue if waiting.work.is_long == lane.is_long]
                if mine:
                    chosen = max(mine, key=_Entry.urgency)
                    self._queue.remove(chosen)
                    lane.begin(chosen)
                    return chosen
                if lane.is_long:
                    break
                if not self._changed.wait(IDLE_SECONDS):
                    lane.examiner.stop()
            self._lanes.remove(lane)
            return None

    def renew(self, lane: _Lane) -> None:
        """Give a lane a new process after its old one was ended, and requeue its work unless that was dropped."""
        with self._changed:
            assert lane.current is not None
            if not lane.current.dropped and not self._closed:
                self._enqueue(lane.current)
            lane.examiner.close()
            lane.examiner = Examiner(self._known, tokens=self._tokens)
            if self._closed:
                lane.examiner.stop(for_good=True)

    def _enqueue(self, waiting: _Entry) -> None:
        self._queue.append(waiting)
        self._lane(is_long=waiting.work.is_long)
        self._changed.notify_all()

    def _lane(self, *, is_long: bool, warm: bool = False) -> None:
        """Start a lane of the kind unless enough exist or one is idle."""
        most = LONG_LANES if is_long else 1
        there = self._long_lanes() if is_long else len(self._lanes) - self._long_lanes()
        idle = any(lane.is_long == is_long and lane.current is None for lane in self._lanes)
        if there < most and not idle and not self._closed:
            lane = _Lane(self, Examiner(self._known, tokens=self._tokens), is_long=is_long, warm=warm)
            self._lanes.append(lane)
            lane.start()

    def _long_lanes(self) -> int:
        return sum(lane.is_long for lane in self._lanes)


class _Entry:
    """Work in the queue or in a lane."""

    def __init__(self, work: LaneWork) -> None:
        self.work = work
        self.since = time.monotonic()
        self.dropped = False

    def urgency(self) -> float:
        """Waiting time divided by expected duration: short work goes first, and long work cannot wait for ever."""
        return (time.monotonic() - self.since) / (LEAST_SECONDS + self.work.bytes / BYTES_PER_SECOND)


class _Lane(threading.Thread):
    """A thread that does one piece of work after the other. It is a daemon, so that a service that ends need not wait for
    it."""

    def __init__(self, lanes: Lanes, examiner: Examiner, *, is_long: bool, warm: bool) -> None:
        super().__init__(name="data-check", daemon=True)
        self._lanes = lanes
        self._warm = warm
        self.examiner = examiner
        self.is_long = is_long
        self.current: _Entry | None = None
        self._begun = 0.0

    def begin(self, waiting: _Entry) -> None:
        self.current = waiting
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Duration of the current work so far, without the start of the process."""
        if self.examiner.is_starting:
            self._begun = time.monotonic()
        return time.monotonic() - self._begun

    def run(self) -> None:
        try:
            if self._warm:
                self.examiner.start()
            while (waiting := self._lanes.next(self)) is not None:
                self._work(waiting)
        except ExaminerLost:  # closed before it began
            pass
        finally:
            self.examiner.close()

    def _work(self, waiting: _Entry) -> None:
        try:
            waiting.work.run(self.examiner)
        except ExaminerLost:
            self._lanes.renew(self)
            self.examiner.start()
