"""Bases, tuned models, and conversations with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from api.page.inner_api import Api, InnerApi
from api.page.rendering import fragment, leave_for, page
from api.page.summaries import Result, best_validated
from api.routes.page.pulls_page import pulls_of
from api.routes.page.sign_in_page import page_router

router = page_router()

_PAGE = 30
"""Tuned models of a page."""
_SHARES = "/v1/fine_tuning/checkpoints/{}/permissions"
PageNumber = Annotated[int, Query(alias="page", ge=1, le=100_000)]
Name = Annotated[str, Query(max_length=300)]


@router.get("/models")
async def models(
    request: Request,
    api: Api,
    show: Literal["tuned", "bases"] | None = None,
    page_number: PageNumber = 1,
) -> Response:
    """Tuned models, the newest first, or bases: these where nothing was tuned yet and nobody
    asked.
    """
    views = (await api.get("/v1/models"))["data"]
    tuned = sorted((view for view in views if view["parent"]), key=lambda view: -view["created"])
    by_name = {view["id"]: view for view in tuned}
    begin = _PAGE * (page_number - 1)
    shown = tuned[begin : begin + _PAGE]
    values = {
        "show": show or ("tuned" if tuned else "bases"),
        "bases": [view for view in views if not view["parent"]],
        "tuned": shown,
        "total": len(tuned),
        "number": page_number,
        "more": len(tuned) > begin + _PAGE,
        "lines": {view["id"]: _lineage(view, by_name) for view in shown},
        "results": await _results(api, shown),
        "chat": await inference_of(api),
        "seen": "",
    }
    pulls = await pulls_of(api) if values["show"] == "bases" else None
    values |= {"may_fetch": pulls is not None, **(pulls or {})}
    return page(request, "models.html", **values)


@router.get("/page/live/bases")
async def live_bases(request: Request, api: Api) -> Response:
    """The table of bases, which refreshes itself while a base is being examined."""
    bases = (await api.get("/v1/models", owned_by="system"))["data"]
    return fragment(request, "models_bases.html", bases=bases, chat=await inference_of(api))


@router.get("/models/shares")
async def shares(request: Request, api: Api, name: Name) -> Response:
    listed = await api.get(_SHARES.format(name), limit=100)
    return fragment(request, "model_shares.html", name=name, shares=listed["data"])


@router.post("/models/verify")
async def verify(request: Request, api: Api, name: Name) -> Response:
    return fragment(
        request, "model_verified.html", report=await api.post(f"/v1/models/{name}/verify")
    )


@router.post("/models/share")
async def share(request: Request, api: Api, name: Name) -> Response:
    """Share with the project that the visitor has typed into the browser's prompt."""
    project = request.headers.get("hx-prompt", "").strip()
    await api.post(_SHARES.format(name), {"project_ids": [project]})
    return await shares(request, api, name)


@router.post("/models/unshare")
async def unshare(request: Request, api: Api, name: Name, share_id: str) -> Response:
    await api.delete(f"{_SHARES.format(name)}/{share_id}")
    return await shares(request, api, name)


@router.post("/models/delete")
async def delete(request: Request, api: Api, name: Name) -> Response:
    await api.delete(f"/v1/models/{name}")
    return leave_for(request, "/models")


@router.get("/try")
async def chat(
    request: Request, api: Api, model: str | None = None, beside: str | None = None
) -> Response:
    """A conversation with one model or with two; its messages go between the browser and the
    API.
    """
    views = (await api.get("/v1/models"))["data"]
    names = [view["id"] for view in views]
    for name in (model, beside):
        if (
            name and name not in names
        ):  # a checkpoint, which is not listed; the API refuses an unknown name
            names.append((await api.get(f"/v1/models/{name}"))["id"])
    chosen = model or next(
        (view["id"] for view in views if view["parent"]), names[0] if names else None
    )
    return page(
        request,
        "chat.html",
        names=names,
        model=chosen,
        beside=beside,
        inference=await inference_of(api),
    )


async def inference_of(api: InnerApi) -> dict[str, str | None]:
    """Return what answers chat completions here, or why nothing does."""
    return await api.get("/v1/inference")


async def _results(api: InnerApi, models: Sequence[dict[str, Any]]) -> dict[str, Result]:
    """Return job → its best result on its validation file; without one, the job is left out."""
    jobs = [view["job_id"] for view in models if view["job_id"]]
    if not jobs:
        return {}
    # The fewest points that a series keeps have its extremes.
    metrics = await api.get(
        "/v1/fine_tuning/metrics", job=jobs, points=4, series=["valid_loss", "valid_mean_reward"]
    )
    best = {view["job_id"]: best_validated(view["series"]) for view in metrics["data"]}
    return {job_id: result for job_id, result in best.items() if result}


def _lineage(model: dict[str, Any], by_name: dict[str, Any]) -> list[str]:
    """Return the models that a tuned model was trained from, the nearest first and the base
    last.
    """
    line: list[str] = []
    while model["parent"] and model["parent"] not in line:
        line.append(model["parent"])
        if (parent := by_name.get(model["parent"])) is None:
            break
        model = parent
    return line if model["root"] in line else [*line, model["root"]]
