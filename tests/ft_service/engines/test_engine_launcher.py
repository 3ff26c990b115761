from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.engines.engine_directory import EngineDirectory
from ft_service.engines.engine_launcher import EngineLauncher
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import ALONE, Absent, Ended, Observation, Running, Unknown
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, killed_exit
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import (
    Control,
    Desired,
    Exit,
    ExitReason,
    Launched,
    Outcome,
    OutcomeKind,
    Result,
    Start,
)
from ft_service.rundir.engine import SeatOrder, seat_key
from ft_service.rundir.events import Event, write_segment
from ft_service.spec import DataFileRef
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from tests.support.engines import sharing_spec
from tests.support.fake_launcher import FakeLauncher
from tests.support.storage import local_s3, new_bucket

ENGINE = "engine-1"


@pytest.fixture
def inner() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def launcher(tmp_path: Path, inner: FakeLauncher) -> EngineLauncher:
    return EngineLauncher(inner, Places(tmp_path))


@pytest.fixture
def engine(tmp_path: Path) -> EngineDirectory:
    return EngineDirectory(Places(tmp_path), ENGINE)


def seat(tmp_path: Path, number: int, engine: str | None = ENGINE) -> Attempt:
    """The first attempt of a job, which has a seat in the engine."""
    attempt = Attempt(RunDir(tmp_path / f"runs/ftjob-{number}"), 1, job_id=f"ftjob-{number}")
    path = None if engine is None else str(tmp_path / "engines" / engine)
    attempt.write_start(
        Start(
            job_id=attempt.job_id,
            attempt=1,
            world_size=2,
            generation=1,
            checkpoint=None,
            engine=path,
        )
    )
    return attempt


def report(attempt: Attempt) -> None:
    write_segment(
        attempt.run, attempt.number, 0, [Event(time=1.0, kind="message", message="begun")]
    )


def start_all(launcher: EngineLauncher, *seats: Attempt) -> tuple[Attempt, ...]:
    for one in seats:
        launcher.start(one)
    return seats


def ended(seen: Observation) -> tuple[ExitReason | None, str | None]:
    assert isinstance(seen, Ended)
    return seen.exit and seen.exit.reason, seen.fault_group


def test_a_seat_is_an_order_to_an_engine_that_is_started_once(
    tmp_path, launcher, inner, engine
) -> None:
    one = seat(tmp_path, 1)
    two = seat(tmp_path, 2)
    assert launcher.observe(one) == Absent()
    start_all(launcher, one, two, one)
    assert inner.started == [(ENGINE, 1)]
    order = engine.run.read(seat_key("ftjob-1", 1), SeatOrder)
    assert order == SeatOrder(job_id="ftjob-1", attempt=1, run_dir=str(tmp_path / "runs/ftjob-1"))
    seen = launcher.observe(one)
    assert isinstance(seen, Running)
    assert not seen.reported
    report(one)
    seen = launcher.observe(one)
    assert isinstance(seen, Running)
    assert seen.reported, "its own events, not the engine's"
    seen = launcher.observe(two)
    assert isinstance(seen, Running)
    assert not seen.reported


@pytest.mark.parametrize(
    "strange_place", ["/somewhere/engine-1", "HOME/engines/..", "HOME/engines/engine-1/below", ""]
)
def test_an_attempt_without_an_engine_is_the_inner_launchers(
    tmp_path, launcher, inner, strange_place: str
) -> None:
    own = seat(tmp_path, 1, None)
    strange = seat(tmp_path, 2)
    place = strange_place.replace("HOME", str(tmp_path))
    start = strange.read_start()
    assert start is not None
    strange.run.write(strange.keys.start, start.model_copy(update={"engine": place}))
    for attempt in (own, strange):
        launcher.start(attempt)
        launcher.signal(attempt, Control(generation=2, desired=Desired.PAUSE))
        launcher.kill(attempt, Reason.STALLED)
        launcher.clean(attempt)
    assert inner.started == inner.cleaned == [("ftjob-1", 1), ("ftjob-2", 1)]
    assert len(inner.signals) == len(inner.kills) == 2


