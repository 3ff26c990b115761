"""SPEC files: the body of a create request as YAML, with paths instead of file ids.

Paths are relative to the SPEC file. `model` is a name from the catalogue, a tuned model's name or,
if it starts with `.`, `/` or `~`, a folder. For a tuned model of a job on this host, the job's id,
the beginning of it, its suffix, or `last` also works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.own_template import with_template_variables
from ft_service.control.bases.describe_bases import local_descriptions
from ft_service.data.answer_metrics import check_metrics
from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.detect_format import DATA_ENDINGS, may_hold_data
from ft_service.data.formats.folders import dataset_files
from ft_service.data.formats.reading import estimate_samples, open_data
from ft_service.data.hub_data import PREFIX, fetched
from ft_service.errors import SpecError
from ft_service.host.hardware import gpu_count
from ft_service.settings import Settings
from ft_service.spec import (
    AdapterRef,
    BaseModelRef,
    DataFileRef,
    JobContext,
    JobRequest,
    JobSpec,
    inherit,
    is_tuned,
    parse_request,
    read_prompts,
    resolve,
)
from ft_service.spec.auto_hyperparameters import COUNTED
from ft_service.spec.request import SWEEP
from ft_service.spec.resolved import named_teacher, teaching_adapter, teaching_base
from ft_service.spec.teachers import PLACE, TeacherRef
from ft_service.spec.yaml_loader import StrictLoader
from ft_service.spec_files.parent import find_local, name_of_local
from ft_service.sweeps.search_space import AskedSweep, parse_sweep

_SPEC_ENDINGS = (".yaml", ".yml", ".json")
_UNKNOWN = "file-not-chosen-yet"
NO_DATA = DataFileRef(name="", path="", sha256="")
"""The data of a job whose base alone is planned."""


@dataclass(frozen=True)
class LocalData:
    """Data file on this host, or the files of a split in a dataset's folder."""

    path: Path
    files: tuple[str, ...] = ()
    """Names relative to the folder; empty: `path` is a file."""

    @property
    def bytes(self) -> int:
        return open_data(self.path, self.files).size

    def ref(self) -> DataFileRef:
        """Return a reference with the digest of the contents. Raises OSError."""
        digest = open_data(self.path, self.files).digest()
        return DataFileRef(
            name=self.path.name, path=str(self.path), sha256=digest, files=self.files
        )


@dataclass(frozen=True)
class SpecFile:
    """Valid SPEC file."""

    path: Path
    body: dict[str, Any]
    """Body as written, with the texts of the chat template's and the prompts' files in place of
    their names.
    """
    request: JobRequest
    datasets: Path | None = None
    """Folder of the data sets that were fetched from the hub; None: unknown."""
    sweep: AskedSweep | None = None
    """Sweep, of which `request` is the first job; None: it is one job."""

    @property
    def has_data(self) -> bool:
        """Whether it names its training file; False: `spec_of_base` made it."""
        return self.request.training_file != _UNKNOWN

    @property
    def training_file(self) -> LocalData:
        name = self.request.training_file
        assert name is not None, "a SPEC names its training file"
        return self._existing("training_file", name, "train")

    @property
    def validation_file(self) -> LocalData | None:
        name = self.request.validation_file
        return None if name is None else self._existing("validation_file", name, "validation")

    def with_model(self, name: str) -> SpecFile:
        """Return the same SPEC with another model."""
        return replace(
            self,
            body=self.body | {"model": name},
            request=self.request.model_copy(update={"model": name}),
        )

    @property
    def model_folder(self) -> Path | None:
        """Folder that `model` names; None: it is a name from the catalogue."""
        name = self.request.model
        return self._absolute(name) if name.startswith((".", "/", "~")) else None

    def _existing(self, field: str, name: str, split: str) -> LocalData:
        path = (
            fetched(name, self.datasets)
            if name.startswith(PREFIX) and self.datasets
            else self._absolute(name)
        )
        if path.is_dir():
            return LocalData(path, dataset_files(path, split))
        if not path.is_file():
            raise SpecError(f"{field} = {name!r}: there is no file {path}.", param=field)
        return LocalData(path)

    def _absolute(self, name: str) -> Path:
        return (self.path.parent / Path(name).expanduser()).resolve()


