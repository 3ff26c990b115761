"""Records of what surrounds jobs on the wire: uploads, permissions, webhooks. Times as in `base.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that arrives in parts."""

    id: str
    project_id: str
    filename: str
    purpose: str
    bytes: int
    """Of the whole file, as announced."""
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
    """The model's."""
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
    """With this one."""


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
    """Of the run there; None: none was begun yet."""
    error: str | None = None
    """The last thing that went wrong."""
    tries: int = 0
    """That went wrong since sending last ended well."""


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
    """Of files whose bytes are kept."""
    webhooks_waiting: int
    """Deliveries that are neither made nor given up."""