def test_what_is_uncertain_of_the_engine_is_uncertain_of_its_seats(
    tmp_path, launcher, inner
) -> None:
    (one,) = start_all(launcher, seat(tmp_path, 1))
    inner.set(ENGINE, 1, Unknown("a rank is still alive"))
    assert launcher.observe(one) == Unknown("a rank is still alive")
    inner.set(ENGINE, 1, Absent())
    assert launcher.observe(one) == Absent(), "its start is repeated"


def test_a_seats_own_end_is_its_end_while_the_engine_goes_on(tmp_path, launcher, engine) -> None:
    one, two = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    one.write_exit(exit_of(ExitReason.PERMANENT_ERROR, "no"))
    assert ended(launcher.observe(one)) == (ExitReason.PERMANENT_ERROR, None)
    assert isinstance(launcher.observe(two), Running)
    launcher.start(one)
    assert isinstance(launcher.observe(one), Ended)


def test_a_kill_seals_one_seat(tmp_path, launcher, inner) -> None:
    one, two = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    two.run.write(
        "result.json",
        Result(attempt=1, steps=1, trained_tokens=1, train_loss=None, valid_loss=None),
    )
    for attempt in (one, two):
        launcher.kill(attempt, Reason.USER_CANCELLED)
    assert ended(launcher.observe(one))[0] is ExitReason.CANCELLED
    assert ended(launcher.observe(two))[0] is ExitReason.SUCCEEDED
    assert inner.kills == []


@pytest.mark.parametrize("reason", [Reason.STALLED, Reason.STOP_TIMEOUT])
def test_an_engine_that_hangs_is_killed_and_is_the_failure_of_none_of_its_jobs(
    tmp_path, launcher, inner, reason
) -> None:
    one, two = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    launcher.kill(one, reason)
    assert inner.kills == [(ENGINE, 1, reason)]
    inner.end(ENGINE, 1, killed_exit(reason))
    assert [ended(launcher.observe(each)) for each in (one, two)] == [
        (ExitReason.ENGINE_LOST, ALONE)
    ] * 2


KILLED = exit_of(ExitReason.WORKER_KILLED, "Rank 0 was killed.")


@pytest.mark.parametrize(("own", "text"), [(KILLED, "Rank 0 was killed."), (None, "vanished")])
def test_a_lost_engine_is_nobodys_failure_and_its_seats_return_in_halves(
    tmp_path, launcher, inner, own: Exit | None, text: str
) -> None:
    seats = start_all(launcher, *(seat(tmp_path, number) for number in range(1, 6)))
    seats[4].write_exit(exit_of(ExitReason.SUCCEEDED, "before"))
    inner.end(ENGINE, 1, own)
    found = [ended(launcher.observe(one)) for one in seats]
    groups = [f"{ENGINE}/0", f"{ENGINE}/0", f"{ENGINE}/1", f"{ENGINE}/1"]
    assert found == [
        *((ExitReason.ENGINE_LOST, group) for group in groups),
        (ExitReason.SUCCEEDED, None),
    ]
    exit = seats[0].read_exit()
    assert exit is not None
    assert text in exit.message
    assert [ended(launcher.observe(one)) for one in reversed(seats)] == found[::-1], (
        "however often it is asked"
    )


def test_halves_are_decided_once(tmp_path, launcher, inner) -> None:
    one, two, three = start_all(launcher, *(seat(tmp_path, number) for number in (1, 2, 3)))
    inner.end(ENGINE, 1, KILLED)
    assert ended(launcher.observe(three)) == (ExitReason.ENGINE_LOST, ALONE)
    late = seat(tmp_path, 4)
    launcher.start(late)
    assert ended(launcher.observe(late)) == (ExitReason.STOPPED, None), "it never sat there"
    assert (
        ended(launcher.observe(one))
        == ended(launcher.observe(two))
        == (ExitReason.ENGINE_LOST, f"{ENGINE}/0")
    )


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (KILLED, ExitReason.WORKER_KILLED),
        (None, ExitReason.WORKER_KILLED),
        (exit_of(ExitReason.PERMANENT_ERROR, "unreadable base"), ExitReason.PERMANENT_ERROR),
        (exit_of(ExitReason.UNREADABLE, "outcome.json"), ExitReason.WORKER_ERROR),
    ],
)
def test_who_sat_alone_fails_with_the_engines_reason(
    tmp_path, launcher, inner, own: Exit | None, reason: ExitReason
) -> None:
    (one,) = start_all(launcher, seat(tmp_path, 1))
    inner.end(ENGINE, 1, own)
    assert ended(launcher.observe(one)) == (reason, ALONE)


