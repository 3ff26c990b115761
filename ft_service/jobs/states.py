"""The record of a job, its states, and what can be observed of its newest attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from ft_service.jobs.queue_snapshot import JobSize
from ft_service.jobs.reasons import Reason
from ft_service.money import cost_of
from ft_service.rundir.documents import Desired, Exit
from ft_service.rundir.engine import SeatSize
from ft_service.spec import JobSpec, StoredSpec, TunedName


class State(StrEnum):
    VALIDATING = "validating_files"
    """Accepted; the data files have not been read yet."""
    QUEUED = "queued"
    """Waits for free slots, or for the end of a back-off."""
    RUNNING = "running"
    """An attempt holds slots."""
    PAUSED = "paused"
    """Holds no slots; continues from its last checkpoint when resumed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ALONE = "alone"
"""Fault group (Job.fault_group) of a job that runs without an engine."""

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
    """Why the service stops an attempt at a checkpoint although its user wants it to run."""

    PREEMPTED = "preempted"
    """A job of higher priority needs its slots; it is queued again."""
    TIME_LIMIT = "time_limit"
    """It has held its slots for as long as it may (`max_seconds`), and the job ends."""
    SWEEP = "sweep"
    """Its sweep stops it because it cannot become the best, and the job ends."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, as the store keeps it. Times are seconds since the epoch in database time."""

    id: str
    project_id: str
    created_at: float
    request: dict[str, Any]
    """The create body as received (defaults not filled in)."""
    stored_spec: StoredSpec
    """The document that `spec` is parsed from."""
    state: State
    phase: Phase | None = None
    desired: Desired = Desired.RUN
    generation: int = 1
    signalled: int = 1
    priority: int = 0
    slots: int = 1
    """Ranks on all nodes together; with `shapes`, those of the smallest shape while it has no
    attempt.
    """
    nodes: int = 1
    """Nodes, with equally many ranks each."""
    shapes: tuple[JobSize, ...] = ()
    """Possible shapes, the largest first; empty: only that of `slots` and `nodes`."""
    max_seconds: int | None = None
    """Limit of the time that it holds slots, over all attempts; None: no limit."""
    halt: Halt | None = None
    """Why the service stops the newest attempt; None: it does not."""
    host: str | None = None
    """Host or place of the newest attempt's processes; before the first, the only one that may
    start it, None: any.
    """
    attempt: int = 0
    """Number of the newest attempt; 0: none yet."""
    failures: int = 0
    """Number of attempts since the newest checkpoint that failed by themselves."""
    losses: int = 0
    """Number of attempts since then that their host or place has ended, or did not start."""
    failed_at_step: int = -1
    """Step of the newest checkpoint when an attempt last failed or was lost; a later one resets
    `failures` and `losses`.
    """
    not_before: float = 0.0
    """A queued job is not started before this time (back-off)."""
    ingested: int = -1
    """Number of the newest attempt's last event segment that is in the store."""
    reason: Reason | None = None
    error: dict[str, Any] | None = None
    finished_at: float | None = None
    trained_tokens: int | None = None
    result_file: str | None = None
    """File id of the metrics, once succeeded."""
    queued_at: float | None = None
    """When it last entered the queue, written by the store; None: never."""
    pending: str | None = None
    """Text for the user why it waits although its turn has come (its host is too small; the
    cluster has no place yet), or why it cannot be observed; None: it waits for its turn, or does
    not wait.
    """
    key_id: str | None = None
    """The key that created it; None: not created with a key."""
    work: float | None = None
    """FLOP of the whole training, as planned."""
    planned_seconds: float | None = None
    """Planned duration of the training; None: the machine's figures are unknown."""
    left_seconds: float | None = None
    """Time left when it last reported a step, estimated from the steps so far."""
    ends_at: float | None = None
    """Expected end while it holds slots; None: unknown."""
    taken_at: float | None = None
    """When its attempt took its slots, written by the store; None: it holds none."""
    held_seconds: float = 0.0
    """Time that its ended attempts held slots; written by the store."""
    slot_seconds: float = 0.0
    """The same multiplied with the number of slots."""
    max_cost: int | None = None
    """The most that it may cost, in millionths of the currency (ft_service/money.py); None: no
    limit.
    """
    price: int | None = None
    """Of a slot-hour, in the same unit: what its newest attempt pays, and before the first what was
    asked when it was created. None: no price is known.
    """
    currency: str | None = None
    """Its three letters; None: nothing of it ever had a price."""
    grams_per_kwh: float | None = None
    """Grams of CO2 of a kWh where its newest attempt runs; None: not known."""
    cost: int = 0
    """What its ended attempts have cost; written by the store."""
    joules: float | None = None
    """Energy that all its attempts have taken; None: not measured."""
    attempt_joules: float | None = None
    """The same of the newest attempt, of ranks of its own."""
    co2_grams: float | None = None
    """What that energy weighs; None: not known."""
    seen_tokens: int = 0
    """Trained tokens that its attempts have reported; steps repeated after a resume count once."""
    sweep_id: str | None = None
    """The sweep that it belongs to, if any."""
    sweep_values: dict[str, Any] | None = None
    """Its own values in the sweep: dotted option → value."""
    sweep_course: dict[str, Any] | None = None
    """Its progress for the comparison in its sweep (ft_service/sweeps/halving.py); None: no step
    reported.
    """
    stopped: str | None = None
    """Text for the user why its sweep stops it; None: it does not."""
    share_key: str | None = None
    """Jobs of a project with equal keys may share an engine; None: it runs alone
    (ft_service/engines/sharing.py).
    """
    seat: SeatSize | None = None
    """What it takes and gains in an engine; None: not planned."""
    engine_id: str | None = None
    """The engine in which its attempt has a seat; None: it has none.

    The store clears it when the job leaves the seat.
    """
    fault_group: str | None = None
    """Jobs that may have ended an engine share one only with jobs of the same group, and not at all
    if it is ALONE; None: it is in no group, and shares with others that are in none.
    """
    traceparent: str | None = None
    """The request that created it, as W3C's Trace Context names it (ft_service/traces.py); None: it
    was not traced.
    """
    name: str | None = None
    """How its users call it; None: by its suffix."""
    note: str | None = None
    """What its users have noted about it."""
    version: int = 1
    """Raised by every write; a write names the version that was read and changes nothing if another
    came first.
    """

    @property
    def effective_desired(self) -> Desired:
        """What the running attempt must do: what the user wants, or stop at a checkpoint because
        the service stops it.
        """
        return Desired.PAUSE if self.halt and self.desired is Desired.RUN else self.desired

    def seconds_held(self, now: float) -> float:
        """Time that all its attempts have held slots up to `now`."""
        return self.held_seconds + (0.0 if self.taken_at is None else max(0.0, now - self.taken_at))

    def is_out_of_time(self, now: float) -> bool:
        return self.max_seconds is not None and self.seconds_held(now) >= self.max_seconds

    def cost_at(self, now: float, seat_seconds: float = 0.0) -> int:
        """What all its attempts have cost up to `now`, in millionths.

        `seat_seconds`: slot-seconds that its seat in an engine has taken, if it has one.
        """
        held = 0.0 if self.taken_at is None else self.slots * max(0.0, now - self.taken_at)
        return self.cost + cost_of(held if self.engine_id is None else seat_seconds, self.price)

    @property
    def planned_cost(self) -> int | None:
        """What its planned training costs, in millionths; None: its time or its price is not
        known.
        """
        if self.planned_seconds is None or self.price is None:
            return None
        return cost_of(self.planned_seconds * self.slots, self.price)

    @property
    def spec(self) -> JobSpec:
        """The resolved SPEC. Raises OtherVersionError for a document that this version cannot
        read.
        """
        return self.stored_spec.parsed

    @property
    def known_spec(self) -> JobSpec:
        """The SPEC as far as this version knows it, to be shown (StoredSpec.known)."""
        return self.stored_spec.known

    @property
    def tuned_name(self) -> TunedName:
        """Name of the tuned model."""
        return self.stored_spec.tuned_name

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.stored_spec.base


