"""Scores of answers: metrics by name, and OpenAI's graders."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from ft_service.data.answer_metrics import METRICS, MOST_COMPARED, SIMILARITIES, grade, refuse_impossible, score
from ft_service.spec import AnswerMetric
from ft_service.spec.evaluation import Grader, Multi


def grader(**given: Any) -> Any:
    return TypeAdapter(Grader).validate_python({"name": "g", "type": "string_check", **given})


def multi(formula: str) -> Multi:
    check = {"type": "string_check", "name": "x", "input": "{{sample.output_text}}", "reference": "four", "operation": "eq"}
    like = {**check, "name": "y", "operation": "ilike"}
    return grader(type="multi", graders={"same": check, "near": like}, calculate_output=formula)


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
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1),
        ("bleu", "the cat", "the cat", 1),
        ("bleu", "", "the cat", 0),
        # precisions 3/4, 2/3, 1/2 and of four words a half of none; no shorter than the reference
        ("bleu", "the cat sat on", "the cat sat down", (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25),
    ],
)
def test_one_answer(metric: AnswerMetric, answer: str, expected: str, score: float) -> None:
    assert METRICS[metric](answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("rouge_1", "on the mat", "mat the on", 1),
        ("rouge_2", "on the mat", "mat the on", 0),
        ("rouge_2", "the cat sat", "the cat lay", 0.5),
        ("gleu", "the cat sat", "the cat sat", 1),
        ("gleu", "the cat", "the cat sat", 3 / 6),
        ("gleu", "", "", 0),
        ("fuzzy_match", "abcd", "abxd", 0.75),
    ],
)
def test_one_similarity(metric: str, answer: str, expected: str, score: float) -> None:
    assert SIMILARITIES[metric](answer, expected) == pytest.approx(score)


def test_without_a_reference_only_what_needs_none_is_scored() -> None:
    assert score("4", "4", ["exact_match", "json_valid"]) == {"exact_match": 1.0, "json_valid": 1.0}
    assert score("four", None, ["exact_match", "json_valid", "bleu"]) == {"json_valid": 0.0}
    checked = grader(input="{{ sample.output_text }}", reference="{{ item.reference_answer }}", operation="eq")
    keyed = grader(name="k", input="{{ sample.output_json.n }}", reference="{{ item.n }}", operation="eq")
    assert score("4", "4", [checked, keyed], {"n": 4}) == {"g": 1.0, "k": 0.0}, "an answer that is no JSON is wrong"
    assert score('{"n": 4}', None, [checked, keyed], {"n": 4}) == {"k": 1.0}


@pytest.mark.parametrize(
    ("operation", "answer", "reward"),
    [
        ("eq", "Four", 0),
        ("eq", "four", 1),
        ("ne", "Four", 1),
        ("like", "is four", 1),
        ("like", "is Four", 0),
        ("ilike", "is Four", 1),
    ],
)
def test_string_checks(operation: str, answer: str, reward: float) -> None:
    graded = grade(grader(input="{{sample.output_text}}", reference="four", operation=operation), answer, {})
    assert (graded.reward, graded.errors) == (reward, frozenset())


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("same + near", 1),
        ("2 * near ^ 2 - same / 4", 2),
        ("min(same, near) + max(0.25, abs(-0.5))", 0.5),
        ("sqrt(floor(4.9)) + ceil(0.1) + log(exp(1))", 4),
    ],
)
def test_a_formula_of_graders(formula: str, value: float) -> None:
    graded = grade(multi(formula), "is Four", {})
    assert graded.reward == pytest.approx(value)
    assert graded.scores == {"same": 0.0, "near": 1.0}


@pytest.mark.parametrize(
    "formula",
    [
        "same +",
        "other",
        "__import__('os')",
        "same.real",
        "near if same else 1",
        "(" * 500,
        "True",
        "log(1, 2, 3)",
        "-" * 1000 + "1",
    ],
)
def test_a_formula_of_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="calculate_output"):
        refuse_impossible(multi(formula))
    assert grade(multi(formula), "four", {}).errors == {"formula_parse_error"}


def test_a_formula_without_a_value_is_an_error_of_the_answer() -> None:
    for formula in ("1 / same", "exp(1000 * near)", "sqrt(-near)"):
        refuse_impossible(multi(formula))
        assert grade(multi(formula), "is Four", {}).errors == {"formula_parse_error"}


def test_what_a_template_names_must_be_there() -> None:
    for text, error in (
        ("{{ item.none }}", "invalid_variable_error"),
        ("{{ item.a[3] }}", "invalid_variable_error"),
        ("{{ sample.output_json.a }}", "sample_parse_error"),
    ):
        graded = grade(grader(input=text, reference="x", operation="ne"), "no JSON", {"a": [1]})
        assert (graded.reward, graded.errors) == (0.0, {error})
    nested = grader(input="{{item.a[0].b}}/{{ sample.output_json.c }}", reference="1/[2]", operation="eq")
    assert grade(nested, '{"c": [2]}', {"a": [{"b": 1}]}).reward == 1
    for text in ("{{ prompt }}", "{{ sample.tokens }}", "{{ item }}", "{{ item.__class__() }}"):
        with pytest.raises(ValueError, match="names nothing"):
            refuse_impossible(grader(input=text, reference="", operation="eq"))


def test_texts_that_would_take_minutes_are_not_compared() -> None:
    near = grader(
        type="text_similarity", input="{{ sample.output_text }}", reference="{{ item.a }}", evaluation_metric="rouge_l"
    )
    longest = "a b " * (MOST_COMPARED // 4)
    assert grade(near, longest, {"a": longest}).reward == 1
    assert grade(near, longest, {"a": longest + "a"}).errors == {"other_error"}
    assert score(longest + "a", "a", [near], {"a": "a"}) == {}


def test_a_template_that_names_an_answer_hundreds_of_times_is_not_filled_in() -> None:
    named = "{{ sample.output_text }}" * 600
    often = grader(type="string_check", input=named, reference="", operation="ne")
    assert grade(often, "a" * 262_144, {}).errors == {"other_error"}
    assert grade(often, "a", {}).reward == 1
