"""Samples of data files as the model sees them, and statistics, for requests: each time by a
process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_service.data.examiner import Examiner, TakesTooLongError
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_request import RecordRange, SamplePage
from ft_service.data.statistics import DataStatistics, Measure
from ft_service.data.token_folder import entries_of
from ft_service.data.token_options import TokenOptions
from ft_service.errors import DataError, NotFoundError, SpecError
from ft_service.jobs.states import Job
from ft_service.spec import DataFileRef
from ft_service.storage.locations import Places

LARGE_BYTES = 32 * 1024**2
"""Size above which only kept tokens are used: to make them takes too long for a request."""
STUCK_SECONDS = 30.0
"""Processor time of one task, such as one sample."""
READ_SECONDS = 60.0
"""Processor time of the whole request."""
GONE_SECONDS = 120.0
"""Limit of the whole request, by which time the client has gone and the host is said to be busy."""


def job_samples(job: Job, which: str, page: RecordRange, places: Places) -> SamplePage:
    """Samples of a job's training or validation file (`which`), as the job learns them.

    Raises NotFoundError if it has none, SpecError if the base's tokenizer cannot be used,
    UnavailableError.
    """
    spec = job.spec
    data = spec.training_data if which == "training" else spec.validation_data
    if data is None:
        aside = (
            "; what it validates with is set aside of its training file"
            if spec.validation_split is not None
            else ""
        )
        raise NotFoundError(
            f"Job {job.id} has no validation file{aside}.", param="file", code="no_validation_file"
        )
    return file_samples(
        data, spec.model.path, TokenOptions.of(spec), spec.training.max_length, page, places
    )


def file_samples(
    data: DataFileRef,
    model_path: str,
    options: TokenOptions,
    max_length: int,
    page: RecordRange,
    places: Places,
) -> SamplePage:
    """Samples of a file with a base's tokenizer.

    Raises NotFoundError if the file is gone, SpecError if the tokenizer cannot be used,
    UnavailableError.
    """
    path = fetched(data, places)
    with examining() as examiner:
        request = examiner.request(data, path, model_path, max_length, options)
        return examiner.show(replace(request, show=page, cpu_seconds=READ_SECONDS))


def job_statistics(job: Job, places: Places) -> DataStatistics:
    """Statistics of a job's files, as it trains on them. Raises as `file_statistics`."""
    spec = job.spec
    return file_statistics(
        Measure.of(spec),
        spec.model.path,
        TokenOptions.of(spec),
        places,
        pairs=spec.in_pairs,
    )


def file_statistics(
    asked: Measure,
    model_path: str,
    options: TokenOptions,
    places: Places,
    *,
    pairs: bool | None = None,
) -> DataStatistics:
    """Statistics of files with a base's tokenizer.

    `pairs`: whether they hold pairs of answers; None: as the training file does.

    Raises NotFoundError if a file is gone, SpecError for one that cannot be trained on, or is large
    and without kept tokens, UnavailableError.
    """
    files = [file for file in (asked.training_file, asked.validation_file) if file is not None]
    here = [file.model_copy(update={"path": str(fetched(file, places))}) for file in files]
    for file in here:
        data = open_data(Path(file.path), file.files, options.columns)
        known = places.tokens_dir is not None and entries_of(places.tokens_dir, file.sha256)
        if data.size > LARGE_BYTES and not known:
            raise SpecError(
                f"{file.name} has {data.size:,} bytes, and its tokens are not kept: they are made "
                "when a job uses it, whose "
                "events have the same numbers. For those of a file alone: ft data stats.",
                param="file_id",
                code="too_large",
            )
    if pairs is None:
        first = open_data(Path(here[0].path), here[0].files, options.columns)
        first.look()
        pairs = first.shape.format is not None and first.shape.format.is_pairs
    where = replace(
        asked, training_file=here[0], validation_file=here[1] if len(here) > 1 else None
    )
    with examining(places.tokens_dir) as examiner:
        path = Path(here[0].path)
        request = examiner.request(
            here[0], path, model_path, asked.training.max_length, options, pairs=pairs
        )
        try:
            return examiner.measure(replace(request, measure=where, cpu_seconds=READ_SECONDS))
        except DataError as error:
            raise SpecError(error.message, param=error.param, code=error.code) from None


def fetched(data: DataFileRef, places: Places) -> Path:
    """Path of a file on this host. Raises NotFoundError if it is gone."""
    path = Path(data.path)
    try:
        path = places.fetched(path)
        there = (
            path.is_file()
            if not data.files
            else all((path / name).is_file() for name in data.files)
        )
    except OSError:
        there = False
    if not there:
        raise NotFoundError(
            f"The contents of {data.name} are gone from the service's disk.",
            param="file_id",
            code="file_gone",
        )
    return path


@contextmanager
def examining(tokens: Path | None = None) -> Iterator[Examiner]:
    """An examiner while the block runs, at most GONE_SECONDS.

    Raises SpecError if READ_SECONDS of a processor are too short, ExaminerLost if the host does not
    give them in that time.

    Its process takes some 200 MB: the caller limits how many there are at once.
    """
    with Examiner(tokens=tokens, stuck_seconds=STUCK_SECONDS) as examiner:
        timer = threading.Timer(GONE_SECONDS, partial(examiner.stop, for_good=True))
        timer.daemon = True
        timer.start()
        try:
            yield examiner
        except TakesTooLongError:
            message = (
                f"To read this takes longer than {READ_SECONDS:g} seconds: ask for fewer "
                "samples, or for earlier ones."
            )
            raise TakesTooLongError(message) from None
        finally:
            timer.cancel()
