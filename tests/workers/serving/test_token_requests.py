"""Continuations of tokens: those of transformers' `generate`, with the log-probabilities of a plain
forward in fp32.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ft_service.spec import PrecisionOptions
from tests.support.bases import SAMPLE
from tests.support.training.models import adapter_value, save_tiny
from workers.model.peft_adapter import PeftAdapter
from workers.serving import answers as answers_module
from workers.serving import engine as engine_module
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine
from workers.serving.model import ServedModel, TokenSpan
from workers.serving.requests import ChatRequest, TextRequest, TokenRequest

FP32 = PrecisionOptions(compute="fp32")
PROMPT = [5, 70, 9, 200, 31, 8, 6, 77, 12, 90, 4, 310]
OTHER = [44, 45, 46, 300, 301, 17, 8, 260, 131, 9, 99]
LIMIT = 10


@pytest.fixture(scope="module")
def base() -> ServedModel:
    return ServedModel(str(SAMPLE), FP32, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def talks() -> Chats:
    return Chats(str(SAMPLE))


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folder → plain PEFT model, of two versions of an adapter."""
    made = {}
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
        tuned = get_peft_model(
            model,
            LoraConfig(r=4, lora_alpha=256, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(adapter_value(name, parameter.shape, seed))
        folder = str(tmp_path_factory.mktemp("versions") / f"step-{seed}")
        tuned.save_pretrained(folder)
        made[folder] = tuned.eval()
    return made


class Sampler:
    """An engine, and what it says of each request."""

    def __init__(self, model: ServedModel, chats: Any) -> None:
        self.said: list[dict[str, Any]] = []
        self.engine = Engine(model, chats, self.said.append)

    def ask(self, name: str, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
        self.engine.add_tokens(
            TokenRequest(name, list(prompt), **{"temperature": 0.0, "max_tokens": LIMIT, **options})
        )

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def of(self, name: str, kind: str, index: int | None = None) -> list[dict[str, Any]]:
        return [
            m
            for m in self.said
            if m.get("id") == name and m["kind"] == kind and index in (None, m.get("index"))
        ]

    def all(self, name: str, field: str, index: int | None = 0, kind: str = "tokens") -> list[Any]:
        """What all messages of a kind say, one behind the other."""
        return [value for message in self.of(name, kind, index) for value in message[field]]

    def reason(self, name: str, index: int = 0) -> str:
        return self.of(name, "end", index)[0]["reason"]


@pytest.fixture
def sampler(base: ServedModel, talks: Chats) -> Sampler:
    return Sampler(base, talks)


def greedy(model: Any, prompt: Sequence[int], tokens: int = LIMIT) -> list[int]:
    """Tokens by transformers, that of an end included."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logs_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of all words behind each token, fp32."""
    return model(torch.tensor([list(tokens)])).logits[0].log_softmax(dim=-1)


def chosen(logs: torch.Tensor, tokens: Sequence[int], start: int) -> list[float]:
    """Log-probabilities of the tokens from `start` on."""
    return [float(logs[place - 1, tokens[place]]) for place in range(start, len(tokens))]


def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    sampler: Sampler, plain: Any
) -> None:
    sampler.ask("a", top_logprobs=3)
    sampler.ask("b", OTHER)
    sampler.run()
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        tokens = sampler.all(name, "tokens")
        assert tokens == greedy(plain, prompt)
        whole = [*prompt, *tokens]
        expected = chosen(logs_of(plain, whole), whole, len(prompt))
        assert sampler.all(name, "logprobs") == pytest.approx(expected, abs=1e-4)
        assert sampler.of(name, "done")[0]["completion_tokens"] == len(tokens)
    likeliest = logs_of(plain, PROMPT)[-1].topk(3)
    (told, *_) = sampler.all("a", "top")
    assert [token for token, _ in told] == likeliest.indices.tolist()
    assert [logprob for _, logprob in told] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_log_probabilities_of_a_prompt_are_those_of_a_plain_forward(
    sampler: Sampler, base: ServedModel, plain: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SCORED_LOGITS", at_once * base.words)
    largest: list[int] = []
    forward = base.forward
    monkeypatch.setattr(
        base,
        "forward",
        lambda pieces: (largest.append(max(p.rows for p in pieces)), forward(pieces))[1],
    )
    sampler.ask("whole", scored=len(PROMPT) - 1, top_prompt_logprobs=2)
    sampler.ask("end", OTHER, scored=3)
    sampler.ask("none", OTHER)
    sampler.run()
    assert max(largest) <= at_once, "no more logits than that exist at once"
    logs = logs_of(plain, PROMPT)
    assert sampler.all("whole", "logprobs", None, "scores") == pytest.approx(
        chosen(logs, PROMPT, 1), abs=1e-4
    )
    assert sampler.of("whole", "scores")[0]["place"] == 1
    top = sampler.all("whole", "top", None, "scores")
    assert [[token for token, _ in own] for own in top] == logs[:-1].topk(2).indices.tolist()
    expected = chosen(logs_of(plain, OTHER), OTHER, len(OTHER) - 3)
    assert sampler.all("end", "logprobs", None, "scores") == pytest.approx(expected, abs=1e-4)
    assert sampler.of("end", "scores")[0]["place"] == len(OTHER) - 3
    assert not sampler.of("none", "scores")
    assert sampler.all("whole", "tokens") == greedy(plain, PROMPT)
    assert sampler.all("end", "tokens") == sampler.all("none", "tokens") == greedy(plain, OTHER)


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", "granitemoehybrid"],
    ids=["its head is the last", "logits are scaled"],
)
def test_layers_that_keep_a_state_give_the_same_log_probabilities(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompt is read whole and once, its logits are made in parts; continuations begin with
    copies of the state.
    """
    folder = save_tiny(family, tmp_path / "base")
    served = ServedModel(str(folder), FP32, torch.device("cpu"), None)
    assert served.by_state
    monkeypatch.setattr(engine_module, "SCORED_LOGITS", 4 * served.words)

    class NoText:
        ends = frozenset[int]()
        tokenizer = None

    sampler = Sampler(served, NoText())
    prompt = [5, 9, 100, 3, 77, 21, 8, 250, 13]
    read: list[int] = []
    embedding = served._model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0].numel())
    )
    sampler.ask("a", prompt, n=3, scored=len(prompt) - 1, max_tokens=5, temperature=1.0, seed=3)
    sampler.run()
    hook.remove()
    assert [tokens for tokens in read if tokens > 1] == [len(prompt)], "once, whatever its length"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = chosen(logs_of(model, prompt), prompt, 1)
    assert sampler.all("a", "logprobs", None, "scores") == pytest.approx(expected, abs=1e-4)
    assert [len(message["logprobs"]) for message in sampler.of("a", "scores")] == [4, 4]
    for index in range(3):
        whole = [*prompt, *sampler.all("a", "tokens", index)]
        logprobs = chosen(logs_of(model, whole), whole, len(prompt))
        assert sampler.all("a", "logprobs", index) == pytest.approx(logprobs, abs=1e-4)


def test_several_continuations_read_the_prompt_once_and_differ(
    sampler: Sampler, base: ServedModel, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.engine._turns.places = 3
    monkeypatch.setattr(engine_module, "MOST_OF_REQUEST", 2)
    read: list[int] = []
    forward = base.forward
    monkeypatch.setattr(
        base,
        "forward",
        lambda pieces: (read.extend(len(p.ids) for p in pieces), forward(pieces))[1],
    )
    sampler.ask("many", n=6, temperature=1.5, seed=11)
    sampler.run()
    assert [tokens for tokens in read if tokens > 1] == [len(PROMPT)]
    drawn = [sampler.all("many", "tokens", index) for index in range(6)]
    assert len({tuple(tokens) for tokens in drawn}) == 6
    for index, tokens in enumerate(drawn):
        whole = [*PROMPT, *tokens]
        expected = chosen(logs_of(plain, whole), whole, len(PROMPT))
        assert sampler.all("many", "logprobs", index) == pytest.approx(expected, abs=1e-4), (
            "at temperature 1, whatever is drawn"
        )
    assert len(sampler.of("many", "done")) == 1


def test_what_a_seed_draws_depends_on_nothing_else_that_runs(sampler: Sampler) -> None:
    for name, seed in (("alone", 5), ("other", 6)):
        sampler.ask(name, n=3, temperature=1.5, seed=seed)
        sampler.run()
    sampler.ask("beside", OTHER, n=4, temperature=2.0)
    sampler.engine.step()
    sampler.ask("again", n=3, temperature=1.5, seed=5)
    sampler.run()
    alone, again, other = (
        [sampler.all(name, "tokens", index) for index in range(3)]
        for name in ("alone", "again", "other")
    )
    assert again == alone
    assert other != alone
    sampler.ask("first", temperature=1.5)
    sampler.ask("second", temperature=1.5)
    sampler.run()
    assert sampler.all("first", "tokens") != sampler.all("second", "tokens"), (
        "without a seed it is random"
    )


def test_a_continuation_ends_with_a_token_or_a_text_to_stop_at(
    sampler: Sampler, talks: Chats, plain: Any
) -> None:
    tokens = greedy(plain, PROMPT)
    ended = next(place for place in range(2, len(tokens)) if tokens[place] not in tokens[:place])
    sampler.ask("token", stop_tokens=[tokens[ended]])
    pieces = [talks.tokenizer.decode(tokens[: place + 1]) for place in range(len(tokens) - 1)]
    stop = pieces[4][len(pieces[2]) :]
    assert stop
    first = next(place for place, text in enumerate(pieces) if stop in text)
    sampler.ask("text", stop_texts=["never", stop])
    sampler.run()
    assert sampler.all("token", "tokens") == tokens[: ended + 1], "the token is among them"
    assert len(sampler.all("token", "logprobs")) == ended + 1
    assert sampler.reason("token") == "stop"
    assert sampler.all("text", "tokens") == tokens[: first + 1], (
        "up to the token that completes the text"
    )
    assert sampler.reason("text") == "stop"


def test_the_end_of_the_base_ends_it_too_unless_nothing_shall(
    sampler: Sampler, talks: Chats, plain: Any
) -> None:
    tokens = greedy(plain, PROMPT)
    assert tokens[-1] in talks.ends
    assert len(tokens) < LIMIT
    sampler.ask("by default")
    sampler.ask("beside others", stop_tokens=[1])
    sampler.ask("never", ends=False)
    sampler.run()
    assert (
        sampler.all("by default", "tokens") == sampler.all("beside others", "tokens") == tokens
    ), "the end is among them"
    assert sampler.reason("by default") == "stop"
    assert sampler.all("never", "tokens")[: len(tokens)] == tokens
    assert (len(sampler.all("never", "tokens")), sampler.reason("never")) == (LIMIT, "length")


def test_special_tokens_count_as_text_to_stop_at(
    sampler: Sampler, talks: Chats, plain: Any
) -> None:
    (special, *_) = talks.ends
    answer = answers_module.TokenAnswer.of(
        TokenRequest("a", PROMPT, stop_texts=[talks.tokenizer.decode([special])], ends=False),
        0,
        talks,
        lambda _: None,
    )
    assert not answer.push(answers_module.Choice(greedy(plain, PROMPT)[0], -1.0))
    assert answer.push(answers_module.Choice(special, -1.0))


def test_versions_of_an_adapter_give_what_each_gives_alone(
    sampler: Sampler, plain: Any, adapters: dict[str, PeftModel]
) -> None:
    first, second = adapters
    sampler.ask("first", adapter=first, scored=4)
    sampler.ask("second", adapter=second)
    sampler.ask("base")
    sampler.run()
    expected = {
        name: greedy(model, PROMPT)
        for name, model in (("first", adapters[first]), ("second", adapters[second]))
    }
    assert expected["first"] != expected["second"]
    for name, tokens in expected.items():
        assert sampler.all(name, "tokens") == tokens
    assert sampler.all("base", "tokens") == greedy(plain, PROMPT)
    scored = chosen(logs_of(adapters[first], PROMPT), PROMPT, len(PROMPT) - 4)
    assert sampler.all("first", "logprobs", None, "scores") == pytest.approx(scored, abs=1e-4)


def test_a_conversation_is_answered_beside_tokens(sampler: Sampler, plain: Any) -> None:
    sampler.ask("tokens", max_tokens=40, ends=False)
    sampler.engine.step()
    sampler.engine.add(
        ChatRequest("chat", [{"role": "user", "content": "hello"}], temperature=0.0, max_tokens=5)
    )
    sampler.run()
    assert sampler.of("chat", "done")[0]["completion_tokens"] <= 5
    expected = greedy(plain, PROMPT)
    assert sampler.all("tokens", "tokens")[: len(expected)] == expected
    assert len(sampler.all("tokens", "tokens")) == 40


def test_a_cancelled_request_gives_its_places_to_others(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.engine._turns.places = 2
    sampler.ask("long", n=5, max_tokens=300)
    sampler.engine.step()
    sampler.engine.step()
    sampler.ask("short")
    sampler.engine.drop("long")
    sampler.run()
    assert sampler.of("short", "done")
    assert not sampler.of("long", "done")
    assert len(sampler.all("long", "tokens", None)) < 300


def test_a_request_with_many_continuations_leaves_room_for_others(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.engine._turns.places = 4
    monkeypatch.setattr(engine_module, "MOST_OF_REQUEST", 2)
    sampler.ask("many", n=7, max_tokens=8, ends=False)
    sampler.engine.step()
    sampler.ask("short", OTHER, max_tokens=2, ends=False)
    sampler.run()
    order = [message["id"] for message in sampler.said if message["kind"] == "end"]
    assert order.index("short") < 2
    assert order.count("many") == 7


def test_tokens_are_reported_in_parts(
    sampler: Sampler, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "TOLD_TOKENS", 4)
    sampler.ask("a", ends=False)
    sampler.run()
    assert [len(message["tokens"]) for message in sampler.of("a", "tokens")] == [4, 4, 2]
    expected = greedy(plain, PROMPT)
    assert sampler.all("a", "tokens")[: len(expected)] == expected


def test_what_cannot_be_sampled_is_refused_by_name(
    sampler: Sampler, base: ServedModel, tmp_path: Path
) -> None:
    sampler.ask("word", [5, base.vocabulary])
    sampler.ask("stop", stop_tokens=[3, -1])
    sampler.ask("room", max_tokens=base.context - len(PROMPT) + 1)
    sampler.ask("adapter", adapter=str(tmp_path / "gone"))
    sampler.ask("fits", max_tokens=None, stop_tokens=list(range(base.vocabulary)))
    sampler.run()
    errors = {name: sampler.of(name, "error")[0] for name in ("word", "stop", "room", "adapter")}
    assert all(error["wrong"] for error in errors.values())
    limit = f"the base's tokens are 0 to {base.vocabulary - 1}"
    assert errors["word"]["message"].startswith(f"prompt[1] = {base.vocabulary}: {limit}")
    assert errors["stop"]["message"].startswith(f"stop[1] = -1: {limit}")
    assert (errors["room"]["code"], errors["room"]["param"]) == (
        "context_length_exceeded",
        "prompt",
    )
    assert "folder is not there" in errors["adapter"]["message"]
    assert len(sampler.all("fits", "tokens")) == 1


def without_last_matrix(folder: Path, copy: Path) -> str:
    """A copy of an adapter whose file lacks a matrix."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    del tensors[max(name for name in tensors if "lora_B" in name)]
    save_file(tensors, copy / "adapter_model.safetensors", metadata={"format": "pt"})
    return str(copy)


@pytest.mark.parametrize("cause", [None, torch.OutOfMemoryError, OSError])
def test_an_adapter_that_cannot_be_loaded_costs_its_own_request(
    sampler: Sampler,
    plain: Any,
    adapters: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: type[Exception] | None,
) -> None:
    """`cause`: what reading its matrices raises; None: what safetensors does for one that is
    missing.
    """
    broken = without_last_matrix(Path(next(iter(adapters))), tmp_path / "adapter")
    if cause is not None:
        monkeypatch.setattr(PeftAdapter, "update", Mock(side_effect=cause))
    sampler.ask("fine")
    sampler.engine.step()
    sampler.engine.prepare(broken, [])
    sampler.ask("tokens", adapter=broken)
    sampler.engine.add_text(TextRequest("text", list(PROMPT), LIMIT, adapter=broken))
    sampler.engine.add(ChatRequest("chat", [{"role": "user", "content": "hello"}], adapter=broken))
    while not sampler.of("chat", "error"):
        sampler.engine.take_rendered(1.0)
    sampler.run()
    code = "out_of_memory" if cause is torch.OutOfMemoryError else "model_not_served"
    for name in ("tokens", "text", "chat"):
        (error,) = sampler.of(name, "error")
        assert (error["code"], error["param"], error["wrong"]) == (code, "model", True)
    assert sampler.all("fine", "tokens") == greedy(plain, PROMPT)


def test_probes_that_found_no_memory_are_reported_by_the_next_request(
    sampler: Sampler, base: ServedModel, adapters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next(iter(adapters))
    with monkeypatch.context() as short:
        short.setattr(base, "logprobs", Mock(side_effect=torch.OutOfMemoryError))
        sampler.ask("first", adapter=folder, probes=[OTHER])
    (error,) = sampler.of("first", "error")
    assert error["code"] == "out_of_memory"
    for name in ("second", "third"):
        sampler.ask(name, adapter=folder, probes=[OTHER])
    sampler.run()
    (probed,) = [message for message in sampler.said if message["kind"] == "probed"]
    assert probed["logprobs"] == [base.logprobs(OTHER, base.adapters.get(folder))]
    assert sampler.of("second", "done")


def test_an_adapter_that_diverged_fails_alone(
    sampler: Sampler, base: ServedModel, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = base.forward

    def broken(pieces: Sequence[TokenSpan]) -> torch.Tensor:
        logits = forward(pieces)
        if pieces[0].ids[:2] == OTHER[:2]:
            logits = logits.clone().index_fill_(1, torch.tensor([7]), float("nan"))
        return logits

    monkeypatch.setattr(base, "forward", broken)
    sampler.ask("drawn", OTHER, n=3)
    sampler.run()
    sampler.ask("scored", OTHER, scored=5)
    sampler.run()
    sampler.ask("fine")
    sampler.run()
    for name in ("drawn", "scored"):
        (error,) = sampler.of(name, "error")
        assert "no finite numbers" in error["message"]
        assert not sampler.of(name, "done")
    assert sampler.all("fine", "tokens") == greedy(plain, PROMPT)


def test_a_forked_cache_shares_what_is_there_and_nothing_that_comes(base: ServedModel) -> None:
    memory = KeyValueCache()
    base.forward([TokenSpan(PROMPT, Span(memory, 0, len(PROMPT)), 0, None)])
    forked = memory.fork()

    def go_on(cache: KeyValueCache, tokens: Sequence[int]) -> torch.Tensor:
        return [
            base.forward([TokenSpan([t], Span(cache, 0, 1), len(PROMPT) + n, None)])
            for n, t in enumerate(tokens)
        ][-1]

    first = go_on(memory, [3, 4])
    second = go_on(forked, [100, 200])
    for tokens, logits in (([3, 4], first), ([100, 200], second)):
        whole = [*PROMPT, *tokens]
        alone = base.forward([TokenSpan(whole, Span(KeyValueCache(), 0, len(whole)), 0, None)])
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
