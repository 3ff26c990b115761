"""The list of jobs, and a job's own pages."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator

from api.http.auth import manages
from api.http.dependencies import Services, Svc
from api.http.threads import parsed_in_turn
from api.page.export_commands import PLACES, run_commands
from api.page.formatting import job_title
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.job_form import given_options, yaml_text
from api.page.rendering import DocumentPart, fragment, leave_for, page, rendered, sent
from api.page.sample_job import sample_base
from api.page.summaries import answers_of, graded_over_time, served_losses
from api.routes.page.engines_page import ENGINES, JOBS
from api.routes.page.models_page import inference_of
from api.routes.page.organization_page import PROJECTS, every
from api.routes.page.sign_in_page import Visitor, form_of, page_router
from ft_service.jobs.method_options import loss_measure
from ft_service.jobs.states import TERMINAL, State
from ft_service.spec import is_tuned
from ft_service.store.records import Principal

router = page_router()

_PAGE = 50
_UNFINISHED = 30
"""Jobs that run or wait, which are shown above all others."""
_FIRST_PAINT = 20
"""Jobs that are painted first: more than a screen holds."""
_SPARK_POINTS = 48
_LOG_LINES = 400
_RECENT_SECONDS = 2.0
_MOST_RECENT = 100
_LATEST_EVENTS = 12
_FILTERS = ("status", "suffix", "base", "metadata", "project")
_ORDERS = {"": "Newest first", "loss": "Lowest loss first"}
"""Orders of the jobs of one page of the list, within what is unfinished and what is not."""
_ROLLOUTS = 20
_PROMPTS_OF_ROLLOUT = 12
"""Steps of reinforcement learning whose answers are shown, and prompts of each."""
Chosen = Annotated[int | None, BeforeValidator(lambda given: None if given == "" else given)]
"""A number that a form offers.

