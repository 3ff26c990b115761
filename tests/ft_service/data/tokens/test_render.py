"""Rendering in linear time: each answer behind its own prompt, as rendering every prompt says,
whatever the template.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.chat_line import parse_line
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Conversation
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens import render as module
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.render import Rendered, render
from ft_service.data.tokens.tokenize import load_tokenizer
from tests.support.chat_templates import TEMPLATES
from tests.support.training.models import save_tokenizer

TINY = Path(__file__).parents[4] / "examples/models/tiny-llama"
CONTENTS = (
    *(
        "",
        " ",
        "yes",
        "yes",
        "  padded \n",
        "hé ñandú",
        "\n\n",
        "a longer answer, of several words.",
        "1",
        "<s>",
    ),
    *(
        "<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n",
        "<|eot_id|>",
        "</s>",
        "user",
        "</assistant>|",
        "[/INST] x",
    ),
)
FEW = (12, 14)
"""Random conversations, and the most exchanges of one: each is rendered once for each of its
answers.
"""
MANY = (40, 30)
DRAWN = [pytest.param(*FEW, id="few"), pytest.param(*MANY, id="many", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def using(tokenizer: PreTrainedTokenizerFast, template: str) -> Any:
    """The tokenizer with another template, and with the special tokens that those name."""
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    other.chat_template = template
    return other


def outcome(tokenizer: Any, sample: Conversation, exact: int) -> list[Rendered] | str:
    """What is learned, or why not.

    `exact`: so many answers have their prompts rendered in any case.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXACT_ANSWERS", exact)
        try:
            return render(tokenizer, sample)
        except LineError as error:
            return str(error)


def holds(tokenizer: Any, sample: Conversation) -> bool:
    """Whether the conversation is taken.

    What is learned must be what all prompts say then, by whichever way.
    """
    found = outcome(tokenizer, sample, 2)
    assert found == outcome(tokenizer, sample, 10**6)
    if isinstance(found, str):
        return False
    learned = [index for index, weight in enumerate(sample.weights) if weight]
    tools = list(sample.tools) or None
    for text, spans, source in found:
        own = [index for index, weight in enumerate(source.weights) if weight]
        assert own == learned[: len(own)]
        learned = learned[len(own) :]
        for index, (first, end) in zip(own, spans, strict=True):
            asked = list(sample.messages[:index])
            assert text[:first] == tokenizer.apply_chat_template(
                asked, tools=tools, tokenize=False, add_generation_prompt=True
            )
            ((alone, ((begin, alone_end),), _),) = render(
                tokenizer, list(source.by_answers())[own.index(index)]
            )
            assert text[first:end] == alone[begin:alone_end]
            place = first
            for words in parts(sample.messages[index]["content"]):
                assert words in text[place:end]
                place = text.index(words, place) + len(words)
        whole = tokenizer.apply_chat_template(list(source.messages), tools=tools, tokenize=False)
        if whole.startswith(text[: spans[-1][0]]):
            assert whole.startswith(text)
        assert len(text) == spans[-1][1]
    assert not learned
    return True


def parts(content: str) -> tuple[str, str]:
    thought, mark, answer = content.rpartition("</think>")
    return (
        (thought.removeprefix("<think>").strip(), answer.strip()) if mark else ("", content.strip())
    )


def conversation(
    random: random.Random, turns: int, *, tools: bool, thinking: float
) -> Conversation:
    """Mostly what templates take: an optional system message, users and assistants in turn, calls
    and their answers. Rarely a turn is out of order, or thinks.
    """
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": "be kind"}] if random.random() < 0.5 else []
    )
    disorder = random.random() < 0.2
    for number in range(turns):
        messages.append(
            {"role": "user", "content": random.choice(CONTENTS) + random.choice(("", f" {number}"))}
        )
        if tools and random.random() < 0.4:
            calls = [call(random, f"c{number}.{n}") for n in range(random.choice((1, 1, 2)))]
            messages.append(
                {
                    "role": "assistant",
                    "content": random.choice(("", "calling")),
                    "tool_calls": calls,
                }
            )
            messages += [
                {"role": "tool", "tool_call_id": made["id"], "content": random.choice(CONTENTS)}
                for made in calls
            ]
        thought = "<think>\nhm\n</think>\n\n" if random.random() < thinking else ""
        weight = {} if random.random() < 0.8 or number == 0 else {"weight": 0}
        messages.append(
            {"role": "assistant", "content": thought + random.choice(CONTENTS), **weight}
        )
        if disorder and random.random() < 0.02:
            messages.append(
                {"role": random.choice(("user", "system", "assistant")), "content": "out of order"}
            )
    if random.random() < 0.2:
        messages.append({"role": "user", "content": "the last word"})
    line: dict[str, Any] = {"messages": messages}
    if tools:
        line["tools"] = [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        ]
    return parse_line(json.dumps(line))


def call(random: random.Random, number: str) -> dict[str, Any]:
    arguments = json.dumps({"a": random.choice(CONTENTS), "b": random.random()})
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [0.0, 0.05])
@pytest.mark.parametrize(("conversations", "exchanges"), DRAWN)
def test_it_is_what_every_prompt_says(
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    thinking: float,
    conversations: int,
    exchanges: int,
) -> None:
    """Few answers are rendered exactly in any case, so that short conversations are treated as long
    ones.
    """
    base = using(tokenizer, TEMPLATES[name])
    drawn = random.Random(f"{name} {thinking}")
    taken = 0
    for _ in range(conversations):
        tools = (
            "tools" in TEMPLATES[name] and "tool_calls" in TEMPLATES[name] and drawn.random() < 0.5
        )
        taken += holds(
            base, conversation(drawn, drawn.randint(1, exchanges), tools=tools, thinking=thinking)
        )
    assert taken, "some are taken"


