"""The list of jobs, and a job's own pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response

from api.http.auth import manages
from api.http.dependencies import Services, Svc
from api.page.answers import Answers, from_evaluations, from_messages
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.job_form import given_options, yaml_text
from api.page.rendering import Part, fragment, page, rendered, sent
from api.routes.page.chat import inference_of
from api.routes.page.entry import Visitor, page_router
from api.routes.page.usage import ORGANIZATION, every
from ft_service.store.records import Principal

router = page_router()

JOBS = "/v1/fine_tuning/jobs"
_PAGE = 50
_AT_FIRST = 20
"""Jobs that are painted at once: more than a screen holds."""
_SPARK_POINTS = 48
_LOG_LINES = 400
_RECENT_SECONDS = 2.0
_MOST_RECENT = 100
_MOST_EVENT_PAGES = 5
TABS = (
    ("", "Curves"),
    ("logs", "Logs"),
    ("settings", "Settings"),
    ("samples", "Samples"),
    ("answers", "Answers"),
    ("checkpoints", "Checkpoints"),
    ("exports", "Exports"),
    ("events", "Events"),
)


@router.get("/jobs")
async def jobs(request: Request, api: Api, viewer: Visitor) -> Response:
    rows = await _rows(request, api, viewer, first=True)
    chosen = rows["filters"]["base"]
    bases = sorted({*await _bases(api), *([chosen] if chosen else [])})
    return page(request, "jobs.html", **rows, bases=bases, projects=await _projects(api, viewer), seen="")


@router.get("/page/live/jobs")
async def live_jobs(request: Request, api: Api, viewer: Visitor, services: Svc) -> Response:
    """What many who look at the same list get is made once."""
    wanted = sorted(pair for pair in request.query_params.multi_items() if pair[0] != "seen")

    async def rows() -> Part:
        return rendered(request, "jobs_rows.html", **await _rows(request, api, viewer))

    return sent(request, await _made_once(("jobs", *wanted), viewer, services, rows))


async def _made_once(
    what: tuple[object, ...], viewer: Principal, services: Services, make: Callable[[], Awaitable[Part]]
) -> Part:
    """A part that refreshes itself: many who look at the same get what was made within the last moment for one of them."""
    key = (viewer.project_id, viewer.scope, *what)
    recent: dict[tuple[object, ...], tuple[float, asyncio.Future[Part]]] = services.remembered
    made = recent.get(key)
    if made is None or time.monotonic() - made[0] > _RECENT_SECONDS or (made[1].done() and made[1].exception()):
        if len(recent) >= _MOST_RECENT:
            recent.clear()
        made = recent[key] = time.monotonic(), asyncio.ensure_future(make())
    return await asyncio.shield(made[1])


@router.get("/jobs/{job_id}")
async def curves(request: Request, job_id: str, api: Api) -> Response:
    return await job_page(request, api, job_id, "job_curves.html", "", events=await _events(api, job_id, 12))


@router.get("/jobs/{job_id}/logs")
async def logs(request: Request, job_id: str, api: Api, rank: int | None = None, attempt: int | None = None) -> Response:
    try:
        text = await api.text(f"{JOBS}/{job_id}/logs", lines=_LOG_LINES, rank=rank, attempt=attempt)
    except ApiError as error:
        if error.error.get("code") != "no_logs":
            raise
        text = ""
    return await job_page(request, api, job_id, "job_logs.html", "logs", text=text, rank=rank, chosen_attempt=attempt)


@router.get("/jobs/{job_id}/settings")
async def settings(request: Request, job_id: str, api: Api) -> Response:
    body = await api.get(f"{JOBS}/{job_id}/request")
    try:
        plan = await api.get(f"{JOBS}/{job_id}/plan")
    except ApiError as error:  # such as a base that is gone
        plan = {"fault": error.message}
    values = {"asked_text": yaml_text(body), "given": given_options(body), "plan": plan}
    return await job_page(request, api, job_id, "job_settings.html", "settings", **values)


@router.get("/jobs/{job_id}/checkpoints")
async def checkpoints(request: Request, job_id: str, api: Api) -> Response:
    found = await api.get(f"{JOBS}/{job_id}/checkpoints", limit=100)
    return await job_page(
        request, api, job_id, "job_checkpoints.html", "checkpoints", checkpoints=found["data"], chat=await inference_of(api)
    )


@router.get("/jobs/{job_id}/samples")
async def samples(request: Request, job_id: str, api: Api, file: Literal["training", "validation"] = "training") -> Response:
    return await job_page(request, api, job_id, "job_samples.html", "samples", file=file)


@router.get("/jobs/{job_id}/answers")
async def answers(request: Request, job_id: str, api: Api, step: int | None = None) -> Response:
    found = await _answers(api, job_id, step)
    return await job_page(request, api, job_id, "job_answers.html", "answers", answers=found)


@router.get("/jobs/{job_id}/events")
async def events(
    request: Request, job_id: str, api: Api, after: str | None = None, kind: Literal["message", "all"] = "message"
) -> Response:
    found = await api.get(f"{JOBS}/{job_id}/events", limit=100, after=after, type=None if kind == "all" else kind)
    values = {"events": found, "first_page": after is None, "shown": kind}
    return await job_page(request, api, job_id, "job_events.html", "events", **values)


@router.get("/page/live/jobs/{job_id}")
async def live_job(request: Request, job_id: str, api: Api, viewer: Visitor, services: Svc) -> Response:
    """What stands above the tabs: state, progress, and what one can do."""

    async def head() -> Part:
        return rendered(request, "job_head.html", **await _head(api, await api.get(f"{JOBS}/{job_id}")))

    return sent(request, await _made_once(("job", job_id), viewer, services, head))


@router.get("/page/live/jobs/{job_id}/events")
async def live_events(request: Request, job_id: str, api: Api, viewer: Visitor, services: Svc) -> Response:
    async def latest() -> Part:
        return rendered(request, "job_latest.html", job={"id": job_id}, events=await _events(api, job_id, 12))

    return sent(request, await _made_once(("latest", job_id), viewer, services, latest))


@router.post("/jobs/{job_id}/{verb}")
async def act(request: Request, job_id: str, verb: str, api: Api, viewer: Visitor, services: Svc) -> Response:
    """Pause, resume or cancel; the answer is what then stands above the tabs."""
    job = await api.post(f"{JOBS}/{job_id}/{verb}")
    services.remembered.pop((viewer.project_id, viewer.scope, "job", job_id), None)  # it says what was before
    return fragment(request, "job_head.html", **await _head(api, job))


async def job_page(request: Request, api: InnerApi, job_id: str, template: str, tab: str, **values: Any) -> Response:
    """A job's page with one of its tabs."""
    job = await api.get(f"{JOBS}/{job_id}")
    ranks = job["distributed"]["nproc_per_node"] * job["distributed"]["nnodes"]
    return page(request, template, **await _head(api, job) | {"tabs": TABS, "tab": tab, "ranks": ranks, "seen": ""} | values)