Without scripts the browser sends it empty where the first choice stays.
"""
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
_PLACES = {place.key: place for place in PLACES}
Where = Annotated[
    Literal["laptop", "server", "transformers", "phone"] | None,
    BeforeValidator(lambda given: given or None),
]
"""A key of `PLACES`; None: not said yet."""


@router.get("/jobs")
async def jobs(request: Request, api: Api, viewer: Visitor) -> Response:
    rows = await _rows(request, api, viewer, first=True)
    chosen = rows["filters"]["base"]
    models = await api.get("/v1/models", owned_by="system")
    bases = sorted({*(model["root"] for model in models["data"]), *([chosen] if chosen else [])})
    return page(
        request, "jobs.html", **rows, bases=bases, projects=await _projects(api, viewer), seen=""
    )


@router.get("/page/live/jobs")
async def live_jobs(request: Request, api: Api, viewer: Visitor, services: Svc) -> Response:
    """The rows of the list, which refresh themselves."""
    filters = sorted(pair for pair in request.query_params.multi_items() if pair[0] != "seen")

    async def rows() -> DocumentPart:
        return rendered(request, "jobs_rows.html", **await _rows(request, api, viewer))

    return sent(request, await _shared(("jobs", *filters), viewer, services, rows))


async def _shared(
    part: tuple[object, ...],
    viewer: Principal,
    services: Services,
    render: Callable[[], Awaitable[DocumentPart]],
) -> DocumentPart:
    """Return a part that refreshes itself.

    It is rendered once per `_RECENT_SECONDS` for all browsers with the same view.
    """
    key = (viewer.project_id, viewer.scope, *part)
    recent: dict[tuple[object, ...], tuple[float, asyncio.Future[DocumentPart]]] = (
        services.recent_parts
    )
    cached = recent.get(key)
    if (
        cached is None
        or time.monotonic() - cached[0] > _RECENT_SECONDS
        or (cached[1].done() and cached[1].exception())
    ):
        if len(recent) >= _MOST_RECENT:
            recent.clear()
        cached = recent[key] = time.monotonic(), asyncio.ensure_future(render())
    return await asyncio.shield(cached[1])


@router.get("/jobs/{job_id}")
async def curves(request: Request, job_id: str, api: Api) -> Response:
    job = await api.get(f"{JOBS}/{job_id}")
    values = {"events": await _latest_events(api, job_id), "parent": await _parent_of(api, job)}
    return await job_page(request, api, job_id, "job_curves.html", "", job, **values)


@router.get("/jobs/{job_id}/logs")
async def logs(
    request: Request, job_id: str, api: Api, rank: Chosen = None, attempt: Chosen = None
) -> Response:
    try:
        text = await api.text(f"{JOBS}/{job_id}/logs", lines=_LOG_LINES, rank=rank, attempt=attempt)
    except ApiError as error:
        if error.error.get("code") != "no_logs":
            raise
        text = ""
    return await job_page(
        request, api, job_id, "job_logs.html", "logs", text=text, rank=rank, chosen_attempt=attempt
    )


@router.get("/jobs/{job_id}/settings")
async def settings(request: Request, job_id: str, api: Api) -> Response:
    body = await api.get(f"{JOBS}/{job_id}/request")
    try:
        plan = await api.get(f"{JOBS}/{job_id}/plan")
    except ApiError as error:  # such as a base that is gone
        plan = {"fault": error.message}
    # A megabyte takes many seconds.
    text, given = await parsed_in_turn(lambda: (yaml_text(body), given_options(body)))
    values = {"request_text": text, "given": given, "plan": plan}
    return await job_page(request, api, job_id, "job_settings.html", "settings", **values)


@router.get("/jobs/{job_id}/checkpoints")
async def checkpoints(request: Request, job_id: str, api: Api) -> Response:
    listed = await api.get(f"{JOBS}/{job_id}/checkpoints", limit=100)
    values = {"checkpoints": listed["data"], "chat": await inference_of(api)}
    return await job_page(request, api, job_id, "job_checkpoints.html", "checkpoints", **values)


@router.get("/jobs/{job_id}/samples")
async def samples(
    request: Request, job_id: str, api: Api, file: Literal["training", "validation"] = "training"
) -> Response:
    return await job_page(request, api, job_id, "job_samples.html", "samples", file=file)


@router.get("/jobs/{job_id}/answers")
async def answers(request: Request, job_id: str, api: Api, step: int | None = None) -> Response:
    listed = await api.find(f"{JOBS}/{job_id}/evaluation", limit=100)
    shown = answers_of(listed["data"], step) if listed else None
    rollouts = await api.find(
        f"{JOBS}/{job_id}/rollouts", limit=_ROLLOUTS, prompts=_PROMPTS_OF_ROLLOUT
    )
    graded = graded_over_time(rollouts["data"], step) if rollouts else None
    return await job_page(
        request, api, job_id, "job_answers.html", "answers", answers=shown, graded=graded
    )


@router.get("/jobs/{job_id}/events")
async def events(
    request: Request,
    job_id: str,
    api: Api,
    after: str | None = None,
    kind: Literal["message", "all"] = "message",
) -> Response:
    listed = await api.get(
        f"{JOBS}/{job_id}/events", limit=100, after=after, type=None if kind == "all" else kind
    )
    values = {"events": listed, "first_page": after is None, "shown": kind}
    return await job_page(request, api, job_id, "job_events.html", "events", **values)


@router.get("/page/live/jobs/{job_id}")
async def live_job(
    request: Request, job_id: str, api: Api, viewer: Visitor, services: Svc
) -> Response:
    """The head of a job's page: its state, progress and actions."""

    async def head() -> DocumentPart:
        return rendered(
            request, "job_head.html", **await _head(api, await api.get(f"{JOBS}/{job_id}"))
        )

    return sent(request, await _shared(("job", job_id), viewer, services, head))


@router.get("/page/live/jobs/{job_id}/events")
async def live_events(
    request: Request, job_id: str, api: Api, viewer: Visitor, services: Svc
) -> Response:
    async def latest() -> DocumentPart:
        return rendered(
            request, "job_latest.html", job={"id": job_id}, events=await _latest_events(api, job_id)
        )

    return sent(request, await _shared(("latest", job_id), viewer, services, latest))


@router.get("/jobs/{job_id}/exports")
async def exports(request: Request, job_id: str, api: Api, where: Where = None) -> Response:
    job = await api.get(f"{JOBS}/{job_id}")
    values = await _exports(api, job_id, where)
    if where and job["fine_tuned_model"]:
        base = (await api.get(f"/v1/models/{job['fine_tuned_model']}"))["root"]
        commands = {
            form: run_commands(form, job, base, job_title(job)) for form in _PLACES[where].forms
        }
        values |= {"base": base, "commands": commands}
    return await job_page(request, api, job_id, "job_exports.html", "exports", job, **values)


@router.get("/page/live/jobs/{job_id}/exports")
async def live_exports(
    request: Request, job_id: str, api: Api, where: Where = None, made: str | None = None
) -> Response:
    """`made`: the forms whose losses the browser shows."""
    values = await _exports(api, job_id, where, made)
    return fragment(request, "job_exports_list.html", job={"id": job_id}, **values)


