from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_service.jobs.forecast import forecast
from ft_service.jobs.line import HALF_LIFE_SECONDS, Holding, Host, Line, Shape, Share, Waiting, accrued, remembered
from ft_service.jobs.queue import Room, displaced, next_start

NOW = 1_000_000.0
NAMES = ("a", "b", "c")
unhurried = settings(deadline=None, database=None, max_examples=60)

times = st.sampled_from([10.0, 60.0, 600.0, 7200.0])


@st.composite
def lines(draw: st.DrawFn, known: bool = True) -> Line:
    """Any moment of a queue. `known`: how long everything takes is."""
    hosts = {f"h{n}": Host(slots=draw(st.integers(1, 6))) for n in range(draw(st.integers(1, 2)))}
    seconds = times if known else st.none() | times
    waiting = [
        Waiting(
            id=f"w{n}",
            project=draw(st.sampled_from(NAMES)),
            number=n,
            slots=draw(st.integers(1, 4)),
            priority=draw(st.sampled_from([0, 0, 0, 1, 5])),
            seconds=draw(seconds),
            not_before=draw(st.sampled_from([0.0, 0.0, 0.0, NOW + 30.0])),
            host=draw(st.sampled_from([None, None, None, "h0"])),
        )
        for n in range(draw(st.integers(0, 12)))
    ]
    limits = st.none() | st.integers(1, 6)
    shares = {name: Share(used=draw(st.sampled_from([0.0, 100.0, 5000.0])), max_slots=draw(limits)) for name in NAMES}
    holdings, running = list[Holding](), Counter[str]()
    for n, host in enumerate(draw(st.lists(st.sampled_from(sorted(hosts)), max_size=6))):
        project, slots = draw(st.sampled_from(NAMES)), draw(st.integers(1, 3))
        held = sum(holding.slots for holding in holdings if holding.host == host)
        running[project] += slots
        if held + slots <= hosts[host].slots and running[project] <= (shares[project].max_slots or 99):
            left = draw(seconds)
            since = draw(st.sampled_from([0.0, 300.0, 3000.0]))
            holdings.append(
                Holding(
                    id=f"r{n}",
                    project=project,
                    host=host,
                    slots=slots,
                    priority=draw(st.sampled_from([0, 0, 1])),
                    ends_at=None if left is None else NOW + left,
                    taken_at=NOW - since,
                    movable=draw(st.booleans()),
                )
            )
    return Line(now=NOW, hosts=hosts, waiting=waiting, holdings=holdings, shares=shares)


def job(name: str, number: int = 0, **values: object) -> Waiting:
    defaults = {"id": name, "project": "a", "number": number, "slots": 1, "seconds": 100.0}
    return Waiting(**(defaults | values))  # type: ignore[arg-type]


def running(name: str, slots: int, ends_in: float | None = 100.0, **values: object) -> Holding:
    ends_at = None if ends_in is None else NOW + ends_in
    defaults = {"id": name, "project": "z", "host": "h", "slots": slots, "ends_at": ends_at, "taken_at": 0.0}
    return Holding(**(defaults | values))  # type: ignore[arg-type]


def line(*waiting: Waiting, total: int = 4, holdings: tuple[Holding, ...] = (), **shares: Share) -> Line:
    return Line(now=NOW, hosts={"h": Host(slots=total)}, waiting=waiting, holdings=holdings, shares=shares)


def order(line: Line) -> list[str]:
    return [waiting.id for waiting in Room(line).in_order()]


@unhurried
@given(lines(known=False))
def test_what_starts_has_room_and_may(line: Line) -> None:
    start = next_start(line)
    if start is None:
        return
    [host] = start.hosts
    free = line.hosts[host].slots - sum(h.slots for h in line.holdings if h.host == host)
    assert start.job.slots <= free
    assert start.job.not_before <= line.now
    assert start.job.host in (None, host)
    limit = line.shares[start.job.project].max_slots
    held = sum(h.slots for h in line.holdings if h.project == start.job.project)
    assert limit is None or held + start.job.slots <= limit


@unhurried
@given(lines(known=False))
def test_filling_gaps_never_moves_the_heads_estimated_start(line: Line) -> None:
    head = job("head", 99, slots=line.hosts["h0"].slots, priority=9, host="h0")
    line = replace(line, waiting=[*line.waiting, head])
    expected = forecast(replace(line, waiting=[head]))["head"].starts_at
    if Room(line).over_limit(head):  # it is passed over, and others are the head
        return
    while (start := next_start(line)) and start.job.id != "head":
        ends_at = None if start.job.seconds is None else NOW + start.job.seconds
        values = {"project": start.job.project, "host": start.hosts[0], "slots": start.job.slots, "ends_at": ends_at}
        line = replace(
            line,
            waiting=[one for one in line.waiting if one.id != start.job.id],
            holdings=[*line.holdings, Holding(id=start.job.id, taken_at=NOW, **values)],
        )
        if expected is not None:
            assert forecast(replace(line, waiting=[head]))["head"].starts_at == expected


