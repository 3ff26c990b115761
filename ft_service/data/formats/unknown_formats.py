"""Files of no known format: what they are, if that can be told, and what to write. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ft_service.data.formats.columns import ANSWERS, CONTEXTS, QUESTIONS, listed
from ft_service.data.formats.detect_format import FORMAT_KEYS, Container, recognise
from ft_service.data.formats.normalize import columns_of
from ft_service.data.image_part import COLUMNS

_KNOWN: Sequence[tuple[frozenset[str], str]] = (
    (
        frozenset({"custom_id", "body"}),
        "is a request of OpenAI's Batch API, which holds no answer: write body.messages, and "
        "after them the "
        "message from the output file's line of the same custom_id, as messages",
    ),
    (
        frozenset({"custom_id", "response"}),
        "is a reply of OpenAI's Batch API, without what was asked: write body.messages of the "
        "request of the same custom_id, "
        "and after them response.body.choices[0].message, as messages",
    ),
    (
        frozenset({"mapping", "current_node"}),
        "is ChatGPT's export, a tree of all versions of a conversation: write the messages from "
        "the root to "
        "current_node as messages with role and content",
    ),
)
"""Keys of records that are known and hold no sample as they are, with what to write.

The first set that fits decides.
"""
_NO_CLUE = "data: {instruction: COLUMN, output: COLUMN}"
"""How a mapping begins where the names of the columns say nothing."""


def unknown_format(container: Container, keys: Sequence[str]) -> str:
    """The reason for refusing a file with unknown columns or keys: their names, the known formats,
    and a mapping to set.
    """
    if (reason := next((reason for own, reason in _KNOWN if own <= set(keys)), None)) is not None:
        return reason
    is_json = container in (Container.LINES, Container.ARRAY)
    names = (
        f"its keys are {listed(keys)}"
        if is_json
        else f"it is {container.value}, and its columns are {listed(keys)}"
    )
    known = "; ".join(dict.fromkeys(format.value for format, _ in FORMAT_KEYS))
    mapping = mapping_for(keys)
    of_data = (
        "If its first row is data, put a row of names before it. "
        if container is Container.CSV and mapping.startswith(_NO_CLUE)
        else ""
    )
    return (
        f"is of no known format: {names}. {of_data}Known are {known}. Say which is which: {mapping}"
    )


def mapping_for(keys: Sequence[str]) -> str:
    """A suggested `data` mapping for a file with these columns; an example if their names give no
    clue.
    """
    lower = {key.strip().lower(): key for key in reversed(keys)}
    if (format := recognise(lower)) is not None:
        own = [name for name in columns_of(format) if name not in COLUMNS]
        pairs = [f"{name}: {lower[name]}" for name in own if name in lower]
        return f"data: {{{', '.join(pairs)}}}"
    question, answer = (
        next((lower[name] for name in names if name in lower), "COLUMN")
        for names in (QUESTIONS, ANSWERS)
    )
    context = next(
        (
            lower[name]
            for name in CONTEXTS
            if name in lower and lower[name] not in (question, answer)
        ),
        None,
    )
    between = f", input: {context}" if context and question != "COLUMN" else ""
    return (
        f"data: {{instruction: {question}{between}, output: {answer}}} makes conversations of them"
    )
