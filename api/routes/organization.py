"""`/v1/organization`: projects, their keys and limits, the audit log, and usage.

For admin keys only.

An admin key manages the keys of its own project. An admin key of the first project (`default`) also
manages the other projects of its organisation, and their limits; of their contents it sees only the
list of jobs, with the parameter `project`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Header, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field, ValidationError

from api.http import idempotency
from api.http.auth import Admin, known_project, manages
from api.http.dependencies import After, JsonBody, Services, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from api.wire.organization_views import (
    DAY_SECONDS,
    ApiKeyView,
    AuditView,
    CostsView,
    DeletedApiKeyView,
    DeletedProjectView,
    DeletedUserView,
    NewApiKeyView,
    ProjectView,
    UsageView,
    UserView,
    api_key_view,
    audit_view,
    costs_view,
    new_api_key_view,
    project_view,
    usage_csv,
    usage_view,
    user_view,
)
from api.wire.views import ListView, list_view, page_of
from ft_service.control.admission.budget import refuse_limit_without_prices
from ft_service.errors import ForbiddenError, NotFoundError, SpecError
from ft_service.spec import Strict, spec_error
from ft_service.spec.option_types import Number
from ft_service.store.records import NewKey, Principal, Project, TenantLimits, Usage
from ft_service.store.tenants.keys import PREFIX as KEY_PREFIX
from ft_service.store.tenants.people import Person
from ft_service.store.tenants.projects import MANAGING_PROJECT
from ft_service.store.tenants.projects import PREFIX as PROJECT_PREFIX
from ft_service.store.tenants.usage import UsageQuery

router = keyed_router("/v1/organization", "organization")

Limit = Annotated[int, Query(ge=1, le=100)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=1, le=2**53)]
_DEFAULT_DAYS = 7
_LAST_DAY = 10_000_000
Time = Annotated[int | None, Field(ge=0, le=_LAST_DAY * DAY_SECONDS)]


class ProjectLimits(Strict):
    """Limits of a project. A limit that is left out stays as it is; null removes it."""

    max_slots: Count | None = None
    max_queued: Count | None = None
    max_bytes: Count | None = None
    max_requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    bases: Annotated[list[Name], Field(max_length=1000)] | None = None
    wandb_entities: Annotated[list[Name], Field(max_length=1000)] | None = None
    max_cost_per_month: Annotated[Number, Field(gt=0, le=1_000_000_000)] | None = None

    def given(self) -> dict[str, Any]:
        values = self.model_dump(include=self.model_fields_set)
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }


class ProjectRequest(Strict):
    """A new project."""

    name: Name
    limits: ProjectLimits = ProjectLimits()


class ProjectUpdate(Strict):
    """Changes to a project."""

    name: Name | None = None
    limits: ProjectLimits = ProjectLimits()


class ProjectKeyRequest(Strict):
    """A new key."""

    name: Name
    scope: Literal["admin", "submit", "read", "metrics"] = "submit"
    expires_in_seconds: Annotated[int, Field(ge=1, le=10 * 366 * DAY_SECONDS)] | None = None
    """None: it never expires."""


class KeyRotation(Strict):
    """The replacement of a key."""

    keep_seconds: Annotated[int, Field(ge=0, le=366 * DAY_SECONDS)] = DAY_SECONDS
    """How long the old key stays valid."""


@router.get("/projects", response_model=ListView[ProjectView])
def list_projects(
    caller: Admin,
    services: Svc,
    after: After = None,
    limit: Limit = 20,
    include_archived: bool = False,
) -> Any:
    """List projects by creation.

    An admin key of another project than the first sees only its own.
    """
    if not manages(caller):
        return list_view(
            [_view(services.store.projects.get_project(caller.project_id), services)],
            has_more=False,
        )
    page = services.store.projects.list_projects(
        organization=caller.organization, archived=include_archived, after=after, limit=limit
    )
    return list_view([_view(project, services) for project in page.data], page.has_more)


@router.post("/projects", openapi_extra=body_schema(ProjectRequest))
def create_project(
    body: JsonBody,
    caller: Admin,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> ProjectView:
    """Create a project, without keys. `limits` are not in OpenAI's API."""
    given = parse_body(body, ProjectRequest)
    _refuse_unless_managing(caller)
    refuse_limit_without_prices(given.limits.max_cost_per_month, services.settings)
    limits = TenantLimits(**given.limits.given())
    keyed_id = idempotency.keyed_id(PROJECT_PREFIX, idempotency_key, caller)
    store = services.store
    organization = caller.organization
    made, _ = idempotency.once(
        lambda: idempotency.earlier_project(store, keyed_id, given.name, limits),
        lambda: store.projects.create_project(
            name=given.name, organization=organization, limits=limits, project_id=keyed_id
        ),
    )
    return _view(made, services)


