"""Records as tokens, one by one."""

from __future__ import annotations

from typing import Any

from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Record
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.tokenize import tokenize


def tokenized(base: Any, record: Record, number: int = 1) -> Tokens | Fault:
    """The tokens of a record that is one sample, or its fault. `base`: a tokenizer."""
    (found,) = tokenize(base, [(number, record)])
    if isinstance(found, Fault):
        return found
    (tokens,) = found
    return tokens
