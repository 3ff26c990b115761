"""The list of engines: which jobs share one, since when, and their shares of its time."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.page.formatting import job_title
from api.page.inner_api import Api
from api.page.rendering import fragment, page
from api.routes.page.sign_in_page import page_router

router = page_router()

ENGINES = "/v1/engines"
JOBS = "/v1/fine_tuning/jobs"


@router.get("/engines")
async def engines(request: Request, api: Api) -> Response:
    return page(request, "engines.html", **await _values(api), seen="")


@router.get("/page/live/engines")
async def live_engines(request: Request, api: Api) -> Response:
    """The rows of the list, which refresh themselves."""
    return fragment(request, "engines_rows.html", **await _values(api))


async def _values(api: Api) -> dict[str, Any]:
    found = (await api.get(ENGINES))["data"]
    seated = [job["id"] for engine in found for job in engine["jobs"]]
    running = (await api.get(JOBS, limit=100, status="running"))["data"] if seated else []
    titles = {view["id"]: job_title(view) for view in running}
    # Those that end just now, and those beyond the list's limit; one may be deleted meanwhile.
    for job_id in seated:
        if job_id not in titles and (view := await api.find(f"{JOBS}/{job_id}")):
            titles[job_id] = job_title(view)
    return {"engines": found, "titles": titles}