def load_spec_file(
    path: Path,
    *,
    sweep: bool | None = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    datasets: Path | None = None,
) -> SpecFile:
    """Read and validate a SPEC file.

    `sweep`: whether it is a sweep; None: it may be. `options`: dotted names and values that replace
    those of the file. `datasets`: folder of data sets from the hub (hf://ORG/NAME); None: unknown.
    A data file in place of a SPEC counts as a SPEC with only that training_file.

    Raises SpecError that names file and line, or field, value and limit.
    """
    if is_data(path):
        if "model" not in options:
            raise SpecError(
                f"{path} is a data file, by its name: name a base (--model M), or give a SPEC "
                "(YAML) with both "
                "training_file and model.",
                param="model",
            )
        read = {"training_file": path.name}
    else:
        read = _read(path)
    body = _with_prompts(_with_template(_with_options(read, options), path.parent), path.parent)
    parsed_sweep = parse_sweep(body) if sweep or (sweep is None and SWEEP in body) else None
    request = parsed_sweep.jobs[0].request if parsed_sweep else parse_request(body)
    if request.evaluation is not None:
        check_metrics(request.evaluation.metrics)
    return SpecFile(
        path=path.absolute(), body=body, request=request, datasets=datasets, sweep=parsed_sweep
    )


def spec_of_base(name: str, options: Mapping[str, Any]) -> SpecFile:
    """Return the SPEC of a job on a base, without data, for its plan. Raises SpecError."""
    body = _with_options({"model": name, "training_file": _UNKNOWN}, options)
    return SpecFile(path=Path.cwd() / "SPEC", body=body, request=parse_request(body))


def may_be_base(path: Path) -> bool:
    """Return whether what was given as a SPEC is the name of a base: nothing is there, and its
    ending is neither a SPEC's nor that of data.
    """
    is_file = path.suffix.lower() in _SPEC_ENDINGS or may_hold_data(path.name)
    return not path.exists() and not path.is_absolute() and not is_file


def is_data(path: Path) -> bool:
    """Return whether a path that was given as a SPEC is data: a folder, or a file by its name.

    JSON may be either: a list, or one record per line, is data.
    """
    if path.is_dir():
        return True
    if path.suffix.lower() != ".json":
        return may_hold_data(path.name)
    try:
        with path.open("rb") as file:
            is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            file.seek(0)
            return is_list or _is_record(file.readline(MAX_LINE_BYTES))
    except OSError:
        return False


def _is_record(line: bytes) -> bool:
    """Return whether a line is an object of JSON, and not a SPEC on one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "training_file" not in record


def _read(path: Path) -> dict[str, Any]:
    is_named_spec = path.suffix.lower() in _SPEC_ENDINGS
    by_name = (
        ""
        if is_named_spec
        else f" By its name it is a SPEC, in YAML; names of data end in {', '.join(DATA_ENDINGS)}."
    )
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not a text file in UTF-8.{by_name}") from None
    except SpecError as error:
        raise SpecError(f"{error.message}{by_name}", param=error.param, code=error.code) from None


def _with_options(body: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with options, by dotted name, in place of its own; after `sweep.` comes the
    dotted name of a varied option. Raises SpecError for a name that leads through a value which is
    not a group of options.
    """
    body = dict(body)
    for name, value in options.items():
        *sections, last = name.split(".")
        if sections[:1] == [SWEEP] and sections[:2] != [SWEEP, "halving"]:
            sections = [SWEEP]
            last = name.partition(".")[2]
        inner = body
        place = ""
        for section in sections:
            place = f"{place}.{section}" if place else section
            there = inner.get(section)
            if there is not None and not isinstance(there, Mapping):
                raise SpecError(
                    f"{name}: {place} is {there!r:.80} here, which is not a group of options.",
                    param=name,
                )
            inner[section] = inner = dict(there or {})
        inner[last] = value
    return body


def parse_option(text: str) -> tuple[str, Any]:
    """Return name and value of `training.learning_rate=1e-4`, whose value is YAML.

    Raises SpecError.
    """
    name, sign, value = text.partition("=")
    name = name.strip()
    if not sign or not all(name.split(".")):
        example = "such as training.learning_rate=1e-4"
        raise SpecError(
            f"--set {text!r:.120}: give an option by its dotted name and its value, {example}.",
            param="set",
        )
    try:
        return name, yaml.load(value, Loader=StrictLoader)
    except yaml.YAMLError as error:
        problem = str(getattr(error, "problem", None) or error).replace("'<stream end>'", "the end")
        raise SpecError(
            f"--set {name}: {value!r:.80} is not a YAML value: {problem}.", param=name
        ) from None


