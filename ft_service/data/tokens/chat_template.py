"""Chat templates, and the only function that renders with one.

Templates come from bases and jobs, and conversations from any user, so rendering may take any time
and memory. Therefore only two processes call `ChatTemplate.write`, both under limits: the one that
examines data files (examine.py), and template_worker.py for all other rendering, through
ft_service/data/template_process.py.

Some templates take messages in another form than the usual one: contents as lists of parts (many
bases that see images), an answer's reasoning as such a part (Magistral, Ministral), or a call's
arguments as text (DeepSeek V3). Lines in front of such a template convert the conversation, so
callers need not know.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.meta
from transformers.utils import chat_template_utils

from ft_service.data.chat_line import VARIABLES
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import IMAGE, Variable
from ft_service.errors import SpecError
from ft_service.spec.template_variables import GIVEN, before, variables_of, without_variables

CLOCK = "strftime_now"
"""The function that templates call for today's date."""
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
"""Names of a base's templates, where it has several."""


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
_THOUGHTS = """\
{%- set ft = namespace(messages=[]) %}
{%- for message in messages %}
{%- if message.reasoning_content %}
{%- set said = [{"type": "text", "text": message.content}] if message.content else [] %}
{%- set message = dict(message, content=[{"type": "thinking", "thinking": message.reasoning_content}] + said) %}
{%- endif %}
{%- set ft.messages = ft.messages + [message] %}
{%- endfor %}
{%- set messages = ft.messages %}
"""
_OF_THINKING = re.compile(r"\btype\b(?s:.*)\bthinking\b")
_OF_PARTS = re.compile(r"\btype\b(?s:.*)\btext\b")
_OF_CALLS = re.compile(r"\btool_calls\b(?s:.*)\barguments\b")
"""Patterns of templates that may need these lines.

Other templates are not tried: rendering is for conversations, under limits.
"""
_OF_THOUGHTS = ("thinking", "reasoning")
"""Names of an answer's reasoning in templates that do not read it as `reasoning_content`."""
_QUESTION = "ft_question"
_ANSWER = "ft_answer"
_VALUE = "ft_value"
_NAME = "ft_participant"
_THOUGHT = "ft_thought"
_USER = {"role": "user", "content": _QUESTION}
_CHAT = [_USER, {"role": "assistant", "content": _ANSWER}]
_CHAT_WITH_THOUGHT = [
    _USER,
    {
        "role": "assistant",
        "content": _ANSWER,
        **dict.fromkeys(("reasoning_content", *_OF_THOUGHTS), _THOUGHT),
    },
]
_CALL = {
    "id": "ftcallone",
    "type": "function",
    "function": {"name": "ft_name", "arguments": {"ft_key": _VALUE}},
}
_CHAT_WITH_CALL = [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


Render = Callable[[str, list[dict[str, Any]]], str]
"""A template's text and a conversation → the conversation as text. Raises LineError."""


def fitted_template(template: str, render: Render) -> str:
    """A chat template with the lines that it needs in front; unchanged if it works without them."""
    if _OF_PARTS.search(template):
        template = _with_lines(render, template, _PARTS, _CHAT, (_QUESTION, _ANSWER))
    if _OF_CALLS.search(template):
        template = _with_lines(render, template, _ARGUMENTS, _CHAT_WITH_CALL, (_QUESTION, _VALUE))
    if _OF_THINKING.search(template):
        template = _with_lines(render, template, _THOUGHTS, _CHAT_WITH_THOUGHT, (_ANSWER, _THOUGHT))
    return template


def _with_lines(
    render: Render, template: str, lines: str, chat: list[dict[str, Any]], words: Sequence[str]
) -> str:
    """The template, with `lines` in front if it writes the words of the chat only then."""
    for candidate in (template, lines + template):
        with contextlib.suppress(LineError):
            text = render(candidate, chat)
            if all(word in text for word in words):
                return candidate
    return template


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A base's chat template, or a job's, and the special tokens that it may name."""

    sources: Mapping[str, str]
    """Name → text; one template is called `default`."""
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str = "") -> ChatTemplate | None:
        """The template of a tokenizer.

        `chat_template`: used in place of it. None: there is none.
        """
        given = chat_template or tokenizer.chat_template
        if not given:
            return None
        sources = ((_DEFAULT, given),) if isinstance(given, str) else tuple(given.items())
        return _kept(
            sources,
            json.dumps(
                {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()}
            ),
        )

    def setting(self, variables: Mapping[str, Variable]) -> ChatTemplate:
        """The template with a record's variables, before a job's.

        Raises LineError for one that it does not read.
        """
        if not variables:
            return self
        # text, since 1 and true are the same to a cache.
        return _kept_setting(self, json.dumps(dict(variables)))

    @property
    def text(self) -> str:
        """All its sources as one text, for searches."""
        return " ".join(self.sources.values())

    @property
    def writes_date(self) -> bool:
        """True if it may write the date."""
        return CLOCK in self.text

    def require_usable(self) -> None:
        """Raise SpecError for a source with wrong syntax, and for a variable that a job sets and
        the source does not read.
        """
        for text in self.sources.values():
            try:
                chat_template_utils._compile_jinja_template(text)  # pyright: ignore[reportPrivateUsage]
                _require_read(text)
            except jinja2.TemplateSyntaxError as error:
                raise SpecError(
                    f"chat_template: line {error.lineno}: {error.message}.", param="chat_template"
                ) from None

    def write(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        day: date,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> str:
        """A conversation as text.

        `prompt`: with the generation prompt, which asks for an answer. `day`: the date for
        templates that write today's. `images`: IMAGE in the user's contents stands for a picture,
        and the text has the base's own sign there. Raises LineError if the template refuses the
        conversation.
        """
        if images:
            messages = [_in_parts(message) for message in messages]
        source = self._fitted[_WITH_TOOLS if tools and _WITH_TOOLS in self.sources else self._usual]
        return _rendered(
            source, self.special_tokens, self._named(messages), tools, day, prompt=prompt
        )

    @cached_property
    def _usual(self) -> str:
        if _DEFAULT not in self.sources:
            raise LineError(
                "",
                "the base has several chat templates, but not one that is called 'default': give "
                "chat_template",
            )
        return _DEFAULT

    @cached_property
    def _fitted(self) -> dict[str, str]:
        """The sources, with the lines that they need for the usual form of messages."""

        def render(source: str, chat: list[dict[str, Any]]) -> str:
            return _rendered(source, self.special_tokens, chat, None, date.min, prompt=False)

        return {name: fitted_template(text, render) for name, text in self.sources.items()}

    def _named(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with their reasoning also under the other names by which templates read it."""
        names = [name for name in _OF_THOUGHTS if re.search(rf"\b{name}\b", self.text)]
        if not names or "reasoning_content" in self.text:
            return messages
        return [
            {**message, **dict.fromkeys(names, message["reasoning_content"])}
            if "reasoning_content" in message
            else message
            for message in messages
        ]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as parts, as templates take pictures, if it has some."""
    if message["role"] != "user" or IMAGE not in message["content"]:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


@lru_cache(maxsize=32)
def writes_name(template: ChatTemplate, role: str) -> bool:
    """True if a template writes the names of participants of this role; False too for one that
    refuses the conversation with which it is tried. Renders: call it under limits.
    """
    chat = [
        *([{"role": "system", "content": _QUESTION}] if role == "system" else []),
        *_CHAT,
        *_CHAT,
    ]
    named = [{**message, "name": _NAME} if message["role"] == role else message for message in chat]
    with contextlib.suppress(LineError):
        return _NAME in template.write(named, None, date.min)
    return False


@lru_cache(maxsize=32)
def _kept_setting(template: ChatTemplate, variables: str) -> ChatTemplate:
    given: dict[str, Variable] = json.loads(variables)
    read = frozenset[str]().union(*map(_read, template.sources.values()))
    for name in given:
        if name not in read:
            reason = (
                "is a variable that the base's chat template does not read. "
                f"{_known(sorted(read))}: leave it out"
            )
            raise LineError(f"{VARIABLES}.{name}", reason)
    sources = {name: before(text, given) for name, text in template.sources.items()}
    return ChatTemplate(sources, template.special_tokens)


@lru_cache(maxsize=16)
def _kept(sources: tuple[tuple[str, str], ...], special_tokens: str) -> ChatTemplate:
    return ChatTemplate(dict(sources), json.loads(special_tokens))


def _require_read(source: str) -> None:
    """Raise SpecError for a variable that a job sets, as lines in front of a source, and the source
    does not read.
    """
    read = _read(source) if (given := variables_of(source)) else frozenset()
    for name in given:
        if name not in read:
            raise SpecError(
                f"{VARIABLES}.{name}: the chat template does not read it. {_known(sorted(read))}: "
                "leave it out.",
                param=f"{VARIABLES}.{name}",
            )


@lru_cache(maxsize=32)
def _read(source: str) -> frozenset[str]:
    """The variables that a source reads and a job or a record can set.

    Raises TemplateSyntaxError.
    """
    environment = chat_template_utils._compile_jinja_template(source).environment  # pyright: ignore[reportPrivateUsage]
    found = jinja2.meta.find_undeclared_variables(environment.parse(without_variables(source)))
    own = found - set(environment.globals) - set(GIVEN)
    return frozenset(name for name in own if not name.endswith("_token"))


def _known(read: Sequence[str]) -> str:
    return f"It reads {', '.join(read[:20])}" if read else "It reads none that could be set"


def _plain(value: Any) -> Any:
    return [str(token) for token in value] if isinstance(value, list) else str(value)


def _rendered(
    source: str,
    special_tokens: Mapping[str, Any],
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    day: date,
    *,
    prompt: bool,
) -> str:
    """The text that a tokenizer's `apply_chat_template` makes. Raises LineError."""
    if not messages:
        raise LineError(
            "",
            "the base's chat template writes no conversation without a message before the answer",
        )
    given = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    try:
        if (
            CLOCK in source
        ):  # a variable may not be a function, so it is a global of the template that is compiled and kept
            compiled: Any = chat_template_utils._compile_jinja_template(source)  # pyright: ignore[reportPrivateUsage]
            compiled.environment.globals[CLOCK] = datetime(day.year, day.month, day.day).strftime
        (text,), _ = chat_template_utils.render_jinja_template(
            [given],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            **special_tokens,
        )
    except (ImportError, MemoryError):  # not an error of the template
        raise
    except Exception as error:  # templates raise what they like, to refuse roles and orders
        raise LineError(
            "", f"the base's chat template refuses this conversation: {error}"
        ) from error
    return text
