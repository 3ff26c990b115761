"""Plans of memory, traffic and time on this service's machines: of a create body before it is
submitted, and of a job.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Description
from ft_service.control.admission.job_admission import (
    AdmissionContext,
    file_ids,
    read,
    resolve_parsed,
)
from ft_service.control.bases.base_pulls import staged_bases
from ft_service.control.bases.pulling import NOT_HERE
from ft_service.control.places.capacity import capacity_of
from ft_service.control.places.price_list import price_list
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.detect_format import Container, Format
from ft_service.data.formats.reading import estimate_samples, open_data
from ft_service.data.token_options import TokenOptions
from ft_service.errors import SpecError
from ft_service.jobs.states import Job
from ft_service.plan.auto_options import within_context
from ft_service.plan.job import plan_job, training_cost, training_time
from ft_service.plan.machines import Machine
from ft_service.plan.plan_text import change_text
from ft_service.plan.sample_lengths import BYTES_PER_TOKEN, SampleLengths
from ft_service.plan.teacher import described_job
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.spec.auto_hyperparameters import COUNTED
from ft_service.storage.locations import Places

_UNKNOWN = "file-not-chosen-yet"
_CHUNK = 1024**2


def plan_body(body: object, context: AdmissionContext, places: Places) -> dict[str, Any]:
    """The plan of a create body.

    Without `training_file` it has no time, and the most memory that the job can need. A base that
    was only looked up so far is planned too; `not_here` is then a sentence that says so, else None.

    Raises SpecError as the creation of the job would, except for a job that does not fit.
    """
    known = isinstance(body, dict) and bool(body.get("training_file"))
    if isinstance(body, dict) and not known:
        body = body | {"training_file": _UNKNOWN}
    parsed = read(body, context)
    files = context.store.files.find_files(file_ids(parsed.request))
    capacity = capacity_of(
        context.settings, parsed.request.distributed.profile, context.principal.project_id
    )
    not_here = None
    try:
        spec = resolve_parsed(parsed, files, capacity, context, data=known)
    except SpecError as error:
        staged = dict(staged_bases(context.settings))
        if error.code != "model_not_found" or parsed.base not in staged:
            raise
        context = replace(context, catalogue=context.catalogue.with_staged(staged))
        spec = resolve_parsed(parsed, files, capacity, context, data=known)
        not_here = NOT_HERE.format(name=parsed.base)
    file_id = parsed.request.training_file if known else None
    size = None if file_id is None else files[file_id].bytes
    path = None if file_id is None else places.file(file_id)
    base = described_job(spec, context.catalogue.descriptions.description)
    most = capacity.most_per_node(spec.distributed.nnodes, context.principal.limits.max_slots)
    planned = _document(base, spec, capacity.machine_for(base), path, size, most)
    rate = price_list(context.settings).rate_of(capacity)
    cost = training_cost(planned["time"], spec.world_size, rate)
    return planned | {"cost": cost, "not_here": not_here}


def plan_of_job(
    job: Job, settings: Settings, places: Places, descriptions: Descriptions
) -> dict[str, Any]:
    """The plan of a job. Raises SpecError if its base is gone, NotDescribedError if it has no
    description.
    """
    base = described_job(job.spec, descriptions.description)
    file_id = job.request["training_file"]
    path = None if file_id is None else places.file(file_id)
    size = path.stat().st_size if path is not None and path.is_file() else None
    capacity = capacity_of(settings, job.spec.distributed.profile)
    machine = capacity.machine_for(base)
    most = capacity.most_per_node(job.nodes, None)
    planned = _document(base, job.spec, machine, path if size is not None else None, size, most)
    rate = price_list(settings).rate_of(capacity)
    return planned | {"cost": training_cost(planned["time"], job.spec.world_size, rate)}


def _document(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    path: Path | None,
    size: int | None,
    most_per_host: int,
) -> dict[str, Any]:
    spec = within_context(base, spec)
    examples = None
    lengths = None if size is None else SampleLengths.of_size(size)
    if path is not None and size is not None and path.is_file():
        examples, lengths = _guessed(path, size, spec)
    plan = plan_job(base, spec, machine, lengths, most_per_host)
    document = plan.as_dict()
    del document["modules"]
    for change, shown in zip(plan.changes, document["changes"], strict=True):
        shown["text"] = change_text(change)
    return document | {"time": training_time(plan, spec, examples) if examples else None}


def _guessed(path: Path, size: int, spec: JobSpec) -> tuple[int | None, SampleLengths]:
    """(units of training.batch_size in an epoch, lengths of its samples), by the size of a stored
    file of `size` bytes.
    """
    records, is_text = _records(path, size, TokenOptions.of(spec).columns)
    if not records:
        return None, SampleLengths.of_size(size)
    samples = records - int(records * (spec.validation_split or 0))
    tokens = size // BYTES_PER_TOKEN * samples // records
    training = spec.training
    if spec.reinforcement is not None:
        tokens += _context_tokens(spec, samples)
        return samples, SampleLengths(tokens, samples).with_answers(spec)
    if spec.preferences is None and (
        is_text or training.train_on == "everything"
    ):  # split into windows, which fill rows if packed
        windows = -(-tokens // training.max_length)
        samples = max(1, windows if training.packing else max(samples, windows))
    tokens += _context_tokens(spec, samples)
    # Each sample of a pair may have most of the pair's tokens.
    together = 1 if spec.preferences is None else 2
    return samples, SampleLengths(together * tokens, together * samples)


def _context_tokens(spec: JobSpec, samples: int) -> int:
    """What comes on top since a teacher reads the context before each sample: on average of both,
    half of it.
    """
    return samples * len(spec.context) // (2 * BYTES_PER_TOKEN)


@lru_cache(maxsize=256)
def _records(path: Path, size: int, columns: Columns) -> tuple[int, bool]:
    """(number of records, whether they are plain text) of a stored file, which never changes:
    counted for JSON lines, else estimated.
    """
    reader = open_data(path, (), columns)
    reader.look()
    is_text = reader.shape.format is Format.TEXT
    if reader.shape.container is not Container.LINES or reader.shape.compression is not None:
        return estimate_samples(path, (), columns, most=COUNTED), is_text
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b"")), is_text
