"""Admission of jobs: a create body becomes a stored job, or is refused and nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions, NotDescribedError
from ft_service.bases.own_template import with_template_variables
from ft_service.control.admission import tuned_models
from ft_service.control.admission.budget import refuse_spent, refuse_without_price
from ft_service.control.admission.reinforcement_admission import refuse_unless_graded
from ft_service.control.places.capacity import Capacity, capacity_of, refuse_too_many
from ft_service.control.places.price_list import price_list
from ft_service.control.tracking.integration_check import refuse_unless_possible
from ft_service.data.answer_metrics import check_metrics
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import estimate_samples
from ft_service.errors import ForbiddenError, FtError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.jobs.queue_snapshot import JobSize
from ft_service.jobs.states import Job, State
from ft_service.money import micros, money_text
from ft_service.plan.admit import Admitted, admit, settle_counted
from ft_service.plan.image_features import note_on_images
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.teacher import described_job
from ft_service.settings import Settings
from ft_service.spec import (
    AdapterRef,
    DataFileRef,
    EvaluationOptions,
    JobContext,
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
from ft_service.spec.auto_hyperparameters import COUNTED
from ft_service.spec.resolved import (
    BaseModelRef,
    named_teacher,
    note_served,
    teaching_adapter,
    teaching_base,
)
from ft_service.spec.teachers import PLACE, TeacherRef
from ft_service.storage.locations import Places
from ft_service.store.database import UNSTORABLE
from ft_service.store.records import File, NewEvent, NewJob, Principal, TenantLimits
from ft_service.store.sql import Store
from ft_service.traces import current_traceparent

MOST_BYTES_OF_PROMPTS = 4 * 262_144
"""Limit of a file of prompts: as many characters as a spec takes, with 4 bytes each."""
NOT_PLANNED = (
    "The base {base} is not described yet. Once it is, the job is planned, and refused if it "
    "cannot train on that base or does "
    "not fit."
)
_NO_FILE = DataFileRef(name="", path="", sha256="")


@dataclass(frozen=True)
class Membership:
    """A job's part in a sweep."""

    sweep_id: str
    values: dict[str, Any]
    """Its own values: dotted option → value."""
    rungs: tuple[float, ...]
    """`rungs` of its JobSpec."""


@dataclass(frozen=True)
class AdmissionContext:
    """Who submits jobs, and to which service."""

    principal: Principal
    store: Store
    settings: Settings
    catalogue: Catalogue
    agents_call: bool = True
    """Whether agents reach the model at the process that submits."""


@dataclass(frozen=True)
class ParsedJob:
    """A parsed create body. What is left to check depends on the base, the files and the plan."""

    job_id: str
    body: dict[str, Any]
    request: JobRequest
    """The body, with what it inherits from a tuned model."""
    base: str
    """Name of the base in the catalogue."""
    parent: AdapterRef | None
    """The tuned model that training continues from."""
    samples: int | None = None
    """Number of samples of the training file, if an option depends on it."""
    sweep: Membership | None = None


def create_job(
    body: object,
    context: AdmissionContext,
    job_id: str | None = None,
    last_look: Callable[[], None] | None = None,
) -> Job:
    """Check a create body and store its job.

    `job_id`: None draws one. `last_look`: called before the job is stored, which it prevents by
    raising; the checks may take long.

    Raises SpecError naming the field, its value and the limit, also for patterns that match nothing
    in the base and for a job that cannot fit this service's machines (the reconciler checks the
    contents of data files later); ConflictError if the id is taken, LimitError if no more jobs of
    the project may wait, UnavailableError if the store does not answer.
    """
    new = new_job(read(body, context, job_id), context)
    if last_look is not None:
        last_look()
    [job] = context.store.jobs.create_jobs([new])
    return job


def read(body: object, context: AdmissionContext, job_id: str | None = None) -> ParsedJob:
    """Parse a create body. `job_id`: None draws one.

    Raises SpecError naming the field, its value and the limit, also for integrations that this
    server cannot serve.
    """
    refuse_unstorable_text(body)
    request = parse_request(body)
    assert isinstance(body, dict)
    parsed = read_request(body, request, context)
    return parsed if job_id is None else replace(parsed, job_id=job_id)


