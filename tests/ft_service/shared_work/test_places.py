"""Places: limits of kinds of work, in threads and in an event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, suppress

import pytest

from ft_service.errors import LimitError, SpecError, UnavailableError
from ft_service.shared_work.places import Kind, Outcome, Places

TWO = Kind(name="test", places=2, of_project=1, waiting=1, seconds=0.05, busy="Tests are run")


def test_a_project_cannot_take_the_others_places() -> None:
    places = Places(TWO)
    with (
        places.hold("a"),
        places.hold("b"),
        pytest.raises(UnavailableError, match="Tests are run for others") as late,
        places.hold("a"),
    ):
        pass

    assert late.value.retry_after is not None
    assert places.projects() == {}


def test_what_waits_beyond_a_limit_is_refused_by_name() -> None:
    places = Places(TWO)

    async def ask() -> None:
        async with places.held("a"):
            waits = asyncio.create_task(_hold(places, "a"))
            await asyncio.sleep(0)
            with pytest.raises(LimitError) as refused:
                async with places.held("a"):
                    pass
            assert refused.value.code == "too_many_at_once"
            async with places.held("b"):
                assert places.projects() == {"a": (1, 1), "b": (0, 1)}
        await waits

    asyncio.run(ask())


def test_a_task_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    places = Places(Kind(name="test", places=1, of_project=1))

    async def ask() -> None:
        async with places.held("a"):
            waits = asyncio.create_task(_hold(places, "b"))
            await asyncio.sleep(0)
            waits.cancel()
            with suppress(asyncio.CancelledError):
                await waits
        async with places.held("c"):
            assert places.projects() == {"c": (0, 1)}

    asyncio.run(ask())


def test_threads_and_tasks_share_the_places() -> None:
    places = Places(Kind(name="test", places=1, of_project=1))
    order: list[str] = []

    def in_thread() -> None:
        with places.hold("b"):
            order.append("b")

    async def ask() -> None:
        async with places.held("a"):
            thread = threading.Thread(target=in_thread)
            thread.start()
            while not places.projects().get("b"):
                await asyncio.sleep(0.001)
            order.append("a")
        await asyncio.to_thread(thread.join)

    asyncio.run(ask())
    assert order == ["a", "b"]


def test_ends_are_counted_by_whose_fault_they_are() -> None:
    places = Places(Kind(name="test", places=1, of_project=1))
    for error in (None, SpecError("wrong"), UnavailableError("away")):
        with ExitStack() as stack:
            stack.enter_context(suppress(SpecError, UnavailableError))
            stack.enter_context(places.hold("a"))
            if error:
                raise error
    assert places.ended == {Outcome.DONE: 1, Outcome.REFUSED: 1, Outcome.LOST: 1}


async def _hold(places: Places, project: str) -> None:
    async with places.held(project):
        pass
