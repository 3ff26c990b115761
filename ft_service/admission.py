"""From a create body to a stored job: what can be refused at the door is refused here, and nothing is stored then."""

from __future__ import annotations

import secrets
from typing import Any

from ft_service import tuned
from ft_service.capacity import Capacity, capacity_of, refuse_too_many
from ft_service.catalogue import Catalogue
from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.job import Job, State
from ft_service.places import Places
from ft_service.plan.admit import admit
from ft_service.settings import Settings
from ft_service.spec import (
    AdapterRef,
    DataFileRef,
    JobRequest,
    JobSpec,
    check_distributed,
    inherit,
    parse_request,
    resolve,
)
from ft_service.store.base import NewEvent, Principal, Store
from ft_service.store.tables import UNSTORABLE


def submit(
    body: object,
    *,
    principal: Principal,
    store: Store,
    settings: Settings,
    catalogue: Catalogue,
    job_id: str | None = None,
) -> Job:
    """Check a create body and store the job. `job_id`: None draws one.

    Raises SpecError naming the field, its value and the limit, for patterns that match nothing in the base and for jobs that
    cannot fit this host too; the contents of data files are looked at later, by the reconciler. Raises ConflictError if
    `job_id` is taken.
    """
    _refuse_unstorable_text(body, "")
    request = parse_request(body)
    assert isinstance(body, dict)
    capacity = capacity_of(settings)
    spec = _resolve(request, job_id or new_id("ftjob-"), principal, store, settings, catalogue, capacity)
    told = [NewEvent(level=level, message=message) for level, message in admit(spec, capacity.machine)]
    job = Job(
        id=spec.job_id,
        project_id=principal.project_id,
        created_at=0.0,
        request=body,
        spec=spec.model_dump(mode="json"),
        state=State.VALIDATING,
        priority=request.priority,
        slots=spec.world_size,
    )
    return store.create_job(job, told)


def _resolve(
    request: JobRequest,
    job_id: str,
    principal: Principal,
    store: Store,
    settings: Settings,
    catalogue: Catalogue,
    capacity: Capacity,
) -> JobSpec:
    parent: AdapterRef | None = None
    base = request.model
    if base.startswith(tuned.PREFIX):
        before, parent = _find_parent(base, principal, store, settings)
        request, base = inherit(request, before, parent.name), before.model.name
    model = catalogue.find(base)
    training = _find_file(request.training_file, "training_file", principal, store, settings)
    validation = None
    if request.validation_file is not None:
        validation = _find_file(request.validation_file, "validation_file", principal, store, settings)
    spec = resolve(
        request,
        job_id=job_id,
        organization=principal.organization,
        model=model.ref(),
        training_data=training,
        validation_data=validation,
        seed=secrets.randbelow(2**31),
        gpus=capacity.gpus,
        parent=parent,
    )
    refuse_too_many(spec, capacity)
    return spec


def slots_to_resume_with(job: Job, nproc_per_node: int, settings: Settings) -> int:
    """Ranks of the job with so many per node, if it can go on with them. Raises SpecError."""
    capacity, spec = capacity_of(settings), JobSpec.model_validate(job.spec)
    spec = spec.model_copy(update={"distributed": spec.distributed.model_copy(update={"nproc_per_node": nproc_per_node})})
    refuse_too_many(spec, capacity)
    check_distributed(spec.distributed, spec.world_size, capacity.gpus)
    return spec.world_size


def _find_parent(name: str, principal: Principal, store: Store, settings: Settings) -> tuple[JobSpec, AdapterRef]:
    """The job that trained a tuned model, and where its adapter lies or will lie once it was made from its checkpoint."""
    places = Places.of(settings)
    try:
        found = tuned.find(name, principal, store)
        tuned.refuse_pruned(found, places)
    except NotFoundError as error:
        raise SpecError(error.message, param="model", code="model_not_found") from None
    run = places.run(found.job.id)
    if found.checkpoint is None and not run.path(found.adapter_key).is_dir():
        message = f"model = {name[:120]!r}: its adapter is gone from the service's disk. Name a checkpoint of that job."
        raise SpecError(message, param="model", code="model_not_found")
    ref = AdapterRef(name=found.name, job_id=found.job.id, path=str(run.root / found.adapter_key))
    return JobSpec.model_validate(found.job.spec), ref


def _find_file(file_id: str, param: str, principal: Principal, store: Store, settings: Settings) -> DataFileRef:
    shown = file_id if len(file_id) <= 80 else file_id[:77] + "..."
    try:
        file = store.get_file(principal.project_id, file_id)
    except NotFoundError:
        message = f"{param} = {shown!r}: this project has no such file. Give the id that POST /v1/files answered."
        raise SpecError(message, param=param, code="file_not_found") from None
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