@router.get("/projects/{project_id}")
def retrieve_project(project_id: str, caller: Admin, services: Svc) -> ProjectView:
    return _view(known_project(project_id, caller, services), services)


@router.post("/projects/{project_id}", openapi_extra=body_schema(ProjectUpdate))
def update_project(project_id: str, body: JsonBody, caller: Admin, services: Svc) -> ProjectView:
    """Change a project's name and limits; limits are not in OpenAI's API.

    They apply after a second.
    """
    given = parse_body(body, ProjectUpdate)
    known_project(project_id, caller, services)
    _refuse_unless_managing(caller)
    refuse_limit_without_prices(given.limits.max_cost_per_month, services.settings)
    return _view(
        services.store.projects.update_project(
            project_id, name=given.name, limits=given.limits.given()
        ),
        services,
    )


@router.post("/projects/{project_id}/archive")
def archive_project(project_id: str, caller: Admin, services: Svc) -> ProjectView:
    """Archive a project: its keys become invalid.

    Its jobs continue, and its files and models stay.
    """
    known_project(project_id, caller, services)
    _refuse_unless_managing(caller)
    return _view(services.store.projects.archive_project(project_id), services)


@router.delete("/projects/{project_id}")
def delete_project(project_id: str, caller: Admin, services: Svc) -> DeletedProjectView:
    """Not in OpenAI's API. Delete a project with all that it has: its keys become invalid, its jobs
    are cancelled, and jobs, models, files, uploads, events, sweeps, webhooks, permissions, Tinker's
    sessions and its part of the audit log are removed in the background. What stays are sums of its
    use by day, and who has deleted it. It cannot be undone.
    """
    known_project(project_id, caller, services)
    _refuse_unless_managing(caller)
    services.store.erasure.delete_project(project_id)
    return DeletedProjectView(id=project_id)


@router.get("/projects/{project_id}/api_keys", response_model=ListView[ApiKeyView])
def list_keys(
    project_id: str, caller: Admin, services: Svc, after: After = None, limit: Limit = 20
) -> Any:
    """List keys, the oldest first, expired and revoked ones too."""
    known_project(project_id, caller, services)
    now = services.store.now()
    views = [api_key_view(key, now) for key in services.store.keys.list_keys(project_id)]
    return page_of(views, after, limit, newest_first=False)


