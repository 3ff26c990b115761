"""Bases that the server fetches, on the list of bases: for whoever runs the service."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import fragment
from api.routes.page.sign_in_page import form_of, page_router

router = page_router()

PULLS = "/v1/pulls"
_ACTIVE = ("queued", "fetching", "verifying")
_MOST_PLANNED = 5
"""Pulls whose default job is planned: the newest."""


@router.get("/page/live/pulls")
async def live_pulls(request: Request, api: Api) -> Response:
    """The list while something is fetched; at the end of that, it has the bases listed again."""
    values = await pulls_of(api) or {}
    return fragment(request, "models_pulls.html", refresh=not values.get("live"), **values)


@router.post("/models/pulls")
async def look_up(request: Request, api: Api) -> Response:
    """Look a base up by its name on the hub. Its weights are fetched when somebody says so."""
    form = await form_of(request)
    await api.post(PULLS, {"model": form.get("model", "").strip(), "look": True})
    return await _listed(request, api)


@router.post("/models/pulls/{pull_id}/{verb}")
async def change(
    request: Request, api: Api, pull_id: str, verb: Literal["fetch", "anyway", "stop", "remove"]
) -> Response:
    address = f"{PULLS}/{pull_id}"
    if verb == "remove":
        await api.delete(address)
    elif verb == "stop":
        await api.post(f"{address}/stop")
    else:
        await api.post(f"{address}/resume", {"anyway": verb == "anyway"})
    return await _listed(request, api)


async def pulls_of(api: InnerApi) -> dict[str, Any] | None:
    """Return what the list of pulls shows; None: the visitor may fetch no bases."""
    try:
        pulls = (await api.get(PULLS))["data"]
    except ApiError as error:
        if error.status == 403:
            return None
        raise
    found = [pull for pull in pulls if pull["state"] == "found" and pull["trainable"]]
    return {
        "pulls": pulls,
        "live": any(pull["state"] in _ACTIVE for pull in pulls),
        "plans": {pull["id"]: await _plan(api, pull) for pull in found[:_MOST_PLANNED]},
    }


async def _plan(api: InnerApi, pull: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a job without options on a base that is not here yet, or its `fault`."""
    try:
        return await api.get(f"{PULLS}/{pull['id']}/plan")
    except ApiError as error:
        return {"fault": error.message}


async def _listed(request: Request, api: InnerApi) -> Response:
    return fragment(request, "models_pulls.html", **(await pulls_of(api) or {}))
