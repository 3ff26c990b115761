"""Metrics of an evaluation's answers, by name or by a grader that compares texts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ft_service.data.answer_format import Answer
from ft_service.errors import SpecError
from ft_service.graders.grades import NO_JSON, Case, parsed
from ft_service.graders.similarities import bleu, rouge_l
from ft_service.graders.texts import check_grader, grade_text
from ft_service.spec import AnswerMetric
from ft_service.spec.evaluation import Metric, metric_name


def exact_match(answer: str, expected: str) -> float:
    """1 if they are equal, except for surrounding white space."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 if the answer contains the expected one, ignoring case."""
    return float(expected.strip().casefold() in answer.casefold())


def json_valid(answer: str, expected: str) -> float:
    """1 if the answer is valid JSON."""
    return float(parsed(answer) is not NO_JSON)


METRICS: Mapping[AnswerMetric, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "json_valid": json_valid,
    "rouge_l": rouge_l,
    "bleu": bleu,
}
NEED_REFERENCE: Collection[AnswerMetric] = ("exact_match", "contains", "rouge_l", "bleu")


def score(
    answer: Answer,
    reference: str | None,
    metrics: Sequence[Metric],
    item: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """An answer's score by each metric.

    Left out: without a reference, metrics that need one; graders that use a field which the item
    does not have. An answer of another form than a grader reads scores 0.
    """
    fields: dict[str, Any] = dict(item or {})
    if reference is not None:
        fields |= {"reference": reference, "reference_answer": reference}
    scores: dict[str, float] = {}
    for metric in metrics:
        if not isinstance(metric, str):
            graded = grade_text(metric, Case(answer.sample(), fields))
            if graded.errors.keys() <= {"sample_parse_error"}:
                scores[metric_name(metric)] = graded.reward
        elif reference is not None or metric not in NEED_REFERENCE:
            scores[metric] = METRICS[metric](answer.whole, reference or "")
    return scores


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Raise SpecError for a grader of a job's evaluation that is wrong for every answer."""
    for number, metric in enumerate(metrics):
        if isinstance(metric, str):
            continue
        try:
            check_grader(metric)
        except ValueError as error:
            place = f"evaluation.metrics.{number}"
            raise SpecError(f"{place}: {error}.", param=place) from None
