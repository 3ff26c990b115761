"""Calls of several requests in one batch: nobody waits for a turn of their own, nobody bears another's fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from api.http.batching import MOST_AT_ONCE, MOST_OF_OWNER, Batched

AWAY = 1000


class Work:
    """Doubles numbers; holds its first call until let go, so that others gather. Refuses the negative, fails over `AWAY`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, given: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(given))
        self.entered.set()
        assert self.released.wait(10)
        if AWAY in given:
            raise RuntimeError("the store is away")
        return [2 * number if number >= 0 else ValueError(f"refused {number}") for number in given]


async def gathered(work: Work, numbers: Sequence[int], owner: Any = lambda number: number) -> list[int | BaseException]:
    """What each call gives or raises, when all came while the one with 0 was worked on."""
    batched = Batched(work, owner)
    first = asyncio.create_task(batched(0))
    await asyncio.to_thread(work.entered.wait, 10)
    others = [asyncio.create_task(batched(number)) for number in numbers]
    await asyncio.sleep(0)  # each has had its turn, and waits
    work.released.set()
    assert await first == 0
    return await asyncio.gather(*others, return_exceptions=True)


def test_what_came_meanwhile_is_worked_on_at_once() -> None:
    work = Work()
    assert asyncio.run(gathered(work, [1, 2, 3])) == [2, 4, 6]
    assert work.batches == [[0], [1, 2, 3]]


def test_owners_take_turns_and_one_fills_no_batch() -> None:
    work = Work()
    odd = list(range(1, 4 * MOST_OF_OWNER, 2))
    asyncio.run(gathered(work, [*odd, 2, 4], lambda number: number % 2))
    assert work.batches[1][:4] == [1, 2, 3, 4]
    assert [len(batch) for batch in work.batches] == [1, MOST_OF_OWNER + 2, MOST_OF_OWNER]
    assert [number for batch in work.batches[1:] for number in batch if number % 2] == odd


def test_one_that_is_refused_takes_no_other_with_it() -> None:
    two, refused, six = asyncio.run(gathered(Work(), [1, -2, 3]))
    assert (two, six) == (2, 6)
    assert isinstance(refused, ValueError)


def test_a_batch_takes_no_more_than_its_limit() -> None:
    work = Work()
    numbers = list(range(1, MOST_AT_ONCE + 2))
    assert asyncio.run(gathered(work, numbers)) == [2 * number for number in numbers]
    assert [len(batch) for batch in work.batches] == [1, MOST_AT_ONCE, 1]


def test_work_that_fails_fails_everybody_it_was_for_and_nobody_after() -> None:
    async def run() -> None:
        work = Work()
        outcomes = await gathered(work, [12, AWAY])
        assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
        assert await Batched(work)(2) == 4

    asyncio.run(run())


def test_who_goes_away_leaves_the_others_their_answers() -> None:
    async def run() -> None:
        work = Work()
        batched = Batched(work)
        first = asyncio.create_task(batched(0))
        await asyncio.to_thread(work.entered.wait, 10)
        gone, stays = asyncio.create_task(batched(1)), asyncio.create_task(batched(2))
        await asyncio.sleep(0)
        gone.cancel()
        work.released.set()
        assert [await first, await stays] == [0, 4]
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(run())


def test_outcomes_that_do_not_match_the_calls_are_an_error_and_no_wait_for_ever() -> None:
    async def run() -> None:
        with pytest.raises(AssertionError):
            await asyncio.wait_for(Batched[int, int](lambda given: [])(1), 10)

    asyncio.run(run())
