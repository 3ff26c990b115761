"""The reconciler's probe: a loop that hangs or has ended is distinguished from one that runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from api.http import probe
from ft_service.control.jobs.reconciler import Reconciler
from ft_service.errors import SpecError
from ft_service.meters import HANGING_SECONDS, STALLED_SECONDS, Meters
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import new_reconciler, new_store


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meters(clock: Clock) -> Meters:
    return Meters(clock)


@pytest.fixture
def get(meters: Meters) -> Iterator[Callable[[str], httpx2.Response]]:
    with probe.serving(0, "127.0.0.1", meters) as port, httpx2.Client(trust_env=False) as http:
        yield lambda path: http.get(f"http://127.0.0.1:{port}{path}", timeout=30)


class Loop:
    """A reconciler in a thread, whose store does not answer while `free` is not set."""

    def __init__(self, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.hangs, self.stop = threading.Event(), threading.Event(), threading.Event()
        self.fails: BaseException | None = None
        self.free.set()
        monkeypatch.setattr(reconciler, "step", self.step)
        self.thread = threading.Thread(target=self.run, args=(reconciler,), daemon=True)
        self.thread.start()

    def run(self, reconciler: Reconciler) -> None:
        try:
            reconciler.run(self.stop)
        except SystemExit:
            self.hangs.set()

    def step(self) -> bool:
        if self.fails is not None:
            raise self.fails
        if not self.free.is_set():
            self.hangs.set()
            self.free.wait()
        return False


@pytest.fixture
def loop(tmp_path: Path, meters: Meters, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    store = new_store(tmp_path)
    loop = Loop(new_reconciler(tmp_path, store, FakeLauncher(), meters=meters), monkeypatch)
    yield loop
    loop.stop.set()
    loop.free.set()
    loop.thread.join(30)
    store.close()


def test_a_loop_that_hangs_is_found_and_one_that_turns_again_is_well(
    get: Callable[[str], httpx2.Response], clock: Clock, loop: Loop
) -> None:
    clock.now += HANGING_SECONDS + 1
    wait_for(lambda: get("/livez").status_code == 200)
    loop.free.clear()
    assert loop.hangs.wait(30)
    clock.now += STALLED_SECONDS - 1
    assert get("/readyz").status_code == 200, "a turn may take its time"
    clock.now += 1
    assert get("/readyz").status_code == 503
    clock.now += HANGING_SECONDS - STALLED_SECONDS - 1
    assert get("/livez").status_code == 200
    clock.now += 1
    answer = get("/livez")
    assert (answer.status_code, answer.text) == (
        503,
        "The reconciler's last turn began 900 seconds ago.\n",
    )
    assert "ft_reconciler_turn_age_seconds 900.0" in get("/metrics").text
    loop.free.set()
    wait_for(lambda: get("/livez").status_code == 200)


def test_a_loop_whose_thread_is_gone_is_found(
    get: Callable[[str], httpx2.Response], clock: Clock, loop: Loop
) -> None:
    wait_for(lambda: "turn_age_seconds 0.0" in get("/metrics").text)
    loop.fails = SystemExit()
    assert loop.hangs.wait(30)
    clock.now += HANGING_SECONDS
    assert get("/livez").status_code == 503


def test_a_loop_that_never_begins_is_found(
    get: Callable[[str], httpx2.Response], clock: Clock
) -> None:
    assert get("/livez").status_code == 200
    assert "ft_reconciler_turn_age_seconds NaN" in get("/").text
    clock.now += HANGING_SECONDS
    assert get("/livez").status_code == 503


def test_a_port_that_is_taken_is_named(meters: Meters) -> None:
    with (
        probe.serving(0, "127.0.0.1", meters) as port,
        pytest.raises(
            SpecError,
            match=rf"Port {port} of 127.0.0.1 is in use by process {os.getpid()}: .+\. Stop that, "
            r"or set FT_METRICS_PORT",
        ),
        probe.serving(port, "127.0.0.1", meters),
    ):
        pass
