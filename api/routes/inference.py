"""Where scripts go once their job has succeeded: this service trains and does not serve, and says what to do instead."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api import tuned
from api.auth import Caller
from api.deps import JsonBody, Svc
from ft_service.errors import NotFoundError, SpecError

router = APIRouter(prefix="/v1/chat/completions", tags=["inference"])

_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}


@router.post("", openapi_extra=_BODY)
def create(body: JsonBody, caller: Caller, services: Svc) -> None:
    """Always a 404: for a tuned model one that names its adapter and how to serve it."""
    name: Any = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise SpecError("model is required: the name of a tuned model.", param="model", code="missing_required_parameter")
    if not name.startswith("ft:"):
        message = "This service trains models and does not serve them: send chat completions to an inference server."
        raise NotFoundError(message, param="model", code="model_not_served")
    job = tuned.find(name, caller, services).job
    raise NotFoundError(
        f"{name} is trained and not served here. Download its adapter with GET /v1/fine_tuning/jobs/{job.id}/adapter "
        f"(or `ft download {job.id}`) and serve it on its base, for example with vLLM: "
        f"vllm serve {job.spec['model']['name']} --enable-lora --lora-modules tuned=adapter",
        param="model",
        code="model_not_served",
    )
