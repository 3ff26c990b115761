"""Usage, the audit log, and projects with their limits and keys, for admin keys."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from api.http.auth import manages
from api.page.formatting import byte_count
from api.page.inner_api import Api, InnerApi
from api.page.rendering import leave_for, page
from api.page.summaries import usage_bars, usage_summary
from api.routes.page.sign_in_page import Visitor, form_of, page_router

router = page_router()

ORGANIZATION = "/v1/organization"
PROJECTS = f"{ORGANIZATION}/projects"
_DAY_SECONDS = 86_400
_MOST_NAMED = 20
"""Projects whose keys' names are read."""
_FULL_PAGE = 100
_NAME_LISTS = ("bases", "wandb_entities")
_NO_NAMES = "none"
"""An empty list of names, as templates/limits.html writes it."""
LIMITS = {
    "max_slots": ("Ranks at once", "ranks that it runs at the same time"),
    "max_queued": ("Queued jobs", "jobs that wait"),
    "max_bytes": ("Bytes of files", "such as 500 MiB or 2 GiB"),
    "max_requests_per_minute": ("Requests a minute", "of all its keys together"),
    "max_priority": ("Highest priority", "higher ones of its jobs are lowered to it"),
    "bases": ("Bases", "names, separated by commas, or none"),
    "wandb_entities": ("W&B entities", "names, separated by commas, or none"),
    "max_cost_per_month": ("Cost a month", "in the currency of the prices"),
}
"""Limit of a project → its label and what to enter."""


