"""The text of one answer while its tokens arrive: whole characters only, and nothing that a stop
may still take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"
"""What bytes decode to that are no character yet."""


class AnswerText:
    """Tokens in, text out. What is out never has to be taken back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, keep_special: bool = False) -> None:
        """`keep_special`: special tokens are part of the text."""
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._keep_special = keep_special
        self._ids: list[int] = []
        self._decoded_from = self._decoded_to = 0
        self.whole = ""
        """All text, up to the stop if there was one."""
        self._given = 0
        self.stopped = False
        """Whether a stop has come up: the answer ends before it."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        before = self._decode(self._ids[self._decoded_from : self._decoded_to])
        now = self._decode(self._ids[self._decoded_from :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        searched = max(0, len(self.whole) - max(map(len, self._stops), default=0))
        self.whole += now[len(before) :]
        self._decoded_from, self._decoded_to = self._decoded_to, len(self._ids)
        self._look_for_stop(searched)
        return self._give(self._certain())

    def end(self) -> str:
        """The rest, once no more tokens come."""
        if not self.stopped:
            before = self._decode(self._ids[self._decoded_from : self._decoded_to])
            self.whole += self._decode(self._ids[self._decoded_from :])[len(before) :]
            self._look_for_stop(0)
        return self._give(len(self.whole))

    def _decode(self, ids: list[int]) -> str:
        return (
            self._tokenizer.decode(ids, skip_special_tokens=not self._keep_special) if ids else ""
        )

    def _look_for_stop(self, start: int) -> None:
        found = [place for stop in self._stops if (place := self.whole.find(stop, start)) >= 0]
        if found:
            self.stopped = True
            self.whole = self.whole[: min(found)]

    def _certain(self) -> int:
        """End of the text that a stop can no longer remove."""
        end = len(self.whole)
        return (
            end
            if self.stopped
            else min((end - _overlap(self.whole, stop) for stop in self._stops), default=end)
        )

    def _give(self, end: int) -> str:
        end = max(end, self._given)
        text = self.whole[self._given : end]
        self._given = end
        return text


def _overlap(text: str, word: str) -> int:
    """Characters at the end of a text with which the word begins."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0
