"""OpenAI's objects of an organisation: projects, keys, the record of changes and use. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel

from ft_service.store.records import ApiKey, AuditEntry, Limits, Project, Usage

DAY_SECONDS = 86_400


class LimitsView(BaseModel):
    """What the project may use; null: no limit."""

    max_slots: int | None
    """Ranks that it runs at once."""
    max_queued: int | None
    """Jobs that wait."""
    max_bytes: int | None
    """Bytes of its files."""
    max_requests_per_minute: int | None
    max_priority: int | None
    """Higher priorities of its jobs are lowered to it."""
    bases: list[str] | None
    """Bases that it may train on."""
    wandb_entities: list[str] | None
    """Weights & Biases entities to which its jobs may send metrics."""


class ProjectView(BaseModel):
    id: str
    object: Literal["organization.project"] = "organization.project"
    name: str
    created_at: int
    archived_at: int | None
    status: Literal["active", "archived"]
    external_key_id: None = None
    residency: None = None

    limits: LimitsView
    share: float
    """Its part, from 0 to 1, of what all projects have used lately (half of it is forgotten every three days). Of jobs of like
    priority those start first whose project has the smaller part."""


class AccountView(BaseModel):
    id: str
    object: Literal["organization.project.service_account"] = "organization.project.service_account"
    created_at: int
    name: str
    role: Literal["owner", "member"]


class OwnerView(BaseModel):
    type: Literal["service_account"] = "service_account"
    service_account: AccountView


class ApiKeyView(BaseModel):
    """A key. Nobody owns one but its project: `owner` says its name and what it may do."""

    id: str
    object: Literal["organization.project.api_key"] = "organization.project.api_key"
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    owner: OwnerView
    owner_project_access: Literal["active", "inactive"]

    scope: str
    revoked_at: int | None


class NewApiKeyView(ApiKeyView):
    value: str
    """The key itself, shown this one time."""


class DeletedApiKeyView(BaseModel):
    id: str
    object: Literal["organization.project.api_key.deleted"] = "organization.project.api_key.deleted"
    deleted: Literal[True] = True


class AuditProjectView(BaseModel):
    id: str


class AuditKeyView(BaseModel):
    id: str | None
    type: Literal["service_account"] = "service_account"


class AuditSessionView(BaseModel):
    ip_address: str | None


class AuditActorView(BaseModel):
    type: Literal["api_key", "session"]
    """session: on the service's own machine, by `ft`."""
    api_key: AuditKeyView | None
    session: AuditSessionView


class AuditView(BaseModel):
    id: str
    type: str
    effective_at: int
    project: AuditProjectView
    actor: AuditActorView

    object: Literal["organization.audit_log"] = "organization.audit_log"
    target: str
    """Id of what was changed."""
    detail: dict[str, Any] | None


class UsageResultView(BaseModel):
    object: Literal["organization.usage.fine_tuning.result"] = "organization.usage.fine_tuning.result"
    trained_tokens: int
    gpu_seconds: float
    """Of slots: seconds times the ranks that a job held a place for."""
    uploaded_bytes: int
    num_jobs: int
    """Whose files were checked."""
    project_id: str | None
    api_key_id: str | None


class UsageBucketView(BaseModel):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResultView]


class UsageView(BaseModel):
    object: Literal["page"] = "page"
    data: list[UsageBucketView]
    has_more: bool
    next_page: str | None


def project_view(project: Project, share: float) -> ProjectView:
    """`share`: of what all projects have used lately."""
    return ProjectView(
        id=project.id,
        name=project.name,
        created_at=int(project.created_at),
        archived_at=_whole(project.archived_at),
        status="active" if project.archived_at is None else "archived",
        limits=limits_view(project.limits),
        share=round(share, 4),
    )


def limits_view(limits: Limits) -> LimitsView:
    return LimitsView.model_validate(
        {**vars(limits), "bases": _list(limits.bases), "wandb_entities": _list(limits.wandb_entities)}
    )


def api_key_view(key: ApiKey, now: float) -> ApiKeyView:
    return ApiKeyView(**_key(key, now))


def new_api_key_view(key: ApiKey, secret: str, now: float) -> NewApiKeyView:
    return NewApiKeyView(**_key(key, now), value=secret)


def _key(key: ApiKey, now: float) -> dict[str, Any]:
    role: Literal["owner", "member"] = "owner" if key.scope == "admin" else "member"
    active = key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
    account = AccountView(id=key.id, created_at=int(key.created_at), name=key.name, role=role)
    return {
        "id": key.id,
        "name": key.name,
        "redacted_value": f"{key.prefix}…",
        "created_at": int(key.created_at),
        "last_used_at": _whole(key.last_used_at),
        "expires_at": _whole(key.expires_at),
        "owner": OwnerView(service_account=account),
        "owner_project_access": "active" if active else "inactive",
        "scope": key.scope,
        "revoked_at": _whole(key.revoked_at),
    }


def audit_view(entry: AuditEntry) -> AuditView:
    return AuditView(
        id=entry.id,
        type=entry.type,
        effective_at=int(entry.created_at),
        project=AuditProjectView(id=entry.project_id),
        actor=AuditActorView(
            type="session" if entry.key_id is None else "api_key",
            api_key=None if entry.key_id is None else AuditKeyView(id=entry.key_id),
            session=AuditSessionView(ip_address=entry.address),
        ),
        target=entry.target,
        detail=entry.detail,
    )


def usage_view(rows: Sequence[Usage], first_day: int, last_day: int, *, next_page: str | None) -> UsageView:
    """A bucket a day, those without use too. `next_page`: None: there is none."""
    of_day: dict[int, list[UsageResultView]] = {day: [] for day in range(first_day, last_day + 1)}
    for row in rows:
        of_day[row.day].append(
            UsageResultView(
                trained_tokens=row.tokens,
                gpu_seconds=row.slot_seconds,
                uploaded_bytes=row.bytes,
                num_jobs=row.jobs,
                project_id=row.project_id,
                api_key_id=row.key_id,
            )
        )
    buckets = [
        UsageBucketView(start_time=day * DAY_SECONDS, end_time=(day + 1) * DAY_SECONDS, results=results)
        for day, results in of_day.items()
    ]
    return UsageView(data=buckets, has_more=next_page is not None, next_page=next_page)


def usage_csv(rows: Sequence[Usage]) -> str:
    """One line a day, project and key."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("day", "project_id", "api_key_id", "trained_tokens", "gpu_seconds", "uploaded_bytes", "num_jobs"))
    for row in rows:
        day = datetime.fromtimestamp(row.day * DAY_SECONDS, UTC).date().isoformat()
        table.writerow((day, row.project_id, row.key_id, row.tokens, repr(row.slot_seconds), row.bytes, row.jobs))
    return text.getvalue()


def _list(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
