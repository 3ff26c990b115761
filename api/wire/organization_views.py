"""OpenAI's objects of an organisation: projects, keys, the audit log and usage. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from api.wire.views import Deleted, MoneyView, Seconds, View, money_view
from ft_service.money import MICROS, amount
from ft_service.store.records import ApiKey, AuditEntry, Project, Usage
from ft_service.store.tenants.people import Person
from ft_service.store.tenants.projects import MANAGING_PROJECT

DAY_SECONDS = 86_400
_USAGE_COLUMNS = (
    "project_id",
    "api_key_id",
    "trained_tokens",
    "gpu_seconds",
    "uploaded_bytes",
    "num_jobs",
)
_COST_COLUMNS = ("cost", "currency", "energy_joules", "co2_grams")
_LINE_ITEM = "fine-tuning, slot-hours"


class LimitsView(View):
    """Limits of a project; null: no limit."""

    max_slots: int | None
    """Ranks of its jobs that run at once."""
    max_queued: int | None
    """Jobs that wait in the queue."""
    max_bytes: int | None
    """Bytes of all its files."""
    max_requests_per_minute: int | None
    max_priority: int | None
    """Higher priorities of its jobs are lowered to it."""
    bases: list[str] | None
    """Bases that its jobs may train on."""
    wandb_entities: list[str] | None
    """Weights & Biases entities to which its jobs may send metrics."""
    max_cost_per_month: float | None
    """What its jobs may cost in a month (UTC), in the currency of the service's prices."""


class ProjectView(View):
    id: str
    object: Literal["organization.project"] = "organization.project"
    name: str
    created_at: Seconds
    archived_at: Seconds | None
    status: Literal["active", "archived"]
    external_key_id: None = None
    residency: None = None

    limits: LimitsView
    share: float
    """Its share, from 0 to 1, of the recent use of all projects (with a half-life of three days).

    Of jobs with the same priority, those of the project with the smaller share start first.
    """


class AccountView(View):
    id: str
    object: Literal["organization.project.service_account"] = "organization.project.service_account"
    created_at: Seconds
    name: str
    role: Literal["owner", "member"]


class OwnerView(View):
    type: Literal["service_account"] = "service_account"
    service_account: AccountView


class ApiKeyView(View):
    """An API key. It belongs to its project; `owner` holds its name and role."""

    id: str
    object: Literal["organization.project.api_key"] = "organization.project.api_key"
    name: str
    redacted_value: str
    created_at: Seconds
    last_used_at: Seconds | None
    expires_at: Seconds | None
    owner: OwnerView
    owner_project_access: Literal["active", "inactive"]

    scope: str
    revoked_at: Seconds | None
    single_sign_on: bool
    """It stands for a person who signs in by single sign-on: no secret opens it, and it ends with
    the person's groups.
    """
    ends_with: str | None
    """Id of the key that stands for the person who made it by single sign-on, with whose access it
    ends; null: it ends by itself.
    """


class NewApiKeyView(ApiKeyView):
    value: str
    """The key itself. It is shown only once."""


class DeletedProjectView(Deleted):
    object: Literal["organization.project.deleted"] = "organization.project.deleted"


class DeletedApiKeyView(Deleted):
    object: Literal["organization.project.api_key.deleted"] = "organization.project.api_key.deleted"


class ProjectOfUserView(View):
    id: str
    role: Literal["owner", "member"]


class ProjectsOfUserView(View):
    object: Literal["list"] = "list"
    data: list[ProjectOfUserView]


class UserView(View):
    """A person who has signed in by single sign-on."""

    id: str
    object: Literal["organization.user"] = "organization.user"
    name: str
    email: str | None
    """The name, if it is an address."""
    role: Literal["owner", "reader"]
    """owner: an admin of the project that manages the others."""
    added_at: Seconds
    projects: ProjectsOfUserView

    signed_in_at: Seconds
    """The last sign-in."""


class DeletedUserView(Deleted):
    object: Literal["organization.user.deleted"] = "organization.user.deleted"
    revoked: list[str]
    """Ids of the keys that were revoked: those that stood for the person, and those that they had
    made.
    """


class AuditProjectView(View):
    id: str


class AuditKeyView(View):
    id: str | None
    type: Literal["service_account"] = "service_account"


class AuditSessionView(View):
    ip_address: str | None


class AuditActorView(View):
    type: Literal["api_key", "session"]
    """session: `ft` on the service's own machine."""
    api_key: AuditKeyView | None
    session: AuditSessionView


class AuditView(View):
    id: str
    type: str
    effective_at: Seconds
    project: AuditProjectView
    actor: AuditActorView

    object: Literal["organization.audit_log"] = "organization.audit_log"
    target: str
    """Id of the changed object."""
    detail: dict[str, Any] | None


class UsageResultView(View):
    object: Literal["organization.usage.fine_tuning.result"] = (
        "organization.usage.fine_tuning.result"
    )
    trained_tokens: int
    gpu_seconds: float
    """Seconds times the slots that jobs held."""
    uploaded_bytes: int
    num_jobs: int
    """Jobs whose files were checked."""
    cost: MoneyView | None
    """null: the slots had no price."""
    energy_joules: float | None
    """As far as it was measured; null: nothing was."""
    co2_grams: float | None
    """What that weighs, as far as it is known; null: nothing is."""
    project_id: str | None
    api_key_id: str | None


