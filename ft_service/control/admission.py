"""From a create body to a stored job: what can be refused at the door is refused here, and nothing is stored then."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ft_service.bases.catalogue import Base, Catalogue
from ft_service.bases.contents import BaseContents
from ft_service.control import tuned_models
from ft_service.control.capacity import Capacity, capacity_now, refuse_too_many
from ft_service.control.limits import allowed_priority, refuse_beyond, refuse_too_many_ranks
from ft_service.control.tracking.door import refuse_unless_possible
from ft_service.data.answer_metrics import check_metrics
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import count_samples
from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.jobs.line import Shape
from ft_service.jobs.states import Job, State
from ft_service.plan.admit import admit_on, trainable_contents
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import Machine, this_host
from ft_service.settings import Settings
from ft_service.spec import (
    AUTO,
    AdapterRef,
    DataFileRef,
    EvaluationOptions,
    JobRequest,
    JobSpec,
    StoredSpec,
    check_distributed,
    inherit,
    is_tuned,
    parse_request,
    read_prompts,
    resolve,
)
from ft_service.spec.rates import COUNTED
from ft_service.spec.resolved import note_served
from ft_service.storage.locations import Places
from ft_service.store.database import UNSTORABLE
from ft_service.store.records import File, Limits, NewEvent, NewJob, Principal
from ft_service.store.sql import Store

MOST_BYTES_OF_PROMPTS = 4 * 262_144
"""Of a file of prompts: of as many characters as a spec takes of them, in any language."""
_NO_FILE = DataFileRef(name="", path="", sha256="")


@dataclass(frozen=True)
class Membership:
    """A job's part in a sweep."""

    sweep_id: str
    values: dict[str, Any]
    """What it has of its own: dotted name → value."""
    rungs: tuple[float, ...]
    """Of JobSpec."""


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
    samples: int | None = None
    """Of the training file, where an option depends on it."""
    sweep: Membership | None = None
    """The sweep that it is one of; None: it is alone."""


def read(body: object, *, principal: Principal, store: Store, settings: Settings, job_id: str | None = None) -> Asked:
    """Read a create body. `job_id`: None draws one. Only where it `takes_time` this asks the store and storage.

    Raises SpecError naming the field, its value and the limit, also for integrations that this server cannot serve.
    """
    refuse_unstorable_text(body)
    request = parse_request(body)
    assert isinstance(body, dict)
    return read_parsed(body, request, principal=principal, store=store, settings=settings, job_id=job_id)


def read_parsed(
    body: dict[str, Any],
    request: JobRequest,
    *,
    principal: Principal,
    store: Store,
    settings: Settings,
    job_id: str | None = None,
    sweep: Membership | None = None,
) -> Asked:
    """`read` for a body that was parsed."""
    if request.evaluation is not None:
        check_metrics(request.evaluation.metrics)
    refuse_unless_possible(request, settings)
    base, parent = request.model, None
    if is_tuned(base):
        before, parent = _find_parent(base, principal, store, settings)
        request, base = inherit(request, before, parent.name), before.model.name
    samples = _count_samples(request, principal, store, settings) if request.counts_samples else None
    return Asked(job_id or new_id("ftjob-"), body, request, base, parent, principal, samples, sweep)


def takes_time(body: object) -> bool:
    """Whether `read` asks the store for a create body's tuned model, or may have to count samples."""
    if not isinstance(body, dict):
        return False
    methods = body["method"].values() if isinstance(body.get("method"), dict) else ()
    places = [body.get("training"), body.get("hyperparameters")]
    places += [method.get("hyperparameters") for method in methods if isinstance(method, dict)]
    counts = any(AUTO in (place.get("n_epochs"), place.get("batch_size")) for place in places if isinstance(place, dict))
    return counts or is_tuned(str(body.get("model")))


