"""Samples of a data file as the model sees them, as the process that has the tokenizers hands them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["learned", "words", "template", "cut"]
"""learned: the model is trained to produce it; words: of a message or a prompt, only read; template: written by the chat
template, only read; cut: behind training.max_length, not seen."""
MOST_LINES = 10**12
"""No file has more, so that nobody needs to ask for what is behind them."""
Answer = Literal["", "preferred", "rejected"]
"""Which one of a preference pair's two; empty: it is no pair."""


@dataclass(frozen=True)
class ShownToken:
    id: int
    text: str
    """As it stands in the sample's text; empty where the token before shows the character that both are part of."""
    role: Role


@dataclass(frozen=True)
class ShownSample:
    """One sample, or why there is none."""

    line: int
    """Number of its record in the file, from 1; 0: the file cannot be read any further."""
    tokens: tuple[ShownToken, ...] = ()
    learned: int = 0
    """Tokens that are trained on."""
    total: int = 0
    """Tokens, cut ones included."""
    cut_at: int | None = None
    """The first token that is cut; None: none is."""
    error: str | None = None
    """Why the record cannot be trained on; None: it can."""
    answer: Answer = ""


@dataclass(frozen=True)
class SamplePage:
    samples: tuple[ShownSample, ...]
    has_more: bool
    word: str
    """What a record of the file is called."""
    shape: str
    """The file's format and container, in words."""


@dataclass(frozen=True)
class Page:
    """Which records are asked for: up to `limit` of them behind number `after`."""

    after: int
    limit: int
