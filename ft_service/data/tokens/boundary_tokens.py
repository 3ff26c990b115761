"""Tokens at the boundary between a prompt and its answer.

A tokenizer may make one token of a prompt's end and an answer's beginning (`<think>\\n` and
`\\n</think>`: one token of two line breaks). In inference the model never sees it: it continues the
prompt's own tokens. So the text is split and tokenised there.

Tokenizers that split texts as GPT-2's does take the last of several white spaces apart if a word
follows: two line breaks at the end of a prompt are one token, and two with an answer behind them.
There the text is split too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from ft_service.data.line_errors import LineError
from ft_service.data.tokens.answer_markers import Span

_SPACE = "\u2581"
"""SentencePiece's character for a space in a token."""
_LONGEST_RUN = 64
"""Characters before an answer in which white space is looked for."""


@dataclass(frozen=True)
class Joined:
    """Tokens of a text that was tokenised in pieces, with the attributes of an Encoding that are
    used.
    """

    ids: list[int]
    offsets: list[Span]

    def __len__(self) -> int:
        return len(self.ids)


def as_prompted(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], encoding: Encoding
) -> Encoding | Joined:
    """The tokens of a text, split where an answer begins if its prompt has other tokens alone: one
    that ends in the answer, or white space that the answer takes apart. The same object if it is
    not split.

    A tokenizer that puts a space before every text cannot tokenise a piece as part of a text: its
    tokens are returned unchanged, and `require_prompted` refuses them.
    """
    cuts = [
        first
        for first, _ in spans
        if _straddled(encoding, first) or _takes_space_apart(tokenizer, text, first)
    ]
    if not cuts:
        return encoding
    begins = [0, *cuts]
    pieces = [text[begin:end] for begin, end in zip(begins, [*cuts, len(text)], strict=True)]
    fast: Any = tokenizer
    encodings: list[Encoding] = fast.backend_tokenizer.encode_batch(
        pieces, add_special_tokens=False
    )
    for piece, made in zip(pieces[1:], encodings[1:], strict=True):
        if (
            made.tokens
            and made.tokens[0].startswith(_SPACE)
            and not piece.startswith((" ", _SPACE))
        ):
            return encoding
    ids = [token for made in encodings for token in made.ids]
    offsets = [
        (begin + first, begin + end)
        for begin, made in zip(begins, encodings, strict=True)
        for first, end in made.offsets
    ]
    return Joined(ids, offsets)


def _takes_space_apart(tokenizer: PreTrainedTokenizerBase, text: str, place: int) -> bool:
    """Return whether white space before a character has other tokens where the text ends with
    it.
    """
    before = text[max(0, place - _LONGEST_RUN) : place]
    words = before.rstrip()
    return len(before) > len(words) + 1 and _asked(tokenizer)(
        before[max(0, len(words) - 1) :], text[place : place + 2]
    )


@lru_cache(maxsize=8)
def _asked(tokenizer: Any) -> Callable[[str, str], bool]:
    """`_differs` of a tokenizer, with its answers kept for as long as that is in use."""
    return lru_cache(maxsize=4096)(partial(_differs, tokenizer))


def _differs(tokenizer: Any, before: str, after: str) -> bool:
    """Return whether a text has other tokens before another one than alone."""
    alone, followed = tokenizer.backend_tokenizer.encode_batch(
        [before, before + after], add_special_tokens=False
    )
    return followed.ids[: len(alone.ids)] != alone.ids


def require_prompted(text: str, spans: list[Span], encoding: Encoding | Joined) -> None:
    """Raise LineError for a token that begins before an answer and ends in it."""
    if isinstance(encoding, Joined):
        return
    place = next((first for first, _ in spans if _straddled(encoding, first)), None)
    if place is not None:
        raise LineError(
            "",
            "the base's tokenizer makes one token of the prompt's end and the answer's beginning, "
            f"{text[max(0, place - 10) : place]!r} and {text[place : place + 10]!r}, which the "
            "model does not see in "
            "inference. Begin the answer otherwise, or give a chat_template whose generation "
            "prompt ends otherwise",
        )


def _straddled(encoding: Encoding, place: int) -> bool:
    """Return whether a token begins before a character and ends after it, in time logarithmic in
    the number of tokens.
    """
    low = 0
    high = len(encoding)
    while low < high:  # the last token that begins before the place
        middle = (low + high) // 2
        begin, _ = encoding.token_to_chars(middle) or (0, 0)
        low, high = (middle + 1, high) if begin < place else (low, middle)
    begin, end = (encoding.token_to_chars(low - 1) or (0, 0)) if low else (0, 0)
    return begin < place < end
