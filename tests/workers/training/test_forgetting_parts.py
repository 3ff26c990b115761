"""Parts of the measurement on a model whose chances are known, with and without its adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.errors import DataError
from tests.support.training.looked_up import CHANCES, LookedUp, sample
from workers.data.batches import make_batch
from workers.data.micro_batches import MicroBatchLimits
from workers.training import forgetting
from workers.training.evaluation_prompts import Question
from workers.training.forgetting import _divergence, _Measurement


@contextmanager
def without(model: LookedUp) -> Iterator[None]:
    """Of the base, chances are those of the next token's row."""
    kept = model.table.data
    model.table.data = CHANCES.roll(1, dims=0).log()
    yield
    model.table.data = kept


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(forgetting, "without_adapter", without)
    spec = SimpleNamespace(model=SimpleNamespace(path=""))
    runtime = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), context=None, spec=spec)
    return SimpleNamespace(runtime=runtime, limits=MicroBatchLimits(64), model=LookedUp())


def test_the_divergence_is_of_the_base_from_the_tuned_model(context: Any) -> None:
    batch = make_batch([sample([0, 3, 2], 2), sample([2, 2], 1)], torch.device("cpu"))
    places = [0, 3, 2]
    base, tuned = CHANCES.roll(1, dims=0)[places], CHANCES[places]
    scaled, sums = _divergence(context.model, batch, 0.25)
    expected = (base * (base / tuned).log()).sum().item()
    assert sums.tolist() == [pytest.approx(expected), 2]
    assert (sums.dtype, scaled.item()) == (torch.float64, pytest.approx(0.25 * expected))


@pytest.mark.parametrize("answers", [[[3, 2], [], [2]], [[], [], []]])
def test_answers_are_compared_behind_their_own_questions(
    answers: list[list[int]], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second question has none."""
    questions = [Question(np.array([1, own], np.int32), "", None) for own in (0, 1, 2)]
    monkeypatch.setattr(_Measurement, "_questions", lambda self: questions)
    monkeypatch.setattr(_Measurement, "_written", lambda self, given: answers)
    found = _Measurement(context, 1, 1.0)._answers()
    if not any(answers):
        assert found is None
        return
    base, tuned = CHANCES.roll(1, dims=0)[[0, 3, 2]], CHANCES[[0, 3, 2]]
    nats = (base * (base / tuned).log()).sum().item() / 3
    expected = {"answer_tokens": 3, "divergence": pytest.approx(nats), "agreement": 2 / 3}
    assert found == expected
    rows = [given["starts"] for given in context.model.given[::2]]
    assert rows == [[0, 4, 7]], "two answers at once"


def test_unfinished_answers_are_written_on_while_there_is_time(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second rank of two; a portion takes 20 seconds, and the last begins at 60 of 80."""
    now = [0.0]
    asked: list[Any] = []
    context.runtime.rank, context.runtime.world = 1, 2
    monkeypatch.setattr(forgetting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(forgetting, "ends_of", lambda questions, tokenizer: {9})
    monkeypatch.setattr(_Measurement, "_tokenizer", None)
    monkeypatch.setattr(forgetting.GreedyDecoding, "of", lambda context, count, ends: (count, ends))

    def greedy(runtime: Any, model: Any, begun: Any, decoding: Any) -> list[list[int]]:
        now[0] += 20
        asked.append(([own.tolist() for own in begun], decoding))
        assert torch.equal(model.table.data, CHANCES.roll(1, dims=0).log()), "of the base"
        return [
            [number] * (8 if number < 2 or len(asked) < 2 else 3) for number, _ in enumerate(begun)
        ]

    monkeypatch.setattr(forgetting, "greedy", greedy)
    questions = [Question(np.array([own], np.int32), "", None) for own in range(6)]
    found = _Measurement(context, 1, 75.0, began=0.0)._written(questions)
    first = [[1], [3], [5]]
    second = [[1, *[0] * 8], [3, *[1] * 8], [5, *[2] * 8]]
    assert asked[:2] == [(first, (8, {9})), (second, (8, {9}))]
    assert asked[2][0] == [second[0] + [0] * 8, second[1] + [1] * 8], "the third has ended"
    assert [len(own) for own in found] == [32 if len(asked) == 4 else 24] * 2 + [11]
    assert len(asked) == 4, "the fourth begins at 60 seconds"
    asked.clear()
    now[0] = 0.0
    shorter = _Measurement(context, 1, 74.0, began=0.0)._written(questions)
    assert [len(own) for own in shorter] == [24, 24, 11]


@pytest.mark.parametrize(
    ("template", "refuses", "chats"),
    [("a", False, [True]), ("a", True, [True, False]), (None, False, [False])],
)
def test_prompts_are_chats_where_the_template_takes_them(
    template: str | None,
    refuses: bool,
    chats: list[bool],
    context: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def questions_of(given: Any, tokenizer: Any, options: Any) -> Any:
        asked.append(given)
        if refuses and given:
            raise DataError("it wants a system message")
        return ["question"]

    monkeypatch.setattr(forgetting.TokenOptions, "of", lambda spec: None)
    monkeypatch.setattr(forgetting, "prompts", lambda chat: chat)
    monkeypatch.setattr(forgetting, "questions_of_prompts", questions_of)
    monkeypatch.setattr(_Measurement, "_tokenizer", SimpleNamespace(chat_template=template))
    assert _Measurement(context, 1, 1.0)._questions() == ["question"]
    assert asked == chats


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("text", "answers"), [(True, True), (True, False), (False, True)])
def test_what_there_was_time_for_is_found_and_the_rest_named(
    training: bool, text: bool, answers: bool, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []

    def of_text(self: _Measurement) -> Any:
        modes.append(self.context.model.training)
        return {"tokens": 9, "base_perplexity": 2.0, "perplexity": 3.0} if text else None

    of_answers = {"answer_tokens": 4, "divergence": 0.5, "agreement": 0.75}
    monkeypatch.setattr(forgetting.time, "monotonic", lambda: 12.0)
    monkeypatch.setattr(_Measurement, "_text", of_text)
    monkeypatch.setattr(_Measurement, "_answers", lambda self: of_answers if answers else None)
    context.model.train(training)
    found = _Measurement(context, 3, 20.0, began=10.0).take()
    assert (modes, context.model.training, found.step) == ([False], training, 3)
    what = "" if text and answers else "divergence not measured" if text else "not measured"
    assert (found.left_out or "").partition(",")[0] == what
    assert what == "" or "5% of the job's time (20.0 s)" in (found.left_out or "")
    assert found.perplexity == (3.0 if text else None)
    assert found.divergence == (0.5 if text and answers else None)
    assert found.seconds == (2.0 if text else 0.0)
