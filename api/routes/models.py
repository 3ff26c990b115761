"""`/v1/models`: the bases of this host and the tuned models of the project."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter

from api.auth import Caller
from api.deps import Services, Svc
from api.views import ModelsView, ModelView, checkpoint_model
from ft_service.errors import NotFoundError, SpecError
from ft_service.job import Job, State
from ft_service.store.base import Principal

router = APIRouter(prefix="/v1/models", tags=["models"])

_PAGE = 100
_TUNED = "ft:"
_CHECKPOINT = ":ckpt-step-"


@router.get("")
def list_models(caller: Caller, services: Svc) -> ModelsView:
    """Every base below FT_MODELS, then the outcomes of the project's succeeded jobs, newest first."""
    bases = [_base(model.name, model.created_at) for model in services.catalogue.list_models()]
    tuned = [_tuned(job) for job in _all_jobs(services, caller) if job.state is State.SUCCEEDED]
    return ModelsView(data=[*bases, *tuned])


@router.get("/{model:path}")
def retrieve(model: str, caller: Caller, services: Svc) -> ModelView:
    """A base, a tuned model, or a checkpoint of one; ids hold `/` and `:`, percent-encoded or not."""
    if model.startswith(_TUNED):
        tuned_name, mark, _ = model.partition(_CHECKPOINT)
        return _find_checkpoint(model, tuned_name, caller, services) if mark else _tuned(find_tuned(model, caller, services))
    try:
        found = services.catalogue.find(model)
    except SpecError as error:
        raise NotFoundError(error.message, param="model", code="model_not_found") from None
    return _base(found.name, found.created_at)


def find_tuned(name: str, caller: Principal, services: Services) -> Job:
    """The succeeded job whose outcome has this name. Raises NotFoundError."""
    job = _job_of(name, caller, services)
    if job.state is not State.SUCCEEDED:
        raise _no_such(name)
    return job


def _find_checkpoint(name: str, tuned_name: str, caller: Principal, services: Services) -> ModelView:
    job = _job_of(tuned_name, caller, services)
    after: str | None = None
    while True:
        page = services.store.list_checkpoints(caller.project_id, job.id, after=after, limit=_PAGE)
        for checkpoint in page.data:
            if checkpoint_model(tuned_name, checkpoint.step) == name:
                return ModelView(id=name, created=int(checkpoint.created_at), owned_by=caller.organization)
        if not page.has_more:
            raise _no_such(name)
        after = page.data[-1].id


def _job_of(tuned_name: str, caller: Principal, services: Services) -> Job:
    """A tuned name ends in its job's id."""
    try:
        job = services.store.get_job(caller.project_id, "ftjob-" + tuned_name.rsplit(":", 1)[-1])
    except NotFoundError:
        raise _no_such(tuned_name) from None
    if job.spec["tuned_name"] != tuned_name:
        raise _no_such(tuned_name)
    return job


def _no_such(name: str) -> NotFoundError:
    message = f"model = {name[:120]!r}: this project has no such tuned model."
    return NotFoundError(message, param="model", code="model_not_found")


def _all_jobs(services: Services, caller: Principal) -> Iterator[Job]:
    after: str | None = None
    while True:
        page = services.store.list_jobs(caller.project_id, after=after, limit=_PAGE)
        yield from page.data
        if not page.has_more:
            return
        after = page.data[-1].id


def _base(name: str, created_at: float) -> ModelView:
    return ModelView(id=name, created=int(created_at), owned_by="system")


def _tuned(job: Job) -> ModelView:
    # `ft:<base>:<organisation>:<suffix>:<id>`
    organization = job.spec["tuned_name"].split(":")[2]
    return ModelView(id=job.spec["tuned_name"], created=int(job.finished_at or job.created_at), owned_by=organization)
