"""The scheduling rule exactly at its edges: equal ends, equal use, equal priorities, limits reached
and not passed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_service.jobs.queue import (
    LOOK_AHEAD,
    UNKNOWN_SECONDS,
    QueueState,
    choose_closing,
    choose_preempted,
    choose_slots,
    next_start,
)
from ft_service.jobs.queue_snapshot import (
    Host,
    JobSize,
    LiveEngine,
    QueuedJob,
    QueueSnapshot,
    RunningJob,
    Share,
    Sharing,
)
from tests.support.queue_snapshots import NOW, job, running_job, snapshot

HEAD = job("head", 0, slots=4)


def started(found: QueueSnapshot) -> str | None:
    start = next_start(found)
    return start and start.job.id


def order(found: QueueSnapshot) -> list[str]:
    return [waiting.id for waiting in QueueState(found).in_order()]


@pytest.mark.parametrize(("seconds", "goes"), [(99.0, "small"), (100.0, "small"), (100.5, None)])
def test_who_ends_when_the_head_starts_goes_before_it(seconds: float, goes: str | None) -> None:
    busy = (running_job("r", 2, ends_in=100.0),)
    assert started(snapshot(HEAD, job("small", 1, seconds=seconds), running=busy)) == goes


@pytest.mark.parametrize(("slots", "goes"), [(1, "long"), (2, "long"), (3, None)])
def test_who_takes_the_slots_that_the_head_leaves_goes_before_it(
    slots: int, goes: str | None
) -> None:
    """Six slots, of which the head takes four at NOW + 100."""
    busy = (running_job("r", 3, ends_in=100.0),)
    assert (
        started(snapshot(HEAD, job("long", 1, slots=slots, seconds=9e9), total=6, running=busy))
        == goes
    )


@pytest.mark.parametrize(("ends_in", "goes"), [((100.0, 100.0), "long"), ((100.0, 101.0), None)])
def test_jobs_that_end_at_the_same_moment_free_their_slots_together(
    ends_in: tuple[float, float], goes: str | None
) -> None:
    """Six slots, of which the head takes four: if both end at once, two are left, else none at that
    moment.
    """
    busy = tuple(running_job(f"r{n}", 2, ends_in=end) for n, end in enumerate(ends_in))
    assert started(snapshot(HEAD, job("long", 1, seconds=9e9), total=6, running=busy)) == goes


def test_the_head_of_the_same_project_is_not_kept_waiting_by_the_projects_limit() -> None:
    busy = (running_job("r", 3, project="b", ends_in=100.0),)
    for limit, goes in ((5, "long"), (4, None)):
        found = snapshot(
            HEAD, job("long", 1, seconds=9e9), total=6, running=busy, a=Share(max_slots=limit)
        )
        assert started(found) == goes, limit


@pytest.mark.parametrize(("limit", "goes"), [(3, "one"), (2, None)])
def test_a_project_runs_as_many_ranks_as_it_may_and_no_more(limit: int, goes: str | None) -> None:
    busy = (running_job("r", 2, project="a"),)
    assert started(snapshot(job("one", 0), total=8, running=busy, a=Share(max_slots=limit))) == goes


def test_of_equal_use_the_older_job_goes_first_and_of_equal_priority_the_project_of_less_use() -> (
    None
):
    waiting = [job("second", 2, project="b"), job("first", 1)]
    assert order(snapshot(*waiting)) == ["first", "second"]
    assert order(snapshot(*waiting, a=Share(used=1.0))) == ["second", "first"]
    assert (
        order(snapshot(job("second", 2, project="b", priority=1), job("first", 1)))[0] == "second"
    )


def test_a_job_of_unknown_length_counts_as_an_hour_for_its_projects_next_one() -> None:
    for ahead, wanted in ((1.0, ["a1", "b1", "a2"]), (2 * UNKNOWN_SECONDS, ["a1", "a2", "b1"])):
        waiting = [job("a1", 1, seconds=None), job("a2", 2), job("b1", 3, project="b")]
        assert order(snapshot(*waiting, b=Share(used=ahead))) == wanted, ahead


def test_the_fullest_host_is_taken_and_of_equal_ones_the_first_by_name() -> None:
    hosts = {name: Host(slots=4) for name in ("y", "x", "z")}
    found = replace(snapshot(job("one", 0)), hosts=hosts)
    start = next_start(found)
    assert start is not None
    assert start.host == "x"
    busy = RunningJob(id="r", project="b", host="z", slots=2)
    start = next_start(replace(found, running=[busy]))
    assert start is not None
    assert start.host == "z"


def test_only_so_many_are_looked_at_behind_the_head() -> None:
    busy = (running_job("r", 2, ends_in=100.0),)
    long = [job(f"long{n}", n, seconds=9e9) for n in range(1, LOOK_AHEAD)]
    assert started(snapshot(HEAD, *long, job("short", 900, seconds=1.0), running=busy)) == "short"
    assert (
        started(
            snapshot(
                HEAD,
                *long,
                job("one more", 800, seconds=9e9),
                job("short", 900, seconds=1.0),
                running=busy,
            )
        )
        is None
    )


@pytest.mark.parametrize(("held", "stops"), [(59.0, False), (60.0, True), (-1.0, True)])
def test_who_has_held_its_slots_long_enough_may_be_preempted(held: float, stops: bool) -> None:
    """A start in the future: the clock was set back since."""
    head = job("head", priority=5, slots=2)
    old = running_job("old", 2, preemptible=True, taken_at=NOW - held)
    found = choose_preempted(snapshot(head, total=2, running=(old,)), after_seconds=60.0)
    assert found == ((head, [old]) if stops else None)


def test_an_equal_priority_is_not_preempted_and_the_lowest_stops_first_then_who_began_last() -> (
    None
):
    head = job("head", priority=5, slots=2)

    def stopped(*running: RunningJob) -> list[str]:
        found = choose_preempted(snapshot(head, total=6, running=running), after_seconds=0.0)
        return [one.id for one in found[1]] if found else []

    def one(name: str, priority: int, taken_at: float = 0.0, slots: int = 2) -> RunningJob:
        return running_job(name, slots, preemptible=True, priority=priority, taken_at=taken_at)

    assert stopped(one("a", 5), one("b", 5), one("c", 5)) == []
    assert stopped(one("a", 4), one("b", 3), one("c", 5)) == ["b"]
    assert stopped(one("a", 3, 10.0), one("b", 3, 20.0), one("c", 3, 15.0)) == ["b"]
    assert stopped(one("b", 3), one("a", 3), one("c", 4)) == ["a"], "of equal ones the first by id"
    assert stopped(one("a", 1, slots=1), one("b", 2, slots=3), one("c", 3)) == ["b"], (
        "less those that are not needed"
    )


def test_of_those_chosen_the_highest_priorities_that_are_not_needed_go_on() -> None:
    head = job("head", priority=9, slots=3)

    def stopped(*slots: int) -> list[str]:
        running = [
            running_job(f"{n}", held, preemptible=True, priority=n) for n, held in enumerate(slots)
        ]
        found = choose_preempted(
            snapshot(head, total=sum(slots), running=tuple(running)), after_seconds=0.0
        )
        return [one.id for one in found[1]] if found else []

    assert stopped(2, 3) == ["1"], "the first is just as large as what is too much"
    assert stopped(1, 1, 2) == ["0", "2"]


def test_the_host_on_which_fewest_slots_must_stop_is_chosen() -> None:
    head = job("head", priority=5, slots=2)
    large, small = (
        RunningJob(id=name, project="b", host=name, slots=slots, preemptible=True)
        for name, slots in (("x", 4), ("y", 2))
    )
    found = replace(
        snapshot(head), hosts={"x": Host(slots=4), "y": Host(slots=2)}, running=[large, small]
    )
    assert choose_preempted(found, after_seconds=0.0) == (head, [small])


def test_time_moves_to_the_next_end_or_the_next_due_job_and_takes_all_of_that_moment() -> None:
    later = [job(name, n, not_before=NOW + 50.0) for n, name in enumerate(("due", "due too"))]
    busy = tuple(
        running_job(f"r{n}", 1, project="b", ends_in=end)
        for n, end in enumerate((50.0, 50.0, 60.0))
    )
    state = QueueState(
        snapshot(*later, job("last", 9, not_before=NOW + 51.0), total=3, running=busy)
    )
    assert order(snapshot(*later)) == []
    assert [one.id for one in state.later()] == ["due", "due too", "last"]
    assert state.advance()
    assert (state.now - NOW, state.free["h"], state.ranks["b"]) == (50.0, 2, 1)
    assert [one.id for one in state.in_order()] == ["due", "due too"]
    assert [one.id for one in state.later()] == ["last"]
    assert [state.advance() for _ in range(3)] == [True, True, False]


SHARED = Sharing("a", "key")


def engine(name: str = "e", **changes: Any) -> LiveEngine:
    values = {
        "id": name,
        "host": "h",
        "slots": 2,
        "sharing": SHARED,
        "seats": 0,
        "most_seats": 2,
    } | changes
    return LiveEngine(**values)


@pytest.mark.parametrize(
    ("changes", "joins"),
    [
        ({}, True),
        ({"seats": 1}, True),
        ({"seats": 2}, False),
        ({"closing": True}, False),
        ({"slots": 1}, False),
        ({"host": "x"}, True),
    ],
)
def test_a_seat_is_free_below_the_most_and_never_in_an_engine_that_ends(
    changes: dict[str, Any], joins: bool
) -> None:
    waiting = job("one", 0, slots=2, sharing=SHARED)
    state = QueueState(replace(snapshot(waiting, total=2), engines=[engine(**changes)]))
    assert (state.open_engine(waiting) is not None) == joins


@pytest.mark.parametrize(("limit", "joins"), [(2, True), (1, False)])
def test_an_engine_within_its_projects_limit_takes_jobs(limit: int, joins: bool) -> None:
    waiting = job("one", 0, slots=2, sharing=SHARED)
    held = running_job("e", 2, project="a")
    state = QueueState(
        replace(snapshot(waiting, running=(held,), a=Share(max_slots=limit)), engines=[engine()])
    )
    assert (state.open_engine(waiting) is not None) == joins


def test_of_engines_with_as_many_jobs_the_first_by_id_is_joined() -> None:
    waiting = job("one", 0, slots=2, sharing=SHARED)
    state = QueueState(
        replace(
            snapshot(waiting),
            engines=[engine("z", seats=1), engine("y", seats=1), engine("a", seats=1)],
        )
    )
    found = state.open_engine(waiting)
    assert found is not None
    assert found.id == "a"


def test_an_idle_engine_ends_for_the_first_job_that_waits_for_its_slots_and_not_while_it_has_jobs() -> (
    None
):
    waiting = job("one", 0, slots=2, project="b")
    held = running_job("e", 2, project="a")
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["e"]),
        ({"seats": 1}, []),
        ({"closing": True}, []),
    ]
    for changes, ends in cases:
        found = replace(snapshot(waiting, total=2, running=(held,)), engines=[engine(**changes)])
        assert [one.id for one in choose_closing(found)] == ends, changes


@pytest.mark.parametrize(
    ("shapes", "free", "gets"), [((4, 2), 4, 4), ((4, 2), 3, 2), ((3, 2), 3, 3)]
)
def test_the_largest_shape_that_fits_exactly_is_taken(
    shapes: tuple[int, ...], free: int, gets: int
) -> None:
    elastic = job("x", slots=2, shapes=tuple(JobSize(1, ranks) for ranks in shapes))
    start = next_start(snapshot(elastic, total=free))
    assert start is not None
    assert start.shape.ranks == gets


def test_all_the_free_slots_are_neighbours_up_to_the_last() -> None:
    assert choose_slots(3, [0, 2, 5, 6, 7]) == [5, 6, 7]
    assert choose_slots(3, [1, 2, 3]) == [1, 2, 3]
    assert choose_slots(4, [1, 2, 3]) is None


def test_a_fixed_host_is_the_only_one() -> None:
    waiting: QueuedJob = job("one", 0, host="y")
    found = replace(snapshot(waiting), hosts={"x": Host(slots=4), "y": Host(slots=4)})
    start = next_start(found)
    assert start is not None
    assert start.host == "y"
    assert next_start(replace(found, hosts={"x": Host(slots=4)})) is None


def test_nobody_makes_room_where_those_that_stop_already_free_enough() -> None:
    head = job("head", 0, slots=2, priority=5)
    stops = running_job("stops", 2, host="x", stopping=True, preemptible=True)
    trains = running_job("trains", 2, host="y", preemptible=True)
    found = replace(
        snapshot(head, running=(stops, trains)), hosts={"x": Host(slots=2), "y": Host(slots=2)}
    )
    assert choose_preempted(found, after_seconds=0.0) is None
    narrow = replace(stops, slots=1)
    found = replace(found, running=(narrow, running_job("stays", 1, host="x"), trains))
    assert choose_preempted(found, after_seconds=0.0) == (head, [trains])
