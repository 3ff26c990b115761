"""Samples of a data file as the model sees them, in replies of the process that has the
tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["learned", "words", "template", "cut"]
"""learned: the model is trained to produce the token; words: a token of a message or a prompt that
is only read; template: a token of the chat template that is only read; cut: a token after
training.max_length, which is not used.
"""
MOST_LINES = 10**12
"""Upper limit of record numbers in requests; no file has more records."""
Answer = Literal["", "preferred", "rejected", "good", "bad"]
"""The answer of a preference pair, or what its label says of an answer; empty: neither."""


@dataclass(frozen=True)
class ShownToken:
    id: int
    text: str
    """The token's part of the sample's text; empty if the previous token has the character that
    both encode. All tokens that stand for an image are shown as one: `[image 640x480, 256 tokens]`.
    """
    role: Role


@dataclass(frozen=True)
class ShownSample:
    """A sample, or the reason why there is none."""

    line: int
    """Number of the record in the file, from 1; 0: the rest of the file cannot be read."""
    tokens: tuple[ShownToken, ...] = ()
    learned: int = 0
    """The number of tokens that are trained on."""
    total: int = 0
    """The number of tokens before the cut."""
    cut_at: int | None = None
    """Place of the first token that is cut; None: no token is cut."""
    error: str | None = None
    """The reason why the record cannot be trained on; None: it can."""
    answer: Answer = ""


@dataclass(frozen=True)
class SamplePage:
    samples: tuple[ShownSample, ...]
    has_more: bool
    word: str
    """The name of the file's records in messages."""
    shape: str
    """The file's format and container, in words."""


@dataclass(frozen=True)
class RecordRange:
    """A range of records: up to `limit` records after number `after`."""

    after: int
    limit: int
