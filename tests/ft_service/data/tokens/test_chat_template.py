"""Lines in front of chat templates that take messages in another form."""

from __future__ import annotations

from datetime import date

import pytest

from ft_service.data.line_errors import LineError
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.errors import SpecError

DAY = date(2026, 1, 2)
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% "
    "endif %}{% endfor %}{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}{% endfor "
    "%}"
)


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {})


def test_contents_become_parts_and_arguments_text_only_for_templates_that_need_it() -> None:
    assert template(PARTS).write(CHAT, None, DAY) == "[Why?][So.]"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert template(TEXT_ARGUMENTS).write(calling, None, DAY) == 'Why?({"a": 1})'
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{# type text tool_calls arguments #}"
    assert template(plain).write(CHAT, None, DAY) == "Why?So."


MAGISTRAL = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for b in "
    "m.content %}"
    "{% if b['type'] == 'text' %}{{ b['text'] }}{% elif b['type'] == 'thinking' %}{{ '[THINK]' + "
    "b['thinking'] + '[/THINK]' }}"
    "{% else %}{{ raise_exception('Only text and thinking blocks are supported.') }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
THINKING = [CHAT[0], {**CHAT[1], "reasoning_content": "Since."}]


def test_reasoning_becomes_a_part_only_for_templates_that_need_it() -> None:
    assert template(MAGISTRAL).write(THINKING, None, DAY) == "Why?;[THINK]Since.[/THINK]So.;"
    assert (
        template(MAGISTRAL).write([CHAT[0], {**THINKING[1], "content": ""}], None, DAY)
        == "Why?;[THINK]Since.[/THINK];"
    )
    assert template(MAGISTRAL).write(CHAT, None, DAY) == "Why?;So.;"
    by_name = (
        "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}{# type thinking #}"
    )
    assert template(by_name).write(THINKING, None, DAY) == "Why?Since.So."


def test_the_date_is_the_given_one() -> None:
    dated = template("{{ strftime_now('%Y-%m-%d') }}")
    assert dated.writes_date
    assert [dated.write(CHAT, None, day) for day in (DAY, date(2025, 3, 4))] == [
        "2026-01-02",
        "2025-03-04",
    ]


def test_wrong_templates_and_refused_conversations_are_told_apart() -> None:
    with pytest.raises(SpecError, match="chat_template: line 1"):
        template("{% for %}").require_usable()
    with pytest.raises(LineError, match="refuses this conversation: no"):
        template("{{ raise_exception('no') }}").write(CHAT, None, DAY)
    with pytest.raises(LineError, match="but not one that is called 'default'"):
        ChatTemplate({"rag": "a"}, {}).write(CHAT, None, DAY)
