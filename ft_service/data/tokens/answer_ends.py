"""What a tokenizer and a chat template say of a base's answers: the tokens that end them, and how
they are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_service.data.answer_format import AnswerFormat
from ft_service.data.call_grammar import calls_of
from ft_service.data.line_errors import LineError
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tool_call_parser import Write

_WORDS = "ft_words"


def answer_ends(write: Write, tokenizer: Any, folder: Path) -> frozenset[int]:
    """The tokenizer's end, those that generation_config.json names, and what the template writes
    behind an answer if that is one special token: what training taught the model to end with.
    """
    ends = {tokenizer.eos_token_id, *stops_of(folder)}
    try:
        text = write(
            [{"role": "user", "content": "ft_question"}, {"role": "assistant", "content": _WORDS}]
        )
    except LineError:  # the template may refuse it, and then has no say
        text = ""
    after = tokenizer(text.rpartition(_WORDS)[2], add_special_tokens=False)["input_ids"]
    if after and after[0] in set(tokenizer.all_special_ids) | set(
        tokenizer.get_added_vocab().values()
    ):
        ends.add(after[0])
    return frozenset(token for token in ends if isinstance(token, int))


def answer_format(write: Write | None, tokenizer: Any) -> AnswerFormat:
    """How answers are written. `write`: None for a base without a chat template."""
    special = sorted(
        added.content for added in tokenizer.added_tokens_decoder.values() if added.special
    )
    return AnswerFormat(tuple(special), calls_of(write) if write is not None else None)
