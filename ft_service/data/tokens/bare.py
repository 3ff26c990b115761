"""Bare text, which no chat template writes: a document, or a prompt and what it goes on with.

It begins with the token that the tokenizer begins every text with, if it has one, and ends with its end of text, which is
learned: a model that never learns it never stops.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ft_service.data.line_errors import LineError
from ft_service.data.records import PromptCompletion, Text
from ft_service.data.tokens.marked import Span


def render_bare(tokenizer: PreTrainedTokenizerBase, record: Text | PromptCompletion, train_on: str) -> tuple[str, list[Span]]:
    """Text and learned spans. Raises LineError if the tokenizer has no end of text, or for a text of which an answer is to be
    learned.
    """
    begin, end = _ends(tokenizer)
    if not end:
        raise LineError("", "the base's tokenizer names no end-of-text token (eos_token), so bare text could not be ended")
    if isinstance(record, Text):
        if train_on == "last_assistant":
            raise LineError(
                "text",
                "has no answers, of which training.train_on = 'last_assistant' learns the last. Leave that out: a text is "
                "learned whole",
            )
        text = begin + record.text + end
        return text, [(len(begin), len(text))]
    prompt = begin + record.prompt
    text = prompt + record.completion + end
    return text, [(len(begin) if train_on == "everything" else len(prompt), len(text))]


def bare_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A prompt as it stands before its completion."""
    return _ends(tokenizer)[0] + prompt


@lru_cache(maxsize=4)
def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of the token that every text begins with, and of that which ends one; empty: there is none."""
    named: Any = tokenizer
    ids = named("").input_ids
    begins = bool(ids) and ids[0] == named.bos_token_id and named.bos_token_id is not None
    return (named.bos_token if begins else ""), named.eos_token or ""