class UsageBucketView(View):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResultView]


class CostsResultView(View):
    """OpenAI's result of costs."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: MoneyView
    """`currency` in lower case, as OpenAI writes it."""
    line_item: str | None
    project_id: str | None
    api_key_id: str | None
    quantity: float | None
    """Slot-hours, where results are grouped by line_item."""
    organization_id: str | None = None


class CostsBucketView(View):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CostsResultView]


class CostsView(View):
    object: Literal["page"] = "page"
    data: list[CostsBucketView]
    has_more: bool
    next_page: str | None


class UsageView(View):
    object: Literal["page"] = "page"
    data: list[UsageBucketView]
    has_more: bool
    next_page: str | None


def project_view(project: Project, share: float) -> ProjectView:
    """Return the view of a project.

    `share`: its part of the recent use of all projects, in [0, 1].
    """
    status = "active" if project.archived_at is None else "archived"
    return ProjectView.of(
        project, status=status, limits=LimitsView.of(project.limits), share=round(share, 4)
    )


def user_view(person: Person) -> UserView:
    roles: dict[str, Literal["owner", "member"]] = {
        project_id: "owner" if scope == "admin" else "member"
        for project_id, scope in person.scopes.items()
    }
    opened = [ProjectOfUserView(id=one, role=role) for one, role in roles.items()]
    return UserView.of(
        person,
        email=person.name if "@" in person.name else None,
        role="owner" if roles.get(MANAGING_PROJECT) == "owner" else "reader",
        projects=ProjectsOfUserView(data=opened),
    )


def api_key_view(key: ApiKey, now: float) -> ApiKeyView:
    role = "owner" if key.scope == "admin" else "member"
    active = key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
    return ApiKeyView.of(
        key,
        redacted_value=f"{key.prefix}…",
        owner=OwnerView(service_account=AccountView.of(key, role=role)),
        owner_project_access="active" if active else "inactive",
        single_sign_on=key.identity is not None,
    )


def new_api_key_view(key: ApiKey, secret: str, now: float) -> NewApiKeyView:
    return NewApiKeyView.of(api_key_view(key, now), value=secret)


def audit_view(entry: AuditEntry) -> AuditView:
    actor = AuditActorView(
        type="session" if entry.key_id is None else "api_key",
        api_key=None if entry.key_id is None else AuditKeyView(id=entry.key_id),
        session=AuditSessionView(ip_address=entry.address),
    )
    return AuditView.of(
        entry,
        effective_at=entry.created_at,
        project=AuditProjectView(id=entry.project_id),
        actor=actor,
    )


def usage_view(
    rows: Sequence[Usage], first_day: int, last_day: int, *, next_page: str | None
) -> UsageView:
    """Return one bucket for each day, also for days without usage.

    `next_page` None: this is the last page.
    """
    of_day: dict[int, list[UsageResultView]] = {day: [] for day in range(first_day, last_day + 1)}
    for row in rows:
        more = {
            "cost": money_view(row.cost, row.currency),
            "energy_joules": row.joules or None,
            "co2_grams": row.co2_grams or None,
        }
        of_day[row.day].append(
            UsageResultView(**dict(zip(_USAGE_COLUMNS, _amounts(row), strict=True)), **more)
        )
    buckets = [
        UsageBucketView(
            start_time=day * DAY_SECONDS, end_time=(day + 1) * DAY_SECONDS, results=results
        )
        for day, results in of_day.items()
    ]
    return UsageView(data=buckets, has_more=next_page is not None, next_page=next_page)


def costs_view(
    rows: Sequence[Usage],
    first_day: int,
    last_day: int,
    *,
    by_line_item: bool,
    next_page: str | None,
) -> CostsView:
    """Return one bucket for each day, also for days without costs.

    `by_line_item`: whether results name what was paid for, the only item being slot-hours.
    """
    of_day: dict[int, list[CostsResultView]] = {day: [] for day in range(first_day, last_day + 1)}
    for row in rows:
        if row.currency is None:
            continue
        of_day[row.day].append(
            CostsResultView(
                amount=MoneyView(value=amount(row.cost), currency=row.currency.lower()),
                line_item=_LINE_ITEM if by_line_item else None,
                quantity=row.slot_seconds / 3600 if by_line_item else None,
                project_id=row.project_id,
                api_key_id=row.key_id,
            )
        )
    buckets = [
        CostsBucketView(
            start_time=day * DAY_SECONDS, end_time=(day + 1) * DAY_SECONDS, results=results
        )
        for day, results in of_day.items()
    ]
    return CostsView(data=buckets, has_more=next_page is not None, next_page=next_page)


def usage_csv(rows: Sequence[Usage]) -> str:
    """Return one line for each day, project and key."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("day", *_USAGE_COLUMNS, *_COST_COLUMNS))
    for row in rows:
        day = datetime.fromtimestamp(row.day * DAY_SECONDS, UTC).date().isoformat()
        cost = "" if row.currency is None else f"{Decimal(row.cost) / MICROS:f}"
        more = (cost, row.currency or "", row.joules or "", row.co2_grams or "")
        table.writerow((day, *_amounts(row), *more))
    return text.getvalue()


def _amounts(row: Usage) -> tuple[Any, ...]:
    """Return the values of `_USAGE_COLUMNS`."""
    return row.project_id, row.key_id, row.tokens, row.slot_seconds, row.bytes, row.jobs
