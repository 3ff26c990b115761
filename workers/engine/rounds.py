"""Which jobs of an engine compute in the next round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A job that waits for its next micro-batch."""

    used: int
    """Tokens that were computed for it so far; a job that has joined begins with the least of those that were there."""
    tokens: int
    """Tokens of its micro-batch, on the rank that has most."""
    trains: bool
    """Whether a backward follows."""


def next_round(turns: Sequence[Turn], budget: int) -> list[int]:
    """The positions, at least one, of the jobs whose micro-batches are computed next, together. `budget`: most tokens of a
    round; a larger micro-batch has one of its own.

    The job with the fewest tokens so far is first, so that among n jobs with micro-batches of at least a and at most b tokens
    each one waits for at most (n - 1) * ceil(b / a + 1) rounds (start-time fair queuing, Goyal et al. 1996).
    """
    order = sorted(range(len(turns)), key=lambda position: (turns[position].used, position))
    chosen, left = order[:1], budget - turns[order[0]].tokens
    for position in order[1:]:
        turn = turns[position]
        if turn.tokens <= left and turn.trains == turns[order[0]].trains:
            chosen.append(position)
            left -= turn.tokens
    return sorted(chosen)
