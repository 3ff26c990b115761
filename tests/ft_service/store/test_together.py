"""Writes of several threads in one transaction: nobody waits for a turn of their own, nobody bears another's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ft_service.errors import ConflictError
from ft_service.ids import new_id
from ft_service.store.base import Store
from ft_service.store.together import MOST_AT_ONCE, Together

from .samples import PROJECT, new_job


class Writer:
    """Doubles numbers; holds its first call until it is let go, so that others gather meanwhile. Refuses what is negative."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, given: Sequence[int]) -> list[int]:
        self.batches.append(list(given))
        self.entered.set()
        assert self.released.wait(10)
        if refused := [number for number in given if number < 0]:
            raise ValueError(f"refused {refused}")
        return [2 * number for number in given]


def gathered(writer: Writer, together: Together[int, int], numbers: Sequence[int]) -> list[int | str]:
    """What each call gives or raises, when all came while the one with 0 was being written."""

    def call(number: int) -> int | str:
        try:
            return together(number)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers) + 1) as threads:
        first = threads.submit(call, 0)
        assert writer.entered.wait(10)
        others = [threads.submit(call, number) for number in numbers]
        eventually(lambda: len(together.waiting) == len(numbers))
        writer.released.set()
        assert first.result(10) == 0
        return [other.result(10) for other in others]


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not come to that")


def test_what_came_meanwhile_is_written_at_once() -> None:
    writer = Writer()
    together = Together(writer)
    assert gathered(writer, together, [1, 2, 3]) == [2, 4, 6]
    assert [sorted(batch) for batch in writer.batches] == [[0], [1, 2, 3]]


def test_one_that_fails_takes_no_other_with_it() -> None:
    writer = Writer()
    assert gathered(writer, Together(writer), [1, -2, 3]) == [2, "refused [-2]", 6]


def test_a_transaction_takes_no_more_than_its_limit() -> None:
    writer = Writer()
    numbers = list(range(1, MOST_AT_ONCE + 2))
    assert gathered(writer, Together(writer), numbers) == [2 * number for number in numbers]
    assert [len(batch) for batch in writer.batches] == [1, MOST_AT_ONCE, 1]


def test_a_call_after_a_failed_one_works() -> None:
    writer = Writer()
    writer.released.set()
    together = Together(writer)
    with pytest.raises(ValueError, match="refused"):
        together(-1)
    assert together(2) == 4


def test_jobs_created_at_once_are_all_there_but_the_one_whose_id_is_taken(store: Store) -> None:
    taken = store.create_job(new_job())
    jobs = [new_job(id=new_id("ftjob-")) for _ in range(30)]
    barrier = threading.Barrier(len(jobs) + 1)

    def create(job) -> str:
        barrier.wait(10)
        try:
            return store.create_job(job).id
        except ConflictError:
            return "taken"

    with ThreadPoolExecutor(len(jobs) + 1) as threads:
        found = list(threads.map(create, [*jobs, taken]))
    assert found == [job.id for job in jobs] + ["taken"]
    page = store.list_jobs(PROJECT, limit=100).data
    assert sorted(job.id for job in page) == sorted([taken.id, *found[:-1]])
    assert all(store.list_events(PROJECT, job.id).data for job in page)
