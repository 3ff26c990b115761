"""The states of a job: its record, what its user wants of it, and what can be seen of its newest attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from ft_service.jobs.line import Shape
from ft_service.jobs.reasons import Reason
from ft_service.rundir.documents import Desired, Exit
from ft_service.spec import JobSpec, StoredSpec, TunedName


class State(StrEnum):
    VALIDATING = "validating_files"
    """Accepted; the data files have not been read yet."""
    QUEUED = "queued"
    """Waits for free slots (or for the end of a back-off)."""
    RUNNING = "running"
    """An attempt holds slots."""
    PAUSED = "paused"
    """Holds nothing; goes on from its last checkpoint when resumed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


class Phase(StrEnum):
    LAUNCHING = "launching"
    """Slots are held; the workers have not reported yet."""
    WAITING = "waiting"
    """The cluster has no place for the attempt yet; users see the job as queued."""
    TRAINING = "training"
    STOPPING = "stopping"
    """The attempt was asked to stop and has not ended."""


class Halt(StrEnum):
    """Why the service itself asks an attempt to stop at a checkpoint, while its user wants it to run."""

    PREEMPTED = "preempted"
    """It makes room for a job of higher priority, and is queued again."""
    TIME_LIMIT = "time_limit"
    """It has held its slots for as long as it may (`max_seconds`), and the job ends."""
    SWEEP = "sweep"
    """Its sweep has found it hopeless, and the job ends."""
    DRAINED = "drained"
    """Its host is to be left, and it is queued again."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the store, as far as deciding needs it. Times are seconds since the epoch in database time."""

    id: str
    project_id: str
    created_at: float
    request: dict[str, Any]
    """The create body as received (defaults not filled in)."""
    stored_spec: StoredSpec
    """What `spec` is read from."""
    state: State
    phase: Phase | None = None
    desired: Desired = Desired.RUN
    generation: int = 1
    signalled: int = 1
    priority: int = 0
    slots: int = 1
    """Ranks of an attempt, of all its nodes together. Of a job with `shapes`: those of its attempt while it has one, else the
    fewest that it may have."""
    nodes: int | None = None
    """Hosts that these are spread over evenly; None: as the spec says."""
    shapes: tuple[Shape, ...] = ()
    """Shapes that it may have, the largest first; empty: only that of `slots` and `nodes`."""
    memory: int | None = None
    """Bytes that a rank needs, as planned; None: not known."""
    max_seconds: int | None = None
    """For how long it may hold slots, over all its attempts; None: no limit."""
    halt: Halt | None = None
    """Why the newest attempt is to stop although its user wants it to run; None: it is not."""
    host: str | None = None
    """The host, or the place, whose processes the newest attempt's are; None before the first."""
    attempt: int = 0
    """Number of the newest attempt; 0: none yet."""
    failures: int = 0
    """Attempts in a row that failed without a new checkpoint."""
    failed_at_step: int = -1
    """Step of the newest checkpoint when an attempt last failed: progress beyond it resets `failures`."""
    not_before: float = 0.0
    """A queued job is not started before this time (back-off)."""
    ingested: int = -1
    """Highest event segment of the newest attempt that is in the store."""
    reason: Reason | None = None
    error: dict[str, Any] | None = None
    finished_at: float | None = None
    trained_tokens: int | None = None
    result_file: str | None = None
    """File id of the metrics, once succeeded."""
    queued_at: float | None = None
    """When it entered the queue last; written by the store. None: it never did."""
    pending: str | None = None
    """Why it waits although its turn has come (its host is too small; the cluster has no place yet), or why nothing is known
    of it, for the user; None: it waits for its turn, or does not wait."""
    key_id: str | None = None
    """The key that created it; None: an earlier version stored it."""
    work: float | None = None
    """FLOP of the whole training, as planned."""
    planned_seconds: float | None = None
    """What the plan says the training takes; None: the machine's figures are not known."""
    left_seconds: float | None = None
    """What was left of the training when it last reported a step, as its steps were measured."""
    ends_at: float | None = None
    """While it holds slots: when it is expected to give them back; None: not known."""
    taken_at: float | None = None
    """Since when its attempt holds slots; written by the store. None: it holds none."""
    held_seconds: float = 0.0
    """For how long attempts held slots that have given them back; written by the store."""
    slot_seconds: float = 0.0
    """The same times the number of slots: what it has used."""
    seen_tokens: int = 0
    """Tokens trained, as far as its attempts have reported; steps repeated after a resume count once."""
    sweep_id: str | None = None
    """The sweep that it is one of; None: it is alone."""
    sweep_values: dict[str, Any] | None = None
    """What it has of its own in the sweep: dotted option → value."""
    sweep_course: dict[str, Any] | None = None
    """How far it has come, as its sweep compares it (ft_service/sweeps/course.py); None: it has reported no step."""
    stopped: str | None = None
    """Why its sweep stops it, for the user; None: it does not."""
    version: int = 1
    """Raised by every write; a write names the version it read and changes nothing if another came first."""

    @property
    def wish(self) -> Desired:
        """What the running attempt is to do: as its user wants, or stop at a checkpoint because the service says so."""
        return Desired.PAUSE if self.halt and self.desired is Desired.RUN else self.desired

    def seconds_held(self, now: float) -> float:
        """For how long it has held slots up to `now`, over all its attempts."""
        return self.held_seconds + (0.0 if self.taken_at is None else max(0.0, now - self.taken_at))

    def is_out_of_time(self, now: float) -> bool:
        return self.max_seconds is not None and self.seconds_held(now) >= self.max_seconds

    @property
    def spec(self) -> JobSpec:
        """What the job is asked to do, resolved. Raises pydantic.ValidationError for what this version cannot read."""
        return self.stored_spec.parsed

    @property
    def tuned_name(self) -> TunedName:
        """Name of the outcome."""
        return self.stored_spec.tuned_name

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.stored_spec.base


Level = Literal["info", "warn", "error"]
"""Level of an event, as OpenAI names them."""


@dataclass(frozen=True)
class Absent:
    """Nothing of this attempt exists, and nothing of it can come to exist any more without a start."""


@dataclass(frozen=True)
class Running:
    """Its supervisor lives, or is to come to life without a further start."""

    reported: bool = False
    """Rank 0 has written at least one event."""
    silent_seconds: float = 0.0
    """Since the last new event, on the observer's monotonic clock."""
    note: str | None = None
    """What its place says about it, for the user: why it does not run yet, or that it is being taken away."""
    level: Level = "info"
    """Level of the note."""
    admitted: bool = True
    """False: its place keeps it waiting, and it does not train yet."""
    fresh: bool = True
    """The place was asked for this observation; False: it is remembered from an earlier one, and says nothing of an outage."""
    leaving: str | None = None
    """Why its host is to be left, for the user; None: it may stay."""


@dataclass(frozen=True)
class Ended:
    """Its processes are gone. `exit` is None if the supervisor left no record."""

    exit: Exit | None
    checkpoint_step: int = -1
    """Step of the newest complete checkpoint of the job; -1: none."""
    delay_seconds: float = 0.0
    """Seconds until the next attempt is worth a try, after one that was stopped because it did not get its place."""


@dataclass(frozen=True)
class Unknown:
    """Could not be observed; nothing may be started or failed on this."""

    why: str
    seconds: float = 0.0
    """For how long its place has not answered, on the observer's monotonic clock; 0: it does, and is unsure."""


Observation = Absent | Running | Ended | Unknown