@router.post("/jobs/{job_id}/exports")
async def make_export(
    request: Request, job_id: str, form: str, api: Api, where: Where = None
) -> Response:
    await api.post(f"{JOBS}/{job_id}/exports", {"format": form})
    return await live_exports(request, job_id, api, where)


@router.post("/jobs/{job_id}/exports/{form}/delete")
async def delete_export(
    request: Request, job_id: str, form: str, api: Api, where: Where = None
) -> Response:
    await api.delete(f"{JOBS}/{job_id}/exports/{form}")
    return await live_exports(request, job_id, api, where)


@router.post("/jobs/{job_id}/delete")
async def delete(request: Request, job_id: str, api: Api) -> Response:
    await api.delete(f"{JOBS}/{job_id}")
    return leave_for(request, "/jobs")


@router.post("/jobs/{job_id}/name")
async def name(request: Request, job_id: str, api: Api) -> Response:
    """Call the job what the form says, and keep its note. Empty: none."""
    form = await form_of(request)
    texts = {part: form.get(part, "").strip() or None for part in ("name", "note")}
    await api.post(f"{JOBS}/{job_id}", texts)
    return leave_for(request, f"/jobs/{job_id}")


@router.post("/jobs/{job_id}/{verb}")
async def act(
    request: Request, job_id: str, verb: str, api: Api, viewer: Visitor, services: Svc
) -> Response:
    """Pause, resume or cancel. The answer is the new head of the job's page.

    `max_cost` in the form: a new limit to resume with.
    """
    limit = (await form_of(request)).get("max_cost", "").strip() if verb == "resume" else ""
    job = await api.post(f"{JOBS}/{job_id}/{verb}", {"max_cost": limit} if limit else None)
    # It shows the state before.
    services.recent_parts.pop((viewer.project_id, viewer.scope, "job", job_id), None)
    return fragment(request, "job_head.html", **await _head(api, job))


async def job_page(
    request: Request,
    api: InnerApi,
    job_id: str,
    template: str,
    tab: str,
    job: dict[str, Any] | None = None,
    **values: Any,
) -> Response:
    """Return a job's page with one of its tabs. `job`: its view, where the caller has it."""
    shown: dict[str, Any] = job or await api.get(f"{JOBS}/{job_id}")
    ranks = shown["distributed"]["nproc_per_node"] * shown["distributed"]["nnodes"]
    return page(
        request,
        template,
        **await _head(api, shown) | {"tabs": TABS, "tab": tab, "ranks": ranks, "seen": ""} | values,
    )


