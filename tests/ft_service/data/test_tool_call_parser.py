"""How calls look is asked of the template, and calls are read from answers by that."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tool_call_parser import CallFormat, call_format
from tests.support.chat_templates import CHATML

LLAMA = """\
{%- for message in messages %}
{%- if message.tool_calls %}{{ '<|head|>assistant\\n\\n' }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot|>' }}
{%- else %}{{ '<|head|>' + message.role + '\\n\\n' + message.content + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant\\n\\n' }}{% endif %}"""
MISTRAL = """\
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""
XML = """\
{%- for message in messages %}
{%- if message.tool_calls %}<f={{ message.tool_calls[0].function.name }}>{% else %}{{ message.content }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, CallFormat("<tool_call>", "name", "arguments")),
        (LLAMA, CallFormat("", "name", "parameters")),
        (MISTRAL, CallFormat("[TOOL_CALLS][", "name", "arguments")),
        (XML, None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_template_says_how_calls_look(template: str, expected: CallFormat | None) -> None:
    given = ChatTemplate({"default": template}, {})

    def write(messages: list[Any], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        return given.write(messages, tools, date.today(), prompt=prompt)

    assert call_format(write) == expected


def test_calls_are_read_with_the_words_before_them() -> None:
    one = '{"name": "f", "arguments": {"a": "é"}}'
    other = '{"name": "g", "arguments": "{}"}'
    text = f"I look.\n<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{other}\n"
    words, calls = CallFormat("<tool_call>", "name", "arguments").parse(text) or ("", [])
    assert words == "I look."
    assert [call["name"] for call in calls] == ["f", "g"]
    assert json.loads(calls[0]["arguments"]) == {"a": "é"}
    assert calls[1]["arguments"] == "{}"


def test_several_calls_may_stand_in_one_list() -> None:
    found = CallFormat("[TOOL_CALLS][", "name", "arguments").parse(
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]'
    )
    assert found is not None
    assert [call["name"] for call in found[1]] == ["f", "g"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "no call",
            "<tool_call>",
            "<tool_call>{bad",
            '<tool_call>{"arguments": {}}',
            '{"name": "f"}',
        ),
        '<tool_call>{"function": 5}',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert CallFormat("<tool_call>", "name", "arguments").parse(text) is None


def test_half_of_a_surrogate_pair_in_a_call_is_no_text() -> None:
    text = r'<tool_call>{"name": "f\ud83d", "arguments": {"a": "\ud83d", "b": "\ud83d\ude00"}}'
    calls = [{"name": "f?", "arguments": '{"a": "?", "b": "😀"}'}]
    assert CallFormat("<tool_call>", "name", "arguments").parse(text) == ("", calls)


def test_a_bare_object_is_a_call_only_with_a_name() -> None:
    bare = CallFormat("", "name", "parameters")
    assert bare.parse('{"name": "f", "parameters": {"a": 1}}') == (
        "",
        [{"name": "f", "arguments": '{"a": 1}'}],
    )
    assert bare.parse('{"intent": "cancel"}') is None
