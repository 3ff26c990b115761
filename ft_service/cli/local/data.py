"""The contents of a job's data files, for commands that need no server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ft_service.bases.catalogue import has_tokenizer
from ft_service.data.data_file import DataReport, Param, check_lines
from ft_service.data.examiner import Examiner, Tell, data_files
from ft_service.data.token_folder import folder_of
from ft_service.errors import DataError, SpecError
from ft_service.rundir.documents import ErrorInfo
from ft_service.settings import Settings
from ft_service.spec import JobSpec

DataReports = Mapping[Param, DataReport]


def examine_data(spec: JobSpec, settings: Settings, tell: Tell, *, need_counts: bool = True) -> DataReports:
    """Reports on every data file, with tokens counted, and kept for the ranks (FT_TOKENS). `tell`: called with the progress if
    that takes long. `need_counts` False: only where transformers is installed and the base has a tokenizer.

    Raises DataError for data that cannot be trained on, SpecError for a base whose tokenizer cannot be used, ExaminerLost.
    """
    reports: dict[Param, DataReport] = {}
    if need_counts or (find_spec("transformers") is not None and has_tokenizer(Path(spec.model.path))):
        with Examiner(tokens=folder_of(os.environ, settings.home)) as examiner:
            for param, data in data_files(spec):
                reports[param] = _refuse_faults(examiner.examine_file(param, data, Path(data.path), spec, tell))
    else:
        for param, data in data_files(spec):
            report = check_lines(Path(data.path), pairs=spec.dpo is not None)
            reports[param] = _refuse_faults(report.error(param, data.name) or report)
    return reports


def messages(reports: DataReports, spec: JobSpec) -> Iterator[tuple[Literal["info", "warn"], str]]:
    """Level and sentence: what each file holds to train on, and what is not trained on."""
    for param, data in data_files(spec):
        yield from reports[param].messages(data.name, spec.training.max_length)


def _refuse_faults(examined: DataReport | ErrorInfo) -> DataReport:
    if isinstance(examined, DataReport):
        return examined
    kind = SpecError if examined.param == "model" else DataError
    raise kind(examined.message, param=examined.param, code=examined.code)