@dataclass(frozen=True)
class Door:
    """What jobs that arrive together are checked against, looked at once for all of them."""

    settings: Settings
    capacity: Capacity
    machines: tuple[Machine, ...]
    """All kinds of nodes, the commonest first."""
    files: Mapping[str, File]
    """Those that they name, as far as there are any."""
    find_base: Callable[[str], Base]
    read_base: Callable[[Path], BaseContents]


def door_for(
    asked: Sequence[Asked], *, store: Store, settings: Settings, catalogue: Catalogue, announced: Sequence[File] = ()
) -> Door:
    """What they are checked against now. `announced`: files that they name and that are not here yet. Raises UnavailableError
    if the store does not answer."""
    capacity = capacity_now(settings, store)
    machines = capacity.machines or (capacity.machine or this_host(),)
    files = store.find_files({file_id for one in asked for file_id in file_ids(one.request)})
    files |= {file.id: file for file in announced}
    return Door(settings, capacity, machines, files, cache(catalogue.find), cache(trainable_contents))


def create(asked: Sequence[Asked], *, store: Store, settings: Settings, catalogue: Catalogue) -> list[Job | Exception]:
    """Check and store jobs, together but each for itself: the job, or why there is none.

    That is SpecError naming the field, its value and the limit, also for patterns that match nothing in the base and for jobs
    that cannot fit this host (the contents of data files are looked at later, by the reconciler); ConflictError if an id is
    taken. Raises UnavailableError if the store does not answer.
    """
    door = door_for(asked, store=store, settings=settings, catalogue=catalogue)
    outcomes = [new_job(one, door) for one in asked]
    created = iter(_create(store, [outcome for outcome in outcomes if isinstance(outcome, NewJob)]))
    return [next(created) if isinstance(outcome, NewJob) else outcome for outcome in outcomes]


def _create(store: Store, new: Sequence[NewJob]) -> list[Job | Exception]:
    try:
        return [*store.create_jobs(new)] if new else []
    except (ConflictError, LimitError) as error:  # one id is taken: each alone, so that nobody bears another's fault
        return [error] if len(new) == 1 else [outcome for one in new for outcome in _create(store, [one])]


def new_job(asked: Asked, door: Door) -> NewJob | Exception:
    """The job to store, with its first events, or why there is none."""
    try:
        resolved = resolve_asked(asked, door)
        size = door.files[asked.request.training_file].bytes
        admitted = admit_on(door.machines, resolved, Lengths.of_size(size), door.read_base)
        spec, told = admitted.spec, [NewEvent(level=level, message=message) for level, message in admitted.told]
    except Exception as error:
        return error
    if asked.request.serve is not None:
        told.append(NewEvent(level="info", message=note_served(spec.lora)))
    limits = asked.principal.limits
    priority = allowed_priority(limits, asked.request.priority)
    if priority != asked.request.priority:
        message = (
            f"Its priority is {priority}, the highest that this project's jobs may have; {asked.request.priority} was asked."
        )
        told.append(NewEvent(level="warn", message=message))
    if priority and door.capacity.ignores_priority:
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
        shapes=_shapes(spec, door.capacity, limits),
        memory=admitted.memory,
        max_seconds=asked.request.max_seconds,
        key_id=asked.principal.key_id,
        work=admitted.work and admitted.work.flops,
        planned_seconds=admitted.work and admitted.work.seconds,
        sweep_id=asked.sweep and asked.sweep.sweep_id,
        sweep_values=asked.sweep and asked.sweep.values,
    )
    return NewJob(job, told, limits.max_queued)


def _shapes(spec: JobSpec, capacity: Capacity, limits: Limits) -> tuple[Shape, ...]:
    """What it may be started as, if that is more than one."""
    most = min(capacity.slots, limits.max_slots or capacity.slots)
    nodes = capacity.nodes if capacity.several_nodes else 1
    shapes = [Shape(*shape) for shape in spec.shapes(nodes, capacity.ranks_per_node, capacity.gpus)]
    shapes = [shape for shape in shapes if shape.ranks <= most]
    return tuple(shapes) if len(shapes) > 1 else ()


