"""Data files on the wire: their check, their samples token by token, and their statistics. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from api.wire.views import View
from ft_service.data.data_file import DataReport
from ft_service.data.sample_request import Answer, Role, SamplePage
from ft_service.data.statistics import DataStatistics, Measure, advice


class FileCheckView(View):
    object: Literal["file.check"] = "file.check"
    file_id: str
    ok: bool
    """Whether every record that was read can be trained on."""
    message: str
    """The file's format, or its errors: each one once, with its lines.

    The same text as `ft data check` prints.
    """
    columns: list[str]
    """The keys or columns of the first record, at most 20."""
    warnings: list[str]
    """Warnings, for example about columns that are left out, copies of samples and empty
    answers.
    """
    records: int
    """Records that can be trained on."""
    whole: bool
    """Whether the whole file was read; of a file that takes longer only the beginning was."""


class TokenView(View):
    id: int
    text: str
    """The token's part of the sample's text: joined, the texts of all tokens are the sample.

    Empty where the token before shows the character that both are part of. All tokens of an image
    are shown as one: `[image 640x480, 256 tokens]`.
    """
    role: Role
    """learned: the model is trained to produce it; words: of a message or a prompt, only read;
    template: written by the chat template, only read; cut: after training.max_length.
    """


class SampleView(View):
    object: Literal["fine_tuning.sample"] = "fine_tuning.sample"
    line: int
    """Number of the record in the file, from 1: a line, an element or a row.

    0: the file cannot be read any further.
    """
    tokens: list[TokenView]
    learned: int
    """Tokens that are trained on."""
    total: int
    """Tokens, cut ones included."""
    cut_at: int | None
    """The first token that is cut; null: no token is."""
    error: str | None
    """Why the record cannot be trained on; null: it can."""
    answer: Answer
    """Which answer of a preference pair it is; empty: it is not a pair."""


class SamplesView(View):
    object: Literal["list"] = "list"
    data: list[SampleView]
    has_more: bool
    """More records follow: request those `after` the last one's line."""
    format: str
    """The file's format and container, in words."""
    word: str
    """The name of one of its records: line, element or row."""


class LinesView(View):
    count: int
    first: list[int]
    """Numbers of the first ones in their file, from 1: lines, elements or rows."""


class SpreadView(View):
    least: int
    mean: float
    median: int
    p90: int
    p99: int
    most: int


class BucketView(View):
    begin: int
    """Tokens, both ends included."""
    end: int
    samples: int


class FileStatisticsView(View):
    name: str
    word: str
    """The name of one of its records: line, element or row."""
    samples: int
    """Samples that are trained on, or validated with; a pair is one."""
    tokens: int
    """Tokens of these samples, after they were cut to training.max_length."""
    targets: int
    """Those of these tokens that are learned."""
    lengths: SpreadView
    """Tokens of every sample, before any were cut."""
    learned: SpreadView
    histogram: list[BucketView]
    """The distribution of the lengths."""
    cut: LinesView
    lost_tokens: int
    dropped: LinesView
    """Samples that are left out: no learned token is left of them."""
    alike: LinesView
    """Pairs whose two answers are the same tokens after the cut: nothing is learned from them."""
    duplicates: LinesView
    """Samples with the same tokens as an earlier one."""
    near_empty: LinesView
    """Answers of at most one token, the end of the turn not counted."""
    skipped: LinesView
    """Records of the whole file that are left out for an image that cannot be used."""


class ComparisonView(View):
    near_copies: LinesView
    """Records that are nearly copies of an earlier one."""
    overlaps: dict[str, LinesView]
    """The validation file, `evaluation.prompts`, or a suite of `ft eval` → records that share words
    with it.
    """
    compared: int | None
    """Only so many records, the first ones, were compared; null: all were."""


class StatisticsView(View):
    object: Literal["fine_tuning.statistics"] = "fine_tuning.statistics"
    training: FileStatisticsView
    validation: FileStatisticsView | None
    overlap: LinesView
    """Samples of the validation file that are trained on too."""
    items: int
    """Units of training.batch_size: samples or pairs; of documents, rows of training.max_length
    tokens.
    """
    steps: int
    trained_tokens: int
    """Tokens over all steps, about."""
    padding_saved: float
    """Share of padding, if each batch were padded to its longest sample."""
    seconds: float | None
    """Training time by the plan; null: not known."""
    flops: float | None
    comparison: ComparisonView
    """The training file's records, compared with each other and with what a model is measured
    by.
    """
    warnings: list[str]
    """Suggested changes, with the lines or the option that cause them."""


def file_check_view(file_id: str, name: str, report: DataReport) -> FileCheckView:
    ok = not report.faults_total
    messages = report.messages(name, 0) if ok else ()
    return FileCheckView(
        file_id=file_id,
        ok=ok,
        message=report.fine_text(name) if ok else report.fault_text(name),
        columns=list(report.columns),
        warnings=[text for level, text in messages if level == "warn"],
        records=report.examples,
        whole=not report.unread,
    )


def samples_view(page: SamplePage) -> SamplesView:
    return SamplesView.of(
        page, data=[SampleView.of(sample) for sample in page.samples], format=page.shape
    )


def statistics_view(statistics: DataStatistics, measure: Measure) -> StatisticsView:
    return StatisticsView.model_validate(
        {**asdict(statistics), "warnings": list(advice(statistics, measure))}
    )
