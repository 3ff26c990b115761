"""From a create body to a stored job: what can be refused at the door is refused here, and nothing is stored then."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.control import tuned_models
from ft_service.control.capacity import Capacity, capacity_now, refuse_too_many
from ft_service.control.limits import allowed_priority, refuse_beyond, refuse_too_many_ranks
from ft_service.control.tracking.door import refuse_unless_possible
from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.jobs.line import Shape
from ft_service.jobs.states import Job, State
from ft_service.plan.admit import admit_on
from ft_service.settings import Settings
from ft_service.spec import (
    AdapterRef,
    DataFileRef,
    JobRequest,
    JobSpec,
    StoredSpec,
    check_distributed,
    inherit,
    is_tuned,
    parse_request,
    resolve,
)
from ft_service.storage.locations import Places
from ft_service.store.database import UNSTORABLE
from ft_service.store.records import File, Limits, NewEvent, NewJob, Principal
from ft_service.store.sql import Store

_NO_FILE = DataFileRef(name="", path="", sha256="")


@dataclass(frozen=True)
class Asked:
    """A create body that was read. What is left depends on the base, the files and the plan."""

    job_id: str
    body: dict[str, Any]
    request: JobRequest
    """The body, and what it inherits from a tuned model."""
    base: str
    """A name for the catalogue."""
    parent: AdapterRef | None
    """The tuned model that training goes on from."""
    principal: Principal


def read(body: object, *, principal: Principal, store: Store, settings: Settings, job_id: str | None = None) -> Asked:
    """Read a create body. `job_id`: None draws one. Only for a tuned model (`names_tuned`) this asks the store and storage.

    Raises SpecError naming the field, its value and the limit, also for integrations that this server cannot serve.
    """
    _refuse_unstorable_text(body, "")
    request = parse_request(body)
    assert isinstance(body, dict)
    if request.integrations:
        refuse_unless_possible(settings)
    base, parent = request.model, None
    if is_tuned(base):
        before, parent = _find_parent(base, principal, store, settings)
        request, base = inherit(request, before, parent.name), before.model.name
    return Asked(job_id or new_id("ftjob-"), body, request, base, parent, principal)


def names_tuned(body: object) -> bool:
    """Whether a create body's base is a tuned model, so that `read` takes its time."""
    return isinstance(body, dict) and is_tuned(str(body.get("model")))


def create(asked: Sequence[Asked], *, store: Store, settings: Settings, catalogue: Catalogue) -> list[Job | Exception]:
    """Check and store jobs, together but each for itself: the job, or why there is none.

    That is SpecError naming the field, its value and the limit, also for patterns that match nothing in the base and for jobs
    that cannot fit this host (the contents of data files are looked at later, by the reconciler); ConflictError if an id is
    taken. Raises UnavailableError if the store does not answer.
    """
    capacity = capacity_now(settings, store)
    files = store.find_files({file_id for one in asked for file_id in file_ids(one.request)})
    outcomes = [_new_job(one, files, settings, catalogue, capacity) for one in asked]
    created = iter(_create(store, [outcome for outcome in outcomes if isinstance(outcome, NewJob)]))
    return [next(created) if isinstance(outcome, NewJob) else outcome for outcome in outcomes]


def _create(store: Store, new: Sequence[NewJob]) -> list[Job | Exception]:
    try:
        return [*store.create_jobs(new)] if new else []
    except (ConflictError, LimitError) as error:  # one id is taken: each alone, so that nobody bears another's fault
        return [error] if len(new) == 1 else [outcome for one in new for outcome in _create(store, [one])]


def _new_job(
    asked: Asked, files: Mapping[str, File], settings: Settings, catalogue: Catalogue, capacity: Capacity
) -> NewJob | Exception:
    try:
        resolved = resolve_asked(asked, files, settings, catalogue, capacity)
        size = files[asked.request.training_file].bytes
        admitted = admit_on(capacity.machines or (capacity.machine,), resolved, size)
        spec, told = admitted.spec, [NewEvent(level=level, message=message) for level, message in admitted.told]
    except Exception as error:
        return error
    limits = asked.principal.limits
    priority = allowed_priority(limits, asked.request.priority)
    if priority != asked.request.priority:
        message = (
            f"Its priority is {priority}, the highest that this project's jobs may have; {asked.request.priority} was asked."
        )
        told.append(NewEvent(level="warn", message=message))
    if priority and capacity.ignores_priority:
        told.append(
            NewEvent(
                level="warn",
                message=f"Its priority, {priority}, has no effect: Kueue admits jobs here, and the operator has given it no "
                "class for priorities (queue_priority_classes of the pod profile).",
            )
        )
    job = Job(
        id=spec.job_id,
        project_id=asked.principal.project_id,
        created_at=0.0,
        request=asked.body,
        stored_spec=StoredSpec.of(spec),
        state=State.VALIDATING,
        priority=priority,
        slots=spec.world_size,
        nodes=spec.distributed.nnodes,
        shapes=_shapes(spec, capacity, limits),
        memory=admitted.memory,
        max_seconds=asked.request.max_seconds,
        key_id=asked.principal.key_id,
        work=admitted.work and admitted.work.flops,
        planned_seconds=admitted.work and admitted.work.seconds,
    )
    return NewJob(job, told, limits.max_queued)


