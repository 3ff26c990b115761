"""Several jobs beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from api.page.comparing import differing, loss_of
from api.page.inner_api import Api, ApiError
from api.page.rendering import page
from api.page.words import job_title
from api.routes.page.entry import page_router
from api.routes.page.jobs import JOBS

router = page_router()

MOST = 8
_TABLE_POINTS = 200


@router.get("/compare")
async def compare(request: Request, api: Api, job: Annotated[list[str] | None, Query()] = None) -> Response:
    """Two to eight jobs: curves over each other, what came of them best first, and the settings that differ."""
    chosen = list(dict.fromkeys(job or ()))
    if len(chosen) > MOST:
        raise ApiError(400, {"message": f"{len(chosen)} jobs are too many to compare: choose at most {MOST}."})
    jobs = [await api.get(f"{JOBS}/{job_id}") for job_id in chosen]
    if len(jobs) < 2:
        found = await api.get(JOBS, limit=50)
        return page(request, "compare_choice.html", jobs=found["data"], chosen=chosen)
    metrics = await api.get("/v1/fine_tuning/metrics", job=chosen, points=_TABLE_POINTS, series=["train_loss", "valid_loss"])
    losses = {one["job_id"]: loss_of(one["series"]) for one in metrics["data"]}
    places = {job_id: place for place, job_id in enumerate(chosen, 1)}
    ranked = sorted(jobs, key=lambda one: (losses[one["id"]] is None, losses[one["id"]] or 0.0))
    values = {
        "jobs": jobs,
        "ranked": ranked,
        "losses": losses,
        "places": places,
        "rows": differing(jobs),
        "titles": [job_title(one) for one in jobs],
    }
    return page(request, "compare.html", **values)
