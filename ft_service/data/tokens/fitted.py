"""Chat templates that take messages in another form than the usual one: contents as lists of parts (many bases that see
images), or a call's arguments as text (DeepSeek V3). Lines before the template bring a conversation into its form, so that
whoever renders with it, for training or for an answer, has no form to know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ft_service.data.line_errors import LineError

_PARTS = """\
{%- set ft = namespace(messages=[]) %}
{%- for message in messages %}
{%- set parts = [{"type": "text", "text": message.content}] if message.content is string else message.content %}
{%- set ft.messages = ft.messages + [dict(message, content=parts)] %}
{%- endfor %}
{%- set messages = ft.messages %}
"""
_ARGUMENTS = """\
{%- set ft = namespace(messages=[], calls=[]) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set ft.calls = [] %}
{%- for call in message.tool_calls %}
{%- set given = call.function.arguments %}
{%- set text = given if given is string else given | tojson %}
{%- set ft.calls = ft.calls + [dict(call, function=dict(call.function, arguments=text))] %}
{%- endfor %}
{%- set message = dict(message, tool_calls=ft.calls) %}
{%- endif %}
{%- set ft.messages = ft.messages + [message] %}
{%- endfor %}
{%- set messages = ft.messages %}
"""
_OF_PARTS, _OF_CALLS = re.compile(r"\btype\b(?s:.*)\btext\b"), re.compile(r"\btool_calls\b(?s:.*)\barguments\b")
"""In templates that may need them: no other is rendered before there is a conversation, with its limits on time and memory."""
_QUESTION, _ANSWER, _VALUE = "ft_question", "ft_answer", "ft_value"
_ASKED = {"role": "user", "content": _QUESTION}
_TALK = [_ASKED, {"role": "assistant", "content": _ANSWER}]
_CALL = {"id": "ftcallone", "type": "function", "function": {"name": "ft_name", "arguments": {"ft_key": _VALUE}}}
_CALLING = [_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


Talked = Callable[[str, list[dict[str, Any]]], str]
"""A template's text and a conversation → the conversation as text. Raises LineError."""


def fitted_template(template: str, talked: Talked) -> str:
    """A chat template behind the lines that it needs; one that works without them, as it is."""
    if _OF_PARTS.search(template):
        template = _behind(talked, template, _PARTS, _TALK, (_QUESTION, _ANSWER))
    if _OF_CALLS.search(template):
        template = _behind(talked, template, _ARGUMENTS, _CALLING, (_QUESTION, _VALUE))
    return template


def _behind(talked: Talked, template: str, lines: str, talk: list[dict[str, Any]], words: tuple[str, ...]) -> str:
    """The template, behind `lines` if it writes these words of the talk only so."""
    return next((it for it in (template, lines + template) if _writes(talked, it, talk, words)), template)


def _writes(talked: Talked, template: str, talk: list[dict[str, Any]], words: tuple[str, ...]) -> bool:
    try:
        text = talked(template, talk)
    except LineError:
        return False
    return all(word in text for word in words)
