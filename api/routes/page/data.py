"""Data files: what there is, and what a model sees of one."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, InnerApi
from api.page.rendering import leave_for, page
from api.routes.page.entry import page_router
from api.routes.page.jobs import JOBS

router = page_router()

_LOOKED_AT = 100


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


@router.post("/data/{file_id}/delete")
async def delete(request: Request, api: Api, file_id: str) -> Response:
    await api.delete(f"/v1/files/{file_id}")
    return leave_for(request, "/data")


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
    return [model["id"] for model in (await api.get("/v1/models"))["data"] if not model["parent"]]
