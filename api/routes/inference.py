"""Chat completions, which scripts ask for once their job has succeeded: the operator's inference server answers them if there
is one, else the preview on this host. Without either the refusal says what to do instead.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.http.auth import Caller
from api.http.dependencies import JsonBody, Services, Svc, server_sent
from api.http.routing import keyed_router
from api.http.threads import in_thread, turn
from api.transfer import chat_answer, inference_proxy
from api.transfer.adapter_download import adapter_folder
from ft_service.control import tuned_models
from ft_service.errors import NotFoundError, SpecError
from ft_service.serving.preview import Deliver, Preview, Ticket
from ft_service.serving.request import ChatCompletion, parse_chat_completion
from ft_service.settings import Settings
from ft_service.spec import is_tuned

router = keyed_router("/v1", "inference")

_ANSWER = server_sent()
_ANSWER[200]["content"]["application/json"] = {"schema": {"type": "object"}}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}


@router.post("/chat/completions", openapi_extra=_BODY, response_class=StreamingResponse, responses=_ANSWER)
async def create(request: Request, body: JsonBody, caller: Caller, services: Svc) -> Response:
    """For a base, an alias, a tuned model or a checkpoint of one; streamed if asked for. Tuned models must be the project's own
    or granted to it. With FT_INFERENCE_URL that server answers. Else the preview of this host does (FT_PREVIEW): training comes
    first, and while it has the slots this is a 503 with `retry-after`, unless `processor` is true, which OpenAI's API has not:
    then the answer comes from the processor, slowly."""
    name: Any = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise SpecError("model is required: the name of a tuned model.", param="model", code="missing_required_parameter")
    tuned = await in_thread(tuned_models.find, name, caller, services.store) if is_tuned(name) else None
    if services.settings.inference_url:
        if "processor" in body:
            message = "processor: is for the preview, and an inference server answers here (FT_INFERENCE_URL). Leave it out."
            raise SpecError(message, param="processor", code="unsupported_parameter")
        return await inference_proxy.chat_completion(services.settings, body)
    if tuned is not None:  # whoever serves models may have loaded one that was pruned since
        await in_thread(tuned_models.refuse_pruned, tuned, services.places)
    if services.preview is None:
        raise _not_served(tuned)
    asked = parse_chat_completion(body)
    adapter = None
    if tuned is not None:
        async with turn("making") if tuned.checkpoint is not None else nullcontext():
            adapter = await in_thread(adapter_folder, tuned, services.places)
    submit = partial(_submit, services, services.preview, asked, tuned, adapter, caller.project_id)
    return await chat_answer.answer(request, asked, services.preview, submit)


def _submit(
    services: Services,
    preview: Preview,
    asked: ChatCompletion,
    tuned: tuned_models.Tuned | None,
    adapter: Path | None,
    project_id: str,
    deliver: Deliver,
) -> Ticket:
    if tuned is None:
        try:
            base = services.catalogue.find(asked.model)
        except SpecError as error:
            raise NotFoundError(error.message, param="model", code="model_not_found") from None
        return preview.submit(str(base.path), None, asked.order(None), deliver, project_id=project_id, beside=asked.processor)
    spec = tuned.job.spec
    order, formats = asked.order(str(adapter)), spec.precision.model_dump(mode="json")
    job = tuned.job if tuned.checkpoint is None else None
    whose = {"project_id": project_id, "beside": asked.processor}
    return preview.submit(spec.model.path, formats, order, deliver, job, **whose)


class InferenceView(BaseModel):
    """Who answers chat completions here."""

    object: Literal["inference"] = "inference"
    answered_by: Literal["preview", "inference_server"] | None
    """preview: a process of this host, to try models; inference_server: the operator's; null: nobody."""
    reason: str | None
    """Why nobody does; null: somebody does."""


@router.get("/inference")
async def retrieve(services: Svc) -> InferenceView:
    """Not in OpenAI's API. Who answers chat completions here, and why nobody does."""
    if services.settings.inference_url:
        return InferenceView(answered_by="inference_server", reason=None)
    if services.preview is not None:
        return InferenceView(answered_by="preview", reason=None)
    return InferenceView(answered_by=None, reason=_why_nobody(services.settings))


def _why_nobody(settings: Settings) -> str:
    if settings.preview == "off":
        return "The preview is turned off (FT_PREVIEW = off), and no inference server is set (FT_INFERENCE_URL)."
    if settings.launcher != "local":
        return "Jobs run in a cluster, where nothing of the service's answers; FT_INFERENCE_URL names a server that does."
    return "This process serves the API alone; the preview runs beside `ft serve`, and FT_INFERENCE_URL names another server."


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of its option --max-lora-rank, 16 unless given."""


def _rank_for_vllm(tuned: tuned_models.Tuned) -> int:
    lora = tuned.job.spec.lora
    largest = max((lora.r, *lora.rank_pattern.values()))
    return next(rank for rank in VLLM_RANKS if rank >= largest)


def _not_served(tuned: tuned_models.Tuned | None) -> NotFoundError:
    if tuned is None:
        message = "This service trains models and does not serve them: send chat completions to an inference server."
    else:
        message = (
            f"{tuned.name} is trained and not served here. Download its adapter with "
            f"GET /v1/fine_tuning/jobs/{tuned.job.id}/adapter (or `ft download {tuned.job.id}`) and serve it on its base, for "
            f"example with vLLM, where BASE is the folder of {tuned.base}: vllm serve BASE --enable-lora --max-lora-rank "
            f"{_rank_for_vllm(tuned)} --lora-modules '{tuned.name}={tuned.job.id}'"
        )
    return NotFoundError(message, param="model", code="model_not_served")
