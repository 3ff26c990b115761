"""Workers that read data files: a short lane and a few long ones, each a thread with a process of
its own.

The duration of a check is unknown beforehand. A check that takes more than seconds turns its lane,
with its process, into a long one, and the short lane gets a new process. If no long lane is free
for its project, the check is restarted once its turn comes. In both kinds projects take turns,
charged by the processor time of their checks, and a project has one long lane at most, so that no
number of long checks keeps another project's waiting.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from ft_service.data.examiner import Examiner, ExaminerLost, ReportCache
from ft_service.shared_work.turns import Turn, Turns

SHORT_SECONDS = 2.0
"""Limit of a check in the short lane, without the start of its process."""
LONG_LANES = 2
LONG_OF_PROJECT = 1
"""Long lanes that a project may have at once."""
IDLE_SECONDS = 600.0
"""Idle time after which the short lane's process is ended."""
BYTES_PER_SECOND = 4 * 1024**2
"""Rough reading speed, by which a check is charged before its processor time is known."""
LEAST_SECONDS = 0.1
"""Assumed duration of the smallest check."""


class LaneWork(Protocol):
    """Work of a lane. `project`: whose turn it takes; `bytes`: to read; `is_long`: whether it skips
    the short lane.
    """

    project: str
    bytes: int
    is_long: bool

    def run(self, examiner: Examiner) -> None:
        """Do the work. Raises ExaminerLost if the examiner was closed; it is then run again unless
        it was dropped.
        """
        ...


class Lanes:
    """`put`, `drop`, `demote_slow` and `close` belong to one thread."""

    def __init__(self, tokens: Path | None = None) -> None:
        """`tokens`: folder for the tokens of files; None: they are not kept."""
        self._known = ReportCache()
        self._tokens = tokens
        self._changed = threading.Condition()
        self._turns = {False: Turns[_Entry](1), True: Turns[_Entry](LONG_LANES, LONG_OF_PROJECT)}
        """Whether the lanes are long → work that waits for them, and runs in them."""
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
            return [lane.turn.item.work for lane in self._lanes if lane.turn is not None]

    def drop(self, work: LaneWork) -> None:
        """End the work, or remove it from the queue."""
        with self._changed:
            for turns in self._turns.values():
                for waiting in [turn.item for turn in turns if turn.item.work is work]:
                    turns.drop(waiting)
            for lane in self._lanes:
                if lane.turn is not None and lane.turn.item.work is work:
                    lane.turn.item.dropped = True
                    lane.examiner.stop(for_good=True)

    def demote_slow(self) -> None:
        """Move work that takes too long out of the short lane."""
        with self._changed:
            for lane in tuple(self._lanes):
                if lane.is_long or lane.turn is None or lane.seconds() <= SHORT_SECONDS:
                    continue
                lane.turn.item.work.is_long = True
                if not self._lengthen(lane, lane.turn):
                    lane.examiner.stop(for_good=True)

    def close(self) -> None:
        """End all work; no more begins."""
        with self._changed:
            self._closed = True
            for lane in self._lanes:
                lane.examiner.stop(for_good=True)
            self._changed.notify_all()

    def next(self, lane: _Lane) -> _Entry | None:
        """The next work of a lane; None: the lane ends.

        The short lane waits for work; a long lane ends when there is none.
        """
        with self._changed:
            self._leave(lane)
            while not self._closed:
                if (turn := self._turns[lane.is_long].take()) is not None:
                    lane.begin(turn)
                    return turn.item
                if lane.is_long:
                    break
                if not self._changed.wait(IDLE_SECONDS):
                    lane.examiner.stop()
            self._lanes.remove(lane)
            return None

    def renew(self, lane: _Lane) -> None:
        """Give a lane a new process after its old one was ended, and requeue its work unless that
        was dropped.
        """
        with self._changed:
            assert lane.turn is not None
            entry = lane.turn.item
            self._leave(lane)
            if not entry.dropped and not self._closed:
                self._enqueue(entry)
            lane.examiner.close()
            lane.examiner = Examiner(self._known, tokens=self._tokens)
            if self._closed:
                lane.examiner.stop(for_good=True)

    def _lengthen(self, lane: _Lane, turn: Turn[_Entry]) -> bool:
        """Turn the short lane into a long one with its work, and start another short one.

        False: its project gets none now.
        """
        long = self._turns[True]
        entry = turn.item
        long.put(turn.project, entry, turn.cost)
        taken = long.take(lambda item: item is entry)
        if taken is None:
            long.drop(entry)
            return False
        self._turns[False].end(turn, cost=lane.cost())
        lane.turn = taken
        lane.is_long = True
        self._lane(is_long=False, warm=True)
        return True

    def _leave(self, lane: _Lane) -> None:
        """Give the place of a lane's work back, for what the work has cost."""
        if lane.turn is not None:
            self._turns[lane.is_long].end(lane.turn, cost=lane.cost())
            lane.turn = None

    def _enqueue(self, waiting: _Entry) -> None:
        work = waiting.work
        self._turns[work.is_long].put(
            work.project, waiting, LEAST_SECONDS + work.bytes / BYTES_PER_SECOND
        )
        self._lane(is_long=work.is_long)
        self._changed.notify_all()

    def _lane(self, *, is_long: bool, warm: bool = False) -> None:
        """Start a lane of the kind unless enough exist, or as many are idle as work waits: one that
        has just been started is idle until its thread runs.
        """
        there = [lane for lane in self._lanes if lane.is_long == is_long]
        idle = sum(lane.turn is None for lane in there)
        waiting = len(self._turns[is_long])
        if len(there) < self._turns[is_long].places and idle < max(1, waiting) and not self._closed:
            lane = _Lane(
                self, Examiner(self._known, tokens=self._tokens), is_long=is_long, warm=warm
            )
            self._lanes.append(lane)
            lane.start()


class _Entry:
    """Work in the queue or in a lane."""

    def __init__(self, work: LaneWork) -> None:
        self.work = work
        self.dropped = False


class _Lane(threading.Thread):
    """A thread that does one piece of work after the other.

    It is a daemon, so that a service that ends need not wait for it.
    """

    def __init__(self, lanes: Lanes, examiner: Examiner, *, is_long: bool, warm: bool) -> None:
        super().__init__(name="data-check", daemon=True)
        self._lanes = lanes
        self._warm = warm
        self.examiner = examiner
        self.is_long = is_long
        self.turn: Turn[_Entry] | None = None
        self._begun = self._cpu_begun = 0.0

    def begin(self, turn: Turn[_Entry]) -> None:
        self.turn = turn
        self._begun = time.monotonic()
        self._cpu_begun = self.examiner.cpu_seconds

    def seconds(self) -> float:
        """Duration of the current work so far, without the start of the process."""
        if self.examiner.is_starting:
            self._begun = time.monotonic()
        return time.monotonic() - self._begun

    def cost(self) -> float:
        """Processor time of the current work so far, in seconds; LEAST_SECONDS at least."""
        return max(LEAST_SECONDS, self.examiner.cpu_seconds - self._cpu_begun)

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
