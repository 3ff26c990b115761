from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_service.jobs.forecast import forecast
from ft_service.jobs.queue import (
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
from ft_service.rundir.engine import SeatSize
from tests.support.queue_snapshots import NOW, job, running_job, snapshot, snapshots

unhurried = settings(deadline=None, database=None, max_examples=60)


def order(snapshot: QueueSnapshot) -> list[str]:
    return [waiting.id for waiting in QueueState(snapshot).in_order()]


@unhurried
@given(snapshots(known=False))
def test_what_starts_has_room_and_may(snapshot: QueueSnapshot) -> None:
    start = next_start(snapshot)
    if start is None:
        return
    host = start.host
    free = snapshot.hosts[host].slots - sum(h.slots for h in snapshot.running if h.host == host)
    assert start.job.slots <= free
    assert start.job.not_before <= snapshot.now
    assert start.job.host in (None, host)
    limit = snapshot.shares[start.job.project].max_slots
    held = sum(h.slots for h in snapshot.running if h.project == start.job.project)
    assert limit is None or held + start.job.slots <= limit


@unhurried
@given(snapshots(known=False))
def test_filling_gaps_never_moves_the_heads_estimated_start(snapshot: QueueSnapshot) -> None:
    head = job("head", 99, slots=snapshot.hosts["h0"].slots, priority=9, host="h0")
    snapshot = replace(snapshot, waiting=[*snapshot.waiting, head])
    expected = forecast(replace(snapshot, waiting=[head]))["head"].starts_at
    if QueueState(snapshot).over_limit(head):  # it is passed over, and others are the head
        return
    while (start := next_start(snapshot)) and start.job.id != "head":
        ends_at = None if start.job.seconds is None else NOW + start.job.seconds
        values = {
            "project": start.job.project,
            "host": start.host,
            "slots": start.job.slots,
            "ends_at": ends_at,
        }
        snapshot = replace(
            snapshot,
            waiting=[one for one in snapshot.waiting if one.id != start.job.id],
            running=[*snapshot.running, RunningJob(id=start.job.id, taken_at=NOW, **values)],
        )
        if QueueState(snapshot).over_limit(head):  # by a job of its own project, which fits before
            return
        if expected is not None:
            assert forecast(replace(snapshot, waiting=[head]))["head"].starts_at == expected


@unhurried
@given(snapshots(known=False), st.sampled_from([0.0, 600.0]))
def test_only_lower_priorities_make_room_and_only_enough_of_them(
    snapshot: QueueSnapshot, after: float
) -> None:
    found = choose_preempted(snapshot, after_seconds=after)
    if found is None:
        return
    head, victims = found
    assert victims
    assert all(
        v.priority < head.priority and v.preemptible and NOW - v.taken_at >= after for v in victims
    )
    host = victims[0].host
    free = snapshot.hosts[host].slots - sum(h.slots for h in snapshot.running if h.host == host)
    freed = sum(v.slots for v in victims)
    assert free < head.slots <= free + freed
    assert all(free + freed - v.slots < head.slots for v in victims), (
        "one of them is asked to stop in vain"
    )
    without = replace(snapshot, running=[h for h in snapshot.running if h not in victims])
    start = next_start(without)
    assert start is not None
    assert start.job.priority >= head.priority, "the state goes to whom it was made for"


def test_a_higher_priority_then_the_project_that_has_used_less_then_creation_comes_first() -> None:
    waiting = [
        job("late", 4, priority=3, project="b"),
        job("first of b", 3, project="b"),
        job("second of a", 2),
        job("first of a", 1),
        job("high", 5, priority=9),
    ]
    assert order(snapshot(*waiting, a=Share(used=50.0), b=Share(used=10.0)))[:3] == [
        "high",
        "late",
        "first of b",
    ]
    assert order(snapshot(*waiting, a=Share(used=50.0), b=Share(used=9000.0)))[2:] == [
        "first of a",
        "second of a",
        "first of b",
    ]


def test_projects_with_the_same_use_take_turns() -> None:
    waiting = [
        job(f"{name}{n}", n if name == "a" else n + 100, project=name)
        for name in "ab"
        for n in range(3)
    ]
    assert order(snapshot(*waiting)) == ["a0", "b100", "a1", "b101", "a2", "b102"] or order(
        snapshot(*waiting)
    ) == [
        "a0",
        "b0",
        "a1",
        "b1",
        "a2",
        "b2",
    ]


@pytest.mark.parametrize("first", [1.0, 5.0])
def test_while_all_are_backlogged_each_gets_its_part(first: float) -> None:
    """Jobs of one project are five times as long as those of another, and of four slots; all came
    first.
    """
    waiting = [job(f"a{n}", n, slots=4, seconds=300.0 * first) for n in range(200)]
    waiting += [job(f"b{n}", 1000 + n, project="b", seconds=300.0) for n in range(900)]
    waiting += [job(f"c{n}", 2000 + n, project="c", slots=2, seconds=450.0) for n in range(300)]
    found = forecast(snapshot(*waiting, total=8))
    until = NOW + 12 * 3600.0
    used = dict.fromkeys("abc", 0.0)
    for one in waiting:
        at = found[one.id].starts_at
        seconds = one.seconds or 0.0
        assert at is not None
        used[one.project] += one.slots * max(0.0, min(until, at + seconds) - at)
    mean = sum(used.values()) / 3
    assert all(abs(slot_seconds - mean) <= 0.1 * mean for slot_seconds in used.values()), used


def test_the_head_is_waited_for_and_only_what_does_not_delay_it_goes_before() -> None:
    head = job("head", 0, slots=4)
    busy = (running_job("r", 2, ends_in=100.0),)
    assert next_start(snapshot(head, job("long", 1, seconds=200.0), running=busy)) is None
    assert next_start(snapshot(head, job("unknown", 1, seconds=None), running=busy)) is None
    start = next_start(
        snapshot(head, job("long", 1, seconds=200.0), job("short", 2, seconds=99.0), running=busy)
    )
    assert start is not None
    assert start.job.id == "short"
    started = next_start(
        snapshot(head, job("long", 1, seconds=9e9), total=5, running=(running_job("r", 2),))
    )
    assert started is not None
    assert started.job.id == "long", "five slots take both"
    assert (
        next_start(snapshot(head, job("short", 1), running=(running_job("r", 2, ends_in=None),)))
        is None
    )


def test_a_project_at_its_limit_is_passed_over_and_told_so() -> None:
    waiting = (job("mine", 0, slots=2), job("small", 1), job("theirs", 2, project="b"))
    found = snapshot(*waiting, running=(running_job("r", 1, project="a"),), a=Share(max_slots=2))
    start = next_start(found)
    assert start is not None
    assert start.job.id == "theirs", "nor does a smaller job of the project go before its own first"
    reasons = {name: one.reason for name, one in forecast(found).items()}
    assert reasons["mine"] == "Its project runs 1 rank and may run 2 at once; this job needs 2."
    assert reasons["theirs"] == "It is about to start."


def test_a_job_that_its_projects_lowered_limit_does_not_allow_keeps_no_other_from_its_start() -> (
    None
):
    found = snapshot(job("large", 0, slots=8), job("small", 1), total=8, a=Share(max_slots=4))
    start = next_start(found)
    assert start is not None
    assert start.job.id == "small"
    told = forecast(found)
    assert (
        told["large"].reason == "Its project runs 0 ranks and may run 4 at once; this job needs 8."
    )
    assert told["small"].reason == "It is about to start."


def test_who_has_just_begun_or_makes_room_already_is_not_preempted() -> None:
    head = job("head", priority=5, slots=2)
    old = running_job("old", 2, preemptible=True)
    young = running_job("young", 2, preemptible=True, taken_at=NOW - 10)
    found = choose_preempted(snapshot(head, running=(old, young)), after_seconds=60.0)
    assert found == (head, [old])
    assert (
        choose_preempted(
            snapshot(head, running=(replace(old, stopping=True), young)), after_seconds=0.0
        )
        is None
    )
    assert (
        choose_preempted(
            snapshot(head, running=(replace(old, priority=5), young)), after_seconds=60.0
        )
        is None
    )


@pytest.mark.parametrize(("free", "gets"), [(8, 8), (7, 6), (3, 2), (1, None)])
def test_a_job_of_any_size_gets_as_many_ranks_as_are_free(free: int, gets: int | None) -> None:
    elastic = job("x", slots=2, seconds=80.0, shapes=(JobSize(1, 8), JobSize(1, 6), JobSize(1, 2)))
    start = next_start(
        snapshot(elastic, total=8, running=(running_job("r", 8 - free),) if free < 8 else ())
    )
    assert (start and start.shape.ranks) == gets
    assert start is None or start.seconds == pytest.approx(160.0 / (gets or 1))


def test_a_job_of_any_size_takes_no_more_than_its_project_may_and_the_head_can_spare() -> None:
    shapes = (JobSize(1, 4), JobSize(1, 2))
    start = next_start(snapshot(job("x", slots=2, shapes=shapes), total=8, a=Share(max_slots=3)))
    assert start is not None
    assert start.shape == JobSize(1, 2)
    head = job("head", slots=6, priority=1)
    long = job("x", 1, slots=2, shapes=shapes, seconds=9e9)
    start = next_start(snapshot(head, long, total=8, running=(running_job("r", 4),)))
    assert start is not None
    assert (start.job.id, start.shape) == ("x", JobSize(1, 2)), "four would delay the head"
    whose = next_start(replace(snapshot(long), hosts={"h": Host(slots=8, counts=False)}))
    assert whose is not None
    assert whose.shape == JobSize(1, 2), "where a cluster counts it gets the fewest"


@pytest.mark.parametrize(
    ("needed", "free", "chosen"),
    [
        (1, [3, 5], [3]),
        (2, [0, 1, 2, 3], [0, 1]),
        (2, [0, 2, 3, 7], [2, 3]),
        (2, [7, 3, 2, 0], [2, 3]),
        (3, [0, 2, 4, 6], [0, 2, 4]),
        (4, [0, 1, 2, 4, 5, 6, 7], [4, 5, 6, 7]),
        (2, [5, 1], [1, 5]),
        (0, [], []),
    ],
)
def test_neighbours_first_then_the_lowest(needed, free, chosen):
    assert choose_slots(needed, free) == chosen


def test_too_few_is_none():
    assert choose_slots(3, [0, 1]) is None
    assert choose_slots(1, []) is None


def sharer(name: str, number: int = 0, **values: object) -> QueuedJob:
    return job(name, number, **{"sharing": Sharing("a", "key"), "slots": 2, **values})


def engine(name: str = "e", seats: int = 1, **values: object) -> LiveEngine:
    defaults = {
        "id": name,
        "host": "h",
        "slots": 2,
        "sharing": Sharing("a", "key"),
        "seats": seats,
        "most_seats": 2,
    }
    return LiveEngine(**(defaults | {"ends_at": NOW + 100.0} | values))  # type: ignore[arg-type]


def seat(held: int, batch: int = 2) -> SeatSize:
    return SeatSize(held=held, batch=batch, batch_tokens=1, room=None, gain=None)


def with_engines(
    *waiting: QueuedJob,
    total: int = 2,
    engines: tuple[LiveEngine, ...] = (engine(),),
    **shares: Share,
) -> QueueSnapshot:
    held = tuple(running_job(one.id, one.slots, project="a") for one in engines)
    return replace(
        snapshot(*waiting, total=total, running=held, **shares), engines=engines, new_engines=True
    )


def test_a_seat_needs_no_slots_and_is_of_no_account_for_the_projects_limit() -> None:
    start = next_start(with_engines(sharer("w"), a=Share(max_slots=2)))
    assert start is not None
    assert (start.job.id, start.engine, start.new_engine) == ("w", "e", False)


def test_an_engine_larger_than_its_projects_lowered_limit_takes_no_more_jobs_and_ends_when_idle() -> (
    None
):
    waiting = sharer("w"), job("small", 1, project="a")
    assert next_start(with_engines(*waiting, total=4, a=Share(max_slots=1))) is None
    (closed,) = choose_closing(
        with_engines(*waiting, engines=(engine(seats=0),), a=Share(max_slots=1))
    )
    assert closed.id == "e"


@pytest.mark.parametrize(
    ("waiting", "live"),
    [
        (sharer("w", sharing=None), engine()),
        (sharer("w", sharing=Sharing("a", "another")), engine()),
        (sharer("w", sharing=Sharing("b", "key"), project="b"), engine()),
        (sharer("w", sharing=Sharing("a", "key", "e/0")), engine()),
        (sharer("w"), engine(sharing=Sharing("a", "key", "e/0"))),
        (sharer("w", slots=1), engine()),
        (sharer("w", host="elsewhere"), engine()),
        (sharer("w"), engine(seats=2)),
        (sharer("w"), engine(closing=True)),
        (sharer("w", seat=seat(4)), engine(sizes=[seat(5)], room=10)),
        (sharer("w", seat=seat(3, batch=4)), engine(sizes=[seat(3)], room=9)),
        (sharer("w"), engine(sizes=[seat(9, batch=2)], room=10)),
    ],
)
def test_who_gets_no_seat(waiting: QueuedJob, live: LiveEngine) -> None:
    assert next_start(with_engines(waiting, engines=(live,))) is None


@pytest.mark.parametrize(
    ("waiting", "live"),
    [
        (sharer("w", seat=seat(4)), engine(sizes=[seat(4)], room=10)),
        (sharer("w", seat=seat(4)), engine(sizes=[None], room=6)),
        (sharer("w", seat=seat(400)), engine(sizes=[seat(4)])),
    ],
)
def test_who_gets_a_seat(waiting: QueuedJob, live: LiveEngine) -> None:
    start = next_start(with_engines(waiting, engines=(live,)))
    assert start is not None
    assert start.engine == "e"


def test_the_engine_with_fewest_jobs_is_joined_that_has_room() -> None:
    engines = (
        engine("small", 1, most_seats=8, sizes=[seat(8)], room=10),
        engine("one", 3, most_seats=8),
        engine("two", 4, most_seats=8),
    )
    start = next_start(with_engines(sharer("w", seat=seat(1)), total=6, engines=engines))
    assert start is not None
    assert start.engine == "one"


def test_a_job_that_no_engine_could_hold_does_not_wait_for_a_seat() -> None:
    """Slots are kept for it, as for a job that runs alone."""
    large = sharer("w", priority=1, seat=seat(20))
    small = job("small", 1, project="b", slots=1, seconds=None)
    queue = with_engines(large, small, total=4, engines=(engine(sizes=[seat(1)], room=10),))
    queue = replace(queue, running=(*queue.running, running_job("r", 1, 50.0)))
    assert next_start(queue) is None
    fits = replace(large, seat=seat(5, batch=5))
    start = next_start(replace(queue, waiting=(fits, small)))
    assert start is not None
    assert start.job.id == "small"


def test_two_jobs_run_apart_where_slots_are_free_unless_an_engine_idles() -> None:
    for seats, engine_id in ((1, None), (0, "e")):
        start = next_start(with_engines(sharer("w"), total=4, engines=(engine(seats=seats),)))
        assert start is not None
        assert (start.engine, start.new_engine) == (engine_id, False)


@pytest.mark.parametrize(
    ("company", "total", "most", "begins"),
    [
        (0, 2, None, False),
        (1, 2, None, True),
        (1, 4, None, False),
        (2, 4, None, True),
        (1, 4, 3, True),
        (1, 4, 4, False),
    ],
)
def test_a_job_starts_an_engine_if_the_slots_left_do_not_suffice_for_its_company(
    company: int, total: int, most: int | None, begins: bool
) -> None:
    queue = with_engines(
        sharer("w", company=company), total=total, engines=(), a=Share(max_slots=most)
    )
    start = next_start(queue)
    assert start is not None
    assert (start.engine, start.new_engine) == (None, begins)
    start = next_start(replace(queue, new_engines=False))
    assert start is not None
    assert not start.new_engine


def test_where_a_cluster_counts_jobs_with_company_share_however_many_slots_it_is_said_to_have() -> (
    None
):
    cluster = {"h": Host(slots=4096, counts=False)}

    def start(waiting: QueuedJob, *live: LiveEngine) -> tuple[str | None, bool]:
        found = next_start(replace(with_engines(waiting, engines=live), hosts=cluster))
        assert found is not None
        return found.engine, found.new_engine

    assert start(sharer("w", company=0)) == (None, False)
    assert start(sharer("w", company=1)) == (None, True)
    assert start(sharer("w", company=1), engine(seats=1)) == ("e", False)
    assert start(sharer("w", company=2), engine(seats=2)) == (None, True), "that one is full"
    assert start(job("other", 1, slots=2), engine(seats=1)) == (None, False)


@pytest.mark.parametrize(("seconds", "joins"), [(99.0, True), (101.0, False), (None, False)])
def test_behind_a_head_that_waits_for_slots_only_those_join_that_do_not_keep_it_waiting(
    seconds: float | None, joins: bool
) -> None:
    """Else the jobs of a long sweep would keep their engine's slots from all others."""
    head = job("head", 0, project="b", slots=2, priority=1)
    start = next_start(with_engines(head, sharer("w", 1, seconds=seconds)))
    assert (start is not None) == joins


def test_a_job_that_waits_for_a_seat_keeps_no_slots_free() -> None:
    waiting = sharer("w", slots=2, priority=1)
    start = next_start(
        with_engines(
            waiting,
            job("small", 1, project="b", slots=1, seconds=None),
            total=3,
            engines=(engine(seats=2),),
        )
    )
    assert start is not None
    assert start.job.id == "small"


def test_engines_without_jobs_end_when_somebody_needs_their_slots() -> None:
    other = job("head", project="b", slots=2)
    idle = engine(seats=0)
    assert choose_closing(with_engines(other, engines=(idle,))) == [idle]
    assert choose_closing(with_engines(other, engines=(engine(seats=1),))) == []
    assert choose_closing(with_engines(other, engines=(engine(seats=0, closing=True),))) == []
    assert choose_closing(with_engines(sharer("w"), engines=(idle,))) == [], "it joins"
    assert choose_closing(with_engines(engines=(idle,))) == []


def test_an_idle_engine_that_uses_up_its_projects_limit_ends_for_the_projects_own_jobs() -> None:
    own = job("own", project="a", slots=2)
    snapshot = with_engines(own, total=4, engines=(engine(seats=0),), a=Share(max_slots=2))
    assert next_start(snapshot) is None
    assert [one.id for one in choose_closing(snapshot)] == ["e"]


def test_in_a_forecast_seats_are_taken_one_after_the_other() -> None:
    found = forecast(with_engines(sharer("one", 0), sharer("two", 1)))
    assert found["one"].starts_at == NOW
    assert found["two"].starts_at == NOW + 100.0
