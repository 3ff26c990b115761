"""Samples of a data file as the model sees them, for whoever asks: each time by a process that ends with the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ft_service.data.examiner import Examiner, ExaminerLost
from ft_service.data.samples import Page, SamplePage
from ft_service.data.token_options import TokenOptions
from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.states import Job
from ft_service.spec import DataFileRef
from ft_service.storage.locations import Places

STUCK_SECONDS = 30.0
"""How long it may be at one task, such as one sample."""
READ_SECONDS = 60.0
"""How long it may take in all, by which time whoever asked has gone."""


def job_samples(job: Job, which: str, page: Page, places: Places) -> SamplePage:
    """Samples of a job's file, `which`: training or validation, as the job learns them. Raises NotFoundError if it has none,
    SpecError if the base's tokenizer cannot be used, UnavailableError.
    """
    spec = job.spec
    data = spec.training_data if which == "training" else spec.validation_data
    if data is None:
        aside = "; what it validates with is set aside of its training file" if spec.validation_split is not None else ""
        raise NotFoundError(f"Job {job.id} has no validation file{aside}.", param="file", code="no_validation_file")
    return file_samples(data, spec.model.path, TokenOptions.of(spec), spec.training.max_length, page, places)


def file_samples(
    data: DataFileRef, model_path: str, options: TokenOptions, max_length: int, page: Page, places: Places
) -> SamplePage:
    """Samples of a file by a base's tokenizer. Raises NotFoundError if the file is gone, SpecError if the tokenizer cannot be
    used, UnavailableError.
    """
    path = fetched(data, places)
    with examining() as examiner:
        request = examiner.request(data, path, model_path, max_length, options)
        return examiner.show(replace(request, show=page))


def fetched(data: DataFileRef, places: Places) -> Path:
    """Where a file lies on this host. Raises NotFoundError if it is gone."""
    path = Path(data.path)
    try:
        path = places.fetched(path)
        there = path.is_file() if not data.files else all((path / name).is_file() for name in data.files)
    except OSError:
        there = False
    if not there:
        raise NotFoundError(f"The contents of {data.name} are gone from the service's disk.", param="file_id", code="file_gone")
    return path


@contextmanager
def examining(tokens: Path | None = None) -> Iterator[Examiner]:
    """An examiner, as long as the block runs, and for no longer than READ_SECONDS. Raises SpecError if that is not enough.

    It has a process of some 200 MB: the caller sees to it that there are few at once.
    """
    late = threading.Event()
    with Examiner(tokens=tokens, stuck_seconds=STUCK_SECONDS) as examiner:

        def end() -> None:
            late.set()
            examiner.stop(for_good=True)

        timer = threading.Timer(READ_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            yield examiner
        except ExaminerLost:
            if not late.is_set():
                raise
            message = f"To read this takes longer than {READ_SECONDS:g} seconds: ask for fewer samples, or for earlier ones."
            raise SpecError(message, code="takes_too_long") from None
        finally:
            timer.cancel()
