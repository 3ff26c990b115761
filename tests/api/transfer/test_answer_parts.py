"""Reasoning and calls of a preview's answer as OpenAI's client sees them, whole and streamed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api.transfer.chat_answer import _Shape
from api.wire.chat_request import parse_chat_completion
from ft_service.data.answer_format import AnswerFormat
from ft_service.data.tool_call_parser import CallFormat
from workers.serving.answers import ChatAnswer
from workers.serving.requests import ChatRequest
from workers.serving.sampling import Choice

END = 0
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def said_of(written: str, prompt: str, **options: Any) -> list[dict[str, Any]]:
    """What the preview's process says of an answer."""
    said: list[dict[str, Any]] = []
    answers = AnswerFormat(("</s>",), CallFormat("<tool_call>", "name", "arguments"))
    chat: Any = SimpleNamespace(tokenizer=Characters(), ends={END}, answers=answers)
    answer = ChatAnswer.of(ChatRequest("a", [], **options), 0, chat, prompt, said.append)
    ended = any(answer.push(Choice(ord(character), None, [])) for character in written)
    answer.end("stop" if ended or answer.push(Choice(END, None, [])) else "length")
    return [
        {"kind": "begun", "prompt_tokens": 3},
        *said,
        {"kind": "done", "completion_tokens": len(written)},
    ]


def shape(**options: Any) -> _Shape:
    body = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], **options}
    return _Shape(parse_chat_completion(body))


@pytest.mark.parametrize(
    ("written", "prompt", "content", "reasoning", "arguments"),
    [
        ("<think>\ntwo twos\n</think>\n\n4", "", "4", "two twos", []),
        ("two twos\n</think>\n\n4", "<think>\n", "4", "two twos", []),
        (f"<think>\nI add\n</think>\n\n{CALL}", "", None, "I add", ['{"a": 2}']),
        (f"I add.\n{CALL}\n{CALL}", "", "I add.", None, ['{"a": 2}'] * 2),
        ("4", "", "4", None, []),
    ],
)
def test_thoughts_and_calls_have_fields_of_their_own(
    written: str, prompt: str, content: str | None, reasoning: str | None, arguments: list[str]
) -> None:
    parts = said_of(written, prompt, tools=[TOOL])
    whole = shape()
    streamed = shape(stream=True)
    for part in parts:
        whole.take(part)
    (choice,) = ChatCompletion.model_validate(whole.whole()).choices
    message = choice.message
    assert (message.content, getattr(message, "reasoning_content", None)) == (content, reasoning)
    called: list[Any] = [call.function for call in message.tool_calls or ()]  # pyright: ignore[reportAttributeAccessIssue]
    assert [(call.name, call.arguments) for call in called] == [("add", own) for own in arguments]
    assert choice.finish_reason == ("tool_calls" if arguments else "stop")

    chunks = [
        ChatCompletionChunk.model_validate(chunk)
        for part in parts
        for chunk in streamed.chunks(part)
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (
        reasoning or ""
    )
    functions = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.name, call.arguments) for call in functions if call] == [
        ("add", own) for own in arguments
    ]
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert len([delta for delta in deltas if delta.content]) == len(
        [text for text in content or "" if text.strip()]
    )


def test_one_call_where_no_more_are_wanted() -> None:
    end = said_of(f"{CALL}\n{CALL}", "", tools=[TOOL], parallel_tool_calls=False)[-2]
    assert (end["reason"], len(end["calls"])) == ("tool_calls", 1)


def test_a_stop_is_looked_for_in_thoughts_too() -> None:
    whole = shape()
    for part in said_of("<think>one END two</think>3", "", stop=["END"]):
        whole.take(part)
    message = whole.whole()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "one")