def read_request(
    body: dict[str, Any],
    request: JobRequest,
    context: AdmissionContext,
    sweep: Membership | None = None,
) -> ParsedJob:
    """`read` for a body that is a JobRequest already."""
    if request.evaluation is not None:
        check_metrics(request.evaluation.metrics)
    refuse_unless_possible(request, context.settings)
    refuse_unless_graded(
        request,
        context.principal.project_id,
        context.settings,
        context.store,
        agents_call=context.agents_call,
    )
    base = request.model
    parent = None
    if is_tuned(base):
        before, parent = _find_parent(base, context)
        request = inherit(request, before, parent.name)
        base = before.model.name
    samples = _count_samples(request, context) if request.counts_samples else None
    return ParsedJob(new_id("ftjob-"), body, request, base, parent, samples, sweep)


def new_job(parsed: ParsedJob, context: AdmissionContext, announced: Sequence[File] = ()) -> NewJob:
    """The job to store, with its first events.

    `announced`: files that it names and that are not uploaded yet.

    Raises SpecError as `create_job`, UnavailableError if the store does not answer.
    """
    request = parsed.request
    principal = context.principal
    limits = context.principal.limits
    refuse_spent(context.store, principal.project_id, limits.max_cost_per_month)
    capacity = capacity_of(context.settings, request.distributed.profile, principal.project_id)
    files = context.store.files.find_files(file_ids(request)) | {
        file.id: file for file in announced
    }
    spec = resolve_parsed(parsed, files, capacity, context)
    rate = price_list(context.settings).rate_of(capacity)
    priority = (
        request.priority
        if limits.max_priority is None
        else min(request.priority, limits.max_priority)
    )
    job = Job(
        id=spec.job_id,
        project_id=principal.project_id,
        created_at=0.0,
        request=parsed.body,
        stored_spec=StoredSpec.of(spec, planned=False),
        state=State.VALIDATING,
        priority=priority,
        slots=spec.world_size,
        nodes=spec.distributed.nnodes,
        shapes=_shapes(spec, capacity, limits),
        max_seconds=request.max_seconds,
        max_cost=None if request.max_cost is None else micros(request.max_cost),
        price=rate and rate.price,
        currency=rate and rate.currency,
        grams_per_kwh=rate and rate.grams_per_kwh,
        host=capacity.host,
        key_id=principal.key_id,
        traceparent=current_traceparent(),
        sweep_id=parsed.sweep and parsed.sweep.sweep_id,
        sweep_values=parsed.sweep and parsed.sweep.values,
    )
    if job.max_cost is not None:
        refuse_without_price(job)
    try:
        size = None if request.training_file is None else files[request.training_file].bytes
        job, events = planned(
            job, size, capacity=capacity, limits=limits, descriptions=context.catalogue.descriptions
        )
        events = [*events, *_beyond_limit(job)]
    except NotDescribedError:
        events = [NewEvent(level="info", message=NOT_PLANNED.format(base=spec.model.name))]
    return NewJob(
        job, [*events, *_first_events(request, spec, capacity, priority)], limits.max_queued
    )


def _beyond_limit(job: Job) -> list[NewEvent]:
    """A warning of a limit that the planned training is likely to reach."""
    cost, limit, currency = job.planned_cost, job.max_cost, job.currency or ""
    if cost is None or limit is None or cost <= limit:
        return []
    message = (
        f"The plan costs {money_text(cost, currency)}, more than max_cost = "
        f"{money_text(limit, currency)}: the job will pause at a checkpoint on its way."
    )
    return [NewEvent(level="warn", message=message)]


def planned(
    job: Job,
    size: int | None,
    *,
    capacity: Capacity,
    limits: TenantLimits,
    descriptions: Descriptions,
) -> tuple[Job, list[NewEvent]]:
    """A job with its plan, and events for its owner about the plan.

    `size`: bytes of its training file; None: it has none. `limits`: its project's.

    Raises SpecError as `create_job`, NotDescribedError if the base has no description yet.
    """
    base = described_job(job.spec, descriptions.description)
    lengths = None if size is None else SampleLengths.of_size(size)
    most = capacity.most_per_node(job.nodes, limits.max_slots)
    admitted = admit(base, job.spec, capacity.machine_for(base), lengths, most)
    settled = replace(
        job,
        stored_spec=StoredSpec.of(admitted.spec),
        shapes=_shapes(admitted.spec, capacity, limits),
        work=admitted.work and admitted.work.flops,
        planned_seconds=admitted.work and admitted.work.seconds,
        seat=admitted.seat,
    )
    return settled, [NewEvent(level=level, message=message) for level, message in admitted.events]


