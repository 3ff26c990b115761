"""Records of the store. Every row belongs to a project; times are seconds since the epoch, always the database's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ft_service.jobs.states import Job
from ft_service.rundir.events import Metrics

Scope = Literal["admin", "submit", "user", "read", "metrics"]
"""admin: everything in its project, and in the first project also all projects of its organisation; submit (user, in earlier
versions): all but who else may use its models; read: nothing but looking; metrics: only GET /metrics, of all projects."""
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a project may use; None: no limit."""

    max_slots: int | None = None
    """Ranks that it runs at once."""
    max_queued: int | None = None
    """Jobs that wait."""
    max_bytes: int | None = None
    """Bytes of its files."""
    max_requests_per_minute: int | None = None
    """Of all its keys together, to all API processes that share a PostgreSQL."""
    max_priority: int | None = None
    """Highest priority of its jobs; a higher one is lowered to it."""
    bases: tuple[str, ...] | None = None
    """Names of bases that it may train on."""
    wandb_entities: tuple[str, ...] | None = None
    """Weights & Biases entities to which its jobs may send metrics."""


@dataclass(frozen=True, kw_only=True)
class Project:
    id: str
    organization: str
    name: str
    created_at: float
    archived_at: float | None = None
    """From then on its keys open nothing."""
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """A change that somebody has made."""

    id: str
    project_id: str
    created_at: float
    type: str
    """What was done: `key.created`."""
    target: str
    """Id of what was changed."""
    key_id: str | None
    """By which key; None: on the service's own machine."""
    address: str | None
    detail: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used on a day, by a project or a key, or all."""

    day: int
    """Days since 1970-01-01 (UTC)."""
    project_id: str | None
    key_id: str | None
    slot_seconds: float
    tokens: int
    bytes: int
    """Uploaded."""
    jobs: int
    """Created."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who is asking."""

    key_id: str
    project_id: str
    organization: str
    scope: Scope
    limits: Limits = Limits()
    """The project's."""


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
    """From then on it is hidden, as if it had been deleted; None: it never expires."""


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """An event about to be stored. `source`: (segment, line) it came from; None for the service's own."""

    level: Literal["info", "warn", "error"]
    message: str
    created_at: float | None = None
    """None: now."""
    metrics: Metrics | None = None
    source: tuple[int, int] | None = None


@dataclass(frozen=True)
class NewJob:
    """A job about to be stored, and the events that tell its user how it will be run."""

    job: Job
    told: Sequence[NewEvent] = ()
    max_queued: int | None = None
    """Jobs of its project that may wait, this one included; None: any number."""


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
    """An event as curves need it."""

    position: int
    """Its place among all events."""
    attempt: int | None
    """None: an event of the service's own."""
    created_at: float
    message: str
    metrics: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a job. `name`: its folder below `checkpoints/` of the run directory."""

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
    """A slice of a list. `has_more`: there are items after the last of `data`."""

    data: list[Item]
    has_more: bool


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to act for a job until the lease ends. `token` is checked by every write under it."""

    job: Job
    token: str
    now: float
    """Database time of the claim."""


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """What the reconciler writes after acting, in one transaction or not at all."""

    job: Job
    events: Sequence[NewEvent] = ()
    checkpoints: Sequence[Checkpoint] = ()
    files: Sequence[File] = ()
    take_slots: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Host → its slot numbers to allocate to `job.attempt`; one that is taken undoes the whole change."""
    release_slots: bool = False
    rest_seconds: float = 0.0
    """For how long nobody need look at the job, beyond the usual, unless it changes or `look_again` is called."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that arrives in parts."""

    id: str
    project_id: str
    filename: str
    purpose: str
    bytes: int
    """Size of the whole file, as announced."""
    file_seconds: int | None
    """Lifetime of the file that it becomes; None: until it is deleted."""
    status: Literal["pending", "completed", "cancelled", "expired"] = "pending"
    created_at: float = 0.0
    expires_at: float = 0.0
    part_ids: list[str] | None = None
    """The parts it was completed with, in order."""
    file_id: str | None = None
    """The file it has become."""


@dataclass(frozen=True, kw_only=True)
class UploadPart:
    id: str
    project_id: str
    upload_id: str
    bytes: int
    sha256: str
    created_at: float = 0.0


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
    """An address that is told when a job has ended."""

    id: str
    project_id: str
    name: str
    url: str
    event_types: list[str]
    secret: str = field(default="", repr=False)
    """`whsec_…`: what deliveries are signed with."""
    old_secret: str | None = field(default=None, repr=False)
    """Signs deliveries too, until `old_secret_expires_at`; None: there is none that is still valid."""
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
    """Tries so far, with this one."""


@dataclass(frozen=True, kw_only=True)
class JobIntegration:
    """Where else a job's metrics are sent."""

    job_id: str
    number: int
    """Its place in the create body's list, from 0."""
    project_id: str
    settings: dict[str, Any]
    """`{"type": "wandb", "wandb": {…}}`, as in the create body."""
    url: str | None = None
    """URL of the run there; None: none was begun yet."""
    error: str | None = None
    """The last thing that went wrong."""
    tries: int = 0
    """Tries that went wrong since sending last ended well."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Numbers over all projects."""

    jobs: dict[tuple[str, str], int]
    """(state, reason; empty if it has none) → jobs."""
    oldest_queued_seconds: float
    """Since the job that waits longest entered the queue; 0: none waits."""
    overdue_seconds: float
    """Since the job that was looked at longest ago, of those that need attention, was looked at; 0: there is none."""
    slots_in_use: dict[str, int]
    """Host → slots that jobs hold."""
    file_bytes: int
    """Sum over files whose bytes are kept."""
    webhooks_waiting: int
    """Deliveries that are neither made nor given up."""
