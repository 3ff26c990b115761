"""The contents of a job's data files, for commands that need no server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ft_service.bases.catalogue import has_tokenizer
from ft_service.data.data_file import Counts, DataReport, Param, check_lines
from ft_service.data.examiner import Examiner, Tell, data_files
from ft_service.data.formats.columns import Columns
from ft_service.data.statistics import Level, Measure, Statistics, messages
from ft_service.data.token_folder import folder_of
from ft_service.errors import DataError, SpecError
from ft_service.host.home import create_home
from ft_service.plan.lengths import Lengths
from ft_service.rundir.documents import ErrorInfo
from ft_service.settings import Settings
from ft_service.spec import JobSpec

Found = TypeVar("Found", DataReport, Statistics)


@dataclass(frozen=True)
class DataFound:
    """What a job's data files hold."""

    reports: Mapping[Param, DataReport]
    statistics: Statistics | None
    """None: tokens were not counted."""

    @property
    def counts(self) -> Counts | None:
        """Of the training file, with what validation_split sets aside."""
        return self.reports["training_file"].counts

    @property
    def lengths(self) -> Lengths | None:
        """Of the samples that are trained on. None: not counted."""
        if self.counts is None or self.statistics is None:
            return None
        return Lengths.of_data(self.counts, self.statistics)

    def messages(self, spec: JobSpec) -> Iterator[tuple[Level, str]]:
        """Level and sentence: what each file holds to train on, what is not trained on, and what to change."""
        for param, data in data_files(spec):
            yield from self.reports[param].messages(data.name, spec.training.max_length, cut=self.statistics is None)
        if self.statistics is not None:
            yield from messages(self.statistics, Measure.of(spec))


def examine_data(spec: JobSpec, settings: Settings, tell: Tell, *, need_counts: bool = True) -> DataFound:
    """Every data file, with tokens counted, and kept for the ranks (FT_TOKENS). `tell`: called with the progress if that takes
    long. `need_counts` False: only where transformers is installed and the base has a tokenizer.

    Raises DataError for data that cannot be trained on, SpecError for a base whose tokenizer cannot be used, ExaminerLost.
    """
    reports: dict[Param, DataReport] = {}
    statistics: Statistics | None = None
    if need_counts or (find_spec("transformers") is not None and has_tokenizer(Path(spec.model.path))):
        create_home(settings.home)
        with Examiner(tokens=folder_of(os.environ, settings.home)) as examiner:
            for param, data in data_files(spec):
                reports[param] = refuse_faults(examiner.examine_file(param, data, Path(data.path), spec, tell))
            statistics = refuse_faults(examiner.measure_job(spec))
    else:
        for param, data in data_files(spec):
            columns = Columns(spec.data.pairs)
            report = check_lines(Path(data.path), files=data.files, columns=columns, pairs=spec.dpo is not None)
            reports[param] = refuse_faults(report.error(param, data.name) or report)
    return DataFound(reports, statistics)


def refuse_faults(examined: Found | ErrorInfo) -> Found:
    """Raises SpecError or DataError in place of an error."""
    if not isinstance(examined, ErrorInfo):
        return examined
    kind = SpecError if examined.param in ("model", "chat_template") else DataError
    raise kind(examined.message, param=examined.param, code=examined.code)
