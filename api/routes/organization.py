"""`/v1/organization`: projects, their keys and limits, the record of changes, and use. For admin keys only.

An admin key manages its own project's keys. One of the first project (`default`) also manages the other projects of its
organisation, and their limits; of what is in them (files, jobs, models) it sees the list of jobs, if it asks by `project`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import PlainTextResponse
from pydantic import Field

from api.http.auth import Admin, known_project, manages
from api.http.dependencies import After, JsonBody, Services, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from api.wire.organization_views import (
    DAY_SECONDS,
    ApiKeyView,
    AuditView,
    DeletedApiKeyView,
    NewApiKeyView,
    ProjectView,
    UsageView,
    api_key_view,
    audit_view,
    new_api_key_view,
    project_view,
    usage_csv,
    usage_view,
)
from api.wire.views import ListView, list_view
from ft_service.errors import ForbiddenError, SpecError
from ft_service.spec import Strict
from ft_service.store.records import Limits, Principal, Project
from ft_service.store.tenants.projects import MANAGING_PROJECT

router = keyed_router("/v1/organization", "organization")

Limit = Annotated[int, Query(ge=1, le=100)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=1, le=2**53)]
_DEFAULT_DAYS = 7
_LAST_DAY = 10_000_000


class ProjectLimits(Strict):
    """What a project may use. What is left out stays; null takes a limit away."""

    max_slots: Count | None = None
    max_queued: Count | None = None
    max_bytes: Count | None = None
    max_requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    bases: Annotated[list[Name], Field(max_length=1000)] | None = None
    wandb_entities: Annotated[list[Name], Field(max_length=1000)] | None = None

    def given(self) -> dict[str, Any]:
        values = self.model_dump(include=self.model_fields_set)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class ProjectRequest(Strict):
    """A new project."""

    name: Name
    limits: ProjectLimits = ProjectLimits()


class ProjectUpdate(Strict):
    """What changes of a project."""

    name: Name | None = None
    limits: ProjectLimits = ProjectLimits()


class ProjectKeyRequest(Strict):
    """A new key."""

    name: Name
    scope: Literal["admin", "submit", "read", "metrics"] = "submit"
    expires_in_seconds: Annotated[int, Field(ge=1, le=10 * 366 * DAY_SECONDS)] | None = None
    """None: it never expires."""


class KeyRotation(Strict):
    """How a key is replaced."""

    keep_seconds: Annotated[int, Field(ge=0, le=366 * DAY_SECONDS)] = DAY_SECONDS
    """For how long the old key goes on beside the new one."""


@router.get("/projects", response_model=ListView[ProjectView])
def list_projects(caller: Admin, services: Svc, after: After = None, limit: Limit = 20, include_archived: bool = False) -> Any:
    """By creation. An admin key of another project than the first sees its own."""
    if not manages(caller):
        return list_view([_view(services.store.get_project(caller.project_id), services)], has_more=False)
    page = services.store.list_projects(organization=caller.organization, archived=include_archived, after=after, limit=limit)
    return list_view([_view(project, services) for project in page.data], page.has_more)


@router.post("/projects", openapi_extra=body_schema(ProjectRequest))
def create_project(body: JsonBody, caller: Admin, services: Svc) -> ProjectView:
    """Create a project, without keys. `limits` are not in OpenAI's API."""
    asked = parse_body(body, ProjectRequest)
    _refuse_unless_managing(caller)
    limits = Limits(**asked.limits.given())
    return _view(services.store.create_project(name=asked.name, organization=caller.organization, limits=limits), services)


@router.get("/projects/{project_id}")
def retrieve_project(project_id: str, caller: Admin, services: Svc) -> ProjectView:
    return _view(known_project(project_id, caller, services), services)


@router.post("/projects/{project_id}", openapi_extra=body_schema(ProjectUpdate))
def update_project(project_id: str, body: JsonBody, caller: Admin, services: Svc) -> ProjectView:
    """Change its name and limits; these are not in OpenAI's API. They hold from a second later on."""
    asked = parse_body(body, ProjectUpdate)
    known_project(project_id, caller, services)
    _refuse_unless_managing(caller)
    return _view(services.store.update_project(project_id, name=asked.name, limits=asked.limits.given()), services)


@router.post("/projects/{project_id}/archive")
def archive_project(project_id: str, caller: Admin, services: Svc) -> ProjectView:
    """End a project: its keys open nothing any more. Its jobs run on, and what it has stays."""
    known_project(project_id, caller, services)
    _refuse_unless_managing(caller)
    return _view(services.store.archive_project(project_id), services)


@router.get("/projects/{project_id}/api_keys", response_model=ListView[ApiKeyView])
def list_keys(project_id: str, caller: Admin, services: Svc, after: After = None, limit: Limit = 20) -> Any:
    """Oldest first, expired and revoked ones too."""
    known_project(project_id, caller, services)
    now, keys = services.store.now(), services.store.list_keys(project_id)
    if after is not None:
        place = next((number for number, key in enumerate(keys) if key.id == after), None)
        if place is None:
            raise SpecError(f"after = {after[:80]!r}: this list has no such item.", param="after")
        keys = keys[place + 1 :]
    return list_view([api_key_view(key, now) for key in keys[:limit]], has_more=len(keys) > limit)


