"""Tuned models by name: `ft:<base>:<organisation>:<suffix>:<id>`, and `…:ckpt-step-<n>` for one of the job's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from api.deps import Services
from api.views import checkpoint_model
from ft_service.errors import NotFoundError
from ft_service.job import Job, State
from ft_service.store.base import Principal

PREFIX = "ft:"
_CHECKPOINT = ":ckpt-step-"
_PAGE = 100


@dataclass(frozen=True)
class Tuned:
    """A model that can be used: it exists, was not deleted, and is the project's own or granted to it."""

    name: str
    job: Job
    created_at: float

    @property
    def organization(self) -> str:
        return self.job.spec["tuned_name"].split(":")[2]

    @property
    def base(self) -> str:
        return self.job.spec["model"]["name"]


def find(name: str, caller: Principal, services: Services) -> Tuned:
    """A tuned model or checkpoint that the caller may use. Raises NotFoundError."""
    try:
        return find_own(name, caller.project_id, services)
    except NotFoundError:
        if not (granted := services.store.granted(caller.project_id, name)):
            raise
    return find_own(name, granted[0].project_id, services)


def find_own(name: str, project_id: str, services: Services) -> Tuned:
    """A tuned model or checkpoint of a project. Raises NotFoundError."""
    tuned_name, mark, _ = name.partition(_CHECKPOINT)
    try:
        job = services.store.get_job(project_id, "ftjob-" + tuned_name.rsplit(":", 1)[-1])
    except NotFoundError:
        raise _no_such(name) from None
    if job.spec["tuned_name"] != tuned_name or services.store.is_deleted(name):
        raise _no_such(name)
    if mark:
        return _checkpoint(name, tuned_name, job, services)
    if job.state is not State.SUCCEEDED:
        raise _no_such(name)
    return _outcome(job)


def list_usable(caller: Principal, services: Services) -> Iterator[Tuned]:
    """The outcomes of the project's succeeded jobs, newest first, then what other projects let it use."""
    deleted = services.store.deleted_models(caller.project_id)
    own: set[str] = set()
    for job in _all_jobs(services, caller):
        if job.state is State.SUCCEEDED and job.spec["tuned_name"] not in deleted:
            own.add(job.spec["tuned_name"])
            yield _outcome(job)
    for permission in services.store.granted(caller.project_id):
        if permission.model in own:
            continue
        try:
            yield find_own(permission.model, permission.project_id, services)
        except NotFoundError:  # deleted by its owner
            continue


def _outcome(job: Job) -> Tuned:
    return Tuned(job.spec["tuned_name"], job, job.finished_at or job.created_at)


def _checkpoint(name: str, tuned_name: str, job: Job, services: Services) -> Tuned:
    after: str | None = None
    while True:
        page = services.store.list_checkpoints(job.project_id, job.id, after=after, limit=_PAGE)
        for checkpoint in page.data:
            if checkpoint_model(tuned_name, checkpoint.step) == name:
                return Tuned(name, job, checkpoint.created_at)
        if not page.has_more:
            raise _no_such(name)
        after = page.data[-1].id


def _all_jobs(services: Services, caller: Principal) -> Iterator[Job]:
    after: str | None = None
    while True:
        page = services.store.list_jobs(caller.project_id, after=after, limit=_PAGE)
        yield from page.data
        if not page.has_more:
            return
        after = page.data[-1].id


def _no_such(name: str) -> NotFoundError:
    message = f"model = {name[:120]!r}: this project has no such tuned model."
    return NotFoundError(message, param="model", code="model_not_found")