async def _head(api: InnerApi, job: dict[str, Any]) -> dict[str, Any]:
    """What stands above the tabs: the job, and who would answer for its model once there is one."""
    return {"job": job, "chat": await inference_of(api) if job["fine_tuned_model"] else None}


async def _answers(api: InnerApi, job_id: str, step: int | None) -> Answers | None:
    """Those before training and at a step; of jobs of earlier versions from what their events say."""
    found = await api.find(f"{JOBS}/{job_id}/evaluation", limit=100)
    if found and found["data"]:
        return from_evaluations(found["data"], step)
    after: str | None = None
    messages: list[str] = []
    for _ in range(_MOST_EVENT_PAGES):
        found = await api.get(f"{JOBS}/{job_id}/events", limit=100, type="message", after=after)
        messages = [*(event["message"] for event in reversed(found["data"])), *messages]
        if (answers := from_messages(messages)) is not None or not found["has_more"]:
            return answers
        after = found["last_id"]
    return None


async def _events(api: InnerApi, job_id: str, most: int) -> list[dict[str, Any]]:
    """The newest that say more than a step's numbers."""
    found = await api.get(f"{JOBS}/{job_id}/events", limit=most, type="message")
    return found["data"]


async def _bases(api: InnerApi) -> set[str]:
    models = await api.get("/v1/models", owned_by="system")
    return {model["root"] for model in models["data"]}


async def _projects(api: InnerApi, viewer: Principal) -> dict[str, str]:
    """Id → name of the projects whose jobs this key sees; empty if there is but one."""
    if viewer.scope != "admin" or not manages(viewer):
        return {}
    found = {one["id"]: one["name"] for one in await every(api, f"{ORGANIZATION}/projects")}
    return found if len(found) > 1 else {}


async def _rows(request: Request, api: InnerApi, viewer: Principal, *, first: bool = False) -> dict[str, Any]:
    """A page of the list. `first`: what is painted at once, without losses; the page asks for the whole then."""
    asked = request.query_params
    filters = {name: asked.get(name) or None for name in ("status", "base", "metadata", "project")}
    key, equals, value = (filters["metadata"] or "").partition("=")
    pair = {f"metadata[{key.strip()}]": value.strip()} if equals else {}
    query = {name: filters[name] for name in ("status", "base", "project")} | {"after": asked.get("after"), **pair}
    found = await api.get(JOBS, limit=_AT_FIRST if first else _PAGE, **query)
    kept = {name: given for name, given in filters.items() if given}
    foreign = filters["project"] not in (None, viewer.project_id)
    here = kept | ({"after": asked["after"]} if "after" in asked else {})
    return {
        "jobs": found["data"],
        "curves": {} if first or foreign else await _losses(api, found["data"]),
        "foreign": foreign,
        "filters": filters,
        "filtered": bool(kept),
        "live": f"/page/live/jobs?{urlencode(here)}",
        "more": found["has_more"],
        "first_page": "after" not in asked,
        "newest": f"/jobs?{urlencode(kept)}",
        "older": f"/jobs?{urlencode(kept | {'after': found['last_id'] or ''})}",
    }


async def _losses(api: InnerApi, jobs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Job → its training loss, for a sparkline."""
    begun = [job["id"] for job in jobs if job["progress"]]
    if not begun:
        return {}
    found = await api.get("/v1/fine_tuning/metrics", job=begun, points=_SPARK_POINTS, series=["train_loss"])
    return {one["job_id"]: one["series"]["train_loss"]["values"] for one in found["data"] if one["series"]}