async def _head(api: InnerApi, job: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `job_head.html`: the job, what answers for its tuned model once it
    exists, and the engine that trains it now with the job's part there.
    """
    chat = await inference_of(api) if job["fine_tuned_model"] else None
    live = (await api.get(ENGINES))["data"] if job["engine_id"] else []
    engine, seat = next(
        ((one, of) for one in live for of in one["jobs"] if of["id"] == job["id"]), (None, None)
    )
    return {"job": job, "chat": chat, "engine": engine, "seat": seat}


async def _parent_of(api: InnerApi, job: dict[str, Any]) -> dict[str, str] | None:
    """Return id and title of the job whose tuned model a job continues.

    None: it begins from a base, its parent's job is gone or another project's, or their losses
    measure different things.
    """
    if not is_tuned(job["model"]):
        return None  # a base's facts take a look at its files
    model = await api.find(f"/v1/models/{job['model']}")
    if not model or not model["parent"] or not model["job_id"]:
        return None
    parent = await api.find(f"{JOBS}/{model['job_id']}")
    if not parent or loss_measure(parent["method"]) != loss_measure(job["method"]):
        return None
    return {"id": parent["id"], "title": job_title(parent)}


async def _latest_events(api: InnerApi, job_id: str) -> list[dict[str, Any]]:
    """Return the newest messages, without the numbers of steps."""
    return (await api.get(f"{JOBS}/{job_id}/events", limit=_LATEST_EVENTS, type="message"))["data"]


async def _exports(
    api: InnerApi, job_id: str, where: str | None, shown_losses: str | None = None
) -> dict[str, Any]:
    """Return the values of `job_exports_list.html`: the forms for where the model will run; those
    that were made where that is not said yet.

    `shown_losses`: as `made` of `live_exports`. While they are those that were made, nothing is
    read of the evaluations, and `served` is None.
    """
    listed = await api.get(f"{JOBS}/{job_id}/exports")
    made = {view["format"]: view for view in listed["data"]}
    whole = ",".join(form for form, view in made.items() if view["status"] == "succeeded")
    served = None
    if shown_losses != whole:
        evaluated = await api.find(f"{JOBS}/{job_id}/evaluation", limit=100)
        served = served_losses(evaluated["data"] if evaluated else (), made)
    place = _PLACES.get(where or "")
    every = {form: text for one in PLACES for form, text in one.forms.items()}
    forms = place.forms if place else {form: every[form] for form in every if form in made}
    shown = {"forms": forms.items(), "places": PLACES, "where": place}
    return {"exports": made, "whole": whole, "served": served, **shown}


async def _projects(api: InnerApi, viewer: Principal) -> dict[str, str]:
    """Return id → name of the projects whose jobs this key may list; empty if there is only one."""
    if not manages(viewer):
        return {}
    names = {project["id"]: project["name"] for project in await every(api, PROJECTS)}
    return names if len(names) > 1 else {}


async def _rows(
    request: Request, api: InnerApi, viewer: Principal, *, first: bool = False
) -> dict[str, Any]:
    """Return the values of `jobs_rows.html`.

    `first`: a short list without curves, after which the browser loads the whole.
    """
    given = request.query_params
    filters = {name: given.get(name) or None for name in _FILTERS}
    sort = given.get("sort") if given.get("sort") in _ORDERS else None
    after = given.get("after")
    unfinished, others, listed = await _listed(api, filters, after, first=first)
    if sort == "loss":
        unfinished.sort(key=_loss)
        others.sort(key=_loss)
    filtered = {name: value for name, value in filters.items() if value}
    kept = filtered | ({"sort": sort} if sort else {})
    foreign = filters["project"] not in (None, viewer.project_id)
    here = kept if after is None else kept | {"after": after}
    jobs = [*unfinished, *others]
    titled = ("Unfinished", unfinished), ("Earlier", others)
    return {
        "jobs": jobs,
        "groups": [(title, part) for title, part in titled if part],
        "curves": {} if first or foreign else await _losses(api, jobs),
        "foreign": foreign,
        "filters": filters,
        "orders": _ORDERS,
        "sort": sort,
        "filtered": bool(filtered),
        "sample": None if jobs or filtered else await _sample_base(api),
        "live": f"/page/live/jobs?{urlencode(here)}",
        "more": listed["has_more"],
        "first_page": after is None,
        "newest": f"/jobs?{urlencode(kept)}",
        "older": f"/jobs?{urlencode(kept | {'after': listed['last_id'] or ''})}",
    }


def _loss(job: dict[str, Any]) -> float:
    """The training loss that the list shows of a job; infinite for one without."""
    loss = (job["progress"] or {}).get("train_loss")
    return math.inf if loss is None else loss


async def _listed(
    api: InnerApi, filters: dict[str, str | None], after: str | None, *, first: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return the jobs that run or wait, on the first page of all states; the others; and the answer
    that these are of.
    """
    key, equals, value = (filters["metadata"] or "").partition("=")
    if filters["metadata"] and not equals:  # else every job would be listed
        raise ApiError(
            400, {"message": f"metadata = {key[:80]!r}: filter by a pair, as key=value."}
        )
    query = {name: filters[name] for name in ("status", "suffix", "base", "project")}
    query |= {f"metadata[{key.strip()}]": value.strip()} if equals else {}
    unfinished: list[dict[str, Any]] = []
    if after is None and not filters["status"]:
        states = [state for state in State if state not in TERMINAL]
        unfinished = (await api.get(JOBS, limit=_UNFINISHED, **query | {"status": states}))["data"]
    listed = await api.get(JOBS, limit=_FIRST_PAINT if first else _PAGE, after=after, **query)
    above = {job["id"] for job in unfinished}
    others = [job for job in listed["data"] if job["id"] not in above]
    if first:
        unfinished = unfinished[:_FIRST_PAINT]
        others = others[: _FIRST_PAINT - len(unfinished)]
    return unfinished, others, listed


async def _sample_base(api: InnerApi) -> str | None:
    """Return the base of the sample job. None: it is not among the bases here."""
    models = await api.get("/v1/models", owned_by="system")
    return next((model["id"] for model in models["data"] if model["id"] == sample_base()), None)


async def _losses(api: InnerApi, jobs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return job → training losses, for a sparkline."""
    begun = [job["id"] for job in jobs if job["progress"]]
    if not begun:
        return {}
    metrics = await api.get(
        "/v1/fine_tuning/metrics", job=begun, points=_SPARK_POINTS, series=["train_loss"]
    )
    return {
        view["job_id"]: view["series"]["train_loss"]["values"]
        for view in metrics["data"]
        if view["series"]
    }