def test_a_full_disk_is_nobodys_fault(tmp_path, launcher, inner) -> None:
    seats = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    inner.end(ENGINE, 1, exit_of(ExitReason.DISK_FULL, "full"))
    assert [ended(launcher.observe(one)) for one in seats] == [(ExitReason.DISK_FULL, None)] * 2


def test_an_order_that_a_stopped_engine_did_not_take_is_a_stop(
    tmp_path, launcher, inner, engine
) -> None:
    taken, untaken = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    report(taken)
    engine.attempt.write_outcome(Outcome(kind=OutcomeKind.STOPPED))
    inner.end(ENGINE, 1, exit_of(ExitReason.STOPPED, "idle"))
    assert ended(launcher.observe(untaken)) == (ExitReason.STOPPED, None)
    assert ended(launcher.observe(taken)) == (ExitReason.WORKER_ERROR, ALONE), (
        "the engine should have said how it ended"
    )


def test_other_orders_in_an_engines_folder_change_nothing(
    tmp_path, launcher, inner, engine
) -> None:
    (one,) = start_all(launcher, seat(tmp_path, 1))
    victim = seat(tmp_path, 2, "engine-2")
    engine.order(victim)
    engine.run.put("seats/ftjob-3-1.json", b"{")
    # Whose files are removed.
    engine.order(Attempt(RunDir(tmp_path / "runs/ftjob-4"), 1, job_id="ftjob-4"))
    inner.end(ENGINE, 1, KILLED)
    assert ended(launcher.observe(one)) == (ExitReason.WORKER_KILLED, ALONE)
    assert not victim.has_exit()
    assert not (tmp_path / "runs/ftjob-4").exists()


def test_with_object_storage_seats_are_settled_there(tmp_path, inner) -> None:
    with local_s3():
        places = Places(tmp_path / "service", ObjectStore(new_bucket()))
        launcher = EngineLauncher(inner, places)
        seats = [Attempt(places.run(f"ftjob-{n}"), 1, job_id=f"ftjob-{n}") for n in (1, 2)]
        for one in seats:
            path = str(places.engines_dir / ENGINE)
            start = Start(
                job_id=one.job_id,
                attempt=1,
                world_size=2,
                generation=1,
                checkpoint=None,
                engine=path,
            )
            one.write_start(start)
        start_all(launcher, *seats)
        order = places.engine(ENGINE).read(seat_key("ftjob-1", 1), SeatOrder)
        assert order is not None
        assert order.run_dir == str(tmp_path / "service/runs/ftjob-1"), "as its pods see it"
        launcher.kill(seats[0], Reason.USER_CANCELLED)
        inner.end(ENGINE, 1, KILLED)
        assert [ended(launcher.observe(one)) for one in seats] == [
            (ExitReason.CANCELLED, None),
            (ExitReason.WORKER_KILLED, ALONE),
        ]
        assert all(places.run(one.job_id).has(one.keys.exit) for one in seats)


def test_an_engine_that_cannot_be_started_is_told(tmp_path, launcher, inner) -> None:
    one = seat(tmp_path, 1)
    inner.refusal = "no room"
    with pytest.raises(LaunchError, match="no room"):
        launcher.start(one)
    assert ended(launcher.observe(one))[0] is ExitReason.LAUNCH_FAILED


def test_a_seat_waits_with_its_engine_and_its_time_begins_with_it(
    tmp_path, launcher, inner
) -> None:
    (one,) = start_all(launcher, seat(tmp_path, 1))
    queued = Running(
        note="Slurm: Priority.", level="info", admitted=False, silent_seconds=99.0, fresh=False
    )
    inner.set(ENGINE, 1, queued)
    assert launcher.observe(one) == replace(queued, silent_seconds=0.0)
    inner.set(ENGINE, 1, Running(note="a pod is taken away", reported=True))
    seen = launcher.observe(one)
    assert isinstance(seen, Running)
    assert (seen.note, seen.admitted, seen.reported) == ("a pod is taken away", True, False)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [(Desired.PAUSE, ExitReason.STOPPED), (Desired.CANCEL, ExitReason.CANCELLED)],
)
def test_a_request_is_a_file_and_ends_a_seat_whose_engine_has_no_place_yet(
    tmp_path, launcher, inner, wish, reason
) -> None:
    one, two = start_all(launcher, seat(tmp_path, 1), seat(tmp_path, 2))
    control = Control(generation=2, desired=wish)
    launcher.signal(one, control)
    assert one.read_control() == control
    assert isinstance(launcher.observe(one), Running), "the engine's ranks obey"
    inner.set(ENGINE, 1, Running(admitted=False))
    launcher.signal(two, Control(generation=2, desired=Desired.RUN))
    assert isinstance(launcher.observe(two), Running)
    launcher.signal(two, control)
    assert ended(launcher.observe(two)) == (reason, None)
    assert inner.signals == inner.cleaned == [], "its place does not know a seat"
    launcher.clean(two)
    assert inner.cleaned == []


