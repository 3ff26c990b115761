"""Data files: the list, and a file as a model sees it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response

from api.http.threads import parsed_in_turn
from api.page import job_form
from api.page.formatting import length_bars
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import leave_for, page
from api.routes.page.jobs_page import JOBS
from api.routes.page.sign_in_page import page_router

router = page_router()

_FILES = 500
"""Files of a page of the list."""
_NEWEST_JOBS = 100
_SHOWN = 10
_FIRST = 3
_HISTOGRAM = 100


@router.get("/data")
async def files(request: Request, api: Api, after: str | None = None) -> Response:
    listed = await api.get("/v1/files", limit=_FILES, after=after)
    jobs = (await api.get(JOBS, limit=_NEWEST_JOBS))["data"]
    uses = Counter(
        file_id for job in jobs for file_id in {job["training_file"], job["validation_file"]}
    )
    return page(
        request,
        "data.html",
        files=listed,
        uses=uses,
        first_page=after is None,
        accepted=job_form.ACCEPTED,
    )


@router.get("/data/{file_id}")
async def file(request: Request, api: Api, file_id: str, model: str | None = None) -> Response:
    view = await api.get(f"/v1/files/{file_id}")
    jobs = (await api.get(JOBS, limit=_NEWEST_JOBS))["data"]
    used_by = [job for job in jobs if file_id in (job["training_file"], job["validation_file"])]
    bases = [base["id"] for base in (await api.get("/v1/models", owned_by="system"))["data"]]
    return page(
        request,
        "data_file.html",
        file=view,
        used_by=used_by,
        faults=_faults(used_by),
        bases=bases,
        model=model,
    )


@router.get("/page/data/{file_id}/samples")
async def file_samples(
    request: Request, api: Api, file_id: str, model: str, after: int = 0
) -> Response:
    """Samples as a base sees them.

    The browser loads them after the page, since they take a second.
    """
    return await _samples(request, api, f"/v1/files/{file_id}/samples", after, model=model)


@router.get("/page/data/{file_id}/first")
async def first_samples(
    request: Request,
    api: Api,
    file_id: str,
    model: str,
    method: str = "supervised",
    columns: str = "",
) -> Response:
    """The first samples as a job of the form would read them.

    `columns`: the form's mapping, as YAML.
    """
    query = {"model": model, "method": method}
    mapping = (await parsed_in_turn(job_form.body_of, {job_form.DATA: columns})).get(job_form.DATA)
    if isinstance(mapping, dict):
        query["data"] = json.dumps(mapping)
    return await _first(request, api, f"/v1/files/{file_id}/samples", **query)


@router.get("/page/data/{file_id}/statistics")
async def file_statistics(request: Request, api: Api, file_id: str, model: str) -> Response:
    """Statistics of the whole file, as a job on a base would see it; or the reason why it cannot be
    trained on.
    """
    try:
        view = await api.get(f"/v1/files/{file_id}/statistics", model=model)
    except ApiError as error:
        return page(request, "statistics.html", found={"fault": error.message})
    buckets = view["training"]["histogram"]
    most = max((bucket["samples"] for bucket in buckets), default=0)
    bars = [bucket | {"share": bucket["samples"] / most} for bucket in buckets]
    return page(request, "statistics.html", found=view, bars=bars)


@router.get("/page/jobs/{job_id}/samples")
async def job_samples(
    request: Request,
    api: Api,
    job_id: str,
    file: str = "training",
    after: int = 0,
    few: bool = False,
) -> Response:
    """Samples as the job's model sees them. `few`: the first ones alone."""
    if few:
        return await _first(request, api, f"{JOBS}/{job_id}/samples", file=file)
    return await _samples(request, api, f"{JOBS}/{job_id}/samples", after, file=file)


@router.post("/data/{file_id}/delete")
async def delete(request: Request, api: Api, file_id: str) -> Response:
    await api.delete(f"/v1/files/{file_id}")
    return leave_for(request, "/data")


async def _first(request: Request, api: InnerApi, path: str, **query: str) -> Response:
    """Return the first samples, or why there are none."""
    try:
        found = await api.get(path, limit=_FIRST, **query) | {"has_more": False}
    except ApiError as error:
        found = {"fault": error.message}
    return page(request, "samples.html", found=found, after=0, lengths=None, more="")


async def _samples(
    request: Request, api: InnerApi, path: str, after: int, **query: str
) -> Response:
    """Return a few samples; the first ones of a job come with a histogram of many."""
    values: dict[str, Any] = {
        "after": after,
        "more": f"{request.url.path}?{urlencode(query)}&after=",
        "lengths": None,
    }
    try:
        view = await api.get(
            path, after=after, limit=_SHOWN if after or "model" in query else _HISTOGRAM, **query
        )
    except ApiError as error:
        return page(request, "samples.html", found={"fault": error.message}, **values)
    if not after and "model" not in query:  # a file's own page shows its statistics
        values["lengths"] = length_bars(view["data"])
        view["has_more"] = view["has_more"] or len(view["data"]) > _SHOWN
        view["data"] = view["data"][:_SHOWN]
    return page(request, "samples.html", found=view, **values)


def _faults(jobs: list[dict[str, Any]]) -> list[str]:
    """Return why jobs could not use a file of theirs, each reason once."""
    errors = [job["error"] for job in jobs if job["error"]]
    of_files = [
        error["message"] for error in errors if "file" in str(error["param"] or error["code"])
    ]
    return list(dict.fromkeys(of_files))
