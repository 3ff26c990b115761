"""Writes that wait for the same turn share one transaction: a flush to the disk costs as much for many rows as for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")

MOST_AT_ONCE = 64
"""Of one transaction, so that other writers get their turn."""


@dataclass
class _Entry(Generic[Given, Made]):
    given: Given
    made: Made | None = None
    error: Exception | None = None
    done: bool = False


class Together(Generic[Given, Made]):
    """Calls of several threads, carried out by one of them at a time for all that have come by then, first come, first served.

    `write`: carries them all out, or none and raises. If it raises, each is tried alone, so that nobody bears another's fault.
    """

    def __init__(self, write: Callable[[Sequence[Given]], Sequence[Made]]) -> None:
        self._write = write
        self._turn = threading.Lock()
        self.waiting: deque[_Entry[Given, Made]] = deque()

    def __call__(self, given: Given) -> Made:
        """Returns when it is stored. Raises what `write` raises for it."""
        entry: _Entry[Given, Made] = _Entry(given)
        self.waiting.append(entry)
        while not entry.done:
            with self._turn:
                if not entry.done:
                    self._carry_out([self.waiting.popleft() for _ in range(min(len(self.waiting), MOST_AT_ONCE))])
        if entry.error is not None:
            raise entry.error
        assert entry.made is not None
        return entry.made

    def _carry_out(self, entries: Sequence[_Entry[Given, Made]]) -> None:
        try:
            for entry, made in zip(entries, self._write([entry.given for entry in entries]), strict=True):
                entry.made = made
        except Exception as error:
            if len(entries) == 1:
                entries[0].error = error
            else:
                for entry in entries:
                    self._carry_out([entry])
        finally:  # whatever happens, nobody waits for a leader that is gone
            for entry in entries:
                entry.done = True
