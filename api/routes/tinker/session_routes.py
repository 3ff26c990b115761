"""Sessions of Tinker clients, and what a client asks for when it begins."""

from __future__ import annotations

from typing import Any

from fastapi import Query

from api.http.dependencies import JsonBody, Svc
from api.http.tinker_auth import TinkerCaller, tinker_router
from ft_service.control.tinker.tinker_models import MODEL_KEY, finish_models, project_models
from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.tinker.bodies import CreateSession, FinishSession, OfSession
from ft_service.tinker.names import SESSION

router = tinker_router()


@router.post("/client/config")
@router.post("/client/dynamic_config")
def client_config(caller: TinkerCaller) -> dict[str, Any]:
    """The client's own defaults hold."""
    return {}


@router.get("/healthz")
def health(caller: TinkerCaller) -> dict[str, str]:
    return {"status": "ok"}


@router.post("/telemetry")
def telemetry(caller: TinkerCaller) -> dict[str, str]:
    """Taken and dropped: nothing is kept of what a client reports of itself."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
def capabilities(caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """The bases that can be trained here."""
    models = []
    named = [
        (base.name, base) for base in services.catalogue.list_models()
    ] + services.catalogue.list_aliases()
    for name, base in named:
        document = services.catalogue.descriptions.known(base.path)
        described = None if document is None else document.base
        usable = document is None or document.refused is None
        longest = None if described is None else described.dimensions.max_positions
        sampled = services.preview is not None or bool(services.settings.inference_urls)
        models.append(
            {
                "model_name": name,
                "max_context_length": longest,
                "trainable": usable,
                "sampleable": sampled,
            }
        )
    return {"supported_models": models}


@router.get("/whoami")
def whoami(caller: TinkerCaller) -> dict[str, Any]:
    return {
        "user_urn": f"key:{caller.key_id}",
        "org_urn": f"organization:{caller.organization}",
        "email": None,
    }


@router.post("/create_session")
def create_session(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    given = CreateSession.parse(body)
    if given.project_id not in (None, caller.project_id):
        raise SpecError(
            f"project_id = {given.project_id!r}: a key is of one project, this one of "
            f"{caller.project_id!r}. Leave project_id "
            "(TINKER_PROJECT_ID) out, or use a key of that project.",
            param="project_id",
        )
    session_id = new_id(SESSION)
    services.store.tinker.create_session(
        session_id, caller.project_id, given.display_name, given.user_metadata
    )
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
def heartbeat(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    services.store.tinker.touch_session(caller.project_id, OfSession.parse(body).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
def finish(session_id: str, body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """End a session. After a success its models end too: each writes its adapter as any job
    does.
    """
    reason = FinishSession.parse(body).reason.type
    if reason not in ("success", "errored", "interrupted"):
        raise SpecError(
            f"reason.type = {reason[:40]!r}: success, errored and interrupted are possible.",
            param="reason",
        )
    services.store.tinker.finish_session(caller.project_id, session_id, reason[:40])
    if services.store.tinker.get_session(caller.project_id, session_id).finish_reason == "success":
        finish_models(caller.project_id, session_id, services.store, services.places)
    return {}


@router.get("/sessions")
def list_sessions(
    caller: TinkerCaller,
    services: Svc,
    limit: int = Query(20, ge=1, le=100),
    offset: int = Query(0, ge=0, le=10**9),
) -> dict[str, Any]:
    return {"sessions": services.store.tinker.list_sessions(caller.project_id, limit, offset)}


@router.get("/sessions/{session_id}")
def get_session(session_id: str, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    session = services.store.tinker.get_session(caller.project_id, session_id)
    models = list(project_models(caller.project_id, services.store, session_id))
    return {
        "training_run_ids": [job.request["metadata"][MODEL_KEY] for job in reversed(models)],
        "sampler_ids": services.store.tinker.samplers_of(session_id),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


_INSTEAD = {
    "auth": "keys are not exchanged for tokens: send X-API-Key",
    "create_custom_loss": "custom losses are computed by the client (custom_loss_server_side is "
    "false)",
    "copy_weights": "publish the weights (publish_checkpoint) and load them from there",
    "sessions/search": "GET /api/v1/sessions lists them",
    "current_checkpoint_storage": "GET /api/v1/checkpoints has the size of each",
    "billing": "GET /v1/organization/usage has the tokens and slot-seconds of every project",
    "audit": "`ft audit` shows the changes of a project",
    "retrieve_futures": "results are asked for one by one (sample_use_retrieve_futures is false)",
    "cancel_future": "requests for samples end by themselves (sample_cancel_enabled is false)",
}
"""Beginning of a path that is not here → what to do instead."""


@router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
def unknown(path: str, caller: TinkerCaller) -> None:
    """Refuse what this service does not have, by its name."""
    instead = next(
        (text for start, text in _INSTEAD.items() if path.startswith(start)),
        "docs/tinker.md lists what there is",
    )
    raise NotFoundError(
        f"/api/v1/{path[:120]} is not here: {instead}.", code="unsupported_operation"
    )
