"""An answer's text and reasoning while it is written: what `AnswerFormat.read` makes of the whole,
given out as soon as it is certain.

Nothing that may be the beginning of a special token, of a thought or of a call is given out, nor
white space that may be the last. From where a call begins, all is kept back until the end, when the
whole answer is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ft_service.data.answer_format import MESSAGE, PARTS, THOUGHTS, Answer, AnswerFormat, channel_of

_OPENINGS = {closing: opening for opening, closing in THOUGHTS}


class _In(Enum):
    """Where in an answer its next characters stand."""

    BEGINNING = "before what may be a thought"
    THOUGHT = "in a thought"
    TEXT = "in the text"
    HEAD = "before the name of a channel has ended"
    ASIDE = (
        "in what is known at the end only: a call, or a channel that is shown if no final one comes"
    )


@dataclass
class _Part:
    """What has been given out of the text, or of the reasoning."""

    given: str = ""
    is_new: bool = False
    """Another part of it has begun, which a new line sets apart."""

    def more(self, words: str) -> str:
        """What of further words is certain.

        White space at their end is dropped: give them again with what follows.
        """
        if not self.given or self.is_new:
            words = words.lstrip()
        words = words.rstrip()
        if words and self.given and self.is_new:
            words = "\n" + words
        self.is_new &= not words
        self.given += words
        return words


class AnswerStream:
    """Parts of an answer in, text and reasoning out."""

    def __init__(self, answers: AnswerFormat, *, tools: bool, closing: str = "") -> None:
        """`tools`, `closing`: as for AnswerFormat.read."""
        self._answers = answers
        self._tools = tools
        self._closing = closing
        self._whole = ""
        self._at = 0
        """Where in the whole begins what is not given out."""
        self._in = _In.HEAD if answers.has_channels else _In.BEGINNING
        self._text, self._reasoning = _Part(), _Part()
        prefix = answers.calls.prefix if tools and answers.calls is not None else None
        self._call = prefix or None
        self._is_bare_call = prefix == ""
        markers = [
            *answers.special,
            *([self._call] if self._call else []),
            *(text for pair in THOUGHTS for text in pair),
        ]
        self._beginnings = {
            marker[:length] for marker in markers for length in range(1, len(marker))
        }
        self._longest = max(map(len, self._beginnings), default=0)
        self._ends = re.compile("|".join(re.escape(end) for end in (self._call, *_OPENINGS) if end))
        """What ends a text, or a thought that was taken for one."""

    def push(self, text: str) -> tuple[str, str]:
        """Text and reasoning that are certain now and were not before."""
        self._whole += text
        said = ""
        thought = ""
        while True:
            before = self._in
            begin = self._at
            words = self._next()
            if before is _In.TEXT:
                said += self._text.more(words)
            elif before is _In.THOUGHT:
                thought += self._reasoning.more(words)
            if (self._in, self._at) == (before, begin):
                return said, thought

    def end(self) -> tuple[str, str, Answer]:
        """The rest of the text and of the reasoning, and the whole answer."""
        whole = self._answers.read(self._whole, tools=self._tools, closing=self._closing)
        return (
            self._rest(self._text, whole.text),
            self._rest(self._reasoning, whole.reasoning),
            whole,
        )

    @staticmethod
    def _rest(part: _Part, whole: str) -> str:
        return whole.removeprefix(part.given) if whole.startswith(part.given) else ""

    def _next(self) -> str:
        """Move on, by at most one change of state.

        Returns the words that were passed, without special tokens.
        """
        match self._in:
            case _In.BEGINNING:
                self._begin()
            case _In.THOUGHT if self._answers.has_channels:
                return self._until(PARTS, _In.HEAD)
            case _In.THOUGHT:
                return self._until(re.compile(re.escape(self._closing)), _In.TEXT)
            case _In.TEXT if self._answers.has_channels:
                return self._until(PARTS, _In.HEAD)
            case _In.TEXT:
                return self._text_until()
            case _In.HEAD:
                self._read_head()
            case _In.ASIDE if self._answers.has_channels:
                self._until(PARTS, _In.HEAD)
            case _In.ASIDE:
                pass
        return ""

    def _begin(self) -> None:
        begun = self._whole.lstrip()
        found = next(
            ((opening, closing) for opening, closing in THOUGHTS if begun.startswith(opening)), None
        )
        if found is not None:
            self._at = len(self._whole) - len(begun) + len(found[0])
            self._closing = found[1]
            self._in = _In.THOUGHT
        elif begun and not any(opening.startswith(begun) for opening, _ in THOUGHTS):
            bare = self._is_bare_call and begun.startswith("{")
            self._in = _In.THOUGHT if self._closing else _In.ASIDE if bare else _In.TEXT

    def _text_until(self) -> str:
        """The words up to a call.

        A mark that closes a thought which nothing has opened is passed over: that what came before
        was a thought shows too late.
        """
        found = self._ends.search(self._whole, self._at)
        if found is None or found[0] == self._call:
            return self._until(self._ends, _In.ASIDE)
        if _OPENINGS[found[0]] in self._whole[: found.start()]:  # both are words
            words = self._whole[self._at : found.end()]
            self._at = found.end()
            return self._answers.without_special(words)
        return self._until(self._ends, _In.TEXT)

    def _until(self, end: re.Pattern[str] | None, then: _In) -> str:
        """The words up to an end, or as far as they are certain."""
        found = end.search(self._whole, self._at) if end is not None else None
        words = self._whole[self._at : found.start() if found else self._certain()]
        self._at += len(words)
        if found is not None:
            self._in = then
            self._at = found.end() if then is not _In.ASIDE else self._at
        elif stripped := len(words) - len(words.rstrip()):
            self._at -= stripped
            words = words.rstrip()
        return self._answers.without_special(words)

    def _certain(self) -> int:
        for length in range(min(self._longest, len(self._whole) - self._at), 0, -1):
            if self._whole[-length:] in self._beginnings:
                return len(self._whole) - length
        return len(self._whole)

    def _read_head(self) -> None:
        message = self._whole.find(MESSAGE, self._at)
        if message < 0:
            return
        kind = channel_of(self._whole[self._at : message], tools=self._tools)
        self._at = message + len(MESSAGE)
        self._in = {"reasoning": _In.THOUGHT, "final": _In.TEXT}.get(kind, _In.ASIDE)
        part = self._reasoning if self._in is _In.THOUGHT else self._text
        part.is_new = True