Level = Literal["info", "warn", "error"]
"""Level of an event, as OpenAI names them."""


@dataclass(frozen=True)
class Absent:
    """No process of this attempt exists, and none can appear without a start."""


@dataclass(frozen=True)
class Running:
    """Its supervisor lives, or will start by itself."""

    reported: bool = False
    """Rank 0 has written at least one event."""
    silent_seconds: float = 0.0
    """Seconds since the last new event, on the observer's monotonic clock."""
    note: str | None = None
    """Text for the user from its place: why it does not run yet, or that it will be stopped."""
    level: Level = "info"
    """Level of the note."""
    admitted: bool = True
    """False: its place keeps it waiting."""
    fresh: bool = True
    """False: remembered from an earlier observation, and no proof that the place answers."""


@dataclass(frozen=True)
class Ended:
    """Its processes are gone. `exit`: None if the supervisor left no record."""

    exit: Exit | None
    checkpoint_step: int = -1
    """Step of the newest complete checkpoint of the job; -1: none."""
    delay_seconds: float = 0.0
    """Seconds to wait before the next attempt, after one that its place stopped before it brought
    the job on.
    """
    fault_group: str | None = None
    """Fault group of the job from now on, since its engine was lost; None: unchanged."""


@dataclass(frozen=True)
class Unknown:
    """It could not be observed; this is no reason to start or fail anything."""

    why: str
    seconds: float = 0.0
    """How long its place has not answered, on the observer's monotonic clock; 0: it answers, but
    does not know.
    """
    begun: bool = True
    """Whether it may have been started. False: it was not yet."""


Observation = Absent | Running | Ended | Unknown
