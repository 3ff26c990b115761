"""Records of the store.

Every row belongs to a project; times are seconds since the epoch on the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ft_service.jobs.states import Job
from ft_service.rundir.events import Metrics

Scope = Literal["admin", "submit", "user", "read", "metrics"]
"""admin: everything in its project, and in the first project also all projects of its organisation;
submit (formerly user): all but sharing models and managing keys; read: only looking;
metrics: only GET /metrics, of all projects.
"""
Order = Literal["asc", "desc"]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key as it may be shown again; the secret itself is not kept."""

    id: str
    project_id: str
    name: str
    scope: Scope
    prefix: str
    """The first characters of the secret, to recognise it by."""
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None
    identity: str | None = None
    """Issuer and subject of a person who signs in by single sign-on, whom no secret stands for;
    None: an ordinary key.
    """
    ends_with: str | None = None
    """Id of the key that stands for the person who made it, with whose access it ends; None: it
    ends by itself.
    """
    latest_end: float | None = None
    """Latest end of a key that ends with a person's access, whatever sign-ins follow; None:
    none. `expires_at` is its end without another sign-in.
    """

    @property
    def own_end(self) -> float | None:
        """When it ends by itself, whoever signs in; None: never."""
        return self.expires_at if self.ends_with is None else self.latest_end


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key that is to be made."""

    project_id: str
    name: str
    scope: Scope
    expires_at: float | None = None
    """When it ends by itself; None: after the longest life of a key, if there is one."""
    id: str | None = None
    """None: a random one."""
    secret: str | None = field(default=None, repr=False)
    """None: a random one."""


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """Limits of a project; None: no limit."""

    max_slots: int | None = None
    """Number of ranks that run at once."""
    max_queued: int | None = None
    """Number of waiting jobs."""
    max_bytes: int | None = None
    """Bytes of all files. Tinker's clients save weights by name while these and the files
    take less.
    """
    max_requests_per_minute: int | None = None
    """Requests with any of its keys, to all API processes that share a PostgreSQL."""
    max_priority: int | None = None
    """Highest priority of a job; a higher one is lowered to it."""
    bases: tuple[str, ...] | None = None
    """Names of bases that it may train on."""
    wandb_entities: tuple[str, ...] | None = None
    """Weights & Biases entities that its jobs may send metrics to."""
    max_cost_per_month: float | None = None
    """What its jobs may cost in a month (UTC), in the operator's currency."""


@dataclass(frozen=True, kw_only=True)
class Project:
    id: str
    organization: str
    name: str
    created_at: float
    archived_at: float | None = None
    """When its keys became invalid."""
    deleted_at: float | None = None
    """When it was deleted; what it has is removed since then."""
    limits: TenantLimits = TenantLimits()


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """A recorded change."""

    id: str
    project_id: str
    created_at: float
    type: str
    """Kind of change, such as `key.created`."""
    target: str
    """Id of the changed object."""
    key_id: str | None
    """The key that made the change; None: made on the service's own machine."""
    address: str | None
    detail: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage on a day, of a project, a key, or all."""

    day: int
    """Days since 1970-01-01 (UTC)."""
    project_id: str | None
    key_id: str | None
    slot_seconds: float
    tokens: int
    bytes: int
    """Bytes uploaded."""
    jobs: int
    """Jobs created."""
    cost: int = 0
    """In millionths of the currency."""
    currency: str | None = None
    """None: nothing had a price."""
    joules: float = 0.0
    """Energy, as far as it was measured."""
    co2_grams: float = 0.0
    """CO2 of that energy, as far as known."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """The authenticated client."""

    key_id: str
    project_id: str
    organization: str
    scope: Scope
    limits: TenantLimits = TenantLimits()
    """Limits of the project."""
    identity: str | None = None
    """As that of the key."""
    ends_with: str | None = None
    """As that of the key."""

    @property
    def person(self) -> str | None:
        """Id of the key that stands for the person who is the client, or has made its key; None: no
        person by single sign-on.
        """
        return self.ends_with if self.identity is None else self.key_id


@dataclass(frozen=True, kw_only=True)
class File:
    id: str
    project_id: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_at: float
    expires_at: float | None = None
    """When it becomes hidden as if deleted; None: it never expires."""
    idempotency_key: str | None = None
    """Digest of the key of the request that created it; None: it had none."""


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """An event to store. `source`: (segment, line) that it was read from; None for the service's
    own events.
    """

    level: Literal["info", "warn", "error"]
    message: str
    created_at: float | None = None
    """None: now."""
    metrics: Metrics | None = None
    source: tuple[int, int] | None = None


@dataclass(frozen=True)
class NewJob:
    """A job to store, with events for its user about how it will run."""

    job: Job
    told: Sequence[NewEvent] = ()
    max_queued: int | None = None
    """Limit of its project's waiting jobs, this one included; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    id: str
    job_id: str
    created_at: float
    level: str
    message: str
    metrics: Metrics | None


@dataclass(frozen=True)
class Reported:
    """An event in the form that curves need."""

    position: int
    """Position among all events."""
    attempt: int | None
    """None for the service's own events."""
    created_at: float
    message: str
    metrics: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a job.

    `name`: its folder below `checkpoints/` of the run directory.
    """

    id: str
    project_id: str
    job_id: str
    name: str
    step: int
    attempt: int
    created_at: float
    metrics: Metrics | None


@dataclass(frozen=True, kw_only=True)
class Page(Generic[Item]):
    """A page of a list. `has_more`: whether items follow the last of `data`."""

    data: list[Item]
    has_more: bool


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to act for a job until the lease ends. Every write under it checks `token`."""

    job: Job
    token: str | None
    """None: no claim was made; a job's reports may be stored unless somebody has claimed it."""
    now: float
    """Database time of the claim."""


