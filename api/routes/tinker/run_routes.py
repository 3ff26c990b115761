"""Training runs of Tinker clients and their saved weights, by REST."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from fastapi import Query, Request, Response

from api.http.dependencies import JsonBody, Services, Svc
from api.http.tinker_auth import TinkerCaller, tinker_router
from ft_service.control.tinker.tinker_models import (
    MODEL_KEY,
    delete_weights,
    find_model,
    find_weights,
    project_models,
    remove_expired,
)
from ft_service.errors import NotFoundError
from ft_service.jobs.states import Job, State
from ft_service.rundir.directory import RunDir
from ft_service.store.records import Principal
from ft_service.tinker.bodies import WeightsTtl
from ft_service.tinker.commands import CommandLog
from ft_service.tinker.names import WeightsPath
from ft_service.tinker.saved_weights import (
    Kind,
    options_of,
    sampler_bytes,
    sampler_key,
    samplers_of,
    saved_weights,
    set_options,
)

router = tinker_router()

_MOST_RUNS = 1000
Limit = Query(20, ge=1, le=100)
Offset = Query(0, ge=0, le=10_000)


@dataclass(frozen=True)
class _Weights:
    """Saved weights of a model."""

    path: WeightsPath
    time: float
    bytes: int

    def view(self, run: RunDir) -> dict[str, Any]:
        options = options_of(run, self.path.checkpoint_id)
        return {
            "checkpoint_id": self.path.checkpoint_id,
            "checkpoint_type": "training" if self.path.kind == "weights" else "sampler",
            "time": _moment(self.time),
            "tinker_path": str(self.path),
            "size_bytes": self.bytes,
            "public": options.public,
            "user_metadata": options.user_metadata,
            "expires_at": None if options.expires_at is None else _moment(options.expires_at),
        }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _weights_of(model: str, run: RunDir) -> list[_Weights]:
    """All saved weights of a model, the newest first; what has expired is removed."""
    found = [
        _Weights(WeightsPath(model, "weights", own.name), own.created_at, own.bytes)
        for own in saved_weights(run)
    ]
    for name in samplers_of(run):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            saved_at = run.path(sampler_key(name)).stat().st_mtime
            found.append(
                _Weights(
                    WeightsPath(model, "sampler_weights", name), saved_at, sampler_bytes(run, name)
                )
            )
    kept = [weights for weights in found if not remove_expired(run, weights.path)]
    return sorted(kept, key=lambda weights: weights.time, reverse=True)


def _run_view(job: Job, services: Services) -> dict[str, Any]:
    model = job.request["metadata"][MODEL_KEY]
    run = services.places.run(job.id)
    weights = _weights_of(model, run)
    training = next((own.view(run) for own in weights if own.path.kind == "weights"), None)
    sampler = next((own.view(run) for own in weights if own.path.kind == "sampler_weights"), None)
    metadata = {
        name: text
        for name, text in job.request["metadata"].items()
        if not name.startswith("tinker_")
    }
    return {
        "training_run_id": model,
        "base_model": job.spec.model.name,
        "model_owner": job.project_id,
        "is_lora": True,
        "lora_rank": job.spec.lora.r,
        "corrupted": job.state is State.FAILED,
        "last_request_time": _moment(CommandLog(run).last_used() or job.created_at),
        "last_checkpoint": training,
        "last_sampler_checkpoint": sampler,
        "user_metadata": metadata or None,
    }


def _page(found: list[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


@router.get("/training_runs")
def list_runs(
    caller: TinkerCaller, services: Svc, limit: int = Limit, offset: int = Offset
) -> dict[str, Any]:
    found = list(islice(project_models(caller.project_id, services.store), offset + limit + 1))
    views = [_run_view(job, services) for job in found[offset : offset + limit]]
    return {"training_runs": views, "cursor": _page(found, limit, offset)}


@router.get("/training_runs/{model}")
def get_run(model: str, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    return _run_view(find_model(services.store, caller.project_id, model), services)


@router.get("/training_runs/{model}/checkpoints")
def list_checkpoints(model: str, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    run = services.places.run(find_model(services.store, caller.project_id, model).id)
    return {"checkpoints": [weights.view(run) for weights in _weights_of(model, run)]}


@router.get("/checkpoints")
def list_all_checkpoints(
    caller: TinkerCaller,
    services: Svc,
    limit: int = Query(100, ge=1, le=1000),
    offset: int = Offset,
) -> dict[str, Any]:
    """Saved weights of the project's newest models, model by model."""
    views: list[dict[str, Any]] = []
    for job in islice(project_models(caller.project_id, services.store), _MOST_RUNS):
        run = services.places.run(job.id)
        views += [
            weights.view(run) for weights in _weights_of(job.request["metadata"][MODEL_KEY], run)
        ]
        if len(views) > offset + limit:
            break
    return {"checkpoints": views[offset : offset + limit], "cursor": _page(views, limit, offset)}


def _own(
    model: str, kind: Kind, name: str, caller: Principal, services: Services
) -> tuple[RunDir, WeightsPath]:
    """The run directory and path of saved weights of the project's own. Raises NotFoundError."""
    job = find_model(services.store, caller.project_id, model)
    path = WeightsPath.parse(f"tinker://{model}/{kind}/{name}")
    find_weights(path, caller, services.store, services.places)
    return services.places.run(job.id), path


@router.delete("/training_runs/{model}/checkpoints/{kind}/{name}")
def delete_checkpoint(
    model: str, kind: Kind, name: str, caller: TinkerCaller, services: Svc
) -> Response:
    run, path = _own(model, kind, name, caller, services)
    services.store.tinker.record_weights(caller.project_id, "deleted", str(path))
    delete_weights(run, path)
    return Response(status_code=204)


@router.api_route(
    "/training_runs/{model}/checkpoints/{kind}/{name}/publish", methods=["POST", "DELETE"]
)
def publish(
    request: Request, model: str, kind: Kind, name: str, caller: TinkerCaller, services: Svc
) -> Response:
    """Let every project of the organization load the weights, whoever knows their path; DELETE: no
    longer.
    """
    run, path = _own(model, kind, name, caller, services)
    public = request.method == "POST"
    if options_of(run, path.checkpoint_id).public != public:
        services.store.tinker.record_weights(
            caller.project_id, "published" if public else "unpublished", str(path)
        )
    return _change(run, path, public=public)


@router.put("/training_runs/{model}/checkpoints/{kind}/{name}/ttl")
def set_ttl(
    model: str, kind: Kind, name: str, body: JsonBody, caller: TinkerCaller, services: Svc
) -> Response:
    seconds = WeightsTtl.parse(body).ttl_seconds
    expires_at = None if seconds is None else time.time() + seconds
    return _change(*_own(model, kind, name, caller, services), expires_at=expires_at)


def _change(run: RunDir, path: WeightsPath, **changes: Any) -> Response:
    set_options(
        run, path.checkpoint_id, options_of(run, path.checkpoint_id).model_copy(update=changes)
    )
    return Response(status_code=204)


@router.get("/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls")
def external_urls(model: str, name: str, caller: TinkerCaller) -> None:
    raise NotFoundError(
        "There are no external weights here: `ft download JOB` gives the adapter in PEFT's layout."
    )
