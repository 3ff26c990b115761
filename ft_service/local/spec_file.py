"""SPEC files: the body of a create request as YAML, with paths where REST has file ids.

Paths are relative to the SPEC file. `model` is a name from the catalogue, a tuned model's name or, when it starts with `.`, `/`
or `~`, a folder.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ft_service.bases.catalogue import Catalogue
from ft_service.control.base_facts import is_tunable
from ft_service.data.answer_metrics import check_metrics
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.folders import dataset_files
from ft_service.data.formats.reading import count_samples, open_data
from ft_service.errors import SpecError
from ft_service.host.hardware import gpu_count
from ft_service.local.parent import find_local
from ft_service.settings import Settings
from ft_service.spec import (
    AdapterRef,
    BaseModelRef,
    DataFileRef,
    JobRequest,
    JobSpec,
    inherit,
    is_tuned,
    parse_request,
    read_prompts,
    resolve,
)
from ft_service.spec.rates import COUNTED
from ft_service.sweeps.asked import parse_sweep


@dataclass(frozen=True)
class LocalData:
    """A data file on this host, or the files of a folder that hold a dataset's split."""

    path: Path
    files: tuple[str, ...] = ()
    """Named from the folder; empty: `path` is a file."""

    @property
    def bytes(self) -> int:
        return open_data(self.path, self.files).size

    def ref(self) -> DataFileRef:
        """Raises OSError."""
        digest = open_data(self.path, self.files).digest()
        return DataFileRef(name=self.path.name, path=str(self.path), sha256=digest, files=self.files)


@dataclass(frozen=True)
class SpecFile:
    """A SPEC file that was read and found valid."""

    path: Path
    body: dict[str, Any]
    """As written, but for a chat template, which is its text, and the prompts of a file, which stand in it."""
    request: JobRequest

    @property
    def training_file(self) -> LocalData:
        return self._existing("training_file", self.request.training_file, "train")

    @property
    def validation_file(self) -> LocalData | None:
        name = self.request.validation_file
        return None if name is None else self._existing("validation_file", name, "validation")

    @property
    def model_folder(self) -> Path | None:
        """The folder that `model` names; None: it is a name from the catalogue."""
        name = self.request.model
        return self._absolute(name) if name.startswith((".", "/", "~")) else None

    def _existing(self, field: str, name: str, split: str) -> LocalData:
        path = self._absolute(name)
        if path.is_dir():
            return LocalData(path, dataset_files(path, split))
        if not path.is_file():
            raise SpecError(f"{field} = {name!r}: there is no file {path}.", param=field)
        return LocalData(path)

    def _absolute(self, name: str) -> Path:
        return (self.path.parent / Path(name).expanduser()).resolve()


def load_spec_file(path: Path, *, sweep: bool = False) -> SpecFile:
    """Read and validate. `sweep`: it is one of a sweep, and `request` that of its first job.

    Raises SpecError naming file and line, or field, value and limit.
    """
    if path.suffix == ".jsonl":
        raise SpecError(f"{path} holds data, by its name: write a SPEC (YAML) that names it as training_file.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not a text file in UTF-8.") from None
    body = _with_prompts(_with_template(parse_yaml(text, str(path)), path.parent), path.parent)
    request = parse_sweep(body).jobs[0].request if sweep else parse_request(body)
    if request.evaluation is not None:
        check_metrics(request.evaluation.metrics)
    return SpecFile(path=path.absolute(), body=body, request=request)


def _with_template(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The body with the text of a chat template that it names by its file. Raises SpecError."""
    given = body.get("chat_template")
    if not isinstance(given, str) or "\n" in given or not given.endswith(".jinja"):
        return body
    try:
        return {**body, "chat_template": (folder / Path(given).expanduser()).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"chat_template = {given!r}: the file cannot be read: {error}.", param="chat_template") from None


def _with_prompts(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The body with the prompts of a file that its evaluation names. Raises SpecError."""
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
        raise SpecError(f"evaluation.prompts = {name!r}: {error}.", param="evaluation.prompts") from None
    return {**body, "evaluation": {**given, "prompts": prompts}}


def resolve_spec_file(spec: SpecFile, settings: Settings, *, job_id: str, seed: int, to_train: bool = True) -> JobSpec:
    """What a worker on this host trains on: model and data files found. `seed`: for a SPEC without one. `to_train` False: of
    the base config.json is enough.

    Raises SpecError for a model or file that is not there; a tuned model must have been trained in this FT_HOME.
    """
    request, model, parent = _model(spec, settings, to_train)
    validation = spec.validation_file
    training, columns = spec.training_file, Columns(request.data.pairs)
    return resolve(
        request,
        job_id=job_id,
        organization=settings.organization,
        model=model,
        training_data=training.ref(),
        validation_data=validation.ref() if validation else None,
        seed=seed,
        gpus=gpu_count(),
        parent=parent,
        date=datetime.now(UTC).date().isoformat(),
        samples=count_samples(training.path, training.files, columns, most=COUNTED) if request.counts_samples else None,
    )


def _model(spec: SpecFile, settings: Settings, to_train: bool) -> tuple[JobRequest, BaseModelRef, AdapterRef | None]:
    """The request with what it takes over from a tuned model, the base, and the adapter to go on from."""
    request, folder = spec.request, spec.model_folder
    if folder is not None:
        return request, Catalogue([folder.parent]).find(folder.name, to_train=to_train).ref(), None
    if not is_tuned(request.model):
        return request, Catalogue.from_settings(settings, is_tunable).find(request.model, to_train=to_train).ref(), None
    before, parent = find_local(request.model, settings)
    there = Path(before.model.path).is_dir()
    base = before.model if there else Catalogue.from_settings(settings, is_tunable).find(before.model.name).ref()
    return inherit(request, before, parent.name), base, parent


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """One YAML mapping without duplicate keys. `name` is used in messages. Raises SpecError."""
    try:
        body = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem).replace("'<stream end>'", "the end of the file")
        raise SpecError(f"{name}{line}: {problem}.") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{name}: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise SpecError(f"{name}: expected options such as `model: …` and `training_file: …`, found {_kind(body)}.")
    return body


def _kind(body: object) -> str:
    kinds = {str: "a line of text", list: "a list", dict: "options"}
    return "nothing" if body is None else kinds.get(type(body), "a number")


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice: keep one", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
