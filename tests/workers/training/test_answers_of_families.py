"""What goes into a conversation comes out of what is learned of it, by the templates of families:
in evaluations, for graders and in chats.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.answer_format import Answer, AnswerFormat
from ft_service.data.answer_stream import AnswerStream
from ft_service.data.chat_line import parse_line
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation
from ft_service.data.token_options import DEFAULT
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.tokenize import as_texts, load_tokenizer, tokenize
from ft_service.reinforcement.prompt_file import PromptHeader, PromptTokens
from ft_service.spec.options import DataOptions
from tests.support.chat_templates import TEMPLATES
from tests.support.training.models import save_tokenizer
from tests.support.training.rendered_here import RenderedHere
from workers.serving.answer_text import AnswerText
from workers.training import evaluation_prompts
from workers.training.evaluation_prompts import asked_of, last_stretch

FILES = Path(__file__).parents[2] / "support/chat_templates_by_family"
FAMILIES = {
    "qwen 2.5": TEMPLATES["chatml with tools"],
    "gemma 3": TEMPLATES["gemma"],
    "mistral": TEMPLATES["mistral"],
    "phi 3.5": TEMPLATES["phi"],
    **{path.stem: path.read_text() for path in sorted(FILES.glob("*.jinja"))},
}
PARTS = re.compile(
    r"</?(think|tool_call|tool_response|arg_key|arg_value|function|parameter|invoke|tool|minimax)\b"
)
"""Of the texts that look like special tokens, those that published tokenizers do not declare as
such.
"""
LOOK_LIKE_TOKENS = re.compile(
    r"<[|｜a-z_][^<>\n'=: ]{0,50}>|\[/?[A-Z_]+\]|\[e~\[|\]~b?!?b?\]|\]~!b\["  # noqa: RUF001
)

TWO = {"role": "user", "content": "2+2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {"id": f"functions.add:{number}", "type": "function", "function": function}


ANSWERS: dict[str, dict[str, Any]] = {
    "plain": {"content": "4"},
    "json": {"content": '{"name": "four", "parameters": {}}'},
    "lines": {"content": "So:\n\n- four <b>4</b>\n- [4]"},
    "reasoned": {"content": "4", "reasoning_content": "two twos\n\nare four"},
    "called": {"content": "", "tool_calls": [call(0, a=2, b="four or so")]},
    "called twice": {"content": "", "tool_calls": [call(0, a=2, b="x y"), call(1, a=[3], b="{")]},
    "called with nothing": {"content": "", "tool_calls": [call(0)]},
    "called with words": {"content": "I add.", "tool_calls": [call(0, a=2, b="four")]},
    "called after a thought": {
        "content": "",
        "reasoning_content": "two twos",
        "tool_calls": [call(0, a=2, b="four")],
    },
}
FOUR = {"role": "assistant", "content": "4"}
THREE = {"role": "user", "content": "3+3?"}
SIX = {"role": "assistant", "content": "6"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call(0, a=2)]}
RESULT = {"role": "tool", "tool_call_id": "functions.add:0", "content": "4"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    **{name: [TWO, {"role": "assistant", **answer}] for name, answer in ANSWERS.items()},
    "of two turns": [{"role": "system", "content": "Be brief."}, TWO, FOUR, THREE, SIX],
    "of two turns, reasoned": [TWO, FOUR | {"reasoning_content": "two twos"}, THREE, SIX],
    "after a result": [TWO, CALLED, RESULT, FOUR, THREE, SIX],
}
MERGED = {("gpt-oss", "called with words")}
"""Where the template writes words as a thought."""


def answer_of(message: dict[str, Any]) -> Answer:
    functions = [own["function"] for own in message.get("tool_calls", ())]
    calls = [
        {**own, "arguments": json.dumps(own["arguments"], ensure_ascii=False)} for own in functions
    ]
    return Answer(message["content"], message.get("reasoning_content", ""), calls)


@pytest.fixture(scope="module")
def bytes_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))._tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def base(
    request: pytest.FixtureRequest, bytes_alone: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any]:
    """A family's name, and a tokenizer with its template and its special tokens."""
    folder = tmp_path_factory.mktemp("base")
    text = FAMILIES[request.param]
    special = sorted(
        {match[0] for match in LOOK_LIKE_TOKENS.finditer(text) if not PARTS.match(match[0])}
        | {"<|user|>"}
    )
    own: Any = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=special,
    )
    own.chat_template = text
    own.save_pretrained(folder)
    stops = (
        ["<|user|>"]
        if request.param == "glm 4.5"
        else ["<|call|>", "<|return|>"]
        if request.param == "gpt-oss"
        else []
    )
    ids = own.convert_tokens_to_ids(stops) or [own.eos_token_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return request.param, load_tokenizer(str(folder))


def learned_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[tuple[Conversation, Tokens]]:
    """The samples of a conversation, with the parts that they are of.

    Empty: the template has no place for all in it.
    """
    tools = {"tools": [TOOL]} if any("tool_calls" in message for message in messages) else {}
    record = parse_line(json.dumps({"messages": messages, **tools}))
    (found,) = tokenize(tokenizer, [(1, record)])
    if isinstance(found, Fault):
        return []
    sources = [text.source for text in as_texts(tokenizer, DEFAULT, record)]
    return [
        (source, own)
        for source, own in zip(sources, found, strict=True)
        if isinstance(source, Conversation)
    ]


def chatted(
    written: list[int], tokenizer: Any, answers: AnswerFormat, closing: str, *, tools: bool
) -> Answer:
    """The answer as a chat gets it, token by token."""
    text = AnswerText(tokenizer, [], keep_special=True)
    parts = AnswerStream(answers, tools=tools, closing=closing)
    said = [parts.push(text.push(token)) for token in written]
    said.append(parts.push(text.end()))
    *rest, whole = parts.end()
    words, thoughts = ("".join(own) for own in zip(*said, rest, strict=True))
    return Answer(words, thoughts, whole.calls)


def test_what_goes_in_comes_out(base: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_prompts, "TemplateProcess", RenderedHere)
    family, tokenizer = base
    chosen = {
        name: messages for name, messages in CONVERSATIONS.items() if (family, name) not in MERGED
    }
    proven = [
        (name, *own) for name, messages in chosen.items() for own in learned_of(tokenizer, messages)
    ]
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(path=tokenizer.name_or_path),
        evaluation=SimpleNamespace(given=()),
        chat_template="",
        context="",
        date="2026-01-01",
        training=SimpleNamespace(train_on="all_assistant"),
        data=DataOptions(),
        method="supervised",
        reinforcement=None,
    )
    evaluation = asked_of(spec, [sample for _, _, sample in proven], tokenizer)
    stored = json.loads(json.dumps(asdict(PromptHeader([], 1, 0, evaluation.answers))))
    header = PromptHeader.of_json(stored)
    for (name, source, sample), question in zip(proven, evaluation.questions, strict=True):
        expected = answer_of(source.messages[-1])
        begin, end = last_stretch(sample.targets)
        learned = sample.ids[begin:end].tolist()
        written = learned[
            : next(place for place, token in enumerate(learned) if token in evaluation.ends)
        ]  # up to the stop
        if (
            family != "llama 3.2" or not expected.calls
        ):  # a call of which nothing but its prompt says that it is one
            assert (name, question.read(written, tokenizer, evaluation.answers)) == (name, expected)
            assert question.reference == expected.whole, name
        tools = bool(source.tools)
        prompt = PromptTokens([], {}, "", tools, question.closing)
        graded = header.read(tokenizer.decode(written), prompt).sample()
        assert (graded.output_text, graded.reasoning) == (expected.text, expected.reasoning), name
        assert [own["function"] for own in graded.output_tools] == expected.calls, name
        assert (
            name,
            chatted(written, tokenizer, evaluation.answers, question.closing, tools=tools),
        ) == (name, expected)
    answers = Counter(name for name, source, _ in proven for weight in source.weights if weight)
    assert {"plain", "json", "lines", "of two turns"} <= set(answers), (
        "every template has a place for these"
    )
    assert all(
        count == len([own for own in chosen[name] if own["role"] == "assistant"])
        for name, count in answers.items()
    )
