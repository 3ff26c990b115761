"""Answers of the engine: the tokens of transformers' `generate`, whatever else is answered at the
same time.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ft_service.data.limited_process import RenderLimits
from ft_service.spec import PrecisionOptions
from tests.support.bases import SAMPLE
from workers.serving import chat_tokens as chat_module
from workers.serving import engine as engine_module
from workers.serving.cached_attention import KeyValueCache
from workers.serving.chat_tokens import Chats, ChatTokenizer
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest, TextRequest

CHATS = [
    json.loads(line)["messages"][:-1]
    for line in (SAMPLE.parents[1] / "data/heldout.jsonl").read_text().splitlines()[:4]
]
LIMIT = 12


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ServedModel(str(SAMPLE), PrecisionOptions(compute="fp32"), torch.device("cpu"), None)


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(str(SAMPLE))


@pytest.fixture(scope="module")
def chat(chats: Chats) -> ChatTokenizer:
    return chats.of(None)


def prompt_of(chat: ChatTokenizer, messages: list[Any]) -> list[int]:
    return chat.tokens(chat.prompt(messages, []).result().text)


@pytest.fixture(scope="module")
def expected(chat: ChatTokenizer) -> list[list[int]]:
    """Tokens by transformers, one conversation at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    answers = []
    for messages in CHATS:
        ids = torch.tensor([prompt_of(chat, messages)])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LIMIT,
            do_sample=False,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


class Heard:
    """What an engine says, and the engine."""

    def __init__(self, served: ServedModel, chats: Chats) -> None:
        self.said: list[dict[str, Any]] = []
        self.engine = Engine(served, chats, self.said.append)

    def ask(self, name: str, messages: list[Any] = CHATS[0], **options: Any) -> None:
        """Ask, and wait until the prompt is rendered."""
        self.engine.add(
            ChatRequest(name, messages, **{"temperature": 0.0, "max_tokens": LIMIT, **options})
        )
        while not self.of(name, "begun") and not self.of(name, "error"):
            self.engine.take_rendered(1.0)

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def of(self, name: str, kind: str, index: int = 0) -> list[dict[str, Any]]:
        return [
            m
            for m in self.said
            if m["id"] == name and m["kind"] == kind and m.get("index", index) == index
        ]

    def text(self, name: str, index: int = 0) -> str:
        return "".join(m["text"] for m in self.of(name, "text", index))


@pytest.fixture
def heard(served: ServedModel, chats: Chats) -> Heard:
    return Heard(served, chats)


def test_answers_that_come_and_go_are_those_of_generate(
    heard: Heard, chat: ChatTokenizer, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts are read in parts, between other answers.
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 20)
    heard.ask("0", CHATS[0])
    for _ in range(4):
        heard.engine.step()
    for number in (1, 2, 3):
        heard.ask(str(number), CHATS[number])
    heard.run()
    for number, tokens in enumerate(expected):
        assert (
            heard.text(str(number))
            == chat.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        )
        ended = tokens[-1] in chat.ends
        assert heard.of(str(number), "end")[0]["reason"] == ("stop" if ended else "length")
        assert heard.of(str(number), "done")[0]["completion_tokens"] == len(tokens)
        assert heard.of(str(number), "begun")[0]["prompt_tokens"] == len(
            prompt_of(chat, CHATS[number])
        )


