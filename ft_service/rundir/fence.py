"""The seal of an attempt: from when on nothing of it may publish or remove anything, whoever of its processes still lives.

An attempt is sealed by its exit record (`attempts/<n>/exit.json`; the launcher writes it where processes cannot be reached) and
by a later attempt's beginning, readable or not. Supervisor and ranks look for the seal and end themselves, and what brings
files to object storage brings none of theirs any more. They may be stopped between a look and what follows from it, for hours.
What an attempt then still does must not matter, so that every name is one of these:

    it carries the attempt (events, logs, checkpoints, temporary folders)     readers go by the newest attempt's start.json:
                                                                              what an earlier one completes later is ignored
    the outcome (adapter/, manifest.json, metrics.csv, result.json)           put if absent; over what an earlier attempt left
                                                                              only after another look

and an attempt removes only what is as old as itself, and only once something newer is complete.
"""

from __future__ import annotations

import time
from typing import Protocol

from ft_service.rundir.attempt import AttemptKeys

SEAL_SECONDS = 1.0
"""How often processes look for the seal where nothing is at stake, so that a slow file system is not asked at every step."""


class SealedError(Exception):
    """The attempt is over: this process must end, and leave everything as it is."""


class Documents(Protocol):
    def has(self, key: str) -> bool: ...


def seals(attempt: int) -> tuple[str, ...]:
    """Keys of the documents any of which seals an attempt. A later attempt that never began has an exit record."""
    return (AttemptKeys(attempt).exit, AttemptKeys(attempt + 1).start, AttemptKeys(attempt + 1).exit)


def _now() -> float:
    """Seconds; goes on while this process is stopped, and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Looks for the seal of one attempt. For any thread."""

    def __init__(self, run: Documents, attempt: int) -> None:
        self.attempt = attempt
        self._run = run
        self._seal: str | None = None
        self._looked_at = float("-inf")

    def seal(self, max_age: float = 0.0) -> str | None:
        """Key of the document that seals the attempt; None: it is not sealed. `max_age`: seconds that the last look may be old.

        Raises what the storage raises when it does not answer: then nobody knows.
        """
        if self._seal is None and _now() - self._looked_at >= max_age:
            began = _now()
            self._seal = next((key for key in seals(self.attempt) if self._run.has(key)), None)
            self._looked_at = began
        return self._seal

    def check(self, max_age: float = 0.0) -> None:
        """Raise SealedError if the attempt is sealed. Call it right before something is published or removed."""
        seal = self.seal(max_age)
        if seal is not None:
            raise SealedError(f"Attempt {self.attempt} is over ({seal} is there): nothing is written any more.")