@pytest.mark.parametrize(("conversations", "exchanges"), DRAWN)
def test_the_sample_bases_template_too(conversations: int, exchanges: int) -> None:
    base = load_tokenizer(str(TINY))
    drawn = random.Random(1)
    taken = [
        holds(base, conversation(drawn, drawn.randint(1, exchanges), tools=False, thinking=0.05))
        for _ in range(conversations)
    ]
    assert sum(taken) > conversations // 2


def chat(messages: int) -> Conversation:
    turns = [
        {"role": "assistant" if n % 2 else "user", "content": f" turn {n} " if n % 5 else ""}
        for n in range(messages)
    ]
    return parse_line(json.dumps({"messages": turns}))


@pytest.mark.parametrize(
    "name",
    [
        "chatml with tools",
        "plain",
        "llama 3",
        "gemma",
        "mistral",
        "deepseek",
        "keeps the last thinking",
    ],
)
def test_the_work_grows_with_the_conversation_and_not_with_its_square(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rendered: list[int] = []
    write = ChatTemplate.write

    def counted(self: ChatTemplate, messages: list[Any], *given: Any, **options: Any) -> str:
        rendered[-1] += len(messages)
        return write(self, messages, *given, **options)

    monkeypatch.setattr(ChatTemplate, "write", counted)
    for length in (150, 600):
        rendered.append(0)
        ((_, spans, _),) = render(using(tokenizer, TEMPLATES[name]), chat(length))
        assert len(spans) == length // 2
    assert rendered[0] < 24 * 150
    assert rendered[1] < 24 * 600


def test_an_answer_that_has_a_sample_of_its_own_is_rendered_twice(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt, and the conversation that ends with it."""
    rendered: list[int] = []
    write = ChatTemplate.write

    def counted(self: ChatTemplate, messages: list[Any], *given: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return write(self, messages, *given, **options)

    monkeypatch.setattr(ChatTemplate, "write", counted)
    turns = [{"role": "assistant" if n % 2 else "user", "content": f"turn {n}"} for n in range(60)]
    samples = render(
        using(tokenizer, TEMPLATES["qwen3"]), parse_line(json.dumps({"messages": turns}))
    )
    assert [len(sample.spans) for sample in samples] == [1] * 30
    assert len(rendered) <= 2 * 30 + 4


def test_samples_that_are_too_long_together_are_refused_with_what_helps(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS", 300)
    base = using(tokenizer, TEMPLATES["qwen3"])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sample = parse_line(json.dumps({"messages": turns * 4}))
    with pytest.raises(LineError, match=r"^messages: makes samples of more than 300 characters"):
        render(base, sample)
    assert len(render(base, sample, TokenOptions(train_on="last_assistant"))) == 1
    assert len(render(base, parse_line(json.dumps({"messages": turns * 2})))) == 2


def test_a_chat_of_5000_turns_takes_no_longer_than_a_few_renderings(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    base = using(tokenizer, TEMPLATES["plain"])
    sample = chat(5000)
    begun = time.process_time()
    base.apply_chat_template(list(sample.messages), tokenize=False)
    once = time.process_time() - begun
    begun = time.process_time()
    ((_, spans, _),) = render(base, sample)
    assert len(spans) == 2500
    assert time.process_time() - begun < 200 * once, "each answer by itself would take 1,250"


def test_an_answer_in_the_middle_of_a_long_chat_that_fits_nowhere_else_has_a_sample_of_its_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Only one answer thinks, long after the first ones."""
    base = using(tokenizer, TEMPLATES["last is other"])
    sample = chat(200)
    sample.messages[141]["content"] = "<think>hm</think>yes"
    first, last = render(base, sample)
    assert (len(first.spans), len(last.spans)) == (71, 29)
    assert first.text.endswith("<assistant><think>hm</think>yes</>")
    assert "hm" not in last.text
    assert last.source.weights == (0,) * 142 + (0, 1) * 29


def test_an_answer_late_in_a_long_chat_that_begins_otherwise_is_learned_behind_its_prompt(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The first answers, of the same kind, stand behind their prompts."""
    late = (
        "{% for m in messages %}<{{ m.role }}>{{ '!' if loop.index0 >= 40 and m.role == "
        "'assistant' }}{{ m.content }}</>"
    )
    template = (
        late + "{% endfor %}{% if add_generation_prompt %}<assistant>{% if messages | length >= 40 "
        "%}?{% endif %}{% endif %}"
    )
    turns = [{"role": "assistant" if n % 2 else "user", "content": f"turn {n}"} for n in range(80)]
    found = render(using(tokenizer, template), parse_line(json.dumps({"messages": turns})))
    learned = [
        (sample.text[:first], sample.text[first:end])
        for sample in found
        for first, end in sample.spans
    ]
    assert [answer for _, answer in learned] == [
        f"{'!' if n > 40 else ''}turn {n}</>" for n in range(1, 80, 2)
    ]
    assert [prompt.endswith("<assistant>?") for prompt, _ in learned] == [
        n >= 40 for n in range(1, 80, 2)
    ]
    assert len(found) == 20, "answers that fit together have a sample together"