def test_a_request_for_which_memory_is_short_leaves_the_others_their_answers(
    heard: Heard,
    served: ServedModel,
    chat: ChatTokenizer,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the forward that failed had given its tokens to the first layers alone."""
    extend = KeyValueCache.extend
    room = 6

    def extend_within(memory: KeyValueCache, layer: int, key: Any, value: Any) -> Any:
        if len(memory._layers) == 1 and layer not in memory._layers and key.shape[2] > room:
            raise torch.OutOfMemoryError
        return extend(memory, layer, key, value)

    for number in (0, 1):
        heard.ask(str(number), CHATS[number])
    for _ in range(3):
        heard.engine.step()
    heard.ask("large", [{"role": "user", "content": "word " * 120}])
    monkeypatch.setattr(KeyValueCache, "extend", extend_within)
    heard.engine.step()
    monkeypatch.setattr(KeyValueCache, "extend", extend)
    heard.run()
    assert heard.of("large", "error")[0]["code"] == "out_of_memory"
    for number in (0, 1):
        assert (
            heard.text(str(number))
            == chat.tokenizer.decode(expected[number], skip_special_tokens=True).strip()
        )
        assert not heard.of(str(number), "error")
        assert heard.of(str(number), "done")[0]["completion_tokens"] == len(expected[number])


def test_prompts_are_read_as_they_came_whatever_their_adapters(
    heard: Heard, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side in the row stand those of one adapter, which may be asked for without an end."""
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 20)
    first, second = sorted(({}, {}), key=id)  # adapters that change nothing
    monkeypatch.setattr(served.adapters, "get", {"first": first, "second": second}.__getitem__)
    asked = iter(range(99))
    for _ in range(2):
        heard.engine.add_text(TextRequest(f"{next(asked)}", [5] * 60, 1, adapter="first"))
    heard.engine.add_text(TextRequest("other", [7] * 10, 1, adapter="second"))
    for _ in range(7):
        heard.engine.add_text(TextRequest(f"{next(asked)}", [5] * 60, 1, adapter="first"))
        heard.engine.step()
    assert heard.of("other", "done")


def test_log_probabilities_are_the_models_own(
    heard: Heard, chat: ChatTokenizer, expected: list[list[int]]
) -> None:
    heard.ask("a", top_logprobs=3, temperature=1.5, seed=1)
    heard.run()
    told = [entry for message in heard.of("a", "text") for entry in message["logprobs"]]
    ids = [
        one
        for entry in told
        for one in chat.tokenizer.encode(entry["token"], add_special_tokens=False)[:1]
    ]
    assert len(ids) == len(told) > 3
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    prompt = prompt_of(chat, CHATS[0])
    first = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
    likeliest = first.topk(3)
    assert [entry["logprob"] for entry in told[0]["top_logprobs"]] == pytest.approx(
        likeliest.values.tolist(), abs=1e-4
    )
    assert [entry["token"] for entry in told[0]["top_logprobs"]] == [
        chat.tokenizer.decode([t]) for t in likeliest.indices
    ]
    assert bytes(told[0]["bytes"]).decode() == told[0]["token"]


def test_a_seed_draws_the_same_again_and_its_answers_differ(heard: Heard) -> None:
    for name in ("a", "b"):
        heard.ask(name, n=3, temperature=1.5, seed=5)
    heard.ask("other", n=1, temperature=1.5, seed=6)
    heard.run()
    answers = [heard.text("a", index) for index in range(3)]
    assert answers == [heard.text("b", index) for index in range(3)]
    assert len({*answers, heard.text("other")}) == 4
    assert len(heard.of("a", "done")) == 1


def test_top_p_leaves_only_the_likeliest(heard: Heard) -> None:
    heard.ask("greedy")
    heard.ask("drawn", temperature=1.0, top_p=1e-6)
    heard.run()
    assert heard.text("drawn") == heard.text("greedy")


def test_an_answer_ends_before_a_stop(
    heard: Heard, chat: ChatTokenizer, expected: list[list[int]]
) -> None:
    whole = chat.tokenizer.decode(expected[0], skip_special_tokens=True)
    stop = whole[5:9]
    heard.ask("a", stop=[stop])
    heard.run()
    assert heard.text("a") == whole[: whole.find(stop)].strip()
    assert heard.of("a", "end")[0]["reason"] == "stop"


def test_what_has_no_room_is_refused_and_others_go_on(heard: Heard) -> None:
    heard.ask("long", max_tokens=510)
    heard.ask("tools", tools=[{"type": "function", "function": {"name": "f"}}])
    heard.ask("fine")
    heard.run()
    (error,) = heard.of("long", "error")
    assert (error["code"], error["wrong"]) == ("context_length_exceeded", True)
    assert "512 tokens" in error["message"]
    assert "no place for tools" in heard.of("tools", "error")[0]["message"]
    assert heard.of("fine", "done")


def test_a_dropped_request_costs_no_more_steps(heard: Heard) -> None:
    heard.ask("a", max_tokens=100)
    heard.engine.step()
    heard.engine.drop("a")
    assert not heard.engine.busy
    heard.engine.step()


