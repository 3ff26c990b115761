"""The form of a new job: its plan while one types, and the job itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.page import job_form
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import leave_for, page
from api.routes.page.entry import form_of, page_router
from api.routes.page.jobs import JOBS
from ft_service.data.formats.recognise import COMPRESSED_ENDINGS, DATA_ENDINGS

router = page_router()


@router.get("/new")
async def form(
    request: Request, api: Api, again: str | None = None, model: str | None = None, ask: int | None = None
) -> Response:
    """An empty form; or `again`: what a job was asked for, perhaps on another base. `ask`: prompts that are to be answered
    before and after training."""
    body = await api.get(f"{JOBS}/{again}/request") if again else {}
    models = await api.get("/v1/models")
    tunable = [one["id"] for one in models["data"] if not one["base"] or one["base"]["trainable"]]
    fields = job_form.fields_of(body) | ({"model": model} if model else {})
    fields |= {"evaluation.prompts": str(ask)} if ask else {}
    files = await api.get("/v1/files", purpose="fine-tune", limit=200)
    names = [*tunable, *({fields["model"]} - {*tunable} if "model" in fields else ())]
    every = job_form.options()
    rest = {
        section: [one for name, one in every.items() if name.startswith(f"{section}.") and name not in job_form.FIRST]
        for section in job_form.SECTIONS
    }
    first = [every[name] for name in job_form.FIRST]
    values = {"names": names, "files": files["data"], "fields": fields, "first": first, "rest": rest, "again": again}
    values["accepted"] = ",".join((*DATA_ENDINGS, *COMPRESSED_ENDINGS))
    return page(request, "new_job.html", **values)


@router.post("/new/plan")
async def plan(request: Request, api: Api) -> Response:
    """What the form so far would take, and the form in other words."""
    found: dict[str, Any]
    try:
        body = job_form.body_of(await form_of(request))
    except ValueError as error:
        found = {"fault": str(error), "param": job_form.OTHER}
        return page(request, "new_plan.html", plan=found, words={}, checks={})
    if "model" in body:
        try:
            found = await api.post("/v1/fine_tuning/plan", body)
        except ApiError as error:
            found = {"fault": error.message, "param": error.error.get("param")}
    else:
        found = {"fault": "Choose a base.", "param": "model"}
    checks = await _checks(api, body)
    if "fault" not in found and (unusable := [name for name, check in checks.items() if check and not check["ok"]]):
        found = {
            "fault": f"The {unusable[0].replace('_', ' ')} cannot be trained on. The reason is shown beside it.",
            "param": unusable[0],
        }
    files = await _names(api)
    words = {
        "Python": job_form.python_text(body, str(request.base_url).rstrip("/")),
        "CLI": job_form.command_text(body, files),
        "YAML": job_form.yaml_text(body, files),
    }
    return page(request, "new_plan.html", plan=found, words=words, checks=checks)


@router.post("/new")
async def create(request: Request, api: Api) -> Response:
    try:
        body = job_form.body_of(await form_of(request))
    except ValueError as error:
        raise ApiError(400, {"message": str(error), "param": job_form.OTHER}) from None
    job = await api.post(JOBS, body)
    return leave_for(request, f"/jobs/{job['id']}")


async def _checks(api: InnerApi, body: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Each file's field → what the file is, or why it cannot be trained on, as a job with this body would read it; None: none
    is chosen, or nothing can be said of it now."""
    method = body["method"].get("type") if isinstance(body.get("method"), dict) else None
    asked = {"method": method if method in ("supervised", "dpo") else "supervised"}
    if isinstance(body.get(job_form.DATA), dict):
        asked["data"] = json.dumps(body[job_form.DATA])
    found: dict[str, dict[str, Any] | None] = {}
    for name in ("training_file", "validation_file"):
        found[name] = None
        if file_id := body.get(name):
            with contextlib.suppress(ApiError):  # such as a mapping that is wrong, which the plan says
                found[name] = await api.get(f"/v1/files/{file_id}/check", **asked)
    return found


async def _names(api: InnerApi) -> dict[str, str]:
    files = await api.get("/v1/files", purpose="fine-tune", limit=200)
    return {file["id"]: file["filename"] for file in files["data"]}
