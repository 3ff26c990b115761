"""Division of a step's samples between ranks and micro-batches: pure functions of their lengths.

Ranks meet at every layer of every micro-batch, so what counts is that the micro-batches of one
round cost alike, and that there are as few rounds as the budget of tokens allows. Which samples
share a micro-batch changes results by rounding only.

    round    one micro-batch on every rank, all at the same time
    budget   tokens of a micro-batch, padding included; a longer sample in the batch raises it to
             its length
    unit     what is not divided: a sample, or the two samples of a pair
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

Rounds = list[list[list[int]]]
"""Samples of each micro-batch, by round and by rank, as positions in the list of lengths.

An empty one is padding.
"""

_TRIES = 8
"""Rows that are looked at for one with room, the cheapest first."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """What a micro-batch may hold."""

    tokens: int
    """The budget."""
    samples: int | None = None
    """Or pairs, where these are shared; None: any number."""
    packed: bool = True
    """Samples are concatenated; False: each in a row of its own, all padded to the longest."""
    per_token: float = 0.0
    """What attention adds to the cost of a token for every token before it in its sample, as a
    share of all else.
    """

    def cost(self, length: int) -> float:
        """Cost of one sample in a packed row, in tokens without attention."""
        return length * (1 + self.per_token * length)


def attention_share(hidden: int) -> float:
    """`Limits.per_token` of a decoder by its width.

    A layer's products take about 4 · 12 hidden² operations a token with a frozen base, forward and
    backward; attention over s tokens 6 · s · hidden: each further token adds 1 / (8 · hidden).
    """
    return 1 / (8 * max(1, hidden))


def share_out(lengths: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
    """The micro-batches of all ranks for samples of these lengths; every sample is in exactly one.

    At least one round.
    """
    bins = (
        _packed(lengths, list(map(limits.cost, lengths)), world, limits)
        if limits.packed
        else _padded(lengths, world, limits)
    )
    return _in_rounds(bins, [_cost(lengths, own, limits) for own in bins], world)


def share_out_pairs(
    lengths: Sequence[tuple[int, int]], world: int, limits: MicroBatchLimits
) -> Rounds:
    """The same for pairs, by the lengths of their two samples: both are in the same micro-batch.

    Padded, each sample has a row as long as the longest of the micro-batch.
    """
    if limits.packed:
        costs = [limits.cost(one) + limits.cost(other) for one, other in lengths]
        bins = _packed([sum(pair) for pair in lengths], costs, world, limits)
        return _in_rounds(bins, [sum(costs[i] for i in own) for own in bins], world)
    widths = [max(pair) for pair in lengths]
    bins = _padded(widths, world, replace(limits, tokens=limits.tokens // 2))
    return _in_rounds(bins, [_cost(widths, own, limits) for own in bins], world)


def _in_rounds(bins: list[list[int]], costs: list[float], world: int) -> Rounds:
    order = sorted(range(len(bins)), key=lambda i: (-costs[i], bins[i]))
    rounds = [
        [sorted(bins[i]) for i in order[first : first + world]]
        for first in range(0, len(order), world)
    ]
    return [
        micro[::-1] if number % 2 else micro for number, micro in enumerate(rounds)
    ]  # no rank always has the largest


def _cost(lengths: Sequence[int], own: Sequence[int], limits: MicroBatchLimits) -> float:
    if limits.packed:
        return sum(limits.cost(lengths[i]) for i in own)
    return len(own) * limits.cost(max((lengths[i] for i in own), default=0))


def _packed(
    lengths: Sequence[int], costs: Sequence[float], world: int, limits: MicroBatchLimits
) -> list[list[int]]:
    """Rows of at most the budget, a multiple of `world` of them: the fewest that hold all, of like
    cost. `costs`: of the units of these lengths.
    """
    budget = max([limits.tokens, *lengths])
    rows = max(
        -(-sum(lengths) // budget), -(-len(lengths) // (limits.samples or len(lengths) or 1)), 1
    )
    fewest = -(-rows // world) * world
    if (found := _by_cost(lengths, costs, fewest, budget, limits)) is not None:
        return found
    # Samples of more than half the budget need a row each: of a validation set, thousands more than
    # the sum says.
    low = fewest
    more = world
    while (found := _by_cost(lengths, costs, low + more, budget, limits)) is None:
        low = low + more
        more = 2 * more
    high = low + more
    while high - low > world:
        middle = low + (high - low) // (2 * world) * world
        if (fewer := _by_cost(lengths, costs, middle, budget, limits)) is None:
            low = middle
        else:
            high = middle
            found = fewer
    return found


def _by_cost(
    lengths: Sequence[int],
    costs: Sequence[float],
    count: int,
    budget: int,
    limits: MicroBatchLimits,
) -> list[list[int]] | None:
    """The longest unit first, each to the row that costs least and has room.

    None: `count` rows have no room for all.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, number) for number in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        passed: list[tuple[float, int]] = []
        while heap and len(passed) < _TRIES:
            cost, number = heapq.heappop(heap)
            room = tokens[number] + lengths[i] <= budget and (
                limits.samples is None or len(rows[number]) < limits.samples
            )
            if room:
                rows[number].append(i)
                tokens[number] += lengths[i]
                heapq.heappush(heap, (cost + costs[i], number))
                break
            passed.append((cost, number))
        else:
            return None
        for entry in passed:
            heapq.heappush(heap, entry)
    return rows


def _padded(lengths: Sequence[int], world: int, limits: MicroBatchLimits) -> list[list[int]]:
    """Samples of like length together, a multiple of `world` of micro-batches, of like size."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widest = max([limits.tokens, *lengths])
    count = -(-max(1, len(_runs(order, lengths, widest, limits.samples))) // world) * world
    # the lowest budget by which no more than `count` are needed
    low = 0
    high = widest
    while low < high:
        middle = (low + high) // 2
        fits = len(_runs(order, lengths, middle, limits.samples)) <= count
        low, high = (low, middle) if fits else (middle + 1, high)
    runs = _runs(order, lengths, low, limits.samples)
    return runs + [[] for _ in range(count - len(runs))]


def _runs(
    order: Sequence[int], lengths: Sequence[int], budget: int, most: int | None
) -> list[list[int]]:
    """`order`, which begins with the longest, cut into runs of which each, padded, is within the
    budget, or one sample.
    """
    runs: list[list[int]] = []
    for i in order:
        own = runs[-1] if runs else []
        if own and (len(own) + 1) * lengths[own[0]] <= budget and (most is None or len(own) < most):
            own.append(i)
        else:
            runs.append([i])
    return runs
