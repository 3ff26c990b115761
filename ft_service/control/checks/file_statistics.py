"""Statistics of data files for whoever asks: from the tokens that are kept, or else made of a file that is not large."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ft_service.control.checks.samples import examining, fetched
from ft_service.data.formats.reading import open_data
from ft_service.data.statistics import Measure, Statistics
from ft_service.data.token_folder import entries_of
from ft_service.data.token_options import TokenOptions
from ft_service.errors import DataError, SpecError
from ft_service.jobs.states import Job
from ft_service.storage.locations import Places

LARGE_BYTES = 32 * 1024**2
"""Of files above this only the kept tokens are looked at: to make them takes longer than a request may."""


def job_statistics(job: Job, places: Places) -> Statistics:
    """Of a job's files, as it trains on them. Raises as `file_statistics`."""
    spec = job.spec
    of = (spec.model.path, TokenOptions.of(spec))
    return file_statistics(Measure.of(spec), *of, places, pairs=spec.dpo is not None)


def file_statistics(
    asked: Measure, model_path: str, options: TokenOptions, places: Places, *, pairs: bool | None = None
) -> Statistics:
    """Of files by a base's tokenizer. `pairs`: they hold pairs of answers; None: as the training file does.

    Raises NotFoundError if a file is gone, SpecError for one that cannot be trained on, and for one that is large and whose
    tokens are not kept, UnavailableError.
    """
    files = [file for file in (asked.training_file, asked.validation_file) if file is not None]
    here = [file.model_copy(update={"path": str(fetched(file, places))}) for file in files]
    for file in here:
        data = open_data(Path(file.path), file.files, options.columns)
        known = places.tokens_dir is not None and entries_of(places.tokens_dir, file.sha256)
        if data.size > LARGE_BYTES and not known:
            raise SpecError(
                f"{file.name} has {data.size:,} bytes, and its tokens are not kept: they are made when a job uses it, whose "
                "events have the same numbers. For those of a file alone: ft data stats.",
                param="file_id",
                code="too_large",
            )
    if pairs is None:
        first = open_data(Path(here[0].path), here[0].files, options.columns)
        first.look()
        pairs = first.shape.format is not None and first.shape.format.is_pairs
    where = replace(asked, training_file=here[0], validation_file=here[1] if len(here) > 1 else None)
    with examining(places.tokens_dir) as examiner:
        path = Path(here[0].path)
        request = examiner.request(here[0], path, model_path, asked.training.max_length, options, pairs=pairs)
        try:
            return examiner.measure(replace(request, measure=where))
        except DataError as error:
            raise SpecError(error.message, param=error.param, code=error.code) from None