@unhurried
@given(lines())
def test_the_forecast_keeps_to_slots_and_limits_and_forgets_nobody(line: Line) -> None:
    found = forecast(line)
    assert sorted(found) == sorted(waiting.id for waiting in line.waiting)
    assert sorted(one.position for one in found.values()) == list(range(1, len(found) + 1))
    room = Room(line)
    for waiting in line.waiting:
        limit = line.shares[waiting.project].max_slots
        possible = room.hosts_for(waiting) and (limit is None or waiting.slots <= limit)
        behind = [
            w
            for w in line.waiting
            if w.project == waiting.project and (-w.priority, w.number) < (-waiting.priority, waiting.number)
        ]
        if possible and all(limit is None or w.slots <= limit for w in behind):
            assert found[waiting.id].starts_at is not None, "everything it waits for ends"
    spans = [(h.host, h.project, h.slots, NOW, h.ends_at) for h in line.holdings]
    for waiting in line.waiting:
        if len(line.hosts) == 1 and (at := found[waiting.id].starts_at) is not None:
            assert waiting.seconds is not None
            spans.append(("h0", waiting.project, waiting.slots, at, at + waiting.seconds))
    for _, _, _, moment, _ in spans:
        there = [span for span in spans if span[3] <= moment < (span[4] or math.inf)]
        for name, host in line.hosts.items():
            assert sum(span[2] for span in there if span[0] == name) <= host.slots
        for name, share in line.shares.items():
            assert share.max_slots is None or sum(span[2] for span in there if span[1] == name) <= share.max_slots


@unhurried
@given(lines(known=False), st.sampled_from([0.0, 600.0]))
def test_only_lower_priorities_make_room_and_only_enough_of_them(line: Line, after: float) -> None:
    found = displaced(line, after_seconds=after)
    if found is None:
        return
    head, victims = found
    assert victims
    assert all(v.priority < head.priority and v.movable and NOW - v.taken_at >= after for v in victims)
    host = victims[0].host
    free = line.hosts[host].slots - sum(h.slots for h in line.holdings if h.host == host)
    freed = sum(v.slots for v in victims)
    assert free < head.slots <= free + freed
    assert all(free + freed - v.slots < head.slots for v in victims), "one of them is asked to stop in vain"
    without = replace(line, holdings=[h for h in line.holdings if h not in victims])
    start = next_start(without)
    assert start is not None
    assert start.job.priority >= head.priority, "the room goes to whom it was made for"


def test_a_higher_priority_then_the_project_that_has_used_less_then_creation_comes_first() -> None:
    waiting = [
        job("late", 4, priority=3, project="b"),
        job("first of b", 3, project="b"),
        job("second of a", 2),
        job("first of a", 1),
        job("high", 5, priority=9),
    ]
    assert order(line(*waiting, a=Share(used=50.0), b=Share(used=10.0)))[:3] == ["high", "late", "first of b"]
    assert order(line(*waiting, a=Share(used=50.0), b=Share(used=9000.0)))[2:] == ["first of a", "second of a", "first of b"]


def test_projects_with_the_same_use_take_turns() -> None:
    waiting = [job(f"{name}{n}", n if name == "a" else n + 100, project=name) for name in "ab" for n in range(3)]
    assert order(line(*waiting)) == ["a0", "b100", "a1", "b101", "a2", "b102"] or order(line(*waiting)) == [
        "a0",
        "b0",
        "a1",
        "b1",
        "a2",
        "b2",
    ]


@pytest.mark.parametrize("first", [1.0, 5.0])
def test_while_all_are_backlogged_each_gets_its_part(first: float) -> None:
    """Jobs of one project are five times as long as those of another, and of four slots; all came first."""
    waiting = [job(f"a{n}", n, slots=4, seconds=300.0 * first) for n in range(200)]
    waiting += [job(f"b{n}", 1000 + n, project="b", seconds=300.0) for n in range(900)]
    waiting += [job(f"c{n}", 2000 + n, project="c", slots=2, seconds=450.0) for n in range(300)]
    found = forecast(line(*waiting, total=8))
    until = NOW + 12 * 3600.0
    used = dict.fromkeys("abc", 0.0)
    for one in waiting:
        at, seconds = found[one.id].starts_at, one.seconds or 0.0
        assert at is not None
        used[one.project] += one.slots * max(0.0, min(until, at + seconds) - at)
    mean = sum(used.values()) / 3
    assert all(abs(slot_seconds - mean) <= 0.1 * mean for slot_seconds in used.values()), used


