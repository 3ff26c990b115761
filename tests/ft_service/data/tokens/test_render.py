"""Rendering in linear time: the same text and the same spans as by rendering every prefix, whatever the template."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.chat_line import parse_line
from ft_service.data.line_errors import LineError
from ft_service.data.records import Chat
from ft_service.data.tokens import render as module
from ft_service.data.tokens.render import Rendered, render
from ft_service.data.tokens.tokenize import load_tokenizer
from tests.support.chat_templates import TEMPLATES
from tests.support.training.models import save_tokenizer

TINY = Path(__file__).parents[4] / "examples/models/tiny-llama"
CONTENTS = (
    *("", " ", "yes", "yes", "  padded \n", "hé ñandú", "\n\n", "a longer answer, of several words.", "1", "<s>"),
    *("<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n", "<|eot_id|>", "</s>", "user", "</assistant>|", "[/INST] x"),
)
CONVERSATIONS = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def using(tokenizer: PreTrainedTokenizerFast, template: str) -> Any:
    """The tokenizer with another template, and with the special tokens that those name."""
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    other.chat_template = template
    return other


def by_every_prefix(tokenizer: Any, sample: Chat) -> Rendered:
    """What is learned, by its definition, of templates that leave nothing out and do not rewrite a turn."""
    messages, tools = list(sample.messages), list(sample.tools) or None

    def template(part: list[Any], prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            raise LineError("", f"the base's chat template refuses this conversation: {error}") from error

    full, spans = template(messages), []
    for index, (message, weight) in enumerate(zip(messages, sample.weights, strict=True)):
        if message["role"] == "assistant" and weight:
            before, until = template(messages[:index], True), template(messages[: index + 1])
            if not (until.startswith(before) and full.startswith(until)):
                raise RewrittenError
            spans.append((len(before), len(until)))
    if any(message["role"] == "system" and message["content"] not in full for message in messages):
        raise LineError("", "the base's chat template leaves this system message out")
    learned = [message["content"] for message, weight in zip(messages, sample.weights, strict=True) if weight]
    for content, (first, end) in zip(learned, spans, strict=True):
        for what, words in zip(("reasoning", "text"), parts(content), strict=True):
            if words not in full[first:end]:
                raise LineError("", f"the base's chat template leaves the {what} of this answer out")
    return full, spans


class RewrittenError(Exception):
    """A prefix is not written as in the whole, so this says nothing."""


def parts(content: str) -> tuple[str, str]:
    thought, mark, answer = content.rpartition("</think>")
    return (thought.removeprefix("<think>").strip(), answer.strip()) if mark else ("", content.strip())


def outcome(rendering: Callable[[Any, Chat], Rendered], tokenizer: Any, sample: Chat) -> object:
    try:
        return rendering(tokenizer, sample)
    except LineError as error:
        return error.reason.split(" answer out")[0].split(" message out")[0]


def agrees(tokenizer: Any, sample: Chat) -> bool:
    """Whether all prefixes say what is learned; they must say the same then."""
    try:
        expected = outcome(by_every_prefix, tokenizer, sample)
    except RewrittenError:
        assert outcome(render, tokenizer, sample) == outcome(marked_exactly, tokenizer, sample)
        return False
    if isinstance(expected, str):
        expected = expected.split(" answer out")[0].split(" message out")[0]
    assert outcome(render, tokenizer, sample) == expected
    return True


def marked_exactly(tokenizer: Any, sample: Chat) -> Rendered:
    """By marks, each prefix rendered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXACT_ANSWERS", 10**6)
        return render(tokenizer, sample)


