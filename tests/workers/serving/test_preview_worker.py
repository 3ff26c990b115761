"""The preview's process without its pipes: bases in turn, and the answers that go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bases import SAMPLE
from workers.serving.__main__ import PreviewWorker

PROMPT = [5, 70, 9, 200, 31]


class Wire:
    """What the worker says."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def say(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def of(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [
            message
            for message in self.said
            if message.get("id") == name and message["kind"] == kind
        ]

    def tokens(self, name: str) -> list[int]:
        return [token for message in self.of(name, "tokens") for token in message["tokens"]]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def worker(wire: Wire) -> PreviewWorker:
    wire_: Any = wire
    return PreviewWorker(wire_)


def load(worker: PreviewWorker, precision: dict[str, Any], path: str = str(SAMPLE)) -> None:
    worker.take(
        {
            "op": "base",
            "load": 1,
            "path": path,
            "precision": precision,
            "threads": 1,
            "memory": None,
        }
    )


def ask(worker: PreviewWorker, name: str, tokens: int = 30) -> None:
    order = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, "ends": False}
    worker.take({"op": "sample", "id": name, "project": "p", **order})


def run(worker: PreviewWorker) -> None:
    while worker.busy:
        worker.step()


def test_answers_go_on_when_their_base_has_its_turn_again(
    worker: PreviewWorker, wire: Wire
) -> None:
    load(worker, {})
    ask(worker, "whole")
    run(worker)
    ask(worker, "cut")
    ask(worker, "cancelled")
    for _ in range(5):
        worker.step()
    load(worker, {"default": "bf16"})
    assert not worker.busy, "what is asked of another base waits"
    worker.take({"op": "cancel", "id": "cancelled"})
    ask(worker, "other", 2)
    run(worker)
    assert wire.of("other", "done")
    assert not wire.of("cut", "done")
    load(worker, {}, "/nowhere")
    assert wire.said[-1]["kind"] == "failed"
    load(worker, {})
    run(worker)
    assert wire.tokens("cut") == wire.tokens("whole")
    assert len(wire.of("cut", "done")) == 1
    assert not wire.of("cancelled", "done")


def test_a_base_that_cannot_be_loaded_again_fails_what_waits_for_it(
    worker: PreviewWorker, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(worker, {})
    ask(worker, "cut")
    worker.step()
    built = PreviewWorker._built

    def gone(*given: Any) -> Any:
        raise OSError("the folder is gone")

    load(worker, {}, "/nowhere")
    monkeypatch.setattr(PreviewWorker, "_built", gone)
    load(worker, {})
    (error,) = wire.of("cut", "error")
    assert error["code"] == "preview_failed"
    monkeypatch.setattr(PreviewWorker, "_built", built)
    load(worker, {})
    assert not worker.busy
    ask(worker, "next", 2)
    run(worker)
    assert wire.of("next", "done")