@dataclass(frozen=True)
class LateAdmission:
    """Admission of jobs whose base had no description when they were created; the reconciler does
    it.
    """

    store: Store
    settings: Settings
    descriptions: Descriptions

    def delay(self, job: Job) -> str | None:
        """Text for the owner why the job waits for its base; None: the base is described or
        refused.
        """
        folders = map(Path, job.spec.bases_read)
        waits = [
            folder for folder in folders if self.descriptions.ask(folder, job.project_id) is None
        ]
        if not waits:
            return None
        why = self.descriptions.delay(waits[0])
        return (
            self.settings.without_paths(why) if why else f"Its base {job.base} is being described."
        )

    def plan(self, job: Job, size: int | None) -> tuple[Job, list[NewEvent]]:
        """`planned` for a job that was stored without a plan.

        Raises the same, in words without this host's paths.
        """
        capacity = capacity_of(self.settings, job.spec.distributed.profile)
        limits = self.store.projects.get_project(job.project_id).limits
        try:
            return planned(
                job, size, capacity=capacity, limits=limits, descriptions=self.descriptions
            )
        except FtError as error:
            error.message = self.settings.without_paths(error.message)
            raise

    def note_images(self, spec: JobSpec, images: int, tokens: int) -> str:
        """`note_on_images` of a planned job. Raises the same, UnavailableError."""
        base = self.descriptions.description(Path(spec.model.path))
        return note_on_images(base, spec, images, tokens)

    def settle(self, spec: JobSpec, lengths: SampleLengths) -> Admitted:
        """Choose the values of "auto" options from the counted samples of a planned job.

        Raises as `planned`.
        """
        base = described_job(spec, self.descriptions.description)
        capacity = capacity_of(self.settings, spec.distributed.profile)
        most = capacity.most_per_node(spec.distributed.nnodes, None)
        return settle_counted(base, spec, capacity.machine_for(base), lengths, most)


def _first_events(
    request: JobRequest, spec: JobSpec, capacity: Capacity, priority: int
) -> list[NewEvent]:
    """Events for the owner about options whose effect differs from the request."""
    told: list[NewEvent] = []
    if request.serve is not None:
        told.append(NewEvent(level="info", message=note_served(spec.lora)))
    if priority != request.priority:
        message = (
            f"Its priority is {priority}, the highest that this project's jobs may have; "
            f"{request.priority} was asked."
        )
        told.append(NewEvent(level="warn", message=message))
    if priority and capacity.ignores_priority:
        message = f"Its priority, {priority}, has no effect: {capacity.ignores_priority}"
        told.append(NewEvent(level="warn", message=message))
    return told


def _shapes(spec: JobSpec, capacity: Capacity, limits: TenantLimits) -> tuple[JobSize, ...]:
    """The shapes that a job may start in; empty if there is only one."""
    most = min(capacity.slots, limits.max_slots or capacity.slots)
    nodes = capacity.nodes if capacity.several_nodes else 1
    shapes = [
        JobSize(*shape) for shape in spec.shapes(nodes, capacity.ranks_per_node, capacity.gpus)
    ]
    shapes = [shape for shape in shapes if shape.ranks <= most]
    return tuple(shapes) if len(shapes) > 1 else ()


def resolve_parsed(
    parsed: ParsedJob,
    files: Mapping[str, File],
    capacity: Capacity,
    context: AdmissionContext,
    *,
    data: bool = True,
) -> JobSpec:
    """The job's spec, in which "auto" values are still open.

    `files`: those that it names, by id; `data` False: the training file is not known yet.

    Raises SpecError for an unknown base or file, and for ranks that the job could never get.
    """
    request = parsed.request
    model = context.catalogue.find(parsed.base)
    training = _NO_FILE
    if data:
        file_id = request.training_file
        training = None if file_id is None else _data_file(file_id, "training_file", files, context)
    if request.evaluation is not None:
        request = _with_prompts(request, request.evaluation, files, context)
    if capacity.profile is not None:
        chosen = request.distributed.model_copy(update={"profile": capacity.profile})
        request = request.model_copy(update={"distributed": chosen})
    validation = None
    if request.validation_file is not None:
        validation = _data_file(request.validation_file, "validation_file", files, context)
    spec = resolve(
        with_template_variables(request, Path(model.ref().path)),
        JobContext(
            job_id=parsed.job_id,
            organization=context.principal.organization,
            model=model.ref(),
            training_data=training,
            validation_data=validation,
            seed=secrets.randbelow(2**31),
            gpus=capacity.gpus,
            parent=parsed.parent,
            teacher=_find_teacher(request, model.ref(), context),
            date=datetime.now(UTC).date().isoformat(),
            samples=parsed.samples,
        ),
    )
    if parsed.sweep is not None:
        spec = spec.model_copy(update={"rungs": parsed.sweep.rungs})
    if spec.by_commands and context.settings.storage:
        raise SpecError(
            f"method.type = {request.method.type!r}: its ranks carry out commands that the service "
            "writes into the run directory, and with FT_STORAGE those do not reach them. Send it "
            "to a service whose pods share FT_HOME.",
            param="method.type",
            code="not_available",
        )
    refuse_too_many(spec, capacity)
    _refuse_beyond(context.principal.limits, request, spec)
    return spec


