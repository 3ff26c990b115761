"""Prompts of an evaluation, made of samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from workers.training import evaluation_prompts
from workers.training.evaluation_prompts import last_stretch, without_end


@pytest.mark.parametrize(
    ("targets", "stretch"),
    [
        ([0, 0, 1, 1], (2, 4)),
        ([0, 1, 1, 0, 0, 1, 0], (5, 6)),
        ([1, 1, 1], (1, 3)),
        ([0, 1], (1, 2)),
    ],
)
def test_the_expected_answer_is_the_last_learned_stretch(
    targets: list[int], stretch: tuple[int, int]
) -> None:
    assert last_stretch(np.array(targets, dtype=bool)) == stretch


class Words:
    """A tokenizer whose tokens are numbers: 9 ends an answer, 8 is a blank."""

    all_special_ids = (9,)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<added>": 7}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join("" if token == 8 else str(token) for token in ids)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [9, 5, 6] if add_special_tokens else [5, 6]}


@pytest.mark.parametrize(
    ("learned", "answer", "ends"),
    [
        ([3, 4], [3, 4], set()),
        ([3, 4, 9], [3, 4], {9}),
        ([3, 9, 4], [3, 9, 4], set()),
        ([3, 7], [3], {7}),
        ([3, 9, 8, 8], [3], {9}),
        ([3, 8], [3, 8], set()),
        ([9], [], {9}),
    ],
)
def test_the_token_that_ends_an_answer_is_no_part_of_it(
    learned: list[int], answer: list[int], ends: set[int]
) -> None:
    assert without_end(learned, Words()) == (answer, ends)


@pytest.mark.parametrize("has_template", [True, False])
def test_a_question_is_what_stands_before_the_last_answer_and_is_written_as_a_prompt(
    has_template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluation_prompts, "turns_of", lambda shown, tokenizer, write: write(shown)
    )
    monkeypatch.setattr(evaluation_prompts, "text_of", lambda shown, tokenizer: f"text {shown}")
    monkeypatch.setattr(evaluation_prompts, "closing_of", lambda text: f"closing {text}")
    monkeypatch.setattr(
        evaluation_prompts.Question,
        "read",
        lambda self, learned, tokenizer, answers: SimpleNamespace(whole=learned),
    )
    written: list[Any] = []

    def write(turns: Any, *, prompt: bool = False) -> Any:
        written.append((turns, prompt))
        return ["turns"]

    sample = Tokens(
        np.array([1, 2, 3, 4, 9], dtype=np.int32), np.array([False, False, True, True, True])
    )
    answers: Any = SimpleNamespace(marks_calls=True)
    given: Any = write if has_template else None
    question = evaluation_prompts._question(sample, Words(), answers, given)
    assert question.ids.tolist() == [1, 2]
    assert (question.prompt, question.closing) == ("text [1, 2]", "closing 1 2")
    assert (question.reference, question.ends, question.tools) == ([3, 4], {9}, True)
    assert question.messages == (["turns"] if has_template else None)
    assert written == ([([1, 2], True)] if has_template else [])


def test_answers_end_with_the_eos_and_with_what_the_expected_ones_do() -> None:
    def question(*ends: int) -> Any:
        return SimpleNamespace(ends=frozenset(ends))

    eos: Any = SimpleNamespace(eos_token_id=2)
    none: Any = SimpleNamespace(eos_token_id=None)
    questions = [question(7), question(), question(7, 9)]
    assert evaluation_prompts.ends_of(questions, eos) == {2, 7, 9}
    assert evaluation_prompts.ends_of(questions, none) == {7, 9}
    assert evaluation_prompts.ends_of([], none) == set()


def test_a_prompt_is_shown_with_a_text_in_place_of_each_picture() -> None:
    picture = Picture.of(b"picture")
    ids = np.arange(10, 20, dtype=np.int32)
    uses = (ImageUse(1, 3, picture), ImageUse(3, 6, picture), ImageUse(8, 9, picture))
    shown = evaluation_prompts._with_names(Tokens(ids, ids > 99, images=uses), Words())
    assert shown == [10, 5, 6, 5, 6, 16, 17, 5, 6, 19]
    assert evaluation_prompts._with_names(Tokens(ids[:2], ids[:2] > 99), Words()) == [10, 11]


def test_a_sample_with_pictures_is_asked_with_those_before_its_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation_prompts, "closing_of", lambda text: f"closes {text}")
    picture = Picture.of(b"picture")
    ids = np.array([3, 4, 4, 3, 6, 9, 3], dtype=np.int32)
    targets = np.array([0, 0, 0, 0, 1, 1, 0], dtype=bool)
    sample = Tokens(ids, targets, images=(ImageUse(1, 3, picture), ImageUse(6, 7, picture)))
    read = SimpleNamespace(read=lambda text, **how: SimpleNamespace(whole=(text, how)))
    answers: Any = SimpleNamespace(marks_calls=True, **vars(read))
    own = evaluation_prompts._question(sample, Words(), answers, None)
    assert (own.ids.tolist(), own.prompt, own.ends) == ([3, 4, 4, 3], "3 5 6 3", {9})
    assert [use.begin for use in own.images] == [1]
    assert (own.messages, own.tools, own.closing) == (None, True, "closes 3 4 4 3")
    assert own.reference == ("6", {"tools": True, "closing": "closes 3 4 4 3"})