@dataclass(frozen=True)
class NewEngine:
    """An engine that a job starts, whose id is `Job.engine_id`: it holds the slots that the job
    takes.
    """

    most_seats: int
    """Most jobs that it trains at once."""
    room: int | None = None
    """Bytes of a rank for all seats and a round; None: not known."""


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """The change that a reconciler's turn stores, in one transaction."""

    job: Job
    events: Sequence[NewEvent] = ()
    checkpoints: Sequence[Checkpoint] = ()
    files: Sequence[File] = ()
    take_slots: Sequence[int] = ()
    """Slot numbers of `job.host` to allocate to `job.attempt`; if one is taken, nothing is
    stored.
    """
    new_engine: NewEngine | None = None
    """The engine that takes these slots in place of the job; None: none."""
    take_seat: bool = False
    """Whether the job takes a seat in the engine `job.engine_id`; if none is free there, nothing is
    stored.
    """
    release_slots: bool = False
    """Whether the job's slots, or its seat, become free."""
    rest_seconds: float = 0.0
    """How long the job need not be looked at, unless it changes or `look_again` is called; at most
    LONGEST_REST_SECONDS of leases.py.
    """


UPLOAD_PREFIX = "upload_"
"""Beginning of every upload's id, which is the name of its parts' folder."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that arrives in parts."""

    id: str
    project_id: str
    filename: str
    purpose: str
    bytes: int
    """Announced size of the whole file."""
    file_seconds: int | None
    """Lifetime of the resulting file; None: until it is deleted."""
    status: Literal["pending", "completed", "cancelled", "expired"] = "pending"
    created_at: float = 0.0
    expires_at: float = 0.0
    part_ids: list[str] | None = None
    """Ids of the completed upload's parts, in order."""
    file_id: str | None = None
    """Id of the resulting file."""


@dataclass(frozen=True, kw_only=True)
class UploadPart:
    id: str
    project_id: str
    upload_id: str
    bytes: int
    sha256: str
    created_at: float = 0.0
    idempotency_key: str | None = None
    """As of a File."""


@dataclass(frozen=True, kw_only=True)
class Permission:
    """A project's permission to use another one's tuned model."""

    id: str
    project_id: str
    """The project that the model belongs to."""
    model: str
    """Name of a tuned model or of a checkpoint."""
    grantee: str
    """The project that may use it."""
    created_at: float


@dataclass(frozen=True, kw_only=True)
class WebhookEndpoint:
    """An address that gets a message when a job has ended."""

    id: str
    project_id: str
    name: str
    url: str
    event_types: list[str]
    secret: str = field(default="", repr=False)
    """`whsec_…`, which signs deliveries."""
    old_secret: str | None = field(default=None, repr=False)
    """Previous secret, which signs deliveries too until `old_secret_expires_at`; None: not valid
    any more.
    """
    old_secret_expires_at: float | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A message on its way to an endpoint."""

    id: str
    project_id: str
    endpoint: WebhookEndpoint
    body: str
    age_seconds: float
    tries: int
    """Number of tries, this one included."""


@dataclass(frozen=True, kw_only=True)
class JobIntegration:
    """A tracker that a job's metrics are sent to."""

    job_id: str
    number: int
    """Index in the create body's list, from 0."""
    project_id: str
    settings: dict[str, Any]
    """`{"type": "wandb", "wandb": {…}}`, as in the create body."""
    url: str | None = None
    """URL of the run; None: not begun yet."""
    error: str | None = None
    """The last error."""
    tries: int = 0
    """Number of failed tries since the last success."""


@dataclass(frozen=True, kw_only=True)
class ProjectStatistics:
    """Numbers of a project that has unfinished jobs, or holds slots."""

    jobs: dict[str, int]
    """State → unfinished jobs."""
    oldest_queued_seconds: float
    """As in ServiceStatistics."""
    slots: int
    """Slots that its jobs and engines hold."""


@dataclass(frozen=True, kw_only=True)
class ServiceStatistics:
    """Numbers over all projects."""

    jobs: dict[tuple[str, str], int]
    """(state, reason; empty if it has none) → jobs."""
    oldest_queued_seconds: float
    """Waiting time of the job that waits longest; 0: no job waits."""
    overdue_seconds: float
    """Longest time since the last noted look at a job, over the jobs that need attention: a
    look that changes nothing is noted every 30 seconds. 0: there is none.
    """
    slots_in_use: dict[str, int]
    """Host → slots that jobs hold."""
    engines: int
    """Engines that hold slots."""
    seats: int
    """Jobs that they train."""
    file_bytes: int
    """Bytes of all files that are not freed."""
    webhooks_waiting: int
    """Number of deliveries that are neither made nor given up."""
    projects: dict[str, ProjectStatistics]


@dataclass(frozen=True, kw_only=True)
class NewSweep:
    """A sweep to store with its jobs."""

    id: str
    project_id: str
    request: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Jobs that differ in a few options, under one id."""

    id: str
    project_id: str
    created_at: float
    request: dict[str, Any]
    """The create body as received."""
    settings: dict[str, Any]
    """How values are chosen and jobs are stopped: a SweepSettings."""
    cancelled_at: float | None = None
    """When its user cancelled it."""
    finished_at: float | None = None
    """When all its jobs were over."""
    best_job: str | None = None
    """Its best job, once finished; None: no job has succeeded with a validation loss."""
    deleted_at: float | None = None
    """When it became hidden."""