@router.post("/projects/{project_id}/api_keys", openapi_extra=body_schema(ProjectKeyRequest))
def create_key(
    project_id: str,
    body: JsonBody,
    caller: Admin,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> NewApiKeyView:
    """Create a key. Its `value` is shown only once.

    A repeat with the same `Idempotency-Key` gives the same key a new value, as long as it was not
    used.
    """
    given = parse_body(body, ProjectKeyRequest)
    known_project(project_id, caller, services)
    now = services.store.now()
    expires_at = None if given.expires_in_seconds is None else now + given.expires_in_seconds
    keyed_id = idempotency.keyed_id(KEY_PREFIX, idempotency_key, caller, project_id)
    store = services.store
    (key, secret), _ = idempotency.once(
        lambda: idempotency.earlier_api_key(
            store, project_id, keyed_id, given.name, given.scope, given.expires_in_seconds
        ),
        lambda: store.keys.create_key(
            NewKey(
                project_id=project_id,
                name=given.name,
                scope=given.scope,
                expires_at=expires_at,
                id=keyed_id,
            ),
            param="expires_in_seconds",
            made_by=caller,
        ),
    )
    return new_api_key_view(key, secret, now)


@router.get("/projects/{project_id}/api_keys/{api_key_id}")
def retrieve_key(project_id: str, api_key_id: str, caller: Admin, services: Svc) -> ApiKeyView:
    known_project(project_id, caller, services)
    return api_key_view(services.store.keys.get_key(project_id, api_key_id), services.store.now())


@router.delete("/projects/{project_id}/api_keys/{api_key_id}")
def revoke_key(project_id: str, api_key_id: str, caller: Admin, services: Svc) -> DeletedApiKeyView:
    """Revoke a key, and with a person's those that they made. It stays in the list, and becomes
    invalid after a second.
    """
    known_project(project_id, caller, services)
    return DeletedApiKeyView(id=services.store.keys.revoke_key(project_id, api_key_id).id)


@router.post(
    "/projects/{project_id}/api_keys/{api_key_id}/rotate", openapi_extra=body_schema(KeyRotation)
)
def rotate_key(
    project_id: str, api_key_id: str, body: JsonBody, caller: Admin, services: Svc
) -> NewApiKeyView:
    """Not in OpenAI's API. Replace a key with a new one of the same name and scope.

    The old one stays valid for `keep_seconds`.
    """
    keep_seconds = parse_body(body, KeyRotation).keep_seconds
    known_project(project_id, caller, services)
    key, secret = services.store.keys.rotate_key(project_id, api_key_id, keep_seconds=keep_seconds)
    return new_api_key_view(key, secret, services.store.now())


@router.get("/users", response_model=ListView[UserView])
def list_users(caller: Admin, services: Svc, after: After = None, limit: Limit = 20) -> Any:
    """List the people who have signed in by single sign-on, the first ones first: to the caller's
    project, or to all projects that it manages.
    """
    people = services.store.people.list_people(**_scope(caller))
    return page_of([user_view(person) for person in people], after, limit, newest_first=False)


@router.get("/users/{user_id}")
def retrieve_user(user_id: str, caller: Admin, services: Svc) -> UserView:
    return user_view(_known_person(user_id, caller, services))


@router.delete("/users/{user_id}")
def delete_user(user_id: str, caller: Admin, services: Svc) -> DeletedUserView:
    """End what a person has here, in every project: sessions in browsers and on command lines, and
    the keys that they made. They come in again as long as their groups at the provider open a
    project: take those away first.
    """
    person = _known_person(user_id, caller, services)
    _refuse_unless_managing(caller)
    revoked = [key.id for key in services.store.people.end(person.id)]
    return DeletedUserView(id=person.id, revoked=revoked)


def _known_person(user_id: str, caller: Principal, services: Services) -> Person:
    """Raises NotFoundError for one who has not signed in to a project of the caller."""
    for person in services.store.people.list_people(**_scope(caller)):
        if person.id == user_id:
            return person
    raise NotFoundError(f"There is no user {user_id[:80]!r}.", param="user_id")


@router.get("/audit_logs", response_model=ListView[AuditView])
def list_audit(caller: Admin, services: Svc, after: After = None, limit: Limit = 20) -> Any:
    """List changes, the newest first: those of the caller's project, or of all projects that it
    manages.
    """
    page = services.store.audit.list_audit(**_scope(caller), after=after, limit=limit)
    return list_view([audit_view(entry) for entry in page.data], page.has_more)


class PeriodParameters(BaseModel):
    """Days, projects and keys, and the page of an answer."""

    start_time: Time = None
    end_time: Time = None
    bucket_width: Literal["1d"] = "1d"
    project_ids: list[str] | None = None
    api_key_ids: list[str] | None = None
    limit: Annotated[int, Field(ge=1, le=366)] = 31
    page: str | None = None


class UsageParameters(PeriodParameters):
    """Which usage is summed, and how it is grouped."""

    group_by: list[Literal["project_id", "api_key_id"]] | None = None
    format: Literal["json", "csv"] = "json"


@router.get(
    "/usage/fine_tuning", response_model=UsageView, responses={200: {"content": {"text/csv": {}}}}
)
def usage(
    request: Request, caller: Admin, services: Svc, query: Annotated[UsageParameters, Query()]
) -> Any:
    """Not in OpenAI's API. Usage by day (UTC), and by project and key if `group_by` says so.

    `start_time`: default: a week ago. `format` csv: one line for each day, project and key.
    """
    query = _with_lists(query, request)
    first, end, next_page = _period(query, services)
    names = ("project_id", "api_key_id") if query.format == "csv" else query.group_by or ()
    rows = _rows(query, first, end, names, caller, services)
    if query.format == "csv":
        return PlainTextResponse(usage_csv(rows), media_type="text/csv")
    return usage_view(rows, first, end, next_page=next_page)


Parameters = TypeVar("Parameters", bound=PeriodParameters)


class CostParameters(PeriodParameters):
    """Which costs are summed, and how they are grouped. OpenAI's."""

    group_by: list[Literal["project_id", "api_key_id", "line_item"]] | None = None
    limit: Annotated[int, Field(ge=1, le=180)] = 7


@router.get("/costs")
def costs(
    request: Request, caller: Admin, services: Svc, query: Annotated[CostParameters, Query()]
) -> CostsView:
    """Costs by day (UTC), by the prices of FT_PRICES when the slots were taken. The only line item
    is the time of slots; a slot's time counts on the day when it became free.
    """
    query = _with_lists(query, request)
    first, end, next_page = _period(query, services)
    names = query.group_by or ()
    rows = _rows(query, first, end, names, caller, services)
    return costs_view(rows, first, end, by_line_item="line_item" in names, next_page=next_page)


def _with_lists(query: Parameters, request: Request) -> Parameters:
    """Return the parameters with the lists that OpenAI's clients write as `group_by[]=…`.

    Raises SpecError for values that a list does not have.
    """
    names = ("project_ids", "api_key_ids", "group_by")
    lists = {name: request.query_params.getlist(f"{name}[]") for name in names}
    given = {name: values for name, values in lists.items() if values}
    try:
        return type(query).model_validate({**query.model_dump(exclude_unset=True), **given})
    except ValidationError as error:
        raise spec_error(error, type(query)) from None


def _period(query: PeriodParameters, services: Services) -> tuple[int, int, str | None]:
    """Return the first and the last day of a page, and the name of the next page.

    Raises SpecError for a page that no answer named.
    """
    today = int(services.store.now() // DAY_SECONDS)
    first = (
        max(0, today - _DEFAULT_DAYS + 1)
        if query.start_time is None
        else query.start_time // DAY_SECONDS
    )
    last = today if query.end_time is None else -(-query.end_time // DAY_SECONDS) - 1
    if query.page is not None:
        if not query.page.isdecimal() or len(query.page) > 9:
            raise SpecError(
                f"page = {query.page[:80]!r}: use the next_page of an answer.", param="page"
            )
        first = max(first, int(query.page))
    end = min(last, first + query.limit - 1)
    return first, end, str(end + 1) if end < last else None


def _rows(
    query: PeriodParameters,
    first: int,
    end: int,
    names: Sequence[str],
    caller: Principal,
    services: Services,
) -> list[Usage]:
    """Return the usage of a page. `names`: what it is grouped by besides the day."""
    grouped = [{"api_key_id": "key_id"}.get(name, name) for name in names if name != "line_item"]
    return services.store.usage.usage(
        UsageQuery(
            first_day=first,
            last_day=end,
            project_ids=query.project_ids,
            key_ids=query.api_key_ids,
            group_by=grouped,
            **_scope(caller, "only_project"),
        )
    )


def _view(project: Project, services: Services) -> ProjectView:
    return project_view(project, services.forecasts.share_of(project.id))


def _refuse_unless_managing(caller: Principal) -> None:
    if not manages(caller):
        raise ForbiddenError(
            "Projects, their limits and users are managed with an admin key of the project "
            f"{MANAGING_PROJECT}."
        )


def _scope(caller: Principal, own: str = "project_id") -> dict[str, Any]:
    """Return what limits a query to the caller's organisation or project.

    `own`: the parameter that takes the project.
    """
    return {"organization": caller.organization} if manages(caller) else {own: caller.project_id}
