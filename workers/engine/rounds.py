"""Choice of the jobs of an engine that compute in the next round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 16
"""Rounds after which a job that has waited for others of higher priority is treated as one of
them.
"""


@dataclass(frozen=True)
class Turn:
    """A job that waits for its next micro-batch."""

    used: int
    """Tokens that were computed for it so far; a job that has joined begins with the least of those
    that were there.
    """
    tokens: int
    """Tokens of its micro-batch, on the rank that has most."""
    trains: bool
    """Whether a backward follows."""
    bytes: int = 0
    """Memory that its micro-batch takes, as planned; 0: not planned."""
    passing: int = 0
    """The part of `bytes` that is gone before another micro-batch of the round needs its own."""
    priority: int = 0
    """Higher first."""
    waited: int = 0
    """Rounds since it computed last, or joined."""


def next_round(turns: Sequence[Turn], budget: int, room: int | None = None) -> list[int]:
    """The positions, at least one, of the jobs whose micro-batches are computed next, together.

    `budget`, `room`: most tokens and bytes of a round (room None: not known); a larger micro-batch
    has one of its own.

    Of the highest priority, the job with the fewest tokens so far is first, so that among n jobs
    with micro-batches of at least a and at most b tokens each one waits for at most (n - 1) *
    ceil(b / a + 1) rounds (start-time fair queuing, Goyal et al. 1996), and for PATIENCE more if
    there are higher priorities than its own.
    """
    highest = max(turn.priority for turn in turns)

    def rank(position: int) -> tuple[int, int, int]:
        turn = turns[position]
        return -(highest if turn.waited >= PATIENCE else turn.priority), turn.used, position

    order = sorted(range(len(turns)), key=rank)
    chosen = order[:1]
    left = budget - turns[order[0]].tokens
    for position in order[1:]:
        turn = turns[position]
        fits = room is None or _bytes([turns[i] for i in (*chosen, position)]) <= room
        if turn.tokens <= left and fits and turn.trains == turns[order[0]].trains:
            chosen.append(position)
            left -= turn.tokens
    return sorted(chosen)


def _bytes(turns: Sequence[Turn]) -> int:
    """Memory that micro-batches of one round take together."""
    return sum(turn.bytes - turn.passing for turn in turns) + max(turn.passing for turn in turns)
