"""What a job has held, may hold, costs, and must do, to the very second."""

from __future__ import annotations

import pytest

from ft_service.jobs.states import TERMINAL, Halt, Job, State
from ft_service.rundir.documents import Desired
from tests.support.records import new_job

NOW = 1000.0
HOURLY = 3_600_000
"""Price of a slot-hour: a slot-second costs 1000."""


def held(**values: object) -> Job:
    """A job that has held two slots for 40 seconds, and 60 before."""
    given = {"slots": 2, "taken_at": NOW - 40, "held_seconds": 60.0, "price": HOURLY, "cost": 5}
    return new_job(**given | values)


def test_the_time_that_a_job_holds_slots_counts_over_all_attempts() -> None:
    assert held().seconds_held(NOW) == 100
    assert held(taken_at=None).seconds_held(NOW) == 60
    assert held(taken_at=NOW + 5).seconds_held(NOW) == 60, "the clock was set back"


@pytest.mark.parametrize(
    ("limit", "is_out"), [(None, False), (0, True), (99, True), (100, True), (101, False)]
)
def test_a_job_is_out_of_time_once_it_has_held_slots_for_as_long_as_it_may(
    limit: int | None, is_out: bool
) -> None:
    assert held(max_seconds=limit).is_out_of_time(NOW) is is_out


def test_a_job_costs_what_its_slots_or_its_seat_have_taken_besides_its_ended_attempts() -> None:
    assert held().cost_at(NOW) == 5 + 2 * 40 * 1000
    assert held().cost_at(NOW, 7.0) == 5 + 2 * 40 * 1000
    assert held(engine_id="engine-1").cost_at(NOW, 7.0) == 5 + 7 * 1000
    assert held(engine_id="engine-1").cost_at(NOW) == 5
    assert held(taken_at=None).cost_at(NOW) == 5
    assert held(taken_at=NOW + 5).cost_at(NOW) == 5
    assert held(price=None).cost_at(NOW) == 5


@pytest.mark.parametrize(
    ("seconds", "price", "cost"),
    [(10.0, HOURLY, 3 * 10 * 1000), (0.0, HOURLY, 0), (None, HOURLY, None), (10.0, None, None)],
)
def test_a_plan_costs_its_time_on_all_its_slots_where_both_time_and_price_are_known(
    seconds: float | None, price: int | None, cost: int | None
) -> None:
    assert new_job(slots=3, planned_seconds=seconds, price=price).planned_cost == cost


@pytest.mark.parametrize("halt", [None, *Halt])
@pytest.mark.parametrize("desired", list(Desired))
def test_a_job_that_is_halted_stops_at_a_checkpoint_unless_its_user_wants_something_else(
    halt: Halt | None, desired: Desired
) -> None:
    wish = new_job(halt=halt, desired=desired).effective_desired
    assert wish is (Desired.PAUSE if halt and desired is Desired.RUN else desired)


def test_a_job_that_is_over_stays_so_and_no_other() -> None:
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == TERMINAL
