"""What is learned of a rollout is what was drawn, by id, whatever a chat template makes of its
history: real templates, the engine, and the rows that ranks train on.

The model draws what a script says (thoughts, calls, words, in pieces that a tokenizer would not
make), with the log-probabilities that it has for it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from api.wire.completion_request import parse_completion
from ft_service.agents.open_rollouts import AnsweredCall, CallUnderWay, OpenRollout
from ft_service.agents.running import EndedRollout
from ft_service.control.reinforcement.agent_rollouts import answer_of
from ft_service.data.chat_line import parse_conversation
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.reinforcement.step_records import TrainedRow
from ft_service.spec import PrecisionOptions
from tests.support.agents import new_rollout
from tests.support.bases import SAMPLE
from tests.support.training.models import save_tiny_llama
from workers.serving import engine as engine_module
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest, TextRequest
from workers.serving.sampling import Choice, Sampling

FILES = Path(__file__).parents[2] / "support/chat_templates_by_family"
FAMILIES = ("qwen 3", "deepseek r1", "gpt-oss")
SPECIAL = re.compile(r"<[|｜][^<>\n'=: ]{0,50}[|｜]>")  # noqa: RUF001
TURNS = 3
TEMPERATURE = 0.5
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "2 and 2?"}
WORDS = ("four", "it is 4", "")


class Scripts:
    """What the model draws next."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def choose(self, logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
        token = self.tokens.pop(0)
        logs = (logits / sampling.logprobs_at).log_softmax(-1)
        return Choice(token, float(logs[token]), ())