def resolve_asked(asked: Asked, door: Door, *, data: bool = True) -> JobSpec:
    """The job's spec, with what is "auto" still open. `data` False: its training file is not known yet.

    Raises SpecError for a base or a file that there is not, and for ranks that it could never get.
    """
    request, project = asked.request, asked.principal.project_id
    settings, files, capacity = door.settings, door.files, door.capacity
    model = door.find_base(asked.base)
    training = _NO_FILE
    if data:
        training = _data_file(request.training_file, "training_file", project, files, settings)
    if request.evaluation is not None:
        request = _with_prompts(request, request.evaluation, project, files, settings)
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
        samples=asked.samples,
    )
    if asked.sweep is not None:
        spec = spec.model_copy(update={"rungs": asked.sweep.rungs})
    refuse_too_many(spec, capacity)
    refuse_beyond(asked.principal.limits, request, spec)
    return spec


def _count_samples(request: JobRequest, principal: Principal, store: Store, settings: Settings) -> int | None:
    """Samples of the training file, as far as they matter. None: this project has no such file, which `create` refuses."""
    file = store.find_files({request.training_file}).get(request.training_file)
    if file is None or file.project_id != principal.project_id:
        return None
    return _counted(Places.of(settings).file(file.id), file.bytes, Columns(request.data.pairs))


@lru_cache(maxsize=256)
def _counted(path: Path, size: int, columns: Columns) -> int | None:
    """Of a file, which never changes."""
    return count_samples(path, (), columns, most=COUNTED) if path.is_file() else None


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
    before, path = found.job.spec, str(run.root / found.adapter_key)
    return before, AdapterRef(name=found.name, job_id=found.job.id, path=path, shared_experts=before.shared_experts)


def file_ids(request: JobRequest) -> list[str]:
    """Ids of the files that a job names."""
    named = [request.training_file, request.validation_file, request.evaluation and request.evaluation.prompts]
    return [file_id for file_id in named if isinstance(file_id, str)]


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


def _with_prompts(
    request: JobRequest, options: EvaluationOptions, project_id: str, files: Mapping[str, File], settings: Settings
) -> JobRequest:
    """The request with the prompts of a file that its evaluation names: they become part of the spec. Raises SpecError."""
    place = "evaluation.prompts"
    if not isinstance(options.prompts, str):
        return request
    data = _data_file(options.prompts, place, project_id, files, settings)
    size = files[options.prompts].bytes
    try:
        if size > MOST_BYTES_OF_PROMPTS:
            raise ValueError(f"it has {size:,} bytes, at most {MOST_BYTES_OF_PROMPTS:,}: give fewer prompts or shorter ones")
        prompts = read_prompts(Places.of(settings).file(options.prompts).read_text(encoding="utf-8"), data.name)
        read = EvaluationOptions.model_validate({**options.model_dump(), "prompts": prompts})
    except OSError:
        raise SpecError(f"{place} = {options.prompts!r}: its contents are gone from the service's disk.", param=place) from None
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{place} = {options.prompts!r}: {said}.", param=place) from None
    except ValueError as error:
        raise SpecError(f"{place} = {options.prompts!r}: {error}.", param=place) from None
    return request.model_copy(update={"evaluation": read})


def refuse_unstorable_text(value: Any, place: str = "") -> None:
    """PostgreSQL keeps neither NUL nor half surrogate pairs, and no option has a use for them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_unstorable_text(key, place or "the body's keys")
            refuse_unstorable_text(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            refuse_unstorable_text(inner, f"{place}.{number}")
    elif isinstance(value, str) and UNSTORABLE.search(value):
        message = f"{place}: holds a character that is not text (NUL or half of a surrogate pair). Leave it out."
        raise SpecError(message, param=place)