def test_use_is_forgotten_by_half_in_three_days() -> None:
    assert remembered(800.0, HALF_LIFE_SECONDS) == 400.0
    assert accrued(2, 60.0) == pytest.approx(120.0, rel=1e-3)
    day = HALF_LIFE_SECONDS / 3
    assert remembered(accrued(3, day), day) + accrued(3, day) == pytest.approx(accrued(3, 2 * day))


def test_the_head_is_waited_for_and_only_what_does_not_delay_it_goes_before() -> None:
    head = job("head", 0, slots=4)
    busy = (running("r", 2, ends_in=100.0),)
    assert next_start(line(head, job("long", 1, seconds=200.0), holdings=busy)) is None
    assert next_start(line(head, job("unknown", 1, seconds=None), holdings=busy)) is None
    start = next_start(line(head, job("long", 1, seconds=200.0), job("short", 2, seconds=99.0), holdings=busy))
    assert start is not None
    assert start.job.id == "short"
    beside = next_start(line(head, job("long", 1, seconds=9e9), total=5, holdings=(running("r", 2),)))
    assert beside is not None
    assert beside.job.id == "long", "five slots take both"
    assert next_start(line(head, job("short", 1), holdings=(running("r", 2, ends_in=None),))) is None


def test_a_project_at_its_limit_is_passed_over_and_told_so() -> None:
    waiting = (job("mine", 0, slots=2), job("small", 1), job("theirs", 2, project="b"))
    found = line(*waiting, holdings=(running("r", 1, project="a"),), a=Share(max_slots=2))
    start = next_start(found)
    assert start is not None
    assert start.job.id == "theirs", "nor does a smaller job of the project go before its own first"
    reasons = {name: one.reason for name, one in forecast(found).items()}
    assert reasons["mine"] == "Its project runs 1 rank and may run 2 at once; this job needs 2."
    assert reasons["theirs"] == "It is about to start."


def test_reasons_say_who_is_before_a_job() -> None:
    waiting = (
        job("head", 0, slots=3, priority=2),
        job("own", 1),
        job("other", 2, project="b"),
        job("last", 3),
        job("back-off", 4, not_before=NOW + 20.0),
        job("noted", 5, note="The job cannot be observed now."),
        job("large", 6, slots=9),
    )
    found = forecast(line(*waiting, holdings=(running("r", 3),), a=Share(used=5000.0)))
    reasons = {name: one.reason for name, one in found.items()}
    assert reasons["head"] == "It is next. It needs 3 slots, and 1 is free."
    assert reasons["last"].endswith("of this project.") or "of this project" in reasons["last"]
    assert "1 of higher priority" in reasons["last"]
    assert reasons["back-off"] == "The next attempt is made in 20 s."
    assert reasons["noted"] == "The job cannot be observed now."
    assert reasons["large"] == "It needs 9 slots on one host, and no host has so many now."
    assert forecast(replace(line(job("x")), hosts={}))["x"].reason.startswith("No process moves jobs now")
    assert found["head"].starts_at == NOW + 100.0


def test_an_unknown_end_gives_no_estimate_and_long_queues_are_estimated_by_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (running("r", 4, ends_in=None),)
    assert forecast(line(job("x"), holdings=busy))["x"].starts_at is None
    waiting = [job(f"w{n}", n) for n in range(40)]
    played = forecast(line(*waiting))
    monkeypatch.setattr("ft_service.jobs.forecast.SIMULATED", 8)
    guessed = forecast(line(*waiting))
    for one in waiting:
        exact, guess = played[one.id].starts_at, guessed[one.id].starts_at
        assert exact is not None
        assert guess is not None
        assert abs(exact - guess) <= 100.0


def test_who_has_just_begun_or_makes_room_already_is_not_displaced() -> None:
    head = job("head", priority=5, slots=2)
    old, young = running("old", 2, movable=True), running("young", 2, movable=True, taken_at=NOW - 10)
    found = displaced(line(head, holdings=(old, young)), after_seconds=60.0)
    assert found == (head, [old])
    assert displaced(line(head, holdings=(replace(old, halting=True), young)), after_seconds=0.0) is None
    assert displaced(line(head, holdings=(replace(old, priority=5), young)), after_seconds=60.0) is None


# Several hosts ----------------------------------------------------------------------------------------------------------------


def fleet(waiting: list[Waiting], holdings: tuple[Holding, ...] = (), **hosts: Host) -> Line:
    return Line(now=NOW, hosts=hosts, waiting=waiting, holdings=holdings, shares={})


def agent(slots: int, kind: str = "H100", memory: int | None = 80, **values: object) -> Host:
    return Host(slots=slots, place="agents", kind=kind, memory=memory, **values)  # type: ignore[arg-type]


