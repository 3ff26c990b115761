"""The comparison of a job's files: training records with each other, with the validation file and
with what the model is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ft_service.data.data_file import check_lines
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.record_comparison import (
    RecordComparison,
    References,
    asked_by,
    suite_texts,
)
from ft_service.data.statistics import Comparison
from ft_service.spec import DataFileRef

SECONDS = 20.0
"""Processor time for the comparison, after which the rest of a file is not compared."""
PROMPTS = "evaluation.prompts"


@dataclass(frozen=True)
class FilesToCompare:
    """Files with paths on this host, and how they are read."""

    training: DataFileRef
    validation: DataFileRef | None
    prompts: tuple[str, ...]
    """What the model is asked in an evaluation."""
    columns: Columns
    pairs: bool
    most: int
    """Records that are compared."""


@lru_cache(maxsize=64)
def compare_files(asked: FilesToCompare) -> Comparison:
    """Compare a training file's records; each time they are asked for by the jobs of a sweep, the
    answer is the same. Nothing is found in a file that cannot be read.
    """
    end = time.process_time() + SECONDS
    references = References.of({**suite_texts(), PROMPTS: asked.prompts})
    try:
        if asked.validation is not None:
            validation = asked.validation
            for text in questions_of(Path(validation.path), validation.files, asked.columns):
                references.add(validation.name, text)
                if time.process_time() > end:
                    references.is_whole = False
                    break
        comparison = RecordComparison(references, asked.most, SECONDS)
        file = asked.training
        return check_lines(
            Path(file.path),
            file.files,
            columns=asked.columns,
            pairs=asked.pairs,
            comparison=comparison,
            stop=lambda: comparison.ends_if(time.process_time() > end),
        ).comparison
    except OSError:
        return Comparison()


def questions_of(path: Path, files: Sequence[str], columns: Columns) -> Iterator[str]:
    """What the records of a data file ask. `files`: those of the folder `path`. Raises OSError."""
    with open_data(path, files, columns) as reader:
        for _, record in reader:
            if not isinstance(record, Fault):
                yield asked_by(record)
