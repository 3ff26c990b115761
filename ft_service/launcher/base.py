"""What the reconciler asks of a place where workers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ft_service.jobs.line import Host
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Observation
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import Control
from ft_service.spec import JobSpec


class LaunchError(Exception):
    """The attempt could not be started; the message says why, for the user."""


class Launcher(Protocol):
    """Every call is safe to repeat. None of them waits for training."""

    @property
    def host(self) -> str:
        """Name of the place whose attempts only this launcher can observe; stable over restarts of the service."""
        ...

    @property
    def slots(self) -> int:
        """How many ranks this place runs at once."""
        ...

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The hosts on which it may place ranks now, by their names in the table of slots. May ask the store."""
        ...

    @property
    def away_seconds(self) -> float:
        """Seconds for which this place has not answered; 0: it answers. May be asked by any thread."""
        ...

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        """Start the attempt that its `start.json` describes, unless it was started before. Raises LaunchError.

        `spec`: the job's, as the service has it. A place that shows an attempt only what its job names goes by this, since an
        attempt before may have changed the run directory's own. None: the job names nothing.

        Where it cannot be started now, `observe` says why, or answers Absent when it is time for another try.
        """
        ...

    def observe(self, attempt: Attempt) -> Observation:
        """What has become of an attempt. Unknown rather than a guess."""
        ...

    def signal(self, attempt: Attempt, control: Control) -> None:
        """Tell the running attempt what the user wants (`control.json`)."""
        ...

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """End the attempt's processes now, and leave an exit record with this reason once they are gone."""
        ...

    def clean(self, attempt: Attempt) -> None:
        """The attempt has ended and that is stored: remove what its place still keeps of it. Run directories stay."""
        ...


@dataclass(frozen=True)
class ListedAttempt:
    """An attempt that a place lists without having been asked for it by name."""

    name: str
    """What the place calls it: the name of the Kubernetes Job."""
    job_id: str
    created_at: str
    """RFC 3339, by the place's clock."""


@runtime_checkable
class ListsAttempts(Protocol):
    """A launcher whose place can list what runs there."""

    def unfinished(self) -> Sequence[ListedAttempt]:
        """Every attempt of this installation that has not ended. Raises LaunchError if the place cannot be asked."""
        ...

    def end_unfinished(self, name: str) -> None:
        """End one of them for good; without effect if it is gone. Raises LaunchError if the place cannot be asked."""
        ...

    def close(self) -> None:
        """Ask nothing more."""
        ...