def _count_samples(request: JobRequest, context: AdmissionContext) -> int | None:
    """Number of samples of the training file, estimated beyond a limit; None: this project has no
    such file, which is refused later.
    """
    if request.training_file is None:
        return None
    file = context.store.files.find_files({request.training_file}).get(request.training_file)
    if file is None or file.project_id != context.principal.project_id:
        return None
    return _counted(
        Places.of(context.settings).file(file.id),
        file.bytes,
        Columns.of(request.data, request.method.type, sampled=request.method.samples_answers),
    )


@lru_cache(maxsize=256)
def _counted(path: Path, size: int, columns: Columns) -> int | None:
    """Number of samples of a stored file, which never changes."""
    return estimate_samples(path, (), columns, most=COUNTED) if path.is_file() else None


def slots_to_resume_with(
    job: Job, nproc_per_node: int, settings: Settings, limits: TenantLimits
) -> int:
    """World size of a job that resumes with so many ranks per node.

    Raises SpecError if it cannot.
    """
    capacity = capacity_of(settings, job.spec.distributed.profile)
    spec = job.spec
    again: dict[str, Any] = {"replicate": "auto"} if "distributed.replicate" in spec.chosen else {}
    options = spec.distributed.model_copy(update={"nproc_per_node": nproc_per_node, **again})
    spec = spec.model_copy(update={"distributed": options})
    refuse_too_many(spec, capacity)
    _refuse_too_many_ranks(limits, spec)
    check_distributed(spec.distributed, spec.world_size, capacity.gpus)
    return spec.world_size


def _find_teacher(
    request: JobRequest, base: BaseModelRef, context: AdmissionContext
) -> TeacherRef | None:
    """What method.distillation.teacher names; None: the job's base.

    Raises SpecError for an unknown teacher and for one that ranks cannot hold, ForbiddenError for a
    base that the project may not use.
    """
    name = named_teacher(request, base.name)
    if name is None:
        return None
    at_server = request.method.distillation.teacher_at == "server"
    if at_server and not context.settings.teacher_urls:
        raise SpecError(
            "method.distillation.teacher_at = 'server': this service knows no server that teaches "
            "(FT_TEACHER_URL, by its operator). Leave it out: the ranks hold the teacher then.",
            param="method.distillation.teacher_at",
            code="not_available",
        )
    if is_tuned(name) and at_server:
        raise SpecError(
            f"{PLACE} = {name[:120]!r} with method.distillation.teacher_at = 'server': servers "
            "answer for bases alone. Leave teacher_at out: the ranks hold a tuned model's adapter.",
            param="method.distillation.teacher_at",
            code="not_available",
        )
    if is_tuned(name):
        before, adapter = _find_parent(name, context, PLACE)
        return teaching_adapter(before, adapter, request.lora, base.name)
    found = context.catalogue.find(name, param=PLACE).ref()
    allowed = context.principal.limits.bases
    if allowed is not None and found.name not in allowed:
        raise ForbiddenError(
            f"{PLACE} = {found.name!r}: this project may use {_names(allowed)}.",
            param=PLACE,
            code="base_not_allowed",
        )
    return teaching_base(found, base, "server" if at_server else "base")


def _find_parent(
    name: str, context: AdmissionContext, place: str = "model"
) -> tuple[JobSpec, AdapterRef]:
    """The spec of the job that trained a tuned model, and the (future) place of its adapter.

    `place`: the option that names it.
    """
    places = Places.of(context.settings)
    try:
        parent = tuned_models.find(name, context.principal, context.store)
        tuned_models.refuse_pruned(parent, places)
    except NotFoundError as error:
        message = error.message.replace("model =", f"{place} =", 1)
        raise SpecError(message, param=place, code="model_not_found") from None
    run = places.run(parent.job.id)
    if parent.checkpoint is None and not run.path(parent.adapter_key).is_dir():
        message = (
            f"{place} = {name[:120]!r}: its adapter is gone from the service's disk. Name a "
            "checkpoint of that job."
        )
        raise SpecError(message, param=place, code="model_not_found")
    before = parent.job.spec
    path = str(run.root / parent.adapter_key)
    return before, AdapterRef(
        name=parent.name, job_id=parent.job.id, path=path, shared_experts=before.shared_experts
    )


