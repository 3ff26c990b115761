"""Scores of answers by the metrics of an evaluation."""

from __future__ import annotations

import pytest

from ft_service.data.answer_format import Answer
from ft_service.data.answer_metrics import METRICS, score
from ft_service.graders.similarities import MOST_COMPARED
from ft_service.spec import AnswerMetric
from tests.support.graders import grader


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("exact_match", " four\n", "four", 1),
        ("exact_match", "Four", "four", 0),
        ("contains", "It is Four.", "four", 1),
        ("contains", "It is five.", "four", 0),
        ("json_valid", '{"a": 1}', "", 1),
        ("json_valid", "[" * 100_000, "", 0),
        ("json_valid", "four", "", 0),
        ("json_valid", '{"a": NaN}', "", 0),
        ("rouge_l", "the cat sat on the mat", "The cat lay on the mat", 10 / 12),
        ("rouge_l", "mat the on", "on the mat", 2 / 6),
        ("rouge_l", "", "four", 0),
        ("rouge_l", "four", "four", 1),
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1),
        ("bleu", "the cat", "the cat", 1),
        ("bleu", "", "the cat", 0),
        # precisions 3/4, 2/3, 1/2 and of four words a half of none; no shorter than the reference
        ("bleu", "the cat sat on", "the cat sat down", (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25),
    ],
)
def test_one_answer(metric: AnswerMetric, answer: str, expected: str, score: float) -> None:
    assert METRICS[metric](answer, expected) == pytest.approx(score)


def test_without_a_reference_only_what_needs_none_is_scored() -> None:
    assert score(Answer("4"), "4", ["exact_match", "json_valid"]) == {
        "exact_match": 1.0,
        "json_valid": 1.0,
    }
    assert score(Answer("four"), None, ["exact_match", "json_valid", "bleu"]) == {"json_valid": 0.0}
    checked = grader(
        input="{{ sample.output_text }}", reference="{{ item.reference_answer }}", operation="eq"
    )
    keyed = grader(
        name="k", input="{{ sample.output_json.n }}", reference="{{ item.n }}", operation="eq"
    )
    assert score(Answer("4"), "4", [checked, keyed], {"n": 4}) == {"g": 1.0, "k": 0.0}, (
        "an answer that is no JSON is wrong"
    )
    assert score(Answer('{"n": 4}'), None, [checked, keyed], {"n": 4}) == {"k": 1.0}


def test_texts_that_would_take_minutes_are_not_compared() -> None:
    near = grader(
        type="text_similarity",
        input="{{ sample.output_text }}",
        reference="a",
        evaluation_metric="rouge_l",
    )
    assert score(Answer("a" * (MOST_COMPARED + 1)), "a", [near]) == {}
