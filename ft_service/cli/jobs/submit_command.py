"""`ft submit`: check a SPEC's data locally, upload the files, create the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases.catalogue import has_tokenizer
from ft_service.cli.data_files.data_commands import uploadable
from ft_service.cli.jobs.job_argument import find_model
from ft_service.cli.jobs.watch_command import watch_job
from ft_service.cli.local.job_inputs import describe_job, examine_data
from ft_service.cli.local.spec_arguments import (
    Changes,
    MaxCost,
    ModelName,
    SpecOrData,
    Suffix,
    load_spec_arguments,
    with_max_cost,
)
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, connect, print_json, print_json_line, print_note, print_text
from ft_service.client.client import Client
from ft_service.data.data_file import Param, check_lines
from ft_service.data.examiner import ExaminerLost
from ft_service.data.formats.columns import Columns
from ft_service.data.statistics import Lines, Measure, Records, advice, without_base
from ft_service.errors import DataError, FtError, NotFoundError, SpecError, UnavailableError
from ft_service.host.running_servers import living_servers
from ft_service.ids import new_id
from ft_service.plan.auto_options import within_context
from ft_service.rundir.file_digest import FileDigest
from ft_service.settings import Settings
from ft_service.spec import PAIR_METHODS, DataFileRef, JobSpec, by_samples
from ft_service.spec_files.spec_file import LocalData, SpecFile, resolve_spec_file

_PACKED = 100
"""Largest assumed compression of a folder's records."""


def register(app: typer.Typer) -> None:
    app.command()(submit)


