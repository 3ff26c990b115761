"""Examination of a job's data files and description of its base, for commands that do not need a
server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ft_service.bases.catalogue import has_tokenizer
from ft_service.bases.describing import Descriptions, NotDescribedError
from ft_service.bases.description import (
    Described,
    Description,
    description_key,
    read_described,
)
from ft_service.cli.output import connect
from ft_service.control.bases.describe_bases import local_descriptions
from ft_service.data.data_file import Counts, DataReport, Param, check_lines
from ft_service.data.examiner import Examiner, Tell, data_files
from ft_service.data.statistics import DataStatistics, Level, Measure, messages
from ft_service.data.token_folder import folder_of
from ft_service.data.token_options import TokenOptions
from ft_service.errors import DataError, FtError, SpecError
from ft_service.host.home import create_home
from ft_service.installation import SAMPLE_DESCRIPTIONS, SAMPLE_MODELS
from ft_service.plan.image_features import note_on_images
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.teacher import described_job
from ft_service.rundir.documents import ErrorInfo
from ft_service.settings import Settings
from ft_service.spec import JobSpec

Found = TypeVar("Found", DataReport, DataStatistics)


@dataclass(frozen=True)
class JobData:
    """Reports on a job's data files."""

    reports: Mapping[Param, DataReport]
    statistics: DataStatistics | None
    """Statistics of the tokens; None: tokens were not counted."""
    on_images: tuple[str, ...] = ()
    """Sentences about images."""

    @property
    def counts(self) -> Counts | None:
        """Counts of the training file, including what validation_split sets aside."""
        return self.reports["training_file"].counts

    @property
    def examples(self) -> int:
        """Units of training.batch_size in an epoch."""
        counted = self.reports["training_file"].examples
        return self.statistics.items if self.statistics else counted

    def lengths(self, spec: JobSpec) -> SampleLengths | None:
        """Lengths of the training samples; None: not counted."""
        if self.counts is not None and spec.reinforcement is not None:
            return SampleLengths.of_prompts(self.counts, spec)
        if self.counts is None or self.statistics is None:
            return None
        return SampleLengths.of_data(self.counts, self.statistics, spec)

    def messages(self, spec: JobSpec) -> Iterator[tuple[Level, str]]:
        """Yield (level, sentence): what each file contains, what is not trained on, and what to
        change.
        """
        for param, data in data_files(spec):
            yield from self.reports[param].messages(
                data.name,
                spec.training.max_length,
                cut=self.statistics is None,
                loss=spec.loss,
            )
        for text in self.on_images:
            yield "info", text
        if self.statistics is not None:
            yield from messages(self.statistics, Measure.of(spec))


def examine_data(
    spec: JobSpec,
    settings: Settings,
    tell: Tell,
    base: Description | None = None,
    *,
    need_counts: bool = True,
    one_rank: int | None = None,
) -> JobData:
    """Examine every data file, count its tokens and keep them for the ranks (FT_TOKENS).

    `tell`: called with the progress if that takes long. `base`: the job's; None: whoever trains it
    says whether it learns from images. `need_counts`: False: tokens are counted
    only if transformers is installed and the base has a tokenizer. `one_rank`: as of `Measure`.

    Raises DataError for data that cannot be trained on, SpecError for a base with an unusable
    tokenizer, or one that cannot learn from the samples' images, ExaminerLost.
    """
    reports: dict[Param, DataReport] = {}
    statistics: DataStatistics | None = None
    if need_counts or (
        find_spec("transformers") is not None and has_tokenizer(Path(spec.model.path))
    ):
        create_home(settings.home)
        with Examiner(tokens=folder_of(os.environ, settings.home)) as examiner:
            for param, data in data_files(spec):
                reports[param] = refuse_faults(
                    examiner.examine_file(param, data, Path(data.path), spec, tell)
                )
            if spec.reinforcement is None:
                statistics = refuse_faults(examiner.measure_job(spec, one_rank=one_rank))
    else:
        for param, data in data_files(spec):
            columns = TokenOptions.of(spec).columns
            report = check_lines(
                Path(data.path),
                files=data.files,
                columns=columns,
                pairs=spec.preferences is not None,
            )
            reports[param] = refuse_faults(report.error(param, data.name) or report)
    return JobData(reports, statistics, _notes_on_images(base, spec, reports))


def _notes_on_images(
    base: Description | None, spec: JobSpec, reports: Mapping[Param, DataReport]
) -> tuple[str, ...]:
    """Raises SpecError for a base that cannot learn from images. `base`: None: nothing is known."""
    shown = [report for report in reports.values() if report.images]
    if base is None or not shown:
        return ()
    tokens = sum(report.counts.image_tokens for report in shown if report.counts is not None)
    return (note_on_images(base, spec, sum(report.images for report in shown), tokens),)


def refuse_faults(examined: Found | ErrorInfo) -> Found:
    """Return the result, or raise SpecError or DataError if it is an error."""
    if not isinstance(examined, ErrorInfo):
        return examined
    kind = SpecError if examined.param in ("model", "chat_template") else DataError
    raise kind(examined.message, param=examined.param, code=examined.code)


SILENT_SECONDS = 1.0
"""Time after which the user reads that a base is being described."""


def describe_base(
    folder: Path, name: str, settings: Settings, notify: Callable[[str], None]
) -> Description:
    """Return the description of a base: from the cache, or made now; if the workers' packages are
    not installed, the one that comes with the sample, or the server's. `name`: the base's name on
    the server. `notify`: called if it takes longer than SILENT_SECONDS.

    Raises SpecError for a base that cannot be tuned, NotDescribedError if nothing describes it.
    """
    descriptions = local_descriptions(settings)
    described = descriptions.known(folder)
    if described is None and descriptions.missing is None:
        notice = threading.Timer(
            SILENT_SECONDS, notify, ["Describing the base, which is done once …"]
        )
        notice.daemon = True
        notice.start()
        try:
            described = descriptions.describe(folder)
        finally:
            notice.cancel()
    return (
        described
        or _of_sample(folder)
        or _of_server(folder, name, descriptions, descriptions.missing or "")
    ).description()


def describe_job(spec: JobSpec, settings: Settings, notify: Callable[[str], None]) -> Description:
    """`describe_base` of a job's base, and of the base that teaches it, if there is one.

    Raises SpecError also for a teacher with another tokenizer.
    """
    names = {Path(spec.model.path): spec.model.name}
    return described_job(
        spec,
        lambda folder: describe_base(folder, names.get(folder, folder.name), settings, notify),
    )


def _of_sample(folder: Path) -> Described | None:
    """Return the description that comes with the sample base; None: it is another base, or its
    files were changed.
    """
    file = SAMPLE_DESCRIPTIONS / f"{folder.name}.json"
    if folder.parent != SAMPLE_MODELS or not file.is_file():
        return None
    document = read_described(file.read_bytes())
    return document if document.key == description_key(folder, document.versions) else None


def _of_server(folder: Path, name: str, descriptions: Descriptions, missing: str) -> Described:
    way_out = "Or use a server that has the same base: FT_BASE_URL and FT_API_KEY."
    try:
        with connect() as client:
            text = client.model_description(name)
    except FtError as error:
        raise NotDescribedError(f"{missing} {way_out} {error.message}", param="model") from None
    if text is None:
        raise NotDescribedError(
            f"{missing} The server has not described {name} yet: try again in a moment.",
            param="model",
        )
    try:
        document = read_described(text)
    except ValueError as error:
        raise NotDescribedError(
            f"{missing} The server's description of {name} cannot be read: {error}.", param="model"
        ) from None
    descriptions.add(folder, document)
    return document
