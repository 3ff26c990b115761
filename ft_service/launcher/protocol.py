"""Interface between the reconciler and a place where attempts run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Observation
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import Control
from ft_service.spec import JobSpec


class LaunchError(Exception):
    """Failure to start an attempt; the message says why, for the user."""


class Launcher(Protocol):
    """Launcher of attempts in one place.

    Every call may be repeated, and no call waits for training.
    """

    @property
    def host(self) -> str:
        """Name of the place, stable over restarts of the service.

        Only this launcher can observe its attempts.
        """
        ...

    @property
    def slots(self) -> int:
        """Number of ranks that this place runs at once."""
        ...

    @property
    def counts(self) -> bool:
        """Whether the service decides which slots are free.

        False: the place does, such as a cluster's queue.
        """
        ...

    @property
    def slots_name_gpus(self) -> bool:
        """Whether a slot's number is that of a GPU of this host.

        False: the cluster gives GPUs to ranks.
        """
        ...

    @property
    def away_seconds(self) -> float:
        """Seconds for which this place has not answered; 0: it answers. Any thread may read it."""
        ...

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        """Start the attempt that its `start.json` describes, unless it was started before.

        Raises LaunchError.

        `spec`: the job's, from the service's database, since an earlier attempt may have changed
        spec.json. A place that mounts only the files of the job reads their names from it. None:
        the job names no files.

        If the attempt cannot be started now, `observe` says why, or returns Absent when it is time
        for another try.
        """
        ...

    def observe(self, attempt: Attempt) -> Observation:
        """Return the state of an attempt; Unknown if it is uncertain."""
        ...

    def signal(self, attempt: Attempt, control: Control) -> None:
        """Pass the user's request on to the running attempt (`control.json`)."""
        ...

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """Kill the attempt's processes, and write an exit record with this reason once they are
        gone.
        """
        ...

    def clean(self, attempt: Attempt) -> None:
        """Remove what the place still keeps of an attempt whose end is stored.

        Run directories stay.
        """
        ...


@dataclass(frozen=True)
class ListedAttempt:
    """Attempt in a place's own list of running attempts."""

    name: str
    """Name in the place, such as that of the Kubernetes Job."""
    job_id: str
    created_at: str
    """Time of creation, RFC 3339, on the place's clock."""


@runtime_checkable
class ListsAttempts(Protocol):
    """Launcher whose place can list its attempts."""

    def unfinished(self) -> Sequence[ListedAttempt]:
        """Return every attempt of this installation that has not ended.

        Raises LaunchError if the place does not answer.
        """
        ...

    def end_unfinished(self, name: str) -> None:
        """End an attempt for good, if it still exists.

        Raises LaunchError if the place does not answer.
        """
        ...

    def close(self) -> None:
        """Make no further requests to the place."""
        ...