def file_ids(request: JobRequest) -> list[str]:
    """Ids of the files that a request names."""
    named = [
        request.training_file,
        request.validation_file,
        request.evaluation and request.evaluation.prompts,
    ]
    return [file_id for file_id in named if isinstance(file_id, str)]


def _data_file(
    file_id: str, param: str, files: Mapping[str, File], context: AdmissionContext
) -> DataFileRef:
    shown = file_id if len(file_id) <= 80 else file_id[:77] + "..."
    file = files.get(file_id)
    if file is None or file.project_id != context.principal.project_id:
        message = (
            f"{param} = {shown!r}: this project has no such file. Give the id that POST "
            "/v1/files answered."
        )
        raise SpecError(message, param=param, code="file_not_found")
    if file.purpose != "fine-tune":
        message = (
            f"{param} = {shown!r}: its purpose is {file.purpose}. Upload it with purpose fine-tune."
        )
        raise SpecError(message, param=param, code="invalid_file_purpose")
    return DataFileRef(
        name=file.filename, path=str(context.settings.files_dir / file.id), sha256=file.sha256
    )


def _with_prompts(
    request: JobRequest,
    options: EvaluationOptions,
    files: Mapping[str, File],
    context: AdmissionContext,
) -> JobRequest:
    """The request with the prompts of the file that its evaluation names. Raises SpecError."""
    place = "evaluation.prompts"
    if not isinstance(options.prompts, str):
        return request
    data = _data_file(options.prompts, place, files, context)
    size = files[options.prompts].bytes
    try:
        if size > MOST_BYTES_OF_PROMPTS:
            raise ValueError(
                f"it has {size:,} bytes, at most {MOST_BYTES_OF_PROMPTS:,}: give fewer prompts or "
                "shorter ones"
            )
        prompts = read_prompts(
            Places.of(context.settings).file(options.prompts).read_text(encoding="utf-8"), data.name
        )
        read = EvaluationOptions.model_validate({**options.model_dump(), "prompts": prompts})
    except OSError:
        raise SpecError(
            f"{place} = {options.prompts!r}: its contents are gone from the service's disk.",
            param=place,
        ) from None
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{place} = {options.prompts!r}: {said}.", param=place) from None
    except ValueError as error:
        raise SpecError(f"{place} = {options.prompts!r}: {error}.", param=place) from None
    return request.model_copy(update={"evaluation": read})


def refuse_unstorable_text(value: Any, place: str = "") -> None:
    """Raise SpecError for text with NUL or half a surrogate pair, which PostgreSQL cannot store."""
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_unstorable_text(key, place or "the body's keys")
            refuse_unstorable_text(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            refuse_unstorable_text(inner, f"{place}.{number}")
    elif isinstance(value, str) and UNSTORABLE.search(value):
        message = (
            f"{place}: holds a character that is not text (NUL or half of a surrogate "
            "pair). Leave it out."
        )
        raise SpecError(message, param=place)


def _refuse_beyond(limits: TenantLimits, request: JobRequest, spec: JobSpec) -> None:
    """Raise ForbiddenError for a base or entity that the project may not use, SpecError for more
    ranks than it may ever run.
    """
    if limits.bases is not None and spec.model.name not in limits.bases:
        raise ForbiddenError(
            f"model = {spec.model.name!r}: this project may train on {_names(limits.bases)}.",
            param="model",
            code="base_not_allowed",
        )
    _refuse_too_many_ranks(limits, spec)
    allowed = limits.wandb_entities
    for number, integration in enumerate(request.integrations or ()):
        entity = integration.wandb and integration.wandb.entity
        if integration.wandb is not None and allowed is not None and entity not in allowed:
            place = f"integrations.{number}.wandb.entity"
            raise ForbiddenError(
                f"{place} = {entity!r}: this project may send metrics to {_names(allowed)}.",
                param=place,
                code="entity_not_allowed",
            )


def _refuse_too_many_ranks(limits: TenantLimits, spec: JobSpec) -> None:
    """Raise SpecError for more ranks than the project may run at once."""
    if limits.max_slots is not None and spec.world_size > limits.max_slots:
        raise SpecError(
            f"distributed.nproc_per_node: the job needs {spec.world_size} ranks, and this project "
            f"may run {limits.max_slots} "
            "at once (its limit max_slots). Ask for fewer.",
            param="distributed.nproc_per_node",
        )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none"