def conversation(random: random.Random, turns: int, *, tools: bool, thinking: float) -> Chat:
    """Mostly what templates take: an optional system message, users and assistants in turn, calls and their answers. Rarely a
    turn is out of order, or thinks."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if random.random() < 0.5 else []
    disorder = random.random() < 0.2
    for number in range(turns):
        messages.append({"role": "user", "content": random.choice(CONTENTS) + random.choice(("", f" {number}"))})
        if tools and random.random() < 0.4:
            calls = [call(random, f"c{number}.{n}") for n in range(random.choice((1, 1, 2)))]
            messages.append({"role": "assistant", "content": random.choice(("", "calling")), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": made["id"], "content": random.choice(CONTENTS)} for made in calls]
        thought = "<think>\nhm\n</think>\n\n" if random.random() < thinking else ""
        weight = {} if random.random() < 0.8 or number == 0 else {"weight": 0}
        messages.append({"role": "assistant", "content": thought + random.choice(CONTENTS), **weight})
        if disorder and random.random() < 0.02:
            messages.append({"role": random.choice(("user", "system", "assistant")), "content": "out of order"})
    if random.random() < 0.2:
        messages.append({"role": "user", "content": "the last word"})
    line: dict[str, Any] = {"messages": messages}
    if tools:
        line["tools"] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    return parse_line(json.dumps(line))


def call(random: random.Random, number: str) -> dict[str, Any]:
    arguments = json.dumps({"a": random.choice(CONTENTS), "b": random.random()})
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [0.0, 0.05])
def test_it_is_what_every_prefix_says(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, name: str, thinking: float
) -> None:
    """Few answers are rendered exactly in any case, so that short conversations are treated as long ones."""
    monkeypatch.setattr(module, "EXACT_ANSWERS", 2)
    base = using(tokenizer, TEMPLATES[name])
    drawn = random.Random(f"{name} {thinking}")
    for _ in range(CONVERSATIONS):
        tools = "tools" in TEMPLATES[name] and "tool_calls" in TEMPLATES[name] and drawn.random() < 0.5
        sample = conversation(drawn, drawn.randint(1, 30), tools=tools, thinking=thinking)
        agrees(base, sample)


def test_the_sample_bases_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_ANSWERS", 2)
    base, drawn = load_tokenizer(str(TINY)), random.Random(1)
    for _ in range(CONVERSATIONS):
        sample = conversation(drawn, drawn.randint(1, 30), tools=False, thinking=0.05)
        agrees(base, sample)


def chat(messages: int) -> Chat:
    turns = [{"role": "assistant" if n % 2 else "user", "content": f" turn {n} " if n % 5 else ""} for n in range(messages)]
    return parse_line(json.dumps({"messages": turns}))


class Counting:
    """A tokenizer that counts the messages it renders."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        self.messages += len(messages)
        return self._tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    "name", ["chatml with tools", "plain", "llama 3", "gemma", "mistral", "deepseek", "keeps the last thinking", "qwen3"]
)
def test_the_work_grows_with_the_conversation_and_not_with_its_square(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    rendered: list[int] = []
    for length in (500, 2000):
        counting: Any = Counting(using(tokenizer, TEMPLATES[name]))
        _, spans = render(counting, chat(length))
        assert len(spans) == length // 2
        rendered.append(counting.messages)
    assert rendered[0] < 8 * 500
    assert rendered[1] < 8 * 2000


def test_a_chat_of_20000_turns_takes_seconds(tokenizer: PreTrainedTokenizerFast) -> None:
    base, sample = using(tokenizer, TEMPLATES["plain"]), chat(20_000)
    begun = time.process_time()
    base.apply_chat_template(list(sample.messages), tokenize=False)
    once = time.process_time() - begun
    begun = time.process_time()
    _, spans = render(base, sample)
    assert len(spans) == 10_000
    assert time.process_time() - begun < 30 * once


def test_a_refusal_in_the_middle_of_a_long_chat_names_the_message(tokenizer: PreTrainedTokenizerFast) -> None:
    """Only one answer thinks, long after the first ones."""
    base, sample = using(tokenizer, TEMPLATES["last is other"]), chat(200)
    sample.messages[141]["content"] = "<think>hm</think>yes"
    with pytest.raises(
        LineError, match=r"^messages\.141\.content: .* leaves the reasoning of this answer out once more follows"
    ):
        render(base, sample)


def test_where_the_last_answers_begin_otherwise_all_are_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    """The text alone would agree with what begins the first answers."""
    late = "{% for m in messages %}<{{ m.role }}>{{ '!' if loop.index0 >= 40 and m.role == 'assistant' }}{{ m.content }}</>"
    prompt = (
        "{% endfor %}{% if add_generation_prompt %}<assistant>{{ '!' if messages | length >= 40 }}{% else %}<eos>{% endif %}"
    )
    turns = [{"role": "assistant" if n % 2 else "user", "content": f"turn {n}"} for n in range(80)]
    text, spans = render(using(tokenizer, late + prompt), parse_line(json.dumps({"messages": turns})))
    expected = [f"turn {n}</>" for n in range(1, 80, 2)]
    expected[-1] += "<eos>"
    assert [text[first:end] for first, end in spans] == expected
