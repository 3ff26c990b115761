from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.control.jobs.reconcilers import run_all
from ft_service.jobs.states import State
from ft_service.launcher.protocol import Launcher
from ft_service.meters import Meters
from ft_service.storage.locations import Places
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import add_job, get, new_store


def test_each_place_starts_the_jobs_that_are_for_it(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    meters = Meters()
    stop = threading.Event()
    places: list[FakeLauncher] = [
        FakeLauncher(4, host="kubernetes/big"),
        FakeLauncher(2, host="kubernetes/spot"),
    ]
    for number, host in enumerate(("big", "spot", "spot", "spot", "gone")):
        add_job(store, f"ftjob-{number}", slots=1, host=f"kubernetes/{host}")
    options = ReconcilerOptions(
        meters=meters, check=lambda job, examiner, tell: Checked(), idle_seconds=0.0
    )
    thread = threading.Thread(target=run_all, args=(store, places, Places(tmp_path), options, stop))
    thread.start()
    try:
        wait_for(lambda: [len(place.started) for place in places] == [1, 2])
        places[1].away_seconds = 7.0
        assert meters.registry.get_sample_value("ft_place_away_seconds") == 7.0
    finally:
        stop.set()
        thread.join(20)
    assert [place.started for place in places] == [
        [("ftjob-0", 1)],
        [("ftjob-1", 1), ("ftjob-2", 1)],
    ]
    assert get(store, "ftjob-3").state in (State.VALIDATING, State.QUEUED), "it has no slot"
    assert get(store, "ftjob-4").state is State.VALIDATING, "it has no place"
    assert not thread.is_alive()
    store.close()


def test_one_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(tmp_path)
    launchers: list[Launcher] = [FakeLauncher(host="a"), FakeLauncher(host="b")]
    run = Reconciler.run

    def failing(reconciler: Reconciler, stop: threading.Event) -> None:
        if reconciler._launcher.host == "b":
            raise ValueError("lost")
        run(reconciler, stop)

    monkeypatch.setattr(Reconciler, "run", failing)
    options = ReconcilerOptions(check=lambda job, examiner, tell: Checked())
    with pytest.raises(ValueError, match="lost"):
        run_all(store, launchers, Places(tmp_path), options, threading.Event())
    store.close()


def test_the_slowest_loop_counts() -> None:
    now = 0.0
    meters = Meters(clock=lambda: now)
    assert meters.turn_age() == 0.0
    meters.turn("a")
    now = 5.0
    meters.turn("b")
    assert meters.turn_age() == 5.0
    meters.turn("a")
    assert meters.turn_age() == 0.0