class Base:
    """A tiny base with the chat template of a family, and its engine."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = family
        template = (FILES / f"{family}.jinja").read_text()
        special = sorted({match[0] for match in SPECIAL.finditer(template)} | {"</s>"})
        made: Any = PreTrainedTokenizerFast(
            tokenizer_object=load_tokenizer(str(SAMPLE))._tokenizer,
            eos_token="<|im_end|>" if family == "qwen 3" else "</s>",
            bos_token="</s>",
            extra_special_tokens=special,
        )
        made.chat_template = template
        save_tiny_llama(folder, vocab_size=len(made), max_position_embeddings=2048)
        made.save_pretrained(folder)
        stops = {"gpt-oss": ["<|call|>", "<|return|>"], "deepseek r1": ["<｜end▁of▁sentence｜>"]}  # noqa: RUF001
        ids = made.convert_tokens_to_ids(stops.get(family, ["<|im_end|>"]))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        self.tokenizer = load_tokenizer(str(folder))
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.said: list[dict[str, Any]] = []
        precision = PrecisionOptions(compute="fp32")
        served = ServedModel(str(folder), precision, torch.device("cpu"), None)
        self.engine = Engine(served, Chats(str(folder)), self.said.append)

    def call(self, rollout: OpenRollout, messages: list[Any]) -> AnsweredCall:
        # This template has no place for tools.
        offered = [] if self.family == "deepseek r1" else [TOOL]
        parsed, tools, _ = parse_conversation(messages, offered)
        order = {"messages": parsed, "tools": tools, "max_tokens": None}
        call = rollout.begin(order, messages, {})
        self.said.clear()
        self.engine.add(ChatRequest("a", **{**call.order, "adapter": None}))
        while not any(part["kind"] in ("begun", "error") for part in self.said):
            self.engine.take_rendered(1.0)
        return self.answered(rollout, call)

    def continued(self, rollout: OpenRollout, prompt: str | list[int]) -> AnsweredCall:
        """The call of an agent that renders its own prompts."""
        body = {"model": "", "prompt": prompt, "max_tokens": 512}
        call = rollout.begin(parse_completion(body).order(prompt, None), None, {})
        self.said.clear()
        order = {name: value for name, value in call.order.items() if name != "op"}
        self.engine.add_text(TextRequest("a", **{**order, "adapter": None}))
        return self.answered(rollout, call)

    def answered(self, rollout: OpenRollout, call: CallUnderWay) -> AnsweredCall:
        while self.engine.busy:
            self.engine.step()
        assert [part["message"] for part in self.said if part["kind"] == "error"] == []
        return rollout.end(call, self.said)

    def drawn(self, rng: random.Random) -> list[int]:
        """An answer as the family writes it, in pieces that are tokens by themselves."""
        thought, words = rng.choice(WORDS), rng.choice(WORDS)
        calls = self.family != "deepseek r1" and rng.random() < 0.4
        arguments = json.dumps({"a": rng.randrange(9)})
        match self.family:
            case "gpt-oss":
                channel = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
                said = "<|channel|>final<|message|>{}<|return|>".format(words or "4")
                called = " to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
                text = channel.format(thought) + (called.format(arguments) if calls else said)
            case "deepseek r1":
                text = f"{thought}\n</think>\n\n{words}<｜end▁of▁sentence｜>"  # noqa: RUF001
            case _:
                call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
                text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
                text += f"{words}{call if calls else ''}<|im_end|>"
        return [token for piece in pieces(text, rng) for token in self.ids(piece)]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of all tokens but the first, by transformers."""
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logs = (self.model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        return logs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def pieces(text: str, rng: random.Random) -> list[str]:
    """A text cut at random places outside of special tokens."""
    found: list[str] = []
    for part in re.split(f"({SPECIAL.pattern})", text):
        if SPECIAL.fullmatch(part):
            found.append(part)
            continue
        while part:
            length = rng.randint(2, 9)
            found.append(part[:length])
            part = part[length:]
    return found


def told(messages: list[Any], answer: AnsweredCall, rng: random.Random) -> list[Any]:
    """The history that an agent sends next: as it was, without its thought, shortened, or anew."""
    said = dict(answer.message)
    calls = said.get("tool_calls", [])
    for call in calls[1:]:
        calls.remove(call)
    match rng.choice(("kept", "kept", "kept", "no thought", "shortened", "anew")):
        case "no thought":
            said.pop("reasoning_content", None)
        case "shortened" if not calls:
            said["content"] = said["content"][:3]
        case "anew":
            return [{"role": "user", "content": f"anew {rng.randrange(9)}"}]
        case _:
            pass
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
    return [*messages, said, *(results or [{"role": "user", "content": "And?"}])]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base") / "base", request.param)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts = Scripts()
    monkeypatch.setattr(engine_module, "choose", scripts.choose)
    return scripts


def checked_rows(
    base: Base, rollout: OpenRollout, drawn: Sequence[Sequence[int]]
) -> Sequence[TrainedRow]:
    """The rows of a rollout, of which exactly what was drawn is learned, with the log-probabilities
    that a trainer has for it.
    """
    record = answer_of(EndedRollout(rollout))
    assert record.trajectory is not None
    rows = record.trajectory.rows
    learned = [list(row.tokens[begin:end]) for row in rows for begin, end in row.sampled]
    assert sorted(learned) == sorted(map(list, drawn))
    at = 0
    for row in rows:
        own = record.logprobs[at : at + len(row.answered)]
        at += len(own)
        first = row.sampled[0][0]
        by_trainer = row.of_sampled(base.logprobs(row.tokens)[first - 1 :])
        assert own == pytest.approx(by_trainer, abs=2e-4)
    assert at == len(record.tokens)
    assert record.trajectory.rewritten == len(rows) - 1
    return rows


def test_learned_tokens_are_those_that_were_drawn(base: Base, scripts: Scripts) -> None:
    rewritten = continued = 0
    for seed in range(2):
        rng = random.Random(f"{base.family}/{seed}")
        rollout = new_rollout(turns=TURNS, tokens=4096, longest_answer=512, window=2048)
        messages: list[Any] = [USER]
        drawn: list[list[int]] = []
        for _ in range(TURNS):
            drawn.append(base.drawn(rng))
            scripts.tokens = list(drawn[-1])
            answer = base.call(rollout, messages)
            assert list(answer.recorded.tokens) == drawn[-1]
            messages = told(messages, answer, rng)
        rows = checked_rows(base, rollout, drawn)
        rewritten += len(rows) - 1
        continued += TURNS - len(rows)
    assert rewritten > 0
    # R1's prompt opens a thought that its history never has.
    assert (continued > 0) == (base.family != "deepseek r1")


@pytest.mark.parametrize("by", ["text", "tokens"])
def test_prompts_that_an_agent_renders_go_on_with_what_was_drawn(
    base: Base, scripts: Scripts, by: str
) -> None:
    """As long as the agent keeps to it: with another history, a row of its own begins. Text is
    tokenised again, and becomes other tokens than were drawn.
    """
    rng = random.Random(f"{base.family}/{by}")
    rollout = new_rollout(turns=TURNS + 1, tokens=4096, longest_answer=512, window=2048)
    text = "user: 2 and 2?\n"
    ids = base.ids(text)
    drawn: list[list[int]] = []
    again = 0
    for turn in range(TURNS + 1):
        if turn == TURNS:
            text = text.replace("2 and 2", "2 and 3")
            ids = [*base.ids("Anew: "), *ids]
        drawn.append(base.drawn(rng))
        scripts.tokens = list(drawn[-1])
        recorded = base.continued(rollout, ids if by == "tokens" else text).recorded
        assert list(recorded.tokens) == drawn[-1]
        text += recorded.drawn_text + "\nuser: And?\n"
        ids = [*ids, *drawn[-1], *base.ids("\nuser: And?\n")]
        again += base.ids(recorded.drawn_text) != drawn[-1]
    rows = checked_rows(base, rollout, drawn)
    assert [len(row.sampled) for row in rows] == [TURNS, 1]
    assert "".join(own for own, _ in rows[0].texts) == base.tokenizer.decode([*rows[0].tokens])
    assert again > 0
