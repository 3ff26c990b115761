"""What is learned of a rollout whose model was called several times: rows of the very tokens that
were sampled. Pure.

    call 1   prompt ─────────── answer
    call 2   prompt of call 1 ─ answer ─ what the agent added ─ answer      one row, two answers
    call 3   a history without thoughts ─ answer                            another row

Nothing is rendered or tokenised again: a chat template may drop earlier thoughts, and text that is
tokenised again may become other tokens than were drawn. So each answer is learned exactly once,
behind the tokens that it was sampled behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.reinforcement.step_records import TrainedRow


@dataclass(frozen=True)
class RecordedCall:
    """One call of the model."""

    prompt: Sequence[int]
    """Tokens that it was sampled behind."""
    tokens: Sequence[int]
    """Those that were drawn, the one that ends the answer included."""
    logprobs: Sequence[float]
    """The sampler's, in nats, of each of them."""
    truncated: bool = False
    """Whether the answer was cut off at its longest length."""
    prompt_text: str = ""
    drawn_text: str = ""
    """Their texts with special tokens; empty: they are not known."""


def rows_of(calls: Sequence[RecordedCall]) -> tuple[list[TrainedRow], list[float]]:
    """The rows of a rollout, and the log-probabilities of their sampled tokens, one row after the
    other.

    `calls`: in the order in which they ended. A call joins the longest row with whose tokens its
    prompt begins. Every sampled token of every call is sampled in exactly one row.
    """
    tokens: list[list[int]] = []
    sampled: list[list[tuple[int, int]]] = []
    logprobs: list[list[float]] = []
    texts: list[list[tuple[str, bool]]] = []
    numbers: list[list[int]] = []
    for number, call in enumerate(calls):
        place = _continued(tokens, call.prompt)
        if place is None:
            place = len(tokens)
            tokens.append([])
            sampled.append([])
            logprobs.append([])
            texts.append([])
            numbers.append([])
        row = tokens[place]
        row += call.prompt[len(row) :]
        sampled[place].append((len(row), len(row) + len(call.tokens)))
        row += call.tokens
        logprobs[place] += call.logprobs
        numbers[place].append(number)
        texts[place] += _texts(texts[place], call)
    parts = zip(tokens, sampled, numbers, texts, strict=True)
    rows = [
        TrainedRow(tokens=own, sampled=at, calls=of, texts=shown) for own, at, of, shown in parts
    ]
    return rows, [value for own in logprobs for value in own]


def _texts(before: Sequence[tuple[str, bool]], call: RecordedCall) -> list[tuple[str, bool]]:
    """The texts that a call adds to those of its row."""
    known = "".join(text for text, _ in before)
    added = call.prompt_text.removeprefix(known)
    return [(text, learned) for text, learned in ((added, False), (call.drawn_text, True)) if text]


def _continued(rows: Sequence[Sequence[int]], prompt: Sequence[int]) -> int | None:
    """The place of the longest row with which a prompt begins; None: there is none."""
    found = [
        place
        for place, row in enumerate(rows)
        if len(row) <= len(prompt) and list(prompt[: len(row)]) == list(row)
    ]
    return max(found, key=lambda place: len(rows[place]), default=None)
