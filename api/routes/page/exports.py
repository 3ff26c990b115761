"""A job's exports: what there is, and having more made."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, InnerApi
from api.page.rendering import fragment
from api.routes.page.entry import page_router
from api.routes.page.jobs import JOBS, job_page

router = page_router()

FORMS = (
    ("gguf", "Ollama, llama.cpp: the merged model in bf16"),
    ("gguf-q8_0", "the same in 8 bits"),
    ("gguf-adapter", "llama.cpp: the adapter beside a base"),
    ("vllm", "vLLM: the adapter with one rank"),
    ("merged", "everything that reads safetensors"),
    ("merged-fp8", "vLLM, transformers: linear layers in FP8"),
    ("merged-int4", "vLLM, transformers: linear layers in INT4"),
)


@router.get("/jobs/{job_id}/exports")
async def exports(request: Request, job_id: str, api: Api) -> Response:
    return await job_page(request, api, job_id, "job_exports.html", "exports", **await _found(api, job_id))


@router.get("/page/live/jobs/{job_id}/exports")
async def live_exports(request: Request, job_id: str, api: Api) -> Response:
    return fragment(request, "job_exports_list.html", job={"id": job_id}, **await _found(api, job_id))


@router.post("/jobs/{job_id}/exports")
async def make(request: Request, job_id: str, form: str, api: Api) -> Response:
    await api.post(f"{JOBS}/{job_id}/exports", {"format": form})
    return await live_exports(request, job_id, api)


@router.post("/jobs/{job_id}/exports/{form}/delete")
async def delete(request: Request, job_id: str, form: str, api: Api) -> Response:
    await api.delete(f"{JOBS}/{job_id}/exports/{form}")
    return await live_exports(request, job_id, api)


async def _found(api: InnerApi, job_id: str) -> dict[str, Any]:
    found = await api.get(f"{JOBS}/{job_id}/exports")
    return {"exports": {one["format"]: one for one in found["data"]}, "forms": FORMS}
