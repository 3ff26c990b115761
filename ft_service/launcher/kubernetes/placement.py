"""Time limits of attempts for which only some pods have a node, and delays before the next attempt
of a job whose attempts the cluster ends without progress.

Kept in memory: after a restart of the service the times begin again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ft_service.launcher.kubernetes.status import PodWait
from ft_service.rundir.checkpoints import attempt_of
from ft_service.rundir.documents import Control, Desired, ExitReason

RETRY_SECONDS = 15.0
"""Seconds until the next attempt after one that was in vain; doubled each time in a row, up to
MAX_RETRY_SECONDS.
"""
MAX_RETRY_SECONDS = 600.0
QUIET_SECONDS = 30.0
"""Seconds within which a cluster usually reports that it cannot place pods."""
SILENT = PodWait(
    "The cluster has not given all pods a node yet, and does not say why.", admitted=False
)


def was_in_vain(
    number: int, reason: ExitReason | None, asked: Control | None, checkpoints: Iterable[str]
) -> bool:
    """Return whether the cluster ended attempt `number` without progress of its job: it got no
    place, or lost it before it wrote a checkpoint. The next one may end alike, such as on nodes
    that are short of memory. Pure.

    `reason`: None: there is no exit record. `asked`: the last request to the attempt; None: none.
    If a user or the service asked it to stop, or to go on after all, the cluster is not the
    cause. The launcher cancels what it gives back. `checkpoints`: names of the job's complete ones.
    """
    if reason is not ExitReason.STOPPED or (
        asked is not None and asked.desired is not Desired.CANCEL
    ):
        return False
    return all(attempt_of(name) != number for name in checkpoints)


class Placements:
    """Placement state of all attempts. For one thread. `name`: that of an attempt's Job."""

    def __init__(
        self, patience_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience_seconds`: how long an attempt may hold some of its places; None: no limit."""
        self._patience = patience_seconds
        self._clock = clock
        self._waiting: dict[str, PodWait] = {}
        self._placing_since: dict[str, float] = {}
        self._partial_since: dict[str, float] = {}
        self._put_off: dict[str, tuple[int, float]] = {}

    def waits(self, name: str, waiting: PodWait | None) -> PodWait | None:
        """Return why not all pods have a place; None: nothing to report yet.

        `waiting`: the cluster's reason; None: it gives none now, so its last one counts.
        """
        since = self._placing_since.setdefault(name, self._clock())
        if waiting is not None:
            self._waiting[name] = waiting
        quiet = self._clock() - since >= QUIET_SECONDS
        return self._waiting.get(name) or (SILENT if quiet else None)

    def is_waiting(self, name: str) -> bool:
        """Return whether an attempt had no place for all of its pods when it was last observed."""
        return name in self._placing_since

    def has_expired(self, name: str, held: int) -> bool:
        """Return whether an attempt without all of its places has held `held` of them for too
        long.
        """
        if not held:
            self._partial_since.pop(name, None)
            return False
        since = self._partial_since.setdefault(name, self._clock())
        return self._patience is not None and self._clock() - since >= self._patience

    def forget(self, name: str) -> None:
        """Forget an attempt that has all its places, or has ended."""
        self._waiting.pop(name, None)
        self._placing_since.pop(name, None)
        self._partial_since.pop(name, None)

    def put_off(self, job_id: str, attempt: int) -> float:
        """Return the seconds until a job's next attempt after one in vain; for the same attempt,
        always the same.
        """
        before, delay = self._put_off.get(job_id, (0, RETRY_SECONDS / 2))
        if before != attempt:
            self._put_off[job_id] = attempt, min(2 * delay, MAX_RETRY_SECONDS)
        return self._put_off[job_id][1]

    def settled(self, job_id: str) -> None:
        """Reset a job's delay: its newest attempt was not in vain."""
        self._put_off.pop(job_id, None)
