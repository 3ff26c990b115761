"""Several jobs side by side: a comparison of chosen jobs, the list of sweeps, and one sweep as a
table of its jobs.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import Response

from api.page.formatting import job_title
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import fragment, page
from api.page.summaries import differing_options, results_by_one_measure
from api.page.sweep_scatters import scatters_of
from api.routes.page.jobs_page import JOBS
from api.routes.page.sign_in_page import page_router
from ft_service.jobs.method_options import loss_measure

router = page_router()

SWEEPS = "/v1/fine_tuning/sweeps"
MOST_COMPARED = 8
_TABLE_POINTS = 200
_SWEEPS_PER_PAGE = 50


@router.get("/compare")
async def compare(
    request: Request, api: Api, job: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Two to eight jobs: the settings in which they differ, their results, best first, and their
    curves in one chart.
    """
    chosen = list(dict.fromkeys(job or ()))
    if len(chosen) > MOST_COMPARED:
        raise ApiError(
            400,
            {
                "message": f"{len(chosen)} jobs are too many to compare: choose at most "
                f"{MOST_COMPARED}."
            },
        )
    jobs = [await api.get(f"{JOBS}/{job_id}") for job_id in chosen]
    if len(jobs) < 2:
        newest = await api.get(JOBS, limit=50)
        return page(request, "compare_choice.html", jobs=newest["data"], chosen=chosen)
    measures = {view["id"]: loss_measure(view["method"]) for view in jobs}
    comparable = len(set(measures.values())) == 1
    rewarded = comparable and None in measures.values()
    names = ["train_loss", "valid_loss", "train_mean_reward", "valid_mean_reward"]
    metrics = await api.get(
        "/v1/fine_tuning/metrics", job=chosen, points=_TABLE_POINTS, series=names
    )
    measured, results = results_by_one_measure(
        {view["job_id"]: view["series"] for view in metrics["data"]}, rewarded=rewarded
    )
    sign = -1.0 if rewarded else 1.0
    best_first = sorted(
        jobs, key=lambda view: (results[view["id"]] is None, sign * (results[view["id"]] or 0.0))
    )
    ranked = best_first if comparable else jobs
    values = {
        "jobs": jobs,
        "ranked": ranked,
        "comparable": comparable,
        "measures": measures,
        "measured": measured,
        "results": results,
        "places": {job_id: place for place, job_id in enumerate(chosen, 1)},
        "rows": differing_options(ranked),
        "titles": [job_title(view) for view in jobs],
    }
    return page(request, "compare.html", **values)


@router.get("/sweeps")
async def sweeps(request: Request, api: Api, after: str | None = None) -> Response:
    listed = await api.get(SWEEPS, limit=_SWEEPS_PER_PAGE, after=after)
    return page(
        request,
        "sweeps.html",
        sweeps=listed["data"],
        more=listed["has_more"],
        last=listed["last_id"],
        after=after,
    )


@router.get("/sweeps/{sweep_id}")
async def sweep(request: Request, sweep_id: str, api: Api) -> Response:
    return page(request, "sweep.html", **await _sweep_values(api, sweep_id), seen="")


@router.get("/page/live/sweeps/{sweep_id}")
async def live_sweep(request: Request, sweep_id: str, api: Api) -> Response:
    return fragment(request, "sweep_jobs.html", **await _sweep_values(api, sweep_id))


@router.post("/sweeps/{sweep_id}/cancel")
async def cancel(request: Request, sweep_id: str, api: Api) -> Response:
    await api.post(f"{SWEEPS}/{sweep_id}/cancel")
    return await live_sweep(request, sweep_id, api)


async def _sweep_values(api: InnerApi, sweep_id: str) -> dict[str, Any]:
    view = await api.get(f"{SWEEPS}/{sweep_id}")
    compared = [job["id"] for job in view["jobs"] if job["step"]][:MOST_COMPARED]
    address = f"/compare?{urlencode({'job': compared}, doseq=True)}" if len(compared) > 1 else None
    return {
        "sweep": view,
        "compare": address,
        "compared": len(compared),
        "scatters": scatters_of(view),
    }
