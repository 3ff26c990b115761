"""Pairwise covering: a short list of choices in which every two values of different factors
meet.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence

Value = tuple[str, str]
"""A factor and one of its values."""
Choice = dict[str, str]
"""One value of every factor."""


def pairwise(
    factors: Mapping[str, Sequence[str]], never: Collection[frozenset[Value]], seed: int
) -> list[Choice]:
    """Choices that together contain every pair of values, without those in `never`.

    Greedy: each choice begins with a pair that is still missing, and takes of every other factor
    the value by which most missing ones are met. The first value of every factor must go with all
    others.
    """
    drawn = random.Random(seed)
    values = [[(factor, value) for value in own] for factor, own in factors.items()]
    every = [
        frozenset(pair)
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    ]
    missing = dict.fromkeys(pair for pair in every if pair not in never)
    choices: list[Choice] = []
    while missing:
        taken = list(next(iter(missing)))
        others = [own for own in values if own[0][0] not in {factor for factor, _ in taken}]
        for own in drawn.sample(others, len(others)):
            fitting = [
                value
                for value in own
                if not any(frozenset((value, other)) in never for other in taken)
            ]
            taken.append(
                max(
                    fitting,
                    key=lambda value: sum(frozenset((value, other)) in missing for other in taken),
                )
            )
        for pair in itertools.combinations(taken, 2):
            missing.pop(frozenset(pair), None)
        chosen = dict(taken)
        choices.append({factor: chosen[factor] for factor in factors})
    return choices
