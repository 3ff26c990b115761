"""Threads and turns are shared between projects, whatever one of them waits for."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from api.http import threads
from api.http.threads import (
    AT_ONCE,
    AT_ONCE_OF_PROJECT,
    THREADS,
    TURNS,
    WAITING,
    SharedWork,
    in_thread,
    turn,
    with_key,
    work_for,
)
from ft_service.errors import LimitError, UnavailableError


def test_a_project_has_its_share_of_the_threads() -> None:
    """Though more of its requests wait than there are threads, another one's is carried out; and
    theirs in the end.
    """
    released = threading.Event()
    at_once = threading.Semaphore(0)

    def wait() -> None:
        at_once.release()
        released.wait()

    async def of(project: str, work) -> None:
        work_for(project)
        await in_thread(work)

    async def both() -> None:
        hanging = [asyncio.create_task(of("rival", wait)) for _ in range(2 * AT_ONCE)]
        for _ in range(AT_ONCE_OF_PROJECT):
            await asyncio.to_thread(at_once.acquire)
        await asyncio.create_task(of("default", lambda: None))
        assert not at_once.acquire(blocking=False), "it has no more than its share"
        assert not any(task.done() for task in hanging)
        released.set()
        await asyncio.gather(*hanging)
        assert THREADS.projects() == {}

    try:
        asyncio.run(asyncio.wait_for(both(), 60))
    finally:
        released.set()


def test_projects_take_turns() -> None:
    """One of a project's requests waits for the turns of all: however many it has, the next one's
    turn comes behind one.
    """
    order: list[str] = []

    async def take(project: str, release: asyncio.Event) -> None:
        work_for(project)
        async with turn("reading"):
            order.append(project)
            await release.wait()

    async def run() -> None:
        release = asyncio.Event()
        asking = [asyncio.create_task(take("rival", release)) for _ in range(5)]
        await asyncio.sleep(0)
        for project in ("second", "third", "default"):
            asking.append(asyncio.create_task(take(project, release)))
            await asyncio.sleep(0)
        assert order == ["rival", "second"], TURNS
        release.set()
        await asyncio.gather(*asking)

    asyncio.run(run())
    assert order[:4] == ["rival", "second", "third", "default"]
    assert order[4:] == ["rival"] * 4


def test_only_so_many_wait_for_a_turn_and_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(project: str) -> None:
        work_for(project)
        async with turn("making"):
            await asyncio.Event().wait()

    async def run() -> None:
        asking = [asyncio.create_task(take("rival")) for _ in range(1 + WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(LimitError, match=f"{WAITING} requests of this project"):
            await take("rival")
        asking.append(asyncio.create_task(take("second")))
        await asyncio.sleep(0)
        monkeypatch.setattr(TURNS["making"], "kind", replace(TURNS["making"].kind, seconds=0.0))
        with pytest.raises(UnavailableError, match="for others"):
            await take("default")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        monkeypatch.undo()
        async with turn("making"):
            pass

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_many_requests_want_at_once_is_done_once_in_one_turn() -> None:
    """Such as the adapter of a fresh checkpoint, for whoever sends it a burst of chats."""
    made = 0
    released = asyncio.Event()
    fails = False

    async def make() -> int:
        nonlocal made
        made += 1
        async with turn("making"):
            await released.wait()
            if fails:
                raise UnavailableError("later")
            return made

    async def run() -> None:
        nonlocal fails
        work_for("default")
        shared = SharedWork[int]()
        many = [asyncio.create_task(shared.result("a", make)) for _ in range(4 * WAITING)]
        await asyncio.sleep(0)
        many.pop(0).cancel()
        released.set()
        assert set(await asyncio.gather(*many)) == {1}, "whoever has begun it may be gone"
        assert await shared.result("a", make) == 2, "nothing is kept"
        fails = True
        outcomes = await asyncio.gather(
            *(shared.result("a", make) for _ in range(2)), return_exceptions=True
        )
        assert [type(one) for one in outcomes] == [UnavailableError] * 2
        assert made == 3

    asyncio.run(asyncio.wait_for(run(), 60))


def test_keys_alternate_before_it_is_known_whose_they_are() -> None:
    """A burst of requests with one key does not put off the look for another one."""
    order: list[str] = []
    released = threading.Event()
    begun = threading.Semaphore(0)

    def look(secret: str) -> None:
        begun.release()
        released.wait()
        order.append(secret)

    async def run() -> None:
        burst = [asyncio.create_task(with_key("rival", look)) for _ in range(50)]
        mine = asyncio.create_task(with_key("mine", look))
        for _ in range(3):
            await asyncio.to_thread(begun.acquire)
        assert not begun.acquire(blocking=False), "two of the burst, and mine"
        released.set()
        await asyncio.gather(mine, *burst)
        assert sorted(order) == ["mine"] + ["rival"] * 50

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        released.set()


def test_no_other_module_takes_threads() -> None:
    """They would be taken first come, first served, whatever project asks."""
    taken = [
        path.name
        for path in Path(threads.__file__).parents[1].rglob("*.py")
        if path.name != "threads.py"
        and re.search(r"run_in_threadpool|to_thread|run_in_executor", path.read_text())
    ]
    assert taken == []
