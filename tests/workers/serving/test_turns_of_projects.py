"""Places, prompts and memory of the engine, shared by projects; answers are those that each gets
alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_service.spec import PrecisionOptions
from tests.support.bases import SAMPLE
from workers.serving import engine as engine_module
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine, shares
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest, TokenRequest
from workers.serving.room import Room

TEXTLESS: Any = SimpleNamespace(ends=frozenset[int](), tokenizer=None)
LONG = [5 + place % 300 for place in range(200)]


@pytest.fixture(scope="module")
def base() -> ServedModel:
    return ServedModel(str(SAMPLE), PrecisionOptions(compute="fp32"), torch.device("cpu"), None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few places, so that steps cost little."""
    for name, most in (("MOST_SEQUENCES", 5), ("MOST_OF_PROJECT", 4), ("MOST_OF_REQUEST", 2)):
        monkeypatch.setattr(engine_module, name, most)


class Shared:
    """An engine, and what it says."""

    def __init__(self, model: ServedModel, chats: Any = TEXTLESS) -> None:
        self.said: list[dict[str, Any]] = []
        self.engine = Engine(model, chats, self.said.append)

    def ask(self, name: str, project: str, prompt: list[int], **options: Any) -> None:
        self.engine.add_tokens(
            TokenRequest(
                name, prompt, project=project, **{"temperature": 0.0, "max_tokens": 4, **options}
            )
        )

    def steps(self, name: str, most: int = 1000) -> int:
        """Steps until a request is answered."""
        for step in range(most):
            if self.of(name, "done"):
                return step
            self.engine.step()
        raise AssertionError(f"{name} is not answered in {most} steps")

    def of(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [
            message for message in self.said if message["id"] == name and message["kind"] == kind
        ]

    def tokens(self, name: str) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for message in self.of(name, "tokens"):
            found.setdefault(message["index"], []).extend(message["tokens"])
        return [found[index] for index in sorted(found)]


def test_a_project_with_thousands_of_answers_keeps_no_chat_of_another_waiting(
    base: ServedModel,
) -> None:
    shared = Shared(base, Chats(str(SAMPLE)))
    for number in range(48):
        shared.ask(
            f"{number}", "b", [5, 6, 7 + number], n=128, max_tokens=200, temperature=2.0, ends=False
        )
    for _ in range(3):
        shared.engine.step()
    chat = ChatRequest("chat", [{"role": "user", "content": "hello"}], project="a", max_tokens=4)
    shared.engine.add(chat)
    while not shared.of("chat", "begun"):
        shared.engine.take_rendered(1.0)
    assert shared.steps("chat", 20) <= 6
    for number in range(48):
        shared.engine.drop(f"{number}")
    assert not shared.engine.busy


@pytest.mark.usefixtures("small")
def test_a_project_with_more_to_do_gets_no_more_than_each_other(base: ServedModel) -> None:
    """Three ask for as many answers as there are places, and more; and answers to a prompt that was
    read do not go first.
    """
    shared = Shared(base)
    for project, requests in (("a", 1), ("b", 4), ("c", 2)):
        for number in range(requests):
            shared.ask(f"{project}{number}", project, [9, 8, 7], n=6, max_tokens=3, ends=False)
    while shared.engine.busy and not shared.of("a0", "done"):
        shared.engine.step()
    ended = [message["id"][0] for message in shared.said if message["kind"] == "end"]
    assert ended.count("b") <= 9
    assert ended.count("c") <= 9


@pytest.mark.usefixtures("small")
def test_others_find_a_place_at_once(base: ServedModel) -> None:
    shared = Shared(base)
    shared.ask("b", "b", [9, 8, 7], n=20, max_tokens=50, ends=False)
    shared.ask("c", "b", [9, 8, 7], n=20, max_tokens=50, ends=False)
    for _ in range(3):
        shared.engine.step()
    assert len(shared.engine._running) == 4
    shared.ask("a", "a", [3, 4], max_tokens=1)
    assert shared.steps("a", 5) == 1


def test_a_short_prompt_is_read_beside_the_long_ones_of_another(
    base: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 20)
    shared = Shared(base)
    for number in range(6):
        shared.ask(f"{number}", "b", LONG, max_tokens=1)
    shared.engine.step()
    shared.ask("a", "a", LONG[:18], max_tokens=1)
    assert shared.steps("a", 60) == 2, "half of each step is its own"


def test_a_budget_is_shared_alike() -> None:
    assert shares({"a": 1000, "b": 3}, 20) == {"b": 3, "a": 17}
    assert shares({"a": 1000, "b": 300, "c": 1}, 21) == {"c": 1, "b": 10, "a": 10}
    assert shares({"a": 5, "b": 0}, 20) == {"b": 0, "a": 5}
    assert shares({"a": 5, "b": 5}, 1) == {"a": 1, "b": 1}, "all get on"
    assert shares({}, 20) == {}


def test_a_project_that_fills_the_memory_makes_room_for_another(
    base: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert base.room is not None
    asked = [("b0", "b", LONG[:60]), ("b1", "b", LONG[1:61]), ("b2", "b", LONG[2:62])]
    alone = Shared(base)
    for name, project, prompt in asked:
        alone.ask(name, project, prompt, max_tokens=60, ends=False)
    alone.ask("a", "a", [3, 4, 5])
    for name in ("b0", "b1", "b2", "a"):
        alone.steps(name)
    monkeypatch.setattr(
        base, "room", Room(base.room.taken(64) * 3, base.room.fixed, base.room.of_token)
    )
    shared = Shared(base)
    for name, project, prompt in asked:
        shared.ask(name, project, prompt, max_tokens=60, ends=False)
    for _ in range(4):
        shared.engine.step()
    shared.ask("a", "a", [3, 4, 5])
    assert shared.steps("a", 40) <= 6
    for name in ("b0", "b1", "b2"):
        shared.steps(name)
    assert [shared.tokens(name) for name in ("a", "b0", "b1", "b2")] == [
        alone.tokens(name) for name in ("a", "b0", "b1", "b2")
    ]


def test_the_order_changes_no_answer(base: ServedModel) -> None:
    prompts = [[5, 9, 100 + number] for number in range(4)]
    alone: list[Any] = []
    for prompt in prompts:
        one = Shared(base)
        one.ask("one", "p", prompt, n=3, max_tokens=6, ends=False)
        one.steps("one")
        alone.append(one.tokens("one"))
    shared = Shared(base)
    for number, prompt in enumerate(prompts):
        shared.ask(f"{number}", f"p{number % 3}", prompt, n=3, max_tokens=6, ends=False)
        shared.engine.step()
    for number, expected in enumerate(alone):
        shared.steps(f"{number}")
        assert shared.tokens(f"{number}") == expected