def test_a_template_that_hangs_costs_its_own_request_and_nobody_waits_for_it(
    heard: Heard, chats: Chats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own template may behave in every line of its data, and not in a chat."""
    monkeypatch.setattr(chat_module, "LIMITS", RenderLimits(seconds=300.0))
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = (
        f"{{% if messages[0].content == 'boom' %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    heard.engine.add(
        ChatRequest("boom", [{"role": "user", "content": "boom"}], adapter=str(tmp_path))
    )
    chats.of(str(tmp_path))._known.result()
    heard.ask("other")
    while not heard.of("other", "done"):
        heard.engine.step()
    assert not heard.of("boom", "error"), "it is not waited for"
    pid = chats.of(str(tmp_path))._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGXCPU)  # as the kernel does at the limit
    heard.run()
    (error,) = heard.of("boom", "error")
    assert (error["wrong"], error["param"]) == (True, "messages")
    assert (
        error["message"]
        == "The chat template took longer than 300 seconds of a processor for this conversation."
    )
    heard.ask("again")
    heard.run()
    assert heard.of("again", "done")


def test_a_request_that_breaks_a_forward_fails_alone(
    heard: Heard,
    served: ServedModel,
    chat: ChatTokenizer,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which of a forward's requests is at fault is not known, and some layers have taken its
    tokens.
    """
    forward = served.forward
    rows = list[int]()

    def broken(pieces: Any) -> torch.Tensor:
        rows.append(len(pieces))
        logits = forward(pieces)
        if any(piece.length > 20 and piece.ids[0] == 7 for piece in pieces):
            raise RuntimeError("an operation has failed")
        return logits

    for number in (0, 1):
        heard.ask(str(number), CHATS[number])
    heard.engine.step()
    heard.engine.add_text(TextRequest("poison", [7] * 40, LIMIT))
    monkeypatch.setattr(served, "forward", broken)
    heard.run()
    (error,) = heard.of("poison", "error")
    assert (error["code"], error["wrong"]) == ("preview_failed", False)
    for number in (0, 1):
        assert (
            heard.text(str(number))
            == chat.tokenizer.decode(expected[number], skip_special_tokens=True).strip()
        )
    assert rows.count(3) == 1, "it is not tried beside others again"
    heard.ask("next")
    heard.ask("beside")
    heard.run()
    assert rows[-1] == 2, "others share forwards"


@pytest.mark.parametrize("place", ["choose", "scores"])
def test_an_error_in_what_is_drawn_is_the_answer_of_its_request(
    heard: Heard,
    chat: ChatTokenizer,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    stock = getattr(engine_module, place)

    def broken(logits: torch.Tensor, *given: Any) -> Any:
        if place == "scores" or given[0].temperature == 2.0:
            raise RuntimeError("invalid multinomial distribution")
        return stock(logits, *given)

    monkeypatch.setattr(engine_module, place, broken)
    heard.ask("0")
    heard.engine.add_text(
        TextRequest("poison", [7] * 4, LIMIT, temperature=2.0, echo=True, top_logprobs=1)
    )
    heard.run()
    assert heard.of("poison", "error")[0]["code"] == "preview_failed"
    assert heard.text("0") == chat.tokenizer.decode(expected[0], skip_special_tokens=True).strip()


def test_a_gpu_that_cannot_go_on_ends_the_process(
    heard: Heard, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    heard.ask("0")
    monkeypatch.setattr(served, "forward", gone)
    monkeypatch.setattr(served, "require_device", gone)
    with pytest.raises(RuntimeError, match="device-side"):
        heard.engine.step()


def test_answers_go_on_where_they_were_when_their_base_is_back(
    heard: Heard, chat: ChatTokenizer, expected: list[list[int]]
) -> None:
    again = ServedModel(str(SAMPLE), PrecisionOptions(compute="fp32"), torch.device("cpu"), None)
    for number in (0, 1):
        heard.ask(str(number), CHATS[number], n=2)
    for _ in range(3):
        heard.engine.step()
    heard.ask("2", CHATS[2])
    # Is rendered meanwhile.
    heard.engine.add(ChatRequest("3", CHATS[3], temperature=0.0, max_tokens=LIMIT))
    heard.engine.park()
    assert sorted(heard.engine.requests) == ["0", "1", "2", "3"]
    heard.engine.drop("2")
    said = len(heard.of("0", "text"))
    heard.engine.resume(again)
    heard.run()
    assert said > 0, "some of it had been said"
    for number in (0, 1, 3):
        assert (
            heard.text(str(number))
            == chat.tokenizer.decode(expected[number], skip_special_tokens=True).strip()
        )
        assert heard.of(str(number), "done")
    assert not heard.of("2", "done")


def test_it_is_told_when_a_request_is_run_that_may_end_the_process(
    heard: Heard,
    served: ServedModel,
    chat: ChatTokenizer,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at() -> Any:
        return next(
            (message["id"] for message in heard.said[::-1] if message["kind"] == "at"), None
        )

    forward = served.forward
    seen = list[tuple[Any, int]]()

    def watched(pieces: Any) -> torch.Tensor:
        seen.append((at(), len(pieces)))
        return forward(pieces)

    monkeypatch.setattr(served, "forward", watched)
    heard.ask("0")
    heard.ask("1", CHATS[1], apart=True)
    heard.engine.add_text(TextRequest("2", [7] * 4, LIMIT))
    heard.run()
    assert {(who, rows) for who, rows in seen if who is not None} == {("1", 1)}
    assert (None, 2) in seen
    assert at() is None
    for number in (0, 1):
        assert (
            heard.text(str(number))
            == chat.tokenizer.decode(expected[number], skip_special_tokens=True).strip()
        )


def test_a_recorded_answer_tells_every_token_that_it_was_sampled_behind_and_that_was_drawn(
    heard: Heard, served: ServedModel, chat: ChatTokenizer, expected: list[list[int]]
) -> None:
    prompt = prompt_of(chat, CHATS[0])
    heard.ask("a", recorded=True, logprobs_at=0.5)
    heard.run()
    end = heard.of("a", "end")[0]
    assert heard.of("a", "begun")[0]["prompt"] == prompt
    assert end["tokens"] == expected[0], "the token that ends the answer is one of them"
    assert "logprobs" not in heard.of("a", "text")[0], "they are not asked for as text"
    ids = torch.tensor([[*prompt, *expected[0]]])
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    logs = (model(ids).logits[0, len(prompt) - 1 : -1] / 0.5).log_softmax(-1)
    drawn = logs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    assert end["logprobs"] == pytest.approx(drawn, abs=1e-4)


@pytest.mark.parametrize("room", [3, 0])
def test_a_recorded_answer_stays_within_its_window(
    heard: Heard, chat: ChatTokenizer, room: int
) -> None:
    window = len(prompt_of(chat, CHATS[0])) + room
    heard.ask("a", recorded=True, window=window)
    heard.run()
    if room:
        end = heard.of("a", "end")[0]
        assert (len(end["tokens"]), end["truncated"]) == (room, True)
    else:
        assert heard.of("a", "error")[0]["code"] == "context_length_exceeded"


def test_a_conversation_that_goes_on_begins_with_the_tokens_that_were_drawn(
    heard: Heard, chat: ChatTokenizer
) -> None:
    """Though its text becomes other tokens: "th" and "e" are not "the"."""
    tokenizer = chat.tokenizer
    text = chat.prompt(CHATS[0], []).result().text
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("th", "e")]
    seen = [*chat.tokens(text), *pieces[0], *pieces[1], tokenizer.eos_token_id]
    again = tokenizer.decode(seen)
    assert chat.tokens(again) != seen
    messages = [
        *CHATS[0],
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": "And?"},
    ]
    plain = prompt_of(chat, messages)
    heard.ask("a", messages, recorded=True, seen=[seen[:3], seen])
    heard.ask("b", messages, recorded=True, seen=[[*seen[:-3], 5]])
    heard.run()
    told = heard.of("a", "begun")[0]["prompt"]
    assert told[: len(seen)] == seen
    assert tokenizer.decode(told) == tokenizer.decode(plain)
    assert heard.of("b", "begun")[0]["prompt"] == plain, "another history is another prompt"
