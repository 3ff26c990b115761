"""Data files: what there is, and what a model sees of one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import leave_for, page
from api.page.words import length_bars
from api.routes.page.entry import page_router
from api.routes.page.jobs import JOBS

router = page_router()

_LOOKED_AT = 100
_SHOWN = 10
_HISTOGRAM = 100


@router.get("/data")
async def files(request: Request, api: Api) -> Response:
    found = await api.get("/v1/files", limit=500)
    jobs = (await api.get(JOBS, limit=_LOOKED_AT))["data"]
    return page(request, "data.html", files=found["data"], uses=_uses(jobs))


@router.get("/data/{file_id}")
async def file(request: Request, api: Api, file_id: str, model: str | None = None) -> Response:
    found = await api.get(f"/v1/files/{file_id}")
    jobs = (await api.get(JOBS, limit=_LOOKED_AT))["data"]
    used_by = [job for job in jobs if file_id in (job["training_file"], job["validation_file"])]
    values = {
        "file": found,
        "used_by": used_by,
        "faults": _faults(used_by, file_id),
        "bases": await _bases(api),
        "model": model,
    }
    return page(request, "data_file.html", **values)


@router.get("/page/data/{file_id}/samples")
async def file_samples(request: Request, api: Api, file_id: str, model: str, after: int = 0) -> Response:
    """As a base sees them; loaded by the page once it is there, since it takes a second."""
    return await _samples(request, api, f"/v1/files/{file_id}/samples", after, model=model)


@router.get("/page/data/{file_id}/statistics")
async def file_statistics(request: Request, api: Api, file_id: str, model: str) -> Response:
    """The whole file in numbers, as a job on a base would see it; or which of its lines are at fault."""
    try:
        found = await api.get(f"/v1/files/{file_id}/statistics", model=model)
    except ApiError as error:
        return page(request, "statistics.html", found={"fault": error.message})
    buckets = found["training"]["histogram"]
    most = max((bucket["samples"] for bucket in buckets), default=0)
    return page(
        request, "statistics.html", found=found, bars=[bucket | {"share": bucket["samples"] / most} for bucket in buckets]
    )


@router.get("/page/jobs/{job_id}/samples")
async def job_samples(request: Request, api: Api, job_id: str, file: str = "training", after: int = 0) -> Response:
    """As the job's model sees them."""
    return await _samples(request, api, f"{JOBS}/{job_id}/samples", after, file=file)


@router.post("/data/{file_id}/delete")
async def delete(request: Request, api: Api, file_id: str) -> Response:
    await api.delete(f"/v1/files/{file_id}")
    return leave_for(request, "/data")


async def _samples(request: Request, api: InnerApi, path: str, after: int, **query: str) -> Response:
    """A few samples; of a job, at the beginning, with a histogram of many."""
    values: dict[str, Any] = {"after": after, "more": f"{request.url.path}?{urlencode(query)}&after=", "lengths": None}
    try:
        found = await api.get(path, after=after, limit=_SHOWN if after or "model" in query else _HISTOGRAM, **query)
    except ApiError as error:
        return page(request, "samples.html", found={"fault": error.message}, **values)
    if not after and "model" not in query:  # the file's own page tells its statistics
        values["lengths"] = length_bars(found["data"])
        found["has_more"] = found["has_more"] or len(found["data"]) > _SHOWN
        found["data"] = found["data"][:_SHOWN]
    return page(request, "samples.html", found=found, **values)


def _uses(jobs: list[dict[str, Any]]) -> dict[str, int]:
    """File → how many of the newest jobs use it."""
    uses: dict[str, int] = {}
    for job in jobs:
        for file_id in {job["training_file"], job["validation_file"]} - {None}:
            uses[file_id] = uses.get(file_id, 0) + 1
    return uses


def _faults(jobs: list[dict[str, Any]], file_id: str) -> list[str]:
    """Why jobs could not use a file, each reason once: the lines at fault."""
    told = [job["error"] for job in jobs if job["error"] and "file" in str(job["error"]["param"] or job["error"]["code"])]
    return list(dict.fromkeys(error["message"] for error in told))


async def _bases(api: InnerApi) -> list[str]:
    return [model["id"] for model in (await api.get("/v1/models", owned_by="system"))["data"]]
