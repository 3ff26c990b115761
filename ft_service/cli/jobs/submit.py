"""`ft submit`: check a SPEC's data here, upload them, create the job."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases.catalogue import has_tokenizer
from ft_service.cli.data_files.commands import uploadable
from ft_service.cli.jobs.following import watch_job
from ft_service.cli.local.data import examine_data
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, connect, print_json, print_json_line, say
from ft_service.client.client import Client
from ft_service.data.data_file import Param, check_lines
from ft_service.data.examiner import ExaminerLost
from ft_service.data.formats.columns import Columns
from ft_service.data.statistics import Measure, Records, advice, without_base
from ft_service.errors import DataError, NotFoundError, SpecError
from ft_service.host.servers import living_servers
from ft_service.ids import new_id
from ft_service.local.spec_file import LocalData, SpecFile, load_spec_file, resolve_spec_file
from ft_service.plan.job import bounded
from ft_service.settings import Settings
from ft_service.spec import DataFileRef, JobSpec, by_samples


def register(app: typer.Typer) -> None:
    app.command()(submit)


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML file; its paths are relative to it.")],
    follow: Annotated[bool, typer.Option("--watch", help="Stay and show the progress.")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Leave it to the server to check the data.")] = False,
    as_json: Json = False,
) -> int:
    """Check a SPEC and its data, upload the files and create the job."""
    loaded = load_spec_file(spec)
    with connect() as client:
        told = frozenset() if unchecked else check_data(client, loaded)
        job = client.create_job(upload_spec(client, loaded))
        if as_json:
            print_json_line(job.model_dump()) if follow else print_json(job.model_dump())
        elif follow:
            print(f"Created {job.id}.")
        else:
            print(f"Created {job.id}.\nWatch it: ft watch {job.id}")
        return watch_job(client, job.id, as_json, told=told) if follow else 0


def check_data(client: Client, spec: SpecFile) -> frozenset[str]:
    """Read the data files as the server will, and say what to change; the sentences. Tokens are counted where the server runs
    on this host and its base has a tokenizer: elsewhere only the server can tell what depends on the base.

    Raises DataError with all that is wrong with one of the files.
    """
    warnings = _advice(spec, _settings_beside(client))
    for sentence in warnings:
        say(f"Warning: {sentence}")
    return frozenset(warnings)


def _advice(spec: SpecFile, beside: Settings | None) -> list[str]:
    if beside is not None and find_spec("transformers") is not None:
        with contextlib.suppress(ExaminerLost):
            resolved = _resolved(spec, beside)
            if resolved is not None and has_tokenizer(Path(resolved.model.path)):
                return _check_tokens(resolved, beside)
    return _check_lines(spec)


def _settings_beside(client: Client) -> Settings | None:
    """This host's settings with the bases of the server, if that runs here."""
    settings = settings_with_models()
    there = any(client.base_url.startswith(f"{server.url}/") for server in living_servers(settings.home))
    return settings if there else None


def _resolved(spec: SpecFile, settings: Settings) -> JobSpec | None:
    """The job on this host's copy of its base. None: that cannot be told from here, and the server will."""
    try:
        return bounded(resolve_spec_file(spec, settings, job_id=new_id("ftjob-"), seed=spec.request.seed or 0, to_train=False))
    except (SpecError, NotFoundError):
        return None


def _check_tokens(spec: JobSpec, settings: Settings) -> list[str]:
    try:
        data = examine_data(spec, settings, say)
    except DataError as error:
        raise DataError(f"{error.message}\nNothing was uploaded.", param=error.param, code=error.code) from None
    return [message for level, message in data.messages(spec) if level == "warn"]


def _check_lines(spec: SpecFile) -> list[str]:
    found: dict[Param, Records] = {}
    for param, data in _data_files(spec):
        path = data.path
        records = found[param] = Records(path.name)
        try:
            columns, pairs = Columns(spec.request.data.pairs), spec.request.method.type == "dpo"
            report = check_lines(path, files=data.files, columns=columns, pairs=pairs, note=records.add)
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}.", param=param) from None
        records.word = report.word
        if not report.faults_total:
            continue
        text = report.fault_text(path.name, "Nothing was uploaded.")
        raise DataError(text, param=param, code=f"invalid_{param}")
    training, validation = found["training_file"], found.get("validation_file")
    dpo = spec.request.method.type == "dpo"
    options, _ = by_samples(spec.request.resolved_training(), training.count, ranks=1, dpo=dpo)
    file = DataFileRef(name=training.name, path="", sha256="")
    asked = Measure(file, file if validation else None, options)
    return list(advice(without_base(training, validation, options), asked))


def upload_spec(client: Client, spec: SpecFile) -> dict[str, Any]:
    """Upload the files that a SPEC names; the create body with their ids. Raises SpecError if the SPEC names a model by its
    folder, or one that the server does not know."""
    if spec.model_folder is not None:
        message = f"model = {spec.request.model!r}: a server knows models by name (`ft models`); folders are for `ft run`."
        raise SpecError(message, param="model")
    try:
        client.model(spec.request.model)  # before the upload, which may take long
    except NotFoundError as error:
        raise SpecError(error.message, param="model", code=error.code) from None
    uploaded: dict[str, str] = {}
    for param, data in _data_files(spec):
        with uploadable(data) as path:
            uploaded[param] = client.upload_file(path).id
    return {**spec.body, **uploaded}


def _data_files(spec: SpecFile) -> list[tuple[Param, LocalData]]:
    """Both are looked for before anything is done with one."""
    found: list[tuple[Param, LocalData]] = [("training_file", spec.training_file)]
    validation = spec.validation_file
    return [*found, ("validation_file", validation)] if validation else found
