"""Exports that a server was asked for: made one after the other, gone on with after a restart, told
to the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import NotFoundError, SpecError, UnavailableError
from ft_service.jobs.states import Job, State
from ft_service.rundir.documents import Export, ExportFormat, read_export
from ft_service.serving import exporting
from ft_service.settings import Settings
from ft_service.shared_work.losses import Losses
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.reconciling import PROJECT, add_job, new_store

GGUF = ExportFormat.GGUF
MERGED = ExportFormat.MERGED


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"home": tmp_path})


@pytest.fixture
def job(store: Store, settings: Settings) -> Job:
    job = add_job(store)
    Places.of(settings).run(job.id).put("adapter/adapter_config.json", b"{}")
    return job


def made(adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]) -> dict[str, Any]:
    assert (adapter / "adapter_config.json").is_file()
    out.mkdir(parents=True)
    (out / "model.gguf").write_bytes(b"12345")
    return {"exact": 3}


def failing(adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]) -> dict[str, Any]:
    raise SpecError("GGUF: the architecture is not exported.")


def stopped(adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]) -> dict[str, Any]:
    raise exporting.Stopped


def told(store: Store, job: Job) -> list[str]:
    return [
        event.message
        for event in store.jobs.list_events(PROJECT, job.id).data
        if "xported" in event.message
    ]


def test_what_is_asked_for_is_made_once_and_told(
    store: Store, settings: Settings, job: Job
) -> None:
    places = Places.of(settings)
    assert exporting.ask(job, GGUF, settings, places).status == "queued"
    with pytest.raises(NotFoundError, match="is queued"):
        exporting.folder_of(job, GGUF, places)
    exporting.make_all(settings, store, threading.Event(), made)
    found = exporting.ask(job, GGUF, settings, places)
    assert (found.status, found.bytes, found.report) == ("succeeded", 5, {"exact": 3})
    assert (exporting.folder_of(job, GGUF, places) / "model.gguf").read_bytes() == b"12345"
    exporting.make_all(settings, store, threading.Event(), failing)  # nothing waits any more
    assert told(store, job) == ["Exported as gguf: 5 bytes to download."]
    exporting.remove(job, GGUF, settings, places)
    assert read_export(places.run(job.id), GGUF) is None
    assert not places.run(job.id).path("exports/gguf").exists()


def test_a_server_that_ends_in_the_middle_leaves_it_to_the_next(
    store: Store, settings: Settings, job: Job
) -> None:
    places = Places.of(settings)
    for to in (MERGED, GGUF):
        exporting.ask(job, to, settings, places)
    exporting.make_all(settings, store, threading.Event(), stopped)
    exports: Any = [read_export(places.run(job.id), to) for to in (MERGED, GGUF)]
    assert {export.status for export in exports} == {"queued", "running"}
    exporting.make_all(settings, store, threading.Event(), made)
    assert {read_export(places.run(job.id), to).status for to in (MERGED, GGUF)} == {"succeeded"}  # pyright: ignore


def test_of_two_servers_of_one_home_one_makes_exports(
    store: Store, settings: Settings, job: Job
) -> None:
    """Each would take the other's end for a removal, and remove what was made."""
    places = Places.of(settings)
    exporting.ask(job, GGUF, settings, places)

    def meanwhile(
        adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]
    ) -> dict[str, Any]:
        exporting.make_all(settings, store, threading.Event(), failing)
        assert not stop()
        return made(adapter, out, to, stop)

    exporting.make_all(settings, store, threading.Event(), meanwhile)
    assert told(store, job) == ["Exported as gguf: 5 bytes to download."]
    assert (exporting.folder_of(job, GGUF, places) / "model.gguf").read_bytes() == b"12345"


@pytest.mark.parametrize("end", [made, failing, stopped])
def test_what_is_removed_while_it_is_made_stays_removed(
    store: Store, settings: Settings, job: Job, end: exporting.Make
) -> None:
    """Its process is told to stop, and may have done its work or failed before it hears of it."""
    places = Places.of(settings)
    run = places.run(job.id)
    for to in (GGUF, MERGED):
        exporting.ask(job, to, settings, places)
    begun: list[ExportFormat] = []

    def make(
        adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]
    ) -> dict[str, Any]:
        begun.append(to)
        if to is MERGED:
            return made(adapter, out, to, stop)
        assert not stop()
        exporting.remove(job, GGUF, settings, places)
        assert stop()
        return end(adapter, out, to, stop)

    exporting.make_all(settings, store, threading.Event(), make)
    assert begun == [GGUF, MERGED]
    assert read_export(run, GGUF) is None
    assert [path.name for path in run.path("exports").iterdir() if path.is_dir()] == ["merged"]
    assert told(store, job) == ["Exported as merged: 5 bytes to download."]
    assert exporting.ask(job, GGUF, settings, places).status == "queued"


def test_a_request_that_was_cut_short_is_made_once_it_is_repeated(
    store: Store, settings: Settings, job: Job
) -> None:
    """The server ended between the state and the order."""
    exporting.ask(job, GGUF, settings, Places.of(settings))
    for order in (settings.home / "exports").iterdir():
        order.unlink()
    assert exporting.ask(job, GGUF, settings, Places.of(settings)).status == "queued"
    exporting.make_all(settings, store, threading.Event(), made)
    assert told(store, job) == ["Exported as gguf: 5 bytes to download."]


def test_what_is_removed_before_its_turn_is_not_made(
    store: Store, settings: Settings, job: Job
) -> None:
    places = Places.of(settings)
    for to in (GGUF, MERGED):
        exporting.ask(job, to, settings, places)
    begun: list[ExportFormat] = []

    def make(
        adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]
    ) -> dict[str, Any]:
        begun.append(to)
        exporting.remove(job, MERGED, settings, places)
        return made(adapter, out, to, stop)

    exporting.make_all(settings, store, threading.Event(), make)
    assert begun == [GGUF]
    assert read_export(places.run(job.id), MERGED) is None


