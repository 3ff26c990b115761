"""The form of a new job: its plan, which follows the fields, and the creation of the job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from api.http.auth import operates
from api.http.dependencies import Svc
from api.http.threads import in_thread, parsed_in_turn
from api.page import job_form
from api.page.inner_api import Api, ApiError, InnerApi
from api.page.rendering import leave_for, page
from api.page.sample_job import sample_files, sample_options
from api.routes.page.compare_page import SWEEPS
from api.routes.page.jobs_page import JOBS
from api.routes.page.sign_in_page import Visitor, form_of, page_router
from ft_service.bases.describing import NotDescribedError

router = page_router()

MOST_FILES = 200
"""Files that the form offers: the newest."""


@router.get("/new")
async def form(
    request: Request,
    api: Api,
    viewer: Visitor,
    services: Svc,
    again: str | None = None,
    model: str | None = None,
    ask: int | None = None,
) -> Response:
    """An empty form. `again`: a job whose create body fills it in; `model`: the base to choose;
    `ask`: the number of prompts to answer before and after training.
    """
    body = await api.get(f"{JOBS}/{again}/request") if again else {}
    fields = await parsed_in_turn(job_form.fields_of, body) | ({"model": model} if model else {})
    fields |= {"evaluation.prompts": str(ask)} if ask else {}
    files = await _data_files(api)
    missing = []
    for label, name in (("training", "training_file"), ("validation", "validation_file")):
        file_id = fields.get(name)
        if file_id and file_id not in [
            file["id"] for file in files
        ]:  # older than those listed, or deleted
            found = await api.find(f"/v1/files/{file_id}")
            files += [found] if found else []
            missing += [] if found else [label]
    bases = {view["id"]: view["base"] for view in (await api.get("/v1/models"))["data"]}
    names = [name for name, base in bases.items() if not base or base["trainable"] is not False]
    options = job_form.options()
    values = {
        "names": names if fields.get("model") in (None, *names) else [*names, fields["model"]],
        "examined": [name for name, base in bases.items() if base and base["trainable"] is None],
        "may_fetch": operates(viewer, services),
        "files": files,
        "missing": missing,
        "fields": fields,
        "methods": job_form.METHODS,
        "pair_losses": job_form.PAIR_LOSSES,
        "example_grader": job_form.EXAMPLE_GRADER,
        "first": [options[name] for name in job_form.FIRST],
        "rest": {
            section: [option for name, option in options.items() if _is_further(name, section)]
            for section in job_form.SECTIONS
        },
        "again": again,
        "accepted": job_form.ACCEPTED,
    }
    return page(request, "new_job.html", **values)


@router.post("/new/plan")
async def plan(request: Request, api: Api) -> Response:
    """The plan of the form as it is now, and the form as Python, a command and YAML."""
    try:
        body = await _body_of(request)
    except ValueError as error:
        fault = {"fault": str(error), "param": job_form.OTHER}
        return page(request, "new_plan.html", plan=fault, words={}, checks={}, mapped={})
    checks = await _checks(api, body)
    names = {file["id"]: file["filename"] for file in await _data_files(api)}
    words = await parsed_in_turn(_words, body, names, str(request.base_url).rstrip("/"))
    values = {
        "checks": checks,
        "roles": job_form.COLUMN_ROLES[_method_of(body)],
        "mapped": _mapping_of(body),
    }
    return page(
        request, "new_plan.html", plan=await _plan(api, body, checks), words=words, **values
    )


@router.post("/new")
async def create(request: Request, api: Api) -> Response:
    try:
        body = await _body_of(request)
    except ValueError as error:
        raise ApiError(400, {"message": str(error), "param": job_form.OTHER}) from None
    if (unusable := _unusable(await _checks(api, body))) is not None:
        raise ApiError(400, {"message": unusable["fault"], "param": unusable["param"]})
    if job_form.SWEEP in body:
        sweep = await api.post(SWEEPS, body)
        return leave_for(request, f"/sweeps/{sweep['id']}")
    job = await api.post(JOBS, body)
    return leave_for(request, f"/jobs/{job['id']}")


@router.post("/new/sample")
async def create_sample(request: Request, api: Api) -> Response:
    """Create the quickstart's job from the data that this installation brings, and show it."""
    body = await in_thread(sample_options)
    files = await in_thread(sample_files)
    there = {(file["filename"], file["bytes"]): file["id"] for file in await _data_files(api)}
    for name, path in files.items():
        content = await in_thread(path.read_bytes)
        found = there.get((path.name, len(content)))
        body[name] = found or (await api.upload(path.name, content))["id"]
    job = await api.post(JOBS, body)
    return leave_for(request, f"/jobs/{job['id']}")


