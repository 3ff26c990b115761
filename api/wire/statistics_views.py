"""Statistics of data files as answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from ft_service.data.statistics import Measure, Statistics, advice


class LinesView(BaseModel):
    count: int
    first: list[int]
    """Numbers of the first ones in their file, from 1: lines, elements or rows."""


class SpreadView(BaseModel):
    least: int
    mean: float
    median: int
    p90: int
    p99: int
    most: int


class BucketView(BaseModel):
    begin: int
    """Tokens, both ends included."""
    end: int
    samples: int


class FileStatisticsView(BaseModel):
    name: str
    word: str
    """What one of its records is called."""
    samples: int
    """That are trained on, or validated with; a pair is one."""
    tokens: int
    """Of these, once they were cut to training.max_length."""
    targets: int
    """Of these tokens, those that are learned."""
    lengths: SpreadView
    """Tokens of every sample, before any were cut."""
    learned: SpreadView
    histogram: list[BucketView]
    """Of the lengths."""
    cut: LinesView
    lost_tokens: int
    dropped: LinesView
    """Left out: nothing that is learned is left of them."""
    duplicates: LinesView
    """The same tokens stand further up."""
    near_empty: LinesView
    """Answers of at most one token beside the end of the turn."""


class StatisticsView(BaseModel):
    object: Literal["fine_tuning.statistics"] = "fine_tuning.statistics"
    training: FileStatisticsView
    validation: FileStatisticsView | None
    overlap: LinesView
    """Samples of the validation file that are trained on too."""
    items: int
    """That training.batch_size counts: samples or pairs, of documents rows of training.max_length tokens."""
    steps: int
    trained_tokens: int
    """Over all steps, about."""
    padding_saved: float
    """Share of padding, were each batch padded to its longest sample."""
    seconds: float | None
    """That training takes by the plan; null: not known."""
    flops: float | None
    warnings: list[str]
    """What to change, with the lines or the option at fault."""


def statistics_view(found: Statistics, asked: Measure) -> StatisticsView:
    return StatisticsView.model_validate({**asdict(found), "warnings": list(advice(found, asked))})
