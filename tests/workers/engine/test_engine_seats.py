"""What an engine decides about its seats: who joins, goes on, computes, leaves, and when it ends.

Seats here are plain records; `test_engine.py` has real ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.rundir.attempt import Attempt, AttemptKeys
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExitReason
from ft_service.rundir.engine import SeatOrder, SeatSize, seat_key
from workers.engine import engine as engine_module
from workers.engine.engine import RoundOrders, TrainingEngine
from workers.engine.seat_thread import SeatState
from workers.training.context import POLL_SECONDS
from workers.training.packing import TOKENS

IDLE = 10.0
WAITS, TRAINS, ANSWERS, ENDED, FAILED = SeatState


class FakeSeat:
    """What an engine asks of a seat."""

    def __init__(self, key: str, state: SeatState = TRAINS, used: int = 0, **more: Any) -> None:
        self.key = key
        self.state = state
        self.used = used
        self.waited = self.priority = 0
        self.size: SeatSize | None = None
        self.call = None
        self.over = self.due = self.dropped = self.stops = False
        self.conclusions: list[OSError | None] = []
        self.concluded = 0
        self.resumed: list[tuple[Any, ...]] = []
        self.groups = SimpleNamespace(destroyed=False)
        self.groups.destroy = lambda: setattr(self.groups, "destroyed", True)
        self.__dict__.update(more)

    def is_over(self) -> bool:
        return self.over

    def is_due(self) -> bool:
        return self.due

    def drop(self) -> None:
        self.dropped = True

    def request_stop(self) -> None:
        self.stops = True

    def resume(self, *given: Any) -> None:
        self.resumed.append(given)

    def conclude(self) -> None:
        refusal = self.conclusions.pop(0) if self.conclusions else None
        if refusal is not None:
            raise refusal
        self.concluded += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    return clock


def new_engine(
    folder: Path, *seats: FakeSeat, tokens: Any = 100, rank: int = 0, **spec: Any
) -> Any:
    given = {"most_seats": 3, "room": None, "idle_seconds": IDLE, **spec}
    training = SimpleNamespace(tokens_per_micro_batch=tokens)
    engine: Any = TrainingEngine(
        SimpleNamespace(spec=SimpleNamespace(training=training), **given),  # type: ignore[arg-type]
        SimpleNamespace(rank=rank, run=RunDir(folder), world=1),  # type: ignore[arg-type]
        SimpleNamespace(model=SimpleNamespace(backward_of_lanes=None)),  # type: ignore[arg-type]
        SimpleNamespace(is_requested=False),  # type: ignore[arg-type]
    )
    engine.seats.extend(seats)
    return engine


def order_of(folder: Path, name: str, *, over: bool = False) -> SeatOrder:
    run = RunDir(folder / "runs" / name)
    order = SeatOrder(job_id=name, attempt=1, run_dir=str(run.root))
    RunDir(folder).write(seat_key(name, 1), order)
    if over:
        run.write(AttemptKeys(1).exit, exit_of(ExitReason.CANCELLED, "cancelled"))
        assert Attempt(run, 1).has_exit()
    return order


def look(engine: Any, clock: Clock) -> RoundOrders | None:
    """What it decides at its next look."""
    clock.now += POLL_SECONDS
    return engine._decide()


def test_an_engine_looks_now_and_then_and_lets_who_has_waited_go_on_at_once(
    tmp_path: Path, clock: Clock
) -> None:
    order = order_of(tmp_path, "a")
    trains, waits = FakeSeat("trains"), FakeSeat("waits", WAITS)
    engine = new_engine(tmp_path, trains, waits)
    clock.now += 0.9 * POLL_SECONDS
    assert engine._decide() is None
    waits.due = True
    assert engine._decide() == RoundOrders(due=("waits",))
    waits.due = False
    clock.now = engine._looked_at + POLL_SECONDS
    assert engine._decide() == RoundOrders((order,))
    assert engine._decide() is None
    assert look(engine, clock) is None, "an order is taken once"
    trains.over = True
    assert look(engine, clock) == RoundOrders(dropped=("trains",))
    assert clock.slept == []


def test_an_engine_without_a_seat_ends_when_it_was_idle_for_long_enough(
    tmp_path: Path, clock: Clock
) -> None:
    engine = new_engine(tmp_path, seat := FakeSeat("a"))
    clock.now += 5 * IDLE
    assert engine._decide() is None
    engine.seats.remove(seat)
    idle_since = clock.now
    clock.now = idle_since + IDLE - 0.01
    assert engine._decide() is None
    order_of(tmp_path, "b")
    clock.now = idle_since + IDLE + 1
    found = engine._decide()
    assert found is not None
    assert (len(found.orders), found.ends) == (1, False)
    engine._left.append(left := FakeSeat("c", conclusions=[OSError(28, "No space")] * 2))
    assert look(engine, clock) is None, "an exit record is not written yet"
    assert look(engine, clock) is None
    assert look(engine, clock) == RoundOrders(ends=True)
    assert (left.concluded, engine._left) == (1, [])


def test_it_is_idle_from_its_last_seat_on_to_the_very_second(tmp_path: Path, clock: Clock) -> None:
    engine = new_engine(tmp_path)
    clock.now = engine._idle_since + IDLE
    assert engine._decide() == RoundOrders(ends=True)


def test_an_engine_that_is_asked_to_stop_takes_no_job_and_ends_with_its_last_seat(
    tmp_path: Path, clock: Clock
) -> None:
    order_of(tmp_path, "late")
    engine = new_engine(tmp_path, seat := FakeSeat("a"))
    engine.stop.is_requested = True
    assert look(engine, clock) == RoundOrders(stops=True)
    engine._stopping = True
    assert look(engine, clock) is None, "seats are asked once"
    engine.seats.clear()
    engine._left.append(FakeSeat("b", conclusions=[OSError(5, "Input/output error")]))
    assert look(engine, clock) is None
    assert look(engine, clock) == RoundOrders(ends=True)
    assert not seat.stops


def test_while_all_wait_an_engine_looks_ever_more_patiently(tmp_path: Path, clock: Clock) -> None:
    engine = new_engine(tmp_path, FakeSeat("a", WAITS), FakeSeat("b", WAITS))
    assert engine._due_seats() == ()
    assert clock.now == pytest.approx(engine._looked_at + POLL_SECONDS, abs=0.05)
    engine._looked_at = clock.now = clock.now + 60
    assert engine._due_seats() == ()
    assert clock.slept[0] < clock.slept[-1]
    engine.seats[1].due = True
    del clock.slept[:]
    engine._looked_at = clock.now
    assert engine._due_seats() == ("b",)
    assert (clock.slept, engine._busy_at) == ([], clock.now)


def test_orders_are_taken_in_their_order_while_there_is_a_seat(
    tmp_path: Path, clock: Clock
) -> None:
    engine = new_engine(tmp_path, FakeSeat("first"), most_seats=3)
    assert engine._new_orders() == ()
    order_of(tmp_path, "a", over=True)
    for name in ("c", "b", "d"):
        order_of(tmp_path, name)
    RunDir(tmp_path).path("seats/0.json").write_text("no json")
    assert [order.job_id for order in engine._new_orders()] == ["b", "c"]
    assert [order.job_id for order in engine._new_orders()] == ["d"], "its turn comes"
    assert engine._new_orders() == ()
    engine = new_engine(tmp_path, FakeSeat("first"), most_seats=1)
    assert engine._new_orders() == ()


def test_who_joins_or_has_waited_begins_with_the_least_of_those_that_compute(
    tmp_path: Path, clock: Clock
) -> None:
    seats = [FakeSeat("a", used=50), FakeSeat("b", used=30), FakeSeat("c", WAITS, used=10)]
    engine = new_engine(tmp_path, *seats, FakeSeat("d", WAITS, used=70), FakeSeat("e", WAITS))
    assert engine._least_used() == 30
    engine._take_back(["c", "d", "a"])
    assert [seat.used for seat in engine.seats] == [50, 30, 30, 70, 0]
    assert [len(seat.resumed) for seat in engine.seats] == [0, 0, 1, 1, 0]
    assert new_engine(tmp_path, seats[2])._least_used() == 30
    assert new_engine(tmp_path)._least_used() == 0


def test_a_seat_that_joins_takes_the_groups_of_one_that_has_ended(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def seat_of(order: SeatOrder, base: Any, host: Any, groups: Any) -> FakeSeat:
        made.append(groups)
        return FakeSeat(order.job_id)

    monkeypatch.setattr(engine_module, "SeatThread", seat_of)
    monkeypatch.setattr(engine_module.Groups, "made", lambda spec, world: f"new of {world}")
    engine = new_engine(tmp_path, FakeSeat("a", used=40))
    engine._free_groups.append("old")
    for name in ("b", "c"):
        engine._join(order_of(tmp_path, name))
    assert made == ["old", "new of 1"]
    assert [(seat.key, seat.used) for seat in engine.seats] == [("a", 40), ("b", 40), ("c", 40)]
    assert [seat.resumed for seat in engine.seats] == [[], [()], [()]]


def states(*of_ranks: SeatState) -> list[tuple[int, int]]:
    return [(int(state), 10) for state in of_ranks]


def test_seats_that_are_over_leave_and_only_those_ended_everywhere_leave_their_groups(
    tmp_path: Path, clock: Clock
) -> None:
    seats = [FakeSeat(name) for name in ("stays", "answers", "ended", "half", "failed", "dropped")]
    engine = new_engine(tmp_path, *seats)
    seen = [
        states(TRAINS, WAITS),
        states(ANSWERS, ANSWERS),
        states(ENDED, ENDED),
        states(ENDED, TRAINS),
        states(TRAINS, FAILED),
        states(TRAINS, TRAINS),
    ]
    seats[4].conclusions = [OSError(28, "No space")]
    assert engine._leave(seen, ["dropped"])
    assert [seat.key for seat in engine.seats] == ["stays", "answers"]
    assert [seat.dropped for seat in seats] == [False, False, True, True, True, True]
    assert engine._free_groups == [seats[2].groups]
    assert [seat.groups.destroyed for seat in seats] == [False, False, False, True, True, True]
    assert [seat.concluded for seat in seats] == [0, 0, 1, 1, 0, 1]
    assert engine._left == [seats[4]], "its record is written at a later look"
    assert not engine._leave(seen[:2], ["dropped"])
    assert (seats[4].concluded, engine._left) == (1, [])


def test_only_rank_0_writes_how_seats_ended(tmp_path: Path, clock: Clock) -> None:
    engine = new_engine(tmp_path, seat := FakeSeat("a"), rank=1)
    assert engine._leave([states(ENDED, ENDED)], [])
    assert (seat.concluded, engine._left) == (0, [])


def size(held: int, batch: int) -> SeatSize:
    return SeatSize(held=held, batch=batch, batch_tokens=10, room=None, gain=None)


def round_of(engine: Any, monkeypatch: pytest.MonkeyPatch, *seen: tuple[int, int]) -> Any:
    """Keys of the seats that compute, and whether a backward follows; None: nobody does."""
    found: list[Any] = []

    def forwards(seats: Any, *, trains: bool) -> dict[Any, Any]:
        found.append(([seat.key for seat in seats], trains))
        return {}

    monkeypatch.setattr(engine, "_forwards", forwards)
    engine._compute(seen)
    return found[0] if found else None


def test_a_round_has_those_that_fit_and_counts_what_they_computed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = [FakeSeat("a", used=5), FakeSeat("b", WAITS), FakeSeat("c"), FakeSeat("d", used=9)]
    engine = new_engine(tmp_path, *seats, tokens=100)
    seen = ((TRAINS, 60), (WAITS, 10), (TRAINS, 40), (TRAINS, 1))
    assert round_of(engine, monkeypatch, *seen) == (["a", "c"], True)
    assert [(seat.used, seat.waited) for seat in seats] == [(65, 0), (0, 0), (40, 0), (9, 1)]
    assert round_of(engine, monkeypatch, *seen) == (["c", "d"], True)
    assert [(seat.used, seat.waited) for seat in seats] == [(65, 1), (0, 0), (80, 0), (10, 0)]
    assert round_of(engine, monkeypatch, *[(WAITS, 0)] * 4) is None
    answers = ((TRAINS, 60), (WAITS, 0), (WAITS, 0), (ANSWERS, 5))
    assert round_of(engine, monkeypatch, *answers) == (["d"], False)


def test_of_a_rank_s_memory_a_round_has_what_the_seats_leave(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seats() -> list[FakeSeat]:
        return [
            FakeSeat("a", size=size(100, 50)),
            FakeSeat("b", size=size(100, 50)),
            FakeSeat("c", WAITS, size=size(100, 50)),
        ]

    seen = ((TRAINS, 10), (TRAINS, 10), (WAITS, 0))
    for room, expected in ((400, ["a", "b"]), (399, ["a"]), (None, ["a", "b"])):
        engine = new_engine(tmp_path, *seats(), room=room)
        assert round_of(engine, monkeypatch, *seen) == (expected, True)


def test_a_higher_priority_computes_before_others(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(tmp_path, FakeSeat("a"), FakeSeat("b", used=9, priority=1), tokens=10)
    assert round_of(engine, monkeypatch, (TRAINS, 10), (TRAINS, 10)) == (["b"], True)


def test_the_budget_of_a_round_is_the_option_or_that_of_packing(tmp_path: Path) -> None:
    assert new_engine(tmp_path, tokens=123)._budget == 123
    assert new_engine(tmp_path, tokens="auto")._budget == TOKENS


class Running(TrainingEngine):
    """An engine whose looks are given, and which notes what it does."""

    looks: list[Any]
    done: list[Any]

    def _agree(self) -> Any:
        return self.looks.pop(0)

    def _compute(self, seen: Any) -> None:
        self.done.append(("compute", seen))

    def _join(self, order: Any) -> None:
        self.done.append(("join", order))

    def _take_back(self, due: Any) -> None:
        self.done.append(("back", due))


def test_rounds_go_on_until_the_engine_ends(tmp_path: Path) -> None:
    engine = new_engine(tmp_path)
    engine.__class__ = Running
    seat = FakeSeat("a")
    engine.done = []
    engine.looks = [
        (RoundOrders(orders=("first",)), []),  # type: ignore[arg-type]
        (None, [[(2, 10), (2, 30)]]),
        (RoundOrders(stops=True), [states(TRAINS, TRAINS)]),
        (None, [states(ENDED, TRAINS)]),
        (None, []),
        (RoundOrders(ends=True, orders=("late",)), []),  # type: ignore[arg-type]
    ]
    engine.seats.append(seat)
    engine.looks[0] = (RoundOrders(orders=("first",)), [states(TRAINS, TRAINS)])  # type: ignore[arg-type]
    engine.run()
    assert engine.done == [
        ("join", "first"),
        ("back", ()),
        ("compute", [(2, 30)]),
        ("back", ()),
        ("back", ()),
        ("back", ()),
    ]
    assert (seat.stops, seat.dropped, engine._stopping) == (True, True, True)
    assert engine.seats == []