def test_a_job_starts_where_its_ranks_fit_and_the_fullest_host_first() -> None:
    hosts = {"large": agent(8), "part": agent(8), "small": agent(8, "L4", 24), "cpu": agent(8, "cpu", 100, shared_memory=True)}
    busy = (running("r", 5, host="part"),)

    def where(**values: Any) -> str | None:
        start = next_start(fleet([job("x", **values)], busy, **hosts))
        return start and start.hosts[0]

    assert where(slots=2, memory=60) == "part"
    assert where(slots=4, memory=60) == "large"
    assert where(slots=8, memory=12, host="cpu") == "cpu"
    assert where(slots=8, memory=20, host="cpu") is None, "its ranks share the memory"
    assert where(slots=8, memory=20) == "large"
    assert where(slots=2, memory=99) is None
    reason = forecast(fleet([job("x", slots=2, memory=99 * 2**30)], busy, **hosts))["x"].reason
    assert reason == "Each of its ranks needs 99.0 GiB, and no host that answers now has so much for one."
    assert where(slots=2, host="agents", memory=20) == "part"
    assert where(slots=2, host="elsewhere") is None


def test_the_nodes_of_a_job_are_on_hosts_of_their_own_of_one_kind() -> None:
    two = job("two", slots=8, nodes=2)
    start = next_start(fleet([two], a=agent(4), b=agent(4, "L4"), c=agent(4)))
    assert start is not None
    assert (start.hosts, start.on_each) == (("a", "c"), 4)
    mixed = fleet([two], a=agent(4), b=agent(4, "L4"), c=agent(3))
    assert next_start(mixed) is None
    assert forecast(mixed)["two"].reason == "It needs 4 slots on each of 2 hosts of one kind, and no host has so many now."
    pod = next_start(Line(now=NOW, hosts={"h": Host(slots=8)}, waiting=[two], holdings=[]))
    assert pod is not None
    assert (pod.hosts, pod.on_each) == (("h",), 8)


def test_both_hosts_are_kept_for_a_head_of_two_nodes() -> None:
    head = job("head", slots=8, nodes=2, priority=1)
    hosts = {"a": agent(4), "b": agent(4), "c": agent(4, "L4")}
    busy = (running("r", 4, host="a", ends_in=100.0),)
    later = [head, job("long", 1, slots=4, seconds=500.0), job("short", 2, slots=4, seconds=50.0)]
    start = next_start(fleet(later, busy, **hosts))
    assert start is not None
    assert (start.job.id, start.hosts) == ("long", ("c",)), "where the head does not go there is room"
    only_two = {name: host for name, host in hosts.items() if name != "c"}
    start = next_start(fleet(later, busy, **only_two))
    assert start is not None
    assert (start.job.id, start.hosts) == ("short", ("b",)), "over before the head's estimated start"
    assert forecast(fleet(later, busy, **only_two))["head"].starts_at == NOW + 100.0


def test_room_for_two_nodes_is_made_on_two_hosts() -> None:
    head = job("head", slots=4, nodes=2, priority=9)
    hosts = {"a": agent(2), "b": agent(2), "c": agent(2)}
    busy = tuple(running(f"r-{name}", 2, host=name, movable=True, priority=p) for name, p in (("a", 9), ("b", 0), ("c", 1)))
    found = displaced(fleet([head], busy, **hosts), after_seconds=0.0)
    assert found is not None
    assert [holding.id for holding in found[1]] == ["r-b", "r-c"]


@pytest.mark.parametrize(("free", "gets"), [(8, 8), (7, 6), (3, 2), (1, None)])
def test_a_job_of_any_size_gets_as_many_ranks_as_are_free(free: int, gets: int | None) -> None:
    elastic = job("x", slots=2, seconds=80.0, shapes=(Shape(1, 8), Shape(1, 6), Shape(1, 2)))
    start = next_start(line(elastic, total=8, holdings=(running("r", 8 - free),) if free < 8 else ()))
    assert (start and start.shape.ranks) == gets
    assert start is None or start.seconds == pytest.approx(160.0 / (gets or 1))


def test_a_job_of_any_size_takes_no_more_than_its_project_may_and_the_head_can_spare() -> None:
    shapes = (Shape(1, 4), Shape(1, 2))
    start = next_start(line(job("x", slots=2, shapes=shapes), total=8, a=Share(max_slots=3)))
    assert start is not None
    assert start.shape == Shape(1, 2)
    head = job("head", slots=6, priority=1)
    long = job("x", 1, slots=2, shapes=shapes, seconds=9e9)
    start = next_start(line(head, long, total=8, holdings=(running("r", 4),)))
    assert start is not None
    assert (start.job.id, start.shape) == ("x", Shape(1, 2)), "four would delay the head"
    whose = next_start(fleet([long], h=Host(slots=8, counts=False)))
    assert whose is not None
    assert whose.shape == Shape(1, 2), "where a cluster counts it gets the fewest"
