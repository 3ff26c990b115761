"""Graders that compare texts, and formulas of them."""

from __future__ import annotations

import numpy as np
import pytest

from ft_service.graders.grades import MOST_REWARD
from ft_service.graders.similarities import MOST_COMPARED, SIMILARITIES
from ft_service.graders.texts import check_grader, grade_text
from ft_service.reinforcement.advantages import advantages
from tests.support.graders import case, grader, multi


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("rouge_1", "on the mat", "mat the on", 1),
        ("rouge_2", "on the mat", "mat the on", 0),
        ("rouge_2", "the cat sat", "the cat lay", 0.5),
        ("rouge_1", "It is Paris.", "it is “paris”!", 1),
        ("rouge_1", "a well-known, x_1", "a well known x 1", 1),
        ("rouge_1", "C'est l'été…", "c est l été", 1),
        ("rouge_1", "नमस्ते दुनिया।", "नमस्ते सब", 0.5),
        ("rouge_l", "四十二。", "四十二", 1),
        ("gleu", "the cat sat", "the cat sat", 1),
        ("gleu", "the cat", "the cat sat", 3 / 6),
        ("gleu", "", "", 0),
        ("fuzzy_match", "abcd", "abxd", 0.75),
    ],
)
def test_one_similarity(metric: str, answer: str, expected: str, score: float) -> None:
    assert SIMILARITIES[metric](answer, expected) == pytest.approx(score)


@pytest.mark.parametrize("text", ["the cat", "the cat sat", "the cat sat on the mat"])
@pytest.mark.parametrize("metric", SIMILARITIES)
def test_no_similarity_is_above_that_of_equal_texts(metric: str, text: str) -> None:
    assert 0 <= SIMILARITIES[metric](text, text) <= 1


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
    graded = grade_text(
        grader(input="{{sample.output_text}}", reference="four", operation=operation),
        case(answer, {}),
    )
    assert (graded.reward, graded.errors) == (reward, {})


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("same + near", 1),
        ("2 * near ^ 2 - same / 4", 2),
        ("min(same, near) + max(0.25, abs(-0.5))", 0.5),
        ("min(0.25) + max(0.25)", 0.5),
        ("sqrt(floor(4.9)) + ceil(0.1) + log(exp(1))", 4),
    ],
)
def test_a_formula_of_graders(formula: str, value: float) -> None:
    graded = grade_text(multi(formula), case("is Four", {}))
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
        check_grader(multi(formula))
    assert grade_text(multi(formula), case("four", {})).errors.keys() == {"formula_parse_error"}


def test_a_formula_without_a_value_is_an_error_of_the_answer() -> None:
    for formula in ("1 / same", "exp(1000 * near)", "sqrt(-near)"):
        check_grader(multi(formula))
        assert grade_text(multi(formula), case("is Four", {})).errors.keys() == {
            "formula_parse_error"
        }


def test_a_reward_that_ranks_could_not_train_on_is_an_error() -> None:
    for formula in ("exp(500 * near)", "-exp(500 * near)", "10 ^ 12 + near"):
        graded = grade_text(multi(formula), case("is Four", {}))
        assert (graded.reward, graded.errors.keys()) == (0.0, {"other_error"})
    rewards = [
        grade_text(multi(formula), case("is Four", {})).reward
        for formula in ("10 ^ 12", "-10 ^ 12")
    ]
    assert rewards == [MOST_REWARD, -MOST_REWARD]
    trained = [*advantages(rewards, "none"), *advantages([*rewards, 0.0], "group")]
    assert np.isfinite(np.asarray(trained, np.float32)).all()


def test_what_a_template_names_must_be_there() -> None:
    for text, error in (
        ("{{ item.none }}", "invalid_variable_error"),
        ("{{ item.a[3] }}", "invalid_variable_error"),
        ("{{ sample.output_json.a }}", "sample_parse_error"),
    ):
        graded = grade_text(
            grader(input=text, reference="x", operation="ne"), case("no JSON", {"a": [1]})
        )
        assert (graded.reward, graded.errors.keys()) == (0.0, {error})
    nested = grader(
        input="{{item.a[0].b}}/{{ sample.output_json.c }}", reference="1/[2]", operation="eq"
    )
    assert grade_text(nested, case('{"c": [2]}', {"a": [{"b": 1}]})).reward == 1
    for text in ("{{ prompt }}", "{{ sample.tokens }}", "{{ item }}", "{{ item.__class__() }}"):
        with pytest.raises(ValueError, match="names nothing"):
            check_grader(grader(input=text, reference="", operation="eq"))


def test_texts_that_would_take_minutes_are_not_compared() -> None:
    near = grader(
        type="text_similarity",
        input="{{ sample.output_text }}",
        reference="{{ item.a }}",
        evaluation_metric="rouge_l",
    )
    longest = "a b " * (MOST_COMPARED // 4)
    assert grade_text(near, case(longest, {"a": longest})).reward == 1
    assert grade_text(near, case(longest, {"a": longest + "a"})).errors.keys() == {"other_error"}


def test_a_template_that_names_an_answer_hundreds_of_times_is_not_filled_in() -> None:
    named = "{{ sample.output_text }}" * 600
    often = grader(type="string_check", input=named, reference="", operation="ne")
    assert grade_text(often, case("a" * 262_144, {})).errors.keys() == {"other_error"}
    assert grade_text(often, case("a", {})).reward == 1
