"""What was used, and what was changed: by project and key, for admin keys."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import page
from api.page.use import AMOUNTS, bars, summed
from api.routes.page.entry import page_router

router = page_router()

ORGANIZATION = "/v1/organization"
_DAY_SECONDS = 86_400
_MOST_NAMED = 20
"""Projects whose keys are looked up by name."""
_FULL_PAGE = 100


@router.get("/usage")
async def usage(
    request: Request,
    api: Api,
    days: Annotated[int, Query(ge=1, le=366)] = 30,
    of: Literal["gpu_seconds", "tokens", "bytes", "jobs"] = "gpu_seconds",
    project: str | None = None,
) -> Response:
    """Sums over the last days (UTC), today included."""
    begin = (int(time.time()) // _DAY_SECONDS - days + 1) * _DAY_SECONDS
    asked: dict[str, Any] = {"start_time": begin, "limit": days, "project_ids": project or None}
    try:
        found = await api.get(f"{ORGANIZATION}/usage/fine_tuning", **asked, group_by=["project_id", "api_key_id"])
        projects = {one["id"]: one["name"] for one in await every(api, f"{ORGANIZATION}/projects", include_archived="true")}
    except ApiError as error:
        return refused_or_raise(request, "usage.html", error)
    summary = summed(found["data"])
    keys = {key["id"]: key["name"] for name in list(summary.projects)[:_MOST_NAMED] for key in await keys_of(api, name)}
    values = {
        "summary": summary,
        "bars": bars(summary.days, of),
        "amounts_named": AMOUNTS,
        "projects": projects,
        "keys": keys,
        "days": days,
        "of": of,
        "project": project,
        "csv": f"{ORGANIZATION}/usage/fine_tuning?format=csv&start_time={begin}&limit={days}",
        "day_name": lambda second: datetime.fromtimestamp(second, UTC).strftime("%d %b"),
        "refused": None,
    }
    return page(request, "usage.html", **values)


@router.get("/changes")
async def changes(request: Request, api: Api, after: str | None = None) -> Response:
    """The record of what was changed, newest first."""
    try:
        found = await api.get(f"{ORGANIZATION}/audit_logs", limit=50, after=after)
    except ApiError as error:
        return refused_or_raise(request, "changes.html", error)
    return page(request, "changes.html", entries=found, first_page=after is None, refused=None)


async def keys_of(api: InnerApi, project_id: str) -> list[dict[str, Any]]:
    """A project's keys, oldest first, revoked and expired ones too."""
    return await every(api, f"{ORGANIZATION}/projects/{project_id}/api_keys")


async def every(api: InnerApi, path: str, **query: str) -> list[dict[str, Any]]:
    """All of a list, page after page."""
    items: list[dict[str, Any]] = []
    while True:
        found = await api.get(path, limit=_FULL_PAGE, after=items[-1]["id"] if items else None, **query)
        items += found["data"]
        if not found["has_more"]:
            return items


def refused_or_raise(request: Request, template: str, error: ApiError) -> Response:
    """A page that says why this key sees none of it. Raises any other error."""
    if error.status != 403:
        raise error
    return page(request, template, refused=error.message)