@router.get("/usage")
async def usage(
    request: Request,
    api: Api,
    days: Annotated[int, Query(ge=1, le=366)] = 30,
    of: Literal["gpu_seconds", "tokens", "bytes", "jobs", "cost", "joules"] = "gpu_seconds",
    project: str | None = None,
) -> Response:
    """Sums over the last days (UTC), today included."""
    begin = (int(time.time()) // _DAY_SECONDS - days + 1) * _DAY_SECONDS
    period: dict[str, Any] = {"start_time": begin, "limit": days, "project_ids": project or None}
    used = await api.get(
        f"{ORGANIZATION}/usage/fine_tuning", **period, group_by=["project_id", "api_key_id"]
    )
    projects = {
        view["id"]: view["name"] for view in await every(api, PROJECTS, include_archived="true")
    }
    summary = usage_summary(used["data"])
    of = of if of in summary.amounts else "gpu_seconds"
    keys = {
        key["id"]: key["name"]
        for name in list(summary.projects)[:_MOST_NAMED]
        for key in await _keys_of(api, name)
    }
    values = {
        "summary": summary,
        "bars": usage_bars(summary.days, of),
        "amounts_named": summary.amounts,
        "projects": projects,
        "keys": keys,
        "days": days,
        "of": of,
        "project": project,
        "csv": f"{ORGANIZATION}/usage/fine_tuning?format=csv&start_time={begin}&limit={days}",
        "day_name": lambda second: datetime.fromtimestamp(second, UTC).strftime("%d %b"),
    }
    return page(request, "usage.html", **values)


@router.get("/changes")
async def changes(request: Request, api: Api, after: str | None = None) -> Response:
    """The audit log, newest first."""
    entries = await api.get(f"{ORGANIZATION}/audit_logs", limit=50, after=after)
    return page(request, "changes.html", entries=entries, first_page=after is None)


@router.get("/projects")
async def projects(request: Request, api: Api, visitor: Visitor) -> Response:
    """Every project that the key may see, archived ones too."""
    listed = await every(api, PROJECTS, include_archived="true")
    return page(request, "projects.html", projects=listed, limits=LIMITS, manages=manages(visitor))


@router.post("/projects")
async def create(request: Request, api: Api) -> Response:
    made = await api.post(PROJECTS, {"name": (await form_of(request)).get("name", "")})
    return leave_for(request, f"/projects/{made['id']}")


@router.get("/projects/{project_id}")
async def project(request: Request, api: Api, visitor: Visitor, project_id: str) -> Response:
    """A project's limits and keys."""
    values = {
        "project": await api.get(f"{PROJECTS}/{project_id}"),
        "limits": LIMITS,
        "manages": manages(visitor),
    }
    return page(request, "project.html", keys=await _keys_of(api, project_id), new=None, **values)


@router.get("/keys")
async def keys(visitor: Visitor, request: Request, api: Api) -> Response:
    """The keys of the visitor's own project."""
    return await project(request, api, visitor, visitor.project_id)


@router.post("/projects/{project_id}/limits")
async def change(request: Request, api: Api, project_id: str) -> Response:
    form = await form_of(request)
    limits = {name: _limit(name, form.get(name, "").strip()) for name in LIMITS}
    name = {"name": form["name"]} if form.get("name") else {}
    await api.post(f"{PROJECTS}/{project_id}", {**name, "limits": limits})
    return leave_for(request, f"/projects/{project_id}")


@router.post("/projects/{project_id}/archive")
async def archive(request: Request, api: Api, project_id: str) -> Response:
    await api.post(f"{PROJECTS}/{project_id}/archive")
    return leave_for(request, "/projects")


@router.post("/projects/{project_id}/keys")
async def create_key(request: Request, api: Api, project_id: str) -> Response:
    form = await form_of(request)
    body: dict[str, Any] = {"name": form.get("name", ""), "scope": form.get("scope", "submit")}
    if days := form.get("expires_days", "").strip():
        whole = _whole(days)
        body["expires_in_seconds"] = whole * _DAY_SECONDS if isinstance(whole, int) else days
    return await _keys_list(
        request, api, project_id, await api.post(f"{PROJECTS}/{project_id}/api_keys", body)
    )


@router.post("/projects/{project_id}/keys/{key_id}/rotate")
async def rotate(request: Request, api: Api, project_id: str, key_id: str) -> Response:
    """Replace a key by a new one; the old one stays valid for a day."""
    new = await api.post(
        f"{PROJECTS}/{project_id}/api_keys/{key_id}/rotate", {"keep_seconds": _DAY_SECONDS}
    )
    return await _keys_list(request, api, project_id, {**new, "rotated": True})


@router.post("/projects/{project_id}/keys/{key_id}/revoke")
async def revoke(request: Request, api: Api, project_id: str, key_id: str) -> Response:
    await api.delete(f"{PROJECTS}/{project_id}/api_keys/{key_id}")
    return await _keys_list(request, api, project_id, None)


async def every(api: InnerApi, path: str, **query: str) -> list[dict[str, Any]]:
    """Return the whole of a list, read page by page."""
    items: list[dict[str, Any]] = []
    while True:
        part = await api.get(
            path, limit=_FULL_PAGE, after=items[-1]["id"] if items else None, **query
        )
        items += part["data"]
        if not part["has_more"]:
            return items


async def _keys_of(api: InnerApi, project_id: str) -> list[dict[str, Any]]:
    return await every(api, f"{PROJECTS}/{project_id}/api_keys")


async def _keys_list(
    request: Request, api: InnerApi, project_id: str, new: dict[str, Any] | None
) -> Response:
    return page(
        request,
        "keys_list.html",
        project={"id": project_id},
        keys=await _keys_of(api, project_id),
        new=new,
    )


def _limit(name: str, text: str) -> Any:
    """Return a limit as the API takes it; None if the text is empty.

    Other text stays text, and the API says what is wrong.
    """
    if not text:
        return None
    if name in _NAME_LISTS:
        return (
            [] if text == _NO_NAMES else [part.strip() for part in text.split(",") if part.strip()]
        )
    if name == "max_bytes":
        return byte_count(text)
    if name == "max_cost_per_month":
        return text  # the API reads numbers with digits behind the point
    return _whole(text)


def _whole(text: str) -> int | str:
    """Return the whole number that a text is; any other text unchanged."""
    return int(text) if re.fullmatch("-?[0-9]{1,20}", text) else text
