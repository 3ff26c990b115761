"""Projects, their limits and their keys, for admin keys."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import leave_for, page
from api.routes.page.entry import Visitor, form_of, page_router
from api.routes.page.usage import ORGANIZATION, every, keys_of, refused_or_raise
from ft_service.store.tenants.projects import MANAGING_PROJECT

router = page_router()

_PROJECTS = f"{ORGANIZATION}/projects"
_DAY_SECONDS = 86_400
_NAMES = ("bases", "wandb_entities")
LIMITS = {
    "max_slots": ("Ranks at once", "ranks that it runs at the same time"),
    "max_queued": ("Queued jobs", "jobs that wait"),
    "max_bytes": ("Bytes of files", "such as 500 MiB or 2 GiB"),
    "max_requests_per_minute": ("Requests a minute", "of all its keys together"),
    "max_priority": ("Highest priority", "higher ones of its jobs are lowered to it"),
    "bases": ("Bases", "names, separated by commas"),
    "wandb_entities": ("W&B entities", "names, separated by commas"),
}
"""Limits of a project → what they are called, and what one writes."""


@router.get("/projects")
async def projects(request: Request, api: Api, visitor: Visitor) -> Response:
    """All that the key may know of, archived ones too."""
    try:
        found = await every(api, _PROJECTS, include_archived="true")
    except ApiError as error:
        return refused_or_raise(request, "projects.html", error)
    values = {"projects": found, "limits": LIMITS, "manages": _manages(visitor), "refused": None}
    return page(request, "projects.html", **values)


@router.post("/projects")
async def create(request: Request, api: Api) -> Response:
    form = await form_of(request)
    made = await api.post(_PROJECTS, {"name": form.get("name", "")})
    return leave_for(request, f"/projects/{made['id']}")


@router.get("/projects/{project_id}")
async def project(request: Request, api: Api, visitor: Visitor, project_id: str) -> Response:
    """Its limits and keys."""
    try:
        found = await api.get(f"{_PROJECTS}/{project_id}")
    except ApiError as error:
        return refused_or_raise(request, "project.html", error)
    values = {"project": found, "limits": LIMITS, "manages": _manages(visitor), "refused": None}
    return page(request, "project.html", keys=await keys_of(api, project_id), new=None, **values)


@router.get("/keys")
async def keys(visitor: Visitor, request: Request, api: Api) -> Response:
    """Those of one's own project."""
    return await project(request, api, visitor, visitor.project_id)


@router.post("/projects/{project_id}/limits")
async def change(request: Request, api: Api, project_id: str) -> Response:
    form = await form_of(request)
    limits = {name: _limit(name, form.get(name, "")) for name in LIMITS}
    name = {"name": form["name"]} if form.get("name") else {}
    await api.post(f"{_PROJECTS}/{project_id}", {**name, "limits": limits})
    return leave_for(request, f"/projects/{project_id}")


@router.post("/projects/{project_id}/archive")
async def archive(request: Request, api: Api, project_id: str) -> Response:
    await api.post(f"{_PROJECTS}/{project_id}/archive")
    return leave_for(request, "/projects")


@router.post("/projects/{project_id}/keys")
async def create_key(request: Request, api: Api, project_id: str) -> Response:
    form = await form_of(request)
    body: dict[str, Any] = {"name": form.get("name", ""), "scope": form.get("scope", "submit")}
    if form.get("expires_days", "").isdecimal():
        body["expires_in_seconds"] = int(form["expires_days"]) * _DAY_SECONDS
    return await _keys(request, api, project_id, await api.post(f"{_PROJECTS}/{project_id}/api_keys", body))


@router.post("/projects/{project_id}/keys/{key_id}/rotate")
async def rotate(request: Request, api: Api, project_id: str, key_id: str) -> Response:
    """A new key in its place; the old one goes on for a day."""
    new = await api.post(f"{_PROJECTS}/{project_id}/api_keys/{key_id}/rotate", {"keep_seconds": _DAY_SECONDS})
    return await _keys(request, api, project_id, {**new, "rotated": True})


@router.post("/projects/{project_id}/keys/{key_id}/revoke")
async def revoke(request: Request, api: Api, project_id: str, key_id: str) -> Response:
    await api.delete(f"{_PROJECTS}/{project_id}/api_keys/{key_id}")
    return await _keys(request, api, project_id, None)


async def _keys(request: Request, api: InnerApi, project_id: str, new: dict[str, Any] | None) -> Response:
    values = {"project": {"id": project_id}, "keys": await keys_of(api, project_id), "new": new}
    return page(request, "keys_list.html", **values)


def _limit(name: str, text: str) -> Any:
    """A limit as the API takes it; empty: none. What is no number goes on as text, and the API says what is wrong."""
    text = text.strip()
    if not text:
        return None
    if name in _NAMES:
        return [part.strip() for part in text.split(",") if part.strip()]
    if name == "max_bytes":
        return _bytes(text)
    return int(text) if text.lstrip("-").isdecimal() else text


def _bytes(text: str) -> Any:
    number, _, unit = text.partition(" ")
    sizes = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    try:
        return int(float(number.replace(",", "")) * sizes[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        return text


def _manages(visitor: Any) -> bool:
    return visitor.project_id == MANAGING_PROJECT and visitor.scope == "admin"