@pytest.mark.parametrize(
    ("make", "status", "event"),
    [
        (made, "succeeded", "Exported as gguf: 5 bytes to download."),
        (failing, "failed", "It was not exported as gguf: GGUF: the architecture is not exported."),
    ],
)
def test_what_was_not_told_since_the_database_was_away_is_told_later_and_not_made_again(
    store: Store,
    settings: Settings,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    make: exporting.Make,
    status: str,
    event: str,
) -> None:
    places = Places.of(settings)
    exporting.ask(job, GGUF, settings, places)

    def away(*_: object) -> None:
        raise UnavailableError("The database is away.")

    with monkeypatch.context() as outage:
        outage.setattr(store.jobs, "add_events", away)
        with pytest.raises(UnavailableError):
            exporting.make_all(settings, store, threading.Event(), make)
    assert told(store, job) == []

    def again(*_: object) -> dict[str, Any]:
        pytest.fail("it was made already")

    for _ in range(2):
        exporting.make_all(settings, store, threading.Event(), again)
    found = read_export(places.run(job.id), GGUF)
    assert found is not None
    assert found.status == status
    assert told(store, job) == [event]


def test_what_cannot_be_made_says_why_and_may_be_asked_for_again(
    store: Store, settings: Settings, job: Job
) -> None:
    places = Places.of(settings)
    exporting.ask(job, GGUF, settings, places)
    exporting.make_all(settings, store, threading.Event(), failing)
    found = read_export(places.run(job.id), GGUF)
    assert found is not None
    assert (found.status, found.error) == ("failed", "GGUF: the architecture is not exported.")
    assert told(store, job) == [
        "It was not exported as gguf: GGUF: the architecture is not exported."
    ]
    assert exporting.ask(job, GGUF, settings, places).status == "queued"


def test_a_process_that_fails_says_its_words_and_one_that_must_stop_is_ended(
    settings: Settings, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = Places.of(settings).run(job.id).path("adapter")
    says = (
        """import sys; print('{"error": "too large", "code": "x", "param": null}'); sys.exit(64)"""
    )
    monkeypatch.setattr(exporting, "WORKER", (*exporting.WORKER[:1], "-c", says))
    with pytest.raises(SpecError, match="too large"):
        exporting.by_process(adapter, tmp_path / "out", GGUF, lambda: False)
    monkeypatch.setattr(
        exporting, "WORKER", (*exporting.WORKER[:1], "-c", "import time; time.sleep(60)")
    )
    with pytest.raises(exporting.Stopped):
        exporting.by_process(adapter, tmp_path / "out", GGUF, lambda: True)


def test_an_export_whose_process_is_killed_is_made_anew_and_nothing_half_done_stays(
    store: Store, settings: Settings, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process fills a folder next to `out`, as workers.output.outcome does, and is killed in
    the middle of it.
    """
    program = """
import json, os, pathlib, signal, sys
out = pathlib.Path(sys.argv[2])
beside, tries = out.with_name(out.name + ".tmp"), out.parent / "tries"
beside.mkdir(exist_ok=True)
tries.open("a").write("x")
(beside / "half").write_text("x" * len(tries.read_text()))
if len(tries.read_text()) <= KILLS:
    os.kill(os.getpid(), signal.SIGKILL)
beside.rename(out)
print(json.dumps({"tries": len(tries.read_text())}))
"""
    places = Places.of(settings)
    run = places.run(job.id)

    lost = Losses("an export", first=0.0)

    def state(kills: int) -> Export:
        monkeypatch.setattr(
            exporting, "WORKER", (*exporting.WORKER[:1], "-c", program.replace("KILLS", str(kills)))
        )
        exporting.ask(job, GGUF, settings, places)
        exporting.make_all(settings, store, threading.Event(), lost=lost)
        found = read_export(run, GGUF)
        assert found is not None
        return found

    for tries in ("x", "xx", "xxx"):
        found = state(kills=3)
        assert (found.status, run.path("exports/tries").read_text()) == ("queued", tries)
        assert "was killed by signal 9" in str(found.error)
        assert sorted(path.name for path in run.path("exports").iterdir() if path.is_dir()) == []
    assert len(told(store, job)) == 1, "of several losses in a row it is told once"
    found = state(kills=3)
    assert (found.status, found.report, found.error) == ("succeeded", {"tries": 4}, None)
    assert [path.name for path in run.path("exports").iterdir() if path.is_dir()] == ["gguf"]
    exporting.make_all(settings, store, threading.Event(), failing)  # nothing waits any more


def test_a_file_that_is_no_order_stops_no_export(
    store: Store, settings: Settings, job: Job
) -> None:
    exporting.ask(job, GGUF, settings, Places.of(settings))
    for name in (f"{PROJECT}@{job.id}@gguf~", "a@b@c@gguf"):
        (settings.home / "exports" / name).touch()
    exporting.make_all(settings, store, threading.Event(), made)
    assert told(store, job) == ["Exported as gguf: 5 bytes to download."]


def test_a_job_that_is_gone_is_forgotten(store: Store, settings: Settings, job: Job) -> None:
    exporting.ask(job, GGUF, settings, Places.of(settings))
    order = next((settings.home / "exports").iterdir())
    order.rename(order.with_name(f"{PROJECT}@ftjob-other@gguf"))
    exporting.make_all(settings, store, threading.Event(), made)
    assert list((settings.home / "exports").iterdir()) == []
    assert job.state is not State.SUCCEEDED
