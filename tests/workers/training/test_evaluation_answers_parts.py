"""How answers are written on a model whose likeliest words are known, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.answer_format import Answer
from ft_service.data.tokens.sample import ImageUse, Picture
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import EvaluatedPrompt, Evaluation
from tests.support.training.looked_up import CHANCES, LookedUp
from tests.workers.training.test_evaluation_answers import Told, evaluator
from workers.data.micro_batches import MicroBatchLimits
from workers.training import evaluation_answers as module
from workers.training.evaluation_answers import GreedyDecoding, greedy, messages
from workers.training.packing import TOKENS

RUNTIME: Any = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
CHAIN = torch.tensor([[0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]])
NEXT = LookedUp(torch.cat([CHAIN, torch.tensor([[0.7, 0.1, 0.1, 0.1]])]))
"""0 is followed by 1, that by 2, that by 3, and that by 0."""


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("most", "ends", "room", "written"),
    [
        (3, set(), None, [[1, 2, 3], [0, 1, 2], [3, 0, 1]]),
        (3, {3}, None, [[1, 2], [0, 1, 2], []]),
        (9, {3, 2}, None, [[1], [0, 1], []]),
        (9, {3}, 3, [[1, 2], [0], []]),
        (1, set(), None, [[1], [0], [3]]),
    ],
)
def test_the_likeliest_word_follows_until_an_end(
    packed: bool, most: int, ends: set[int], room: int | None, written: list[list[int]]
) -> None:
    limits = MicroBatchLimits(64, packed=packed)
    prompts = [ids(0), ids(1, 3), ids(0, 1, 2)]
    if room is not None:
        written = [*written[:2], []]
    found = greedy(RUNTIME, NEXT, prompts, GreedyDecoding(most, ends, limits, room))
    assert found == written
    assert [len(own) for own in prompts] == [1, 2, 3]


def test_pictures_go_with_their_prompts_and_tokens_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[Any] = []
    seen: list[Any] = []
    monkeypatch.setattr(module, "reshard", freed.append)

    def following(runtime: Any, model: Any, rows: Any, decoding: Any) -> list[int]:
        seen.append([(row.ids.tolist(), row.ids.dtype, row.images) for row in rows])
        return [7] * len(rows)

    monkeypatch.setattr(module, "_next_tokens", following)
    use = (ImageUse(0, 1, Picture.of(b"picture")),)
    decoding = GreedyDecoding(3, {9}, MicroBatchLimits(64))
    tokens: list[int] = []

    def goes_on(token: int) -> bool:
        tokens.append(token)
        return token < 3

    assert greedy(RUNTIME, NEXT, [ids(4), ids(5)], decoding, goes_on, images=[(), use]) is None
    assert (tokens, freed) == ([1, 2, 3], [NEXT])
    int32 = np.dtype(np.int32)
    assert [sorted(own, key=str) for own in seen] == [
        [([4], int32, ()), ([5], int32, use)],
        [([4, 7], int32, ()), ([5, 7], int32, use)],
    ]


def test_a_forward_has_as_many_tokens_as_usual_and_any_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "room_of", lambda context: 77)
    for tokens in (TOKENS - 1, TOKENS + 1):
        context: Any = SimpleNamespace(limits=MicroBatchLimits(tokens, 3, packed=False))
        own = GreedyDecoding.of(context, 5, {9})
        assert own.limits == MicroBatchLimits(max(tokens, TOKENS), None, packed=False)
        assert (own.max_new_tokens, own.ends, own.room) == (5, {9}, 77)
    forwards = module._forwards({3: 4, 5: 4, 8: 2}, MicroBatchLimits(6))
    assert sorted(map(sorted, forwards)) in ([[3], [5, 8]], [[3, 8], [5]])
    assert module._forwards({}, MicroBatchLimits(6)) == []
    assert LookedUp().table.shape == CHANCES.shape


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_ranks_answer_in_turn_and_all_know_all_answers(
    rank: int, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = evaluator(RunDir(tmp_path), 1, Told(), ("a", "b", "c"))
    own._runtime.rank, own._runtime.world = rank, 2  # type: ignore[misc]
    for number, question in enumerate(own._questions):
        question.ids[:] = number
    given: list[Any] = []

    def write(
        runtime: Any, model: Any, prompts: Any, decoding: Any, goes_on: Any, images: Any
    ) -> Any:
        given.append(([own.tolist() for own in prompts], model.training, images, decoding))
        return [[100 + int(own[0])] for own in prompts]

    of_all = [[Answer("d"), Answer("f")], [Answer("e")]]

    def from_all(value: Any) -> Any:
        assert value == of_all[rank]
        return of_all

    monkeypatch.setattr(module, "greedy", write)
    monkeypatch.setattr(module, "from_all", from_all)
    model = own._context.model
    model.train(training)
    assert own.ask(3) == [Answer("d"), Answer("e"), Answer("f")]
    prompts = [[0], [2]] if rank == 0 else [[1]]
    ((asked, mode, images, decoding),) = given
    assert (asked, mode, images) == (prompts, False, [()] * len(prompts))
    assert (decoding.ends, decoding.max_new_tokens) == ({0}, own._options.max_new_tokens)
    assert (model.training, own.on_validation) == (training, own._options.on_validation)


@pytest.mark.parametrize(
    ("tokens", "prompts", "told"),
    [(15, 2, None), (16, 1, "prompt 1 leaves no room"), (17, 3, "prompt 1 (and 2 more) leaves")],
)
def test_prompts_as_long_as_the_context_are_told_of(
    tokens: int, prompts: int, told: str | None, tmp_path: Path
) -> None:
    said = Told()
    own = evaluator(RunDir(tmp_path), 1, said, (None,) * prompts, tokens=tokens)
    own._tell_of_room()
    assert len(said.said) == (told is not None)
    assert told is None or told in said.said[0]


def test_a_conversation_is_shown_with_its_roles_and_a_metric_without_a_before() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    row = EvaluatedPrompt(
        **{"prompt": "x", "messages": turns, "reference": "r", "base": "", "tuned": "t"},
        scores={},
        base_scores={},
    )
    found = Evaluation(
        step=4, time=0.0, metrics={"a": 0.5, "b": 1}, base_metrics={"b": 0.25}, samples=[row]
    )
    first, second = messages(found, everything=True)
    assert first.endswith("1 prompt: a 0.50 (before: 0.00), b 1.00 (before: 0.25).")
    assert second == "Asked: system: be brief\nuser: hi\nExpected: r\nBefore: \nAfter: t"
    assert messages(found, everything=False) == [first]
