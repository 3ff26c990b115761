"""Sweeps: the list, and one as a table of its jobs, best first."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, InnerApi
from api.page.rendering import fragment, page
from api.routes.page.compare import MOST
from api.routes.page.entry import page_router

router = page_router()

SWEEPS = "/v1/fine_tuning/sweeps"
_PAGE = 50


@router.get("/sweeps")
async def sweeps(request: Request, api: Api, after: str | None = None) -> Response:
    found = await api.get(SWEEPS, limit=_PAGE, after=after)
    return page(request, "sweeps.html", sweeps=found["data"], more=found["has_more"], last=found["last_id"], after=after)


@router.get("/sweeps/{sweep_id}")
async def sweep(request: Request, sweep_id: str, api: Api) -> Response:
    return page(request, "sweep.html", **await _values(api, sweep_id), seen="")


@router.get("/page/live/sweeps/{sweep_id}")
async def live_sweep(request: Request, sweep_id: str, api: Api) -> Response:
    return fragment(request, "sweep_jobs.html", **await _values(api, sweep_id))


@router.post("/sweeps/{sweep_id}/cancel")
async def cancel(request: Request, sweep_id: str, api: Api) -> Response:
    await api.post(f"{SWEEPS}/{sweep_id}/cancel")
    return fragment(request, "sweep_jobs.html", **await _values(api, sweep_id))


async def _values(api: InnerApi, sweep_id: str) -> dict[str, Any]:
    found = await api.get(f"{SWEEPS}/{sweep_id}")
    compared = [job["id"] for job in found["jobs"] if job["step"]][:MOST]
    address = f"/compare?{urlencode({'job': compared}, doseq=True)}" if len(compared) > 1 else None
    return {"sweep": found, "compare": address, "compared": len(compared)}