def submit(
    spec: SpecOrData,
    model: ModelName = None,
    suffix: Suffix = None,
    changes: Changes = None,
    max_cost: MaxCost = None,
    follow: Annotated[bool, typer.Option("--watch", help="Wait, and show the progress.")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check the data here; the server will.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check a SPEC and its data, upload the files and create the job.

    Before the upload the server checks whether it would accept the job; a file that it has already
    is not uploaded again.
    """
    loaded = load_spec_arguments(spec, with_max_cost(changes, max_cost), model, suffix)
    with connect() as client:
        loaded = check_accepted(client, loaded)
        seen_messages = frozenset() if unchecked else check_data(client, loaded)
        with uploaded(client, loaded) as body:
            job = client.create_job(body)
        seen_messages |= {f"Created fine-tuning job: {job.id}"}
        if as_json:
            if follow:
                print_json_line(job.model_dump())
            else:
                print_json(job.model_dump())
        else:
            planned = (
                "" if job.planned_cost is None else f" It costs about {job.planned_cost.text}."
            )
            watch = "" if follow else f"\nWatch it: ft watch {job.id}"
            print_text(f"Created {job.id}.{planned}{watch}")
        return watch_job(client, job.id, as_json, seen_messages=seen_messages) if follow else 0


def check_data(client: Client, spec: SpecFile) -> frozenset[str]:
    """Check the data files as the server will, print warnings, and return them.

    Tokens are counted if the server runs on this host and its base has a tokenizer: otherwise only
    the server can check what depends on the base.

    Raises DataError with all faults of one of the files.
    """
    warnings = _advice(spec, _settings_of_local_server(client))
    for sentence in warnings:
        print_note(f"Warning: {sentence}")
    return frozenset(warnings)


def _advice(spec: SpecFile, settings: Settings | None) -> list[str]:
    if settings is not None and find_spec("transformers") is not None:
        with contextlib.suppress(ExaminerLost):
            resolved = _resolved(spec, settings)
            if resolved is not None and has_tokenizer(Path(resolved.model.path)):
                return _check_tokens(resolved, settings)
    return _check_lines(spec)


def _settings_of_local_server(client: Client) -> Settings | None:
    """Return this host's settings with the server's bases; None: the server runs elsewhere."""
    settings = settings_with_models()
    there = any(
        client.base_url.startswith(f"{server.url}/") for server in living_servers(settings.home)
    )
    return settings if there else None


def _resolved(spec: SpecFile, settings: Settings) -> JobSpec | None:
    """Return the job with this host's copy of its base; None: only the server can resolve it."""
    try:
        resolved = resolve_spec_file(
            spec, settings, job_id=new_id("ftjob-"), seed=spec.request.seed or 0, to_train=False
        )
        return within_context(
            describe_job(resolved, settings, print_note),
            resolved,
        )
    except (SpecError, NotFoundError, UnavailableError):
        return None


def _check_tokens(spec: JobSpec, settings: Settings) -> list[str]:
    try:
        data = examine_data(spec, settings, print_note)
    except DataError as error:
        raise DataError(
            f"{error.message}\nNothing was uploaded.", param=error.param, code=error.code
        ) from None
    return [message for level, message in data.messages(spec) if level == "warn"]


def _check_lines(spec: SpecFile) -> list[str]:
    records_by_file: dict[Param, Records] = {}
    refs: dict[Param, DataFileRef] = {}
    told: list[str] = []
    for param, data in _data_files(spec):
        path = data.path
        records = records_by_file[param] = Records(path.name)
        try:
            request = spec.request
            columns = Columns.of(
                request.data, request.method.type, sampled=request.method.samples_answers
            )
            pairs = request.method.type in PAIR_METHODS
            report = check_lines(
                path, files=data.files, columns=columns, pairs=pairs, records=records
            )
            refs[param] = data.ref()
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}.", param=param) from None
        if not report.faults_total:
            # Which are advice on all files.
            alone = replace(report, duplicates=Lines(), near_empty=Lines())
            told += [
                message
                for level, message in alone.messages(
                    path.name, 0, loss=request.method.loss_options()
                )
                if level == "warn"
            ]
            continue
        text = report.fault_text(path.name, "Nothing was uploaded.")
        raise DataError(text, param=param, code=f"invalid_{param}")
    training = records_by_file["training_file"]
    validation = records_by_file.get("validation_file")
    options, _ = by_samples(
        spec.request.resolved_training(), training.count, ranks=1, method=spec.request.method.type
    )
    measure = Measure(refs["training_file"], refs.get("validation_file"), options)
    return told + list(advice(without_base(training, validation, options), measure))


def check_accepted(client: Client, spec: SpecFile) -> SpecFile:
    """Return the SPEC with its model as the server names it, after the server has checked its job
    or sweep. Raises SpecError and LimitError as the creation would, before anything is uploaded;
    SpecError if it names a model by its folder.
    """
    if spec.model_folder is not None:
        message = (
            f"model = {spec.request.model!r}: a server knows models by name (`ft models`); "
            "folders are for `ft run`."
        )
        raise SpecError(message, param="model")
    files = _data_files(spec)
    spec = spec.with_model(find_model(client, spec.request.model))
    announced = {
        param: {"filename": _uploaded_name(data), "bytes": _least_bytes(data)}
        for param, data in files
    }
    client.check_job(
        {name: value for name, value in spec.body.items() if name not in announced}, announced
    )
    return spec


def _uploaded_name(data: LocalData) -> str:
    return f"{data.path.name}.jsonl.gz" if data.files else data.path.name


def _least_bytes(data: LocalData) -> int:
    """Return the bytes to upload; for a folder's records, which are compressed first, a lower
    bound.
    """
    return max(1, data.bytes // _PACKED) if data.files else data.bytes


@contextlib.contextmanager
def uploaded(client: Client, spec: SpecFile) -> Iterator[dict[str, Any]]:
    """Yield the create body with the ids of the SPEC's files, after uploading those that the server
    does not have. They are deleted again if the block fails, but stay if the result of the request
    is unknown: the next try uses them.
    """
    new: list[str] = []
    ids: dict[str, str] = {}
    try:
        for param, data in _data_files(spec):
            with uploadable(data) as path:
                ids[param] = _file_id(client, path, param, new)
        yield {**spec.body, **ids}
    except BaseException as error:
        unknown = isinstance(error, UnavailableError | KeyboardInterrupt) and len(ids) == len(
            _data_files(spec)
        )
        for file_id in () if unknown else new:
            with contextlib.suppress(FtError):
                client.delete_file(file_id)
        raise


def _file_id(client: Client, path: Path, param: Param, new: list[str]) -> str:
    """Return the id of a file with these contents, uploading it unless the server has it; an
    uploaded id is added to `new`.
    """
    try:
        same_contents = client.files_with(FileDigest.of(path).sha256)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.", param=param) from None
    same = next(
        (file for file in same_contents if file.filename == path.name),
        next(iter(same_contents), None),
    )
    if same is None:
        new.append(client.upload_file(path).id)
        return new[-1]
    if same.id not in new:
        other = "" if same.filename == path.name else f" and called {same.filename}"
        print_note(
            f"{path.name} is on the server already ({same.id}{other}): it is not uploaded again."
        )
    return same.id


def _data_files(spec: SpecFile) -> list[tuple[Param, LocalData]]:
    """Return the data files, after checking that both exist."""
    files: list[tuple[Param, LocalData]] = [("training_file", spec.training_file)]
    validation = spec.validation_file
    return [*files, ("validation_file", validation)] if validation else files