def _with_template(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the body with the text of a chat template that it names by its file.

    Raises SpecError.
    """
    given = body.get("chat_template")
    if not isinstance(given, str) or "\n" in given or not given.endswith(".jinja"):
        return body
    try:
        return {
            **body,
            "chat_template": (folder / Path(given).expanduser()).read_text(encoding="utf-8"),
        }
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"chat_template = {given!r}: the file cannot be read: {error}.", param="chat_template"
        ) from None


def _with_prompts(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the body with the prompts of a file that its evaluation names. Raises SpecError."""
    given = body.get("evaluation")
    name = given.get("prompts") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(name, str):
        return body
    path = (folder / Path(name).expanduser()).resolve()
    try:
        prompts = read_prompts(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        message = f"evaluation.prompts = {name!r}: {path} cannot be read: {error.strerror}."
        raise SpecError(message, param="evaluation.prompts") from None
    except ValueError as error:
        raise SpecError(
            f"evaluation.prompts = {name!r}: {error}.", param="evaluation.prompts"
        ) from None
    return {**body, "evaluation": {**given, "prompts": prompts}}


def resolve_spec_file(
    spec: SpecFile,
    settings: Settings,
    *,
    job_id: str,
    seed: int,
    to_train: bool = True,
    like: JobSpec | None = None,
    gpus: int | None = None,
) -> JobSpec:
    """Return the resolved spec for a worker on this host, with paths of model and data.

    `seed`: for a SPEC without one. `to_train`: False: only the base's config.json is needed.
    `like`: another job on the same files, which are not read again. `gpus`: those of the host that
    would train; None: of this one.

    A SPEC without data (`spec_of_base`) has NO_DATA.

    Raises SpecError for a missing model or file; a tuned model must have been trained in this
    FT_HOME.
    """
    request, model, parent = _model(spec, settings, to_train)
    validation = spec.validation_file
    training = spec.training_file if spec.has_data else None
    columns = Columns.of(request.data, request.method.type, sampled=request.method.samples_answers)
    if like is None:
        training_data = training.ref() if training else NO_DATA
        validation_data = validation.ref() if validation else None
    else:
        training_data = like.training_data
        validation_data = like.validation_data
    context = JobContext(
        job_id=job_id,
        organization=settings.organization,
        model=model,
        training_data=training_data,
        validation_data=validation_data,
        seed=seed,
        gpus=gpu_count() if gpus is None else gpus,
        parent=parent,
        teacher=_teacher(request, model, settings, to_train),
        date=datetime.now(UTC).date().isoformat(),
        samples=estimate_samples(training.path, training.files, columns, most=COUNTED)
        if request.counts_samples and training
        else None,
    )
    return resolve(with_template_variables(request, Path(model.path)), context)


def _model(
    spec: SpecFile, settings: Settings, to_train: bool
) -> tuple[JobRequest, BaseModelRef, AdapterRef | None]:
    """Return the request with options inherited from a tuned model, the base, and the adapter to
    continue.
    """
    request = spec.request
    folder = spec.model_folder
    if folder is not None:
        return request, Catalogue.find_folder(folder, to_train=to_train).ref(), None
    if not is_tuned(request.model):
        try:
            return request, _catalogue(settings).find(request.model, to_train=to_train).ref(), None
        except SpecError:
            tuned = name_of_local(request.model, settings)
            if tuned is None:
                raise
            request = request.model_copy(update={"model": tuned})
    before, parent = find_local(request.model, settings)
    there = Path(before.model.path).is_dir()
    base = before.model if there else _catalogue(settings).find(before.model.name).ref()
    return inherit(request, before, parent.name), base, parent


def _teacher(
    request: JobRequest, base: BaseModelRef, settings: Settings, to_train: bool
) -> TeacherRef | None:
    """Return what method.distillation.teacher names here; None: the job's base. Raises
    SpecError.
    """
    name = named_teacher(request, base.name)
    if name is None:
        return None
    if is_tuned(name):
        before, adapter = find_local(name, settings, PLACE)
        return teaching_adapter(before, adapter, request.lora, base.name)
    found = _catalogue(settings).find(name, to_train=to_train, param=PLACE).ref()
    return teaching_base(found, base)


def _catalogue(settings: Settings) -> Catalogue:
    return Catalogue.from_settings(settings, local_descriptions(settings, makes=False))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML mapping without duplicate keys. `name`: for messages. Raises SpecError."""
    try:
        body = yaml.load(text, Loader=StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem).replace("'<stream end>'", "the end of the file")
        raise SpecError(f"{name}{line}: {problem}.") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{name}: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise SpecError(
            f"{name}: expected options such as `model: …` and `training_file: …`, found "
            f"{_kind(body)}."
        )
    return body


def _kind(body: object) -> str:
    kinds = {str: "a line of text", list: "a list", dict: "options"}
    return "nothing" if body is None else kinds.get(type(body), "a number")
