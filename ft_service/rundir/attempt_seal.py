"""Seal of an attempt: once it exists, no process of the attempt may publish or remove anything.

An attempt is sealed by its exit record (`attempts/<n>/exit.json`; the launcher writes it where
processes cannot be reached) and by a later attempt's start.json, readable or not. Supervisor and
ranks look for the seal and end themselves, and their uploads to object storage stop. A process may
be suspended for hours between a look and the write that follows. Writes of a sealed attempt must
therefore be harmless, so every name is one of these:

    it contains the attempt's number (events, logs, checkpoints, temporary folders)
        readers go by the newest attempt's start.json and ignore what an earlier attempt completes
        later
    it is the outcome (adapter/, manifest.json, metrics.csv, result.json)
        written if absent; an earlier attempt's is replaced only after another look at the seal

An attempt removes only files of its own or earlier attempts, and what is complete only once
something newer is.
"""

from __future__ import annotations

import time

from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir

SEAL_SECONDS = 1.0
"""Pause between looks where nothing is at risk, so that a slow file system is not read at every
step.
"""


class SealedError(Exception):
    """Error in a process of a sealed attempt: it must end and change nothing."""


def seals(attempt: int) -> tuple[str, ...]:
    """Return the keys of the documents that seal an attempt.

    A later attempt that never began has an exit record.
    """
    return (
        AttemptKeys(attempt).exit,
        AttemptKeys(attempt + 1).start,
        AttemptKeys(attempt + 1).exit,
    )


def _now() -> float:
    """Return seconds of a clock that advances while this process, or the machine, is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Check for the seal of one attempt. For any thread."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self.attempt = attempt
        self._run = run
        self._seal: str | None = None
        self._checked_at = float("-inf")

    def seal(self, max_age: float = 0.0) -> str | None:
        """Return the key of the document that seals the attempt; None: it is not sealed.

        `max_age`: seconds for which an earlier look counts.

        Raises the storage's error if it does not answer: then it is not known.
        """
        if self._seal is None and _now() - self._checked_at >= max_age:
            began = _now()
            self._seal = next((key for key in seals(self.attempt) if self._run.has(key)), None)
            self._checked_at = began
        return self._seal

    def check(self, max_age: float = 0.0) -> None:
        """Raise SealedError if the attempt is sealed.

        Call it right before publishing or removing something.
        """
        seal = self.seal(max_age)
        if seal is not None:
            raise SealedError(
                f"Attempt {self.attempt} is over ({seal} exists): nothing more is written."
            )