@router.post("/projects/{project_id}/api_keys", openapi_extra=body_schema(ProjectKeyRequest))
def create_key(project_id: str, body: JsonBody, caller: Admin, services: Svc) -> NewApiKeyView:
    """Make a key, whose `value` is shown this one time."""
    asked = parse_body(body, ProjectKeyRequest)
    known_project(project_id, caller, services)
    now = services.store.now()
    expires_at = None if asked.expires_in_seconds is None else now + asked.expires_in_seconds
    key, secret = services.store.create_key(project_id=project_id, name=asked.name, scope=asked.scope, expires_at=expires_at)
    return new_api_key_view(key, secret, now)


@router.get("/projects/{project_id}/api_keys/{api_key_id}")
def retrieve_key(project_id: str, api_key_id: str, caller: Admin, services: Svc) -> ApiKeyView:
    known_project(project_id, caller, services)
    return api_key_view(services.store.get_key(project_id, api_key_id), services.store.now())


@router.delete("/projects/{project_id}/api_keys/{api_key_id}")
def revoke_key(project_id: str, api_key_id: str, caller: Admin, services: Svc) -> DeletedApiKeyView:
    """Revoke a key; it stays in the list. It opens nothing from a second later on."""
    known_project(project_id, caller, services)
    return DeletedApiKeyView(id=services.store.revoke_key(project_id, api_key_id).id)


@router.post("/projects/{project_id}/api_keys/{api_key_id}/rotate", openapi_extra=body_schema(KeyRotation))
def rotate_key(project_id: str, api_key_id: str, body: JsonBody, caller: Admin, services: Svc) -> NewApiKeyView:
    """Replace a key by one of the same name and scope. The old one goes on for `keep_seconds`."""
    asked = parse_body(body, KeyRotation)
    known_project(project_id, caller, services)
    key, secret = services.store.rotate_key(project_id, api_key_id, keep_seconds=asked.keep_seconds)
    return new_api_key_view(key, secret, services.store.now())


@router.get("/audit_logs", response_model=ListView[AuditView])
def list_audit(caller: Admin, services: Svc, after: After = None, limit: Limit = 20) -> Any:
    """What was changed, newest first: in the caller's project, or in all that it manages."""
    page = services.store.list_audit(**_scope(caller), after=after, limit=limit)
    return list_view([audit_view(entry) for entry in page.data], page.has_more)


@router.get("/usage/fine_tuning", response_model=UsageView, responses={200: {"content": {"text/csv": {}}}})
def usage(
    caller: Admin,
    services: Svc,
    start_time: Annotated[int | None, Query(ge=0, le=_LAST_DAY * DAY_SECONDS)] = None,
    end_time: Annotated[int | None, Query(ge=0, le=_LAST_DAY * DAY_SECONDS)] = None,
    bucket_width: Literal["1d"] = "1d",
    project_ids: Annotated[list[str] | None, Query()] = None,
    api_key_ids: Annotated[list[str] | None, Query()] = None,
    group_by: Annotated[list[Literal["project_id", "api_key_id"]] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=366)] = 31,
    page: str | None = None,
    format: Literal["json", "csv"] = "json",
) -> Any:
    """What was used, by day (UTC), and by project and key if `group_by` says so. `start_time`: default: a week ago. `format`
    csv: one line a day, project and key."""
    today = int(services.store.now() // DAY_SECONDS)
    first = max(0, today - _DEFAULT_DAYS + 1) if start_time is None else start_time // DAY_SECONDS
    last = today if end_time is None else -(-end_time // DAY_SECONDS) - 1
    if page is not None:
        if not page.isdecimal() or len(page) > 9:
            raise SpecError(f"page = {page[:80]!r}: use the next_page of an answer.", param="page")
        first = max(first, int(page))
    groups = [{"api_key_id": "key_id"}.get(name, name) for name in group_by or ()]
    if format == "csv":
        groups = ["project_id", "key_id"]
    end = min(last, first + limit - 1)
    rows = services.store.usage(
        first_day=first,
        last_day=end,
        project_ids=project_ids,
        key_ids=api_key_ids,
        group_by=groups,
        **_usage_scope(caller),
    )
    if format == "csv":
        return PlainTextResponse(usage_csv(rows), media_type="text/csv")
    return usage_view(rows, first, end, next_page=str(end + 1) if end < last else None)


def _view(project: Project, services: Services) -> ProjectView:
    return project_view(project, services.forecasts.share_of(project.id))


def _refuse_unless_managing(caller: Principal) -> None:
    if not manages(caller):
        raise ForbiddenError(f"Projects and their limits are managed with an admin key of the project {MANAGING_PROJECT}.")


def _scope(caller: Principal) -> dict[str, Any]:
    return {"organization": caller.organization} if manages(caller) else {"project_id": caller.project_id}


def _usage_scope(caller: Principal) -> dict[str, Any]:
    return {"organization": caller.organization} if manages(caller) else {"only_project": caller.project_id}