def test_a_place_that_is_taken_back_is_the_fault_of_no_job(tmp_path, launcher, inner) -> None:
    """Such as by preemption in Slurm, or the drain of a node."""
    seats = start_all(launcher, *(seat(tmp_path, number) for number in (1, 2, 3)))
    report(seats[0])
    inner.set(ENGINE, 1, Ended(exit_of(ExitReason.STOPPED, "preempted"), delay_seconds=60.0))
    seen = [launcher.observe(one) for one in seats]
    assert [ended(one) for one in seen] == [(ExitReason.STOPPED, None)] * 3
    assert [one.delay_seconds for one in seen if isinstance(one, Ended)] == [0.0, 60.0, 60.0], (
        "who trained had a place"
    )


def test_a_seat_in_a_lost_node_alone_is_tried_again_as_a_job_is(tmp_path, launcher, inner) -> None:
    (one,) = start_all(launcher, seat(tmp_path, 1))
    inner.end(ENGINE, 1, exit_of(ExitReason.HOST_LOST, "A node of the attempt has failed."))
    assert ended(launcher.observe(one)) == (ExitReason.HOST_LOST, ALONE)


def test_the_ranks_of_an_engine_see_a_jobs_data_before_its_order(tmp_path, inner, engine) -> None:
    shown: list[tuple[str, bool]] = []
    one = seat(tmp_path, 1)
    launcher = EngineLauncher(
        inner,
        Places(tmp_path),
        lambda to, spec: shown.append((to.engine_id, to.has_order(one))),
    )
    launcher.start(one, sharing_spec())
    assert shown == [(ENGINE, False)]
    assert engine.has_order(one)


@pytest.mark.parametrize("has_links", [True, False])
def test_an_engine_is_shown_the_data_of_its_jobs_until_it_ends(
    tmp_path, engine, monkeypatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(
            "os.link", lambda source, target: (_ for _ in ()).throw(PermissionError)
        )
    for key in ("files/file-1", "files/file-2", "tokens/1.how/rows", "tokens/2.how/rows"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text(key)
    mine = DataFileRef(name="a", path=str(tmp_path / "files/file-1"), sha256="1")
    gone = DataFileRef(name="b", path=str(tmp_path / "files/file-3"), sha256="3")
    for _ in range(2):
        engine.show(sharing_spec(training_data=mine, validation_data=gone), tmp_path)
    data = tmp_path / f"engines/{ENGINE}.data"
    assert sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()) == [
        "files/file-1",
        "tokens/1.how/rows",
    ]
    assert (data / "files/file-1").samefile(tmp_path / "files/file-1") is has_links
    engine.hide()
    engine.hide()
    assert not data.exists()
    assert (tmp_path / "files/file-1").read_text() == "files/file-1"
    (tmp_path / "engines").mkdir(exist_ok=True)
    data.write_text("in the way")
    with pytest.raises(LaunchError, match="cannot be shown to its engine"):
        engine.show(sharing_spec(training_data=mine), tmp_path)


def test_an_engine_that_its_cluster_has_lost_is_not_started_again_for_a_job_that_joins(
    tmp_path, launcher, inner, engine
) -> None:
    start_all(launcher, seat(tmp_path, 1))
    engine.attempt.write_launched(Launched(job="ft-engine-1-1", uid="1"))
    inner.refusal = "its ranks may have written there"
    start_all(launcher, seat(tmp_path, 2))
    assert inner.started == [(ENGINE, 1)]
