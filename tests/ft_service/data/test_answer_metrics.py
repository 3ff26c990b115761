"""Scores of answers."""

from __future__ import annotations

import pytest

from ft_service.data.answer_metrics import METRICS, score
from ft_service.spec import AnswerMetric


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
        ("rouge_l", "the cat sat on the mat", "The cat lay on the mat", 10 / 12),
        ("rouge_l", "mat the on", "on the mat", 2 / 6),
        ("rouge_l", "", "four", 0),
        ("rouge_l", "four", "four", 1),
    ],
)
def test_one_answer(metric: AnswerMetric, answer: str, expected: str, score: float) -> None:
    assert METRICS[metric](answer, expected) == pytest.approx(score)


def test_without_a_reference_only_what_needs_none_is_scored() -> None:
    assert score("4", "4", ["exact_match", "json_valid"]) == {"exact_match": 1.0, "json_valid": 1.0}
    assert score("four", None, ["exact_match", "json_valid"]) == {"json_valid": 0.0}