def _shapes(spec: JobSpec, capacity: Capacity, limits: Limits) -> tuple[Shape, ...]:
    """What it may be started as, if that is more than one."""
    most = min(capacity.slots, limits.max_slots or capacity.slots)
    nodes = capacity.nodes if capacity.several_nodes else 1
    shapes = [Shape(*shape) for shape in spec.shapes(nodes, capacity.ranks_per_node, capacity.gpus)]
    shapes = [shape for shape in shapes if shape.ranks <= most]
    return tuple(shapes) if len(shapes) > 1 else ()


def resolve_asked(
    asked: Asked, files: Mapping[str, File], settings: Settings, catalogue: Catalogue, capacity: Capacity, *, data: bool = True
) -> JobSpec:
    """The job's spec, with what is "auto" still open. `data` False: its training file is not known yet.

    Raises SpecError for a base or a file that there is not, and for ranks that it could never get.
    """
    request, project = asked.request, asked.principal.project_id
    model = catalogue.find(asked.base)
    training = _NO_FILE
    if data:
        training = _data_file(request.training_file, "training_file", project, files, settings)
    validation = None
    if request.validation_file is not None:
        validation = _data_file(request.validation_file, "validation_file", project, files, settings)
    spec = resolve(
        request,
        job_id=asked.job_id,
        organization=asked.principal.organization,
        model=model.ref(),
        training_data=training,
        validation_data=validation,
        seed=secrets.randbelow(2**31),
        gpus=capacity.gpus,
        parent=asked.parent,
        date=datetime.now(UTC).date().isoformat(),
    )
    refuse_too_many(spec, capacity)
    refuse_beyond(asked.principal.limits, request, spec)
    return spec


def slots_to_resume_with(job: Job, nproc_per_node: int, store: Store, settings: Settings, limits: Limits) -> int:
    """Ranks of the job with so many per node, if it can go on with them. Raises SpecError."""
    capacity, spec = capacity_now(settings, store), job.spec
    again: dict[str, Any] = {"replicate": "auto"} if "distributed.replicate" in spec.chosen else {}
    options = spec.distributed.model_copy(update={"nproc_per_node": nproc_per_node, **again})
    spec = spec.model_copy(update={"distributed": options})
    refuse_too_many(spec, capacity)
    refuse_too_many_ranks(limits, spec)
    check_distributed(spec.distributed, spec.world_size, capacity.gpus)
    return spec.world_size


def _find_parent(name: str, principal: Principal, store: Store, settings: Settings) -> tuple[JobSpec, AdapterRef]:
    """The job that trained a tuned model, and where its adapter lies or will lie once it was made from its checkpoint."""
    places = Places.of(settings)
    try:
        found = tuned_models.find(name, principal, store)
        tuned_models.refuse_pruned(found, places)
    except NotFoundError as error:
        raise SpecError(error.message, param="model", code="model_not_found") from None
    run = places.run(found.job.id)
    if found.checkpoint is None and not run.path(found.adapter_key).is_dir():
        message = f"model = {name[:120]!r}: its adapter is gone from the service's disk. Name a checkpoint of that job."
        raise SpecError(message, param="model", code="model_not_found")
    ref = AdapterRef(name=found.name, job_id=found.job.id, path=str(run.root / found.adapter_key))
    return found.job.spec, ref


def file_ids(request: JobRequest) -> list[str]:
    """Ids of the files that a job names."""
    return [file_id for file_id in (request.training_file, request.validation_file) if file_id is not None]


def _data_file(file_id: str, param: str, project_id: str, files: Mapping[str, File], settings: Settings) -> DataFileRef:
    shown = file_id if len(file_id) <= 80 else file_id[:77] + "..."
    file = files.get(file_id)
    if file is None or file.project_id != project_id:
        message = f"{param} = {shown!r}: this project has no such file. Give the id that POST /v1/files answered."
        raise SpecError(message, param=param, code="file_not_found")
    if file.purpose != "fine-tune":
        message = f"{param} = {shown!r}: its purpose is {file.purpose}. Upload it with purpose fine-tune."
        raise SpecError(message, param=param, code="invalid_file_purpose")
    return DataFileRef(name=file.filename, path=str(settings.files_dir / file.id), sha256=file.sha256)


def _refuse_unstorable_text(value: Any, place: str) -> None:
    """PostgreSQL keeps neither NUL nor half surrogate pairs, and no option has a use for them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unstorable_text(key, place or "the body's keys")
            _refuse_unstorable_text(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_unstorable_text(inner, f"{place}.{number}")
    elif isinstance(value, str) and UNSTORABLE.search(value):
        message = f"{place}: holds a character that is not text (NUL or half of a surrogate pair). Leave it out."
        raise SpecError(message, param=place)
