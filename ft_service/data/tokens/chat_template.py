"""A chat template, and the one function that renders by it.

Templates come with bases and from jobs, and conversations from anybody, so either may take any time and any memory. Therefore
only two processes call `ChatTemplate.write`, both under limits: the one that examines data files (examine.py), and the one that
renders for everybody else (rendering.py), of which ft_service/data/template_process.py is the other end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from ft_service.data.line_errors import LineError
from ft_service.data.tokens.fitted import fitted_template
from ft_service.errors import SpecError

CLOCK = "strftime_now"
"""What templates call for today's date."""
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
"""Names of a base's templates, where it has several."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A base's chat template, or a job's, and the special tokens that it may name."""

    sources: Mapping[str, str]
    """Name → text; one template is called `default`."""
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str = "") -> ChatTemplate | None:
        """The one that a tokenizer has. `chat_template`: in place of it. None: there is none."""
        given = chat_template or tokenizer.chat_template
        if not given:
            return None
        sources = ((_DEFAULT, given),) if isinstance(given, str) else tuple(given.items())
        return _kept(sources, json.dumps({name: _plain(value) for name, value in tokenizer.special_tokens_map.items()}))

    @property
    def text(self) -> str:
        """All of its texts, to look for words in."""
        return " ".join(self.sources.values())

    @property
    def writes_date(self) -> bool:
        """Whether it may write the date."""
        return CLOCK in self.text

    def require_usable(self) -> None:
        """Raises SpecError for a text that is not written as a template."""
        for text in self.sources.values():
            try:
                chat_template_utils._compile_jinja_template(text)  # pyright: ignore[reportPrivateUsage]
            except jinja2.TemplateSyntaxError as error:
                raise SpecError(f"chat_template: line {error.lineno}: {error.message}.", param="chat_template") from None

    def write(self, messages: list[dict[str, Any]], tools: list[Any] | None, day: date, *, prompt: bool = False) -> str:
        """A conversation as text. `prompt`: up to where the assistant answers, as it is asked for an answer. `day`: today's
        date, for templates that write it. Raises LineError for what the template does not take.
        """
        source = self._fitted[_WITH_TOOLS if tools and _WITH_TOOLS in self.sources else self._usual]
        return _rendered(source, self.special_tokens, self._named(messages), tools, day, prompt=prompt)

    @cached_property
    def _usual(self) -> str:
        if _DEFAULT not in self.sources:
            raise LineError("", "the base has several chat templates, none of which is called 'default': give chat_template")
        return _DEFAULT

    @cached_property
    def _fitted(self) -> dict[str, str]:
        """The texts, behind the lines that they need for the usual form of messages."""

        def talked(source: str, talk: list[dict[str, Any]]) -> str:
            return _rendered(source, self.special_tokens, talk, None, date.min, prompt=False)

        return {name: fitted_template(text, talked) for name, text in self.sources.items()}

    def _named(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with reasonings also in the field `thinking`, for templates that look for it there."""
        if "thinking" not in self.text or "reasoning_content" in self.text:
            return messages
        return [
            {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
            for message in messages
        ]


@lru_cache(maxsize=16)
def _kept(sources: tuple[tuple[str, str], ...], special_tokens: str) -> ChatTemplate:
    return ChatTemplate(dict(sources), json.loads(special_tokens))


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
    """As `apply_chat_template` of a tokenizer renders. Raises LineError."""
    if not messages:
        raise LineError("", "the base's chat template writes no conversation without a message before the answer")
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        if CLOCK in source:  # a variable may not be a function, so it is a global of the template that is compiled and kept
            compiled: Any = chat_template_utils._compile_jinja_template(source)  # pyright: ignore[reportPrivateUsage]
            compiled.environment.globals[CLOCK] = datetime(day.year, day.month, day.day).strftime
        (text,), _ = chat_template_utils.render_jinja_template(
            [given], tools=tools, chat_template=source, add_generation_prompt=prompt, **special_tokens
        )
    except (ImportError, MemoryError):  # no word of the template's
        raise
    except Exception as error:  # templates raise what they like, to refuse roles and orders
        raise LineError("", f"the base's chat template refuses this conversation: {error}") from error
    return text
