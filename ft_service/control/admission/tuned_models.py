"""Tuned models: which ones a project may use, and which of them still exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ft_service.errors import NotFoundError
from ft_service.jobs.states import Job, State
from ft_service.rundir.checkpoints import obtainable_checkpoints, step_of
from ft_service.rundir.directory import RunDir
from ft_service.spec import TunedName
from ft_service.storage.locations import Places
from ft_service.store.records import Checkpoint, Principal
from ft_service.store.sql import Store

_PAGE = 100


@dataclass(frozen=True)
class Tuned:
    """A trained model that was not deleted and is the project's own or granted to it.

    `refuse_pruned` tells whether a checkpoint still exists; outcomes exist until they are deleted
    (pruning.py).
    """

    name: str
    job: Job
    created_at: float
    checkpoint: Checkpoint | None = None
    """The checkpoint; None: the job's outcome."""

    @property
    def organization(self) -> str:
        return self.job.tuned_name.organization

    @property
    def base(self) -> str:
        return self.job.base

    @property
    def adapter_key(self) -> str:
        """The adapter's folder in the job's run directory; a checkpoint's is made when first
        needed.
        """
        return "adapter" if self.checkpoint is None else f"adapters/{self.checkpoint.name}"


def find(name: str, caller: Principal, store: Store) -> Tuned:
    """A tuned model or checkpoint that the caller may use. Raises NotFoundError."""
    try:
        return find_own(name, caller.project_id, store)
    except NotFoundError:
        if not (granted := store.models.granted(caller.project_id, name)):
            raise
    return find_own(name, granted[0].project_id, store)


def find_own(name: str, project_id: str, store: Store) -> Tuned:
    """A tuned model or checkpoint of a project. Raises NotFoundError."""
    try:
        wanted = TunedName.parse(name)
        job = store.jobs.get_job(project_id, wanted.job_id)
    except (ValueError, NotFoundError):
        raise no_such(name) from None
    if job.tuned_name != wanted.outcome or str(wanted) != name or store.models.is_deleted(name):
        raise no_such(name)
    if wanted.step is None:
        if job.state is not State.SUCCEEDED:
            raise no_such(name)
        return _outcome(job)
    point = store.jobs.checkpoint_at(job.id, wanted.step)
    if point is None:
        raise no_such(name)
    return Tuned(name, job, point.created_at, point)


def find_checkpoint(checkpoint_id: str, project_id: str, store: Store) -> Tuned:
    """A checkpoint of a project's job, by the checkpoint's id. Raises NotFoundError."""
    point = store.jobs.get_checkpoint(project_id, checkpoint_id)
    job = store.jobs.get_job(project_id, point.job_id)
    name = str(job.tuned_name.at(point.step))
    if store.models.is_deleted(name):
        raise no_such(name)
    return Tuned(name, job, point.created_at, point)


def refuse_pruned(found: Tuned, places: Places) -> None:
    """Raise NotFoundError for a checkpoint that exists neither as shards nor as an adapter."""
    point = found.checkpoint
    if point is not None and point.name not in obtainable_checkpoints(places.run(found.job.id)):
        raise NotFoundError(
            f"model = {found.name[:120]!r}: this checkpoint was pruned (by "
            "checkpoint.save_total_limit or the service's age "
            "limits), or set aside because it was damaged. Name another checkpoint of that job.",
            param="model",
            code="model_not_found",
        )


def usable_checkpoints(job: Job, run: RunDir, store: Store) -> list[str]:
    """Names of a job's checkpoints that exist as shards or as an adapter, and whose model was not
    deleted.
    """
    deleted = store.models.deleted_models(job.project_id)
    name = job.tuned_name
    return sorted(
        found
        for found in obtainable_checkpoints(run)
        if str(name.at(step_of(found))) not in deleted
    )


def list_usable(caller: Principal, store: Store, places: Places) -> Iterator[Tuned]:
    """The outcomes of the project's succeeded jobs, newest first, then existing models that other
    projects grant to it.
    """
    deleted = store.models.deleted_models(caller.project_id)
    own: set[str] = set()
    for job in _succeeded_jobs(caller, store):
        found = _outcome(job)
        if found.name not in deleted:
            own.add(found.name)
            yield found
    for permission in store.models.granted(caller.project_id):
        if permission.model in own:
            continue
        try:
            found = find_own(permission.model, permission.project_id, store)
            refuse_pruned(found, places)
        except NotFoundError:  # deleted by its owner, or pruned
            continue
        yield found


def _outcome(job: Job) -> Tuned:
    return Tuned(str(job.tuned_name), job, job.finished_at or job.created_at)


def _succeeded_jobs(caller: Principal, store: Store) -> Iterator[Job]:
    after: str | None = None
    while True:
        page = store.jobs.list_jobs(
            caller.project_id, after=after, limit=_PAGE, states=[State.SUCCEEDED]
        )
        yield from page.data
        if not page.has_more:
            return
        after = page.data[-1].id


def no_such(name: str) -> NotFoundError:
    """The error for a name of a tuned model that the caller's project may not use, or that is
    none.
    """
    message = f"model = {name[:120]!r}: this project has no such tuned model."
    return NotFoundError(message, param="model", code="model_not_found")
