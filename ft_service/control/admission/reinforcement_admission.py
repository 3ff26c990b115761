"""Admission of jobs whose answers are sampled: whether this service can sample and grade for
them.
"""

from __future__ import annotations

from ft_service.agents.addresses import Access, check_environment
from ft_service.control.webhook_delivery import secrets_of
from ft_service.errors import FtError, SpecError
from ft_service.graders.grading import GraderContext, check_outside, require_usable
from ft_service.graders.limits import GraderLimits
from ft_service.settings import Settings
from ft_service.spec.environments import EndpointEnvironment
from ft_service.spec.request import JobRequest
from ft_service.store.sql import Store

BY_SERVERS = "samples by inference servers (FT_INFERENCE_URL)"
_PLACE = "method.reinforcement."


def refuse_unless_graded(
    request: JobRequest,
    project_id: str,
    settings: Settings,
    store: Store,
    *,
    agents_call: bool = True,
) -> None:
    """Raise SpecError if this service cannot sample for a job whose answers are sampled, or its
    grader cannot grade here. `agents_call`: whether agents reach the model at this process.
    """
    if not request.method.samples_answers:
        return
    if not settings.previews and not (settings.inference_urls and settings.adapters):
        raise SpecError(
            f"method.type = {request.method.type!r}: this service has no sampler. The operator switches "
            "the preview on (FT_PREVIEW=on, which needs FT_LAUNCHER=local), "
            "or names an inference server and the folder from which it loads adapters "
            "(FT_INFERENCE_URL, FT_ADAPTERS).",
            param="method.type",
            code="not_available",
        )

    method = request.method.reinforcement
    if method is None:
        return

    def secrets(endpoint_id: str) -> list[str]:
        return secrets_of(store.webhooks.get_webhook(project_id, endpoint_id))

    if method.environment is not None and not settings.previews:
        raise no_preview(_why_no_preview(settings))
    if isinstance(method.environment, EndpointEnvironment) and not agents_call:
        raise no_calls_here()
    limits = GraderLimits.from_settings(settings)
    try:
        if method.environment is not None:
            access = Access(project_id, secrets, limits.allow_private)
            check_environment(method.environment, access)
        if method.grader is not None:
            require_usable(method.grader, limits)
            check_outside(
                method.grader, GraderContext(project=project_id, limits=limits, secrets=secrets)
            )
    except FtError as error:
        raise SpecError(
            _PLACE + error.message, param=_PLACE + (error.param or "grader"), code=error.code
        ) from None


def no_calls_here() -> SpecError:
    """The error of a job whose agent cannot call the model."""
    return SpecError(
        _PLACE
        + "environment.type = 'endpoint': agents call the model at the process that moves jobs, "
        "and here the API is served by another one (ft serve --api-only). Take an environment of "
        "type mcp or openenv, which calls nothing, or submit the job to a server of one process "
        "(ft serve).",
        param=_PLACE + "environment.type",
        code="not_available",
    )


def no_preview(why: str) -> SpecError:
    """The error of a job with an environment where the service's own preview does not sample.

    `why`: what the service does.
    """
    return SpecError(
        _PLACE + f"environment: the model acts by the service's own preview, and this one {why}. "
        "Leave the environment out, or submit the job to a server with FT_LAUNCHER=local and "
        "FT_PREVIEW=on, and without FT_INFERENCE_URL.",
        param=_PLACE + "environment",
        code="not_available",
    )


def _why_no_preview(settings: Settings) -> str:
    if settings.inference_urls:
        return BY_SERVERS
    if settings.launcher != "local":
        return f"has none with FT_LAUNCHER={settings.launcher}"
    return "has none (FT_PREVIEW=off)"


def refuse_without_sampler(request: JobRequest) -> None:
    """Raise SpecError for a job that needs a service to sample and grade for it."""
    if request.method.samples_answers:
        raise SpecError(
            f"method.type = {request.method.type!r}: answers are sampled by a server. Start one "
            "(ft serve) and submit the "
            "job to it (ft submit).",
            param="method.type",
            code="not_available",
        )