async def _body_of(request: Request) -> dict[str, Any]:
    """Return the create body of the form, read beside the event loop: a megabyte of YAML takes many
    seconds. Raises ValueError.
    """
    return await parsed_in_turn(job_form.body_of, await form_of(request))


def _words(body: Mapping[str, Any], names: Mapping[str, str], base_url: str) -> dict[str, str]:
    """Return a create body as Python, as a command and as YAML. `names`: id → name of files."""
    return {
        "Python": job_form.python_text(body, base_url),
        "CLI": job_form.command_text(body, names),
        "YAML": job_form.yaml_text(body, names),
    }


def _is_further(name: str, section: str) -> bool:
    return name.startswith(f"{section}.") and name not in job_form.FIRST


async def _plan(
    api: InnerApi, body: Mapping[str, Any], checks: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Return the plan of a create body; in its place `fault` and `param`, or `pending` and `retry`
    while its base has no description. Of a sweep it is that of the job without the values to try,
    with `jobs`: how many there would be, once its data is chosen.
    """
    if "model" not in body:
        return {"fault": "Choose a base.", "param": "model"}
    job = {name: value for name, value in body.items() if name != job_form.SWEEP}
    jobs = None
    try:
        if job_form.SWEEP in body and "training_file" in body:
            jobs = (await api.post("/v1/fine_tuning/check", {"job": dict(body)}))["jobs"]
        planned = await api.post("/v1/fine_tuning/plan", job)
    except ApiError as error:
        if error.error.get("code") != NotDescribedError.code:
            return {"fault": error.message, "param": error.error.get("param")}
        planned = {
            "pending": None if error.retry_after else error.message,
            "retry": error.retry_after,
        }
    return _unusable(checks) or planned | {"jobs": jobs}


def _unusable(checks: Mapping[str, dict[str, Any] | None]) -> dict[str, str] | None:
    """Return fault and param of the first file that cannot be trained on; None: there is none.

    A check that met a limit says nothing of its file.
    """
    for name, check in checks.items():
        if check and check["whole"] and not check["ok"]:
            fault = (
                f"The {name.replace('_', ' ')} cannot be trained on. The reason is shown next "
                "to it."
            )
            return {"fault": fault, "param": name}
    return None


async def _checks(api: InnerApi, body: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Return each file field's check, as a job with this body would read the file; None: no file is
    chosen, or it cannot be checked now.
    """
    query = {"method": _method_of(body)}
    if mapping := _mapping_of(body):
        query["data"] = json.dumps(mapping)
    checks: dict[str, dict[str, Any] | None] = {}
    for name in ("training_file", "validation_file"):
        checks[name] = None
        if file_id := body.get(name):
            with contextlib.suppress(
                ApiError
            ):  # such as a wrong mapping of columns, which the plan reports
                checks[name] = await api.get(f"/v1/files/{file_id}/check", **query)
    return checks


def _method_of(body: Mapping[str, Any]) -> str:
    method = body.get("method")
    kind = method.get("type") if isinstance(method, dict) else None
    return kind if isinstance(kind, str) and kind in job_form.COLUMN_ROLES else "supervised"


def _mapping_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format's names of columns with the file's; empty: none, or no mapping."""
    return body[job_form.DATA] if isinstance(body.get(job_form.DATA), dict) else {}


async def _data_files(api: InnerApi) -> list[dict[str, Any]]:
    return (await api.get("/v1/files", purpose="fine-tune", limit=MOST_FILES))["data"]
