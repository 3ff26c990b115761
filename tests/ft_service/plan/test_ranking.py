from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ft_service.money import Rate
from ft_service.plan.job import training_cost
from ft_service.plan.plan_text import cost_text
from ft_service.plan.ranking import Choice, ranked

RATE = Rate(3_000_000, "EUR")


def choice(name: str, *, fits: bool | None, seconds: float | None, price: int | None) -> Choice:
    time = {"seconds_at_most": seconds, "seconds_likely": seconds}
    rate = None if price is None else Rate(price, "EUR")
    plan: Any = SimpleNamespace(fits=fits)
    return Choice(name, plan, time, training_cost(time, 2, rate))


def test_money_comes_before_time_and_what_fits_before_all() -> None:
    choices = [
        choice("slow", fits=True, seconds=9000, price=None),
        choice("dear", fits=True, seconds=100, price=90_000_000),
        choice("small", fits=False, seconds=10, price=1),
        choice("fast", fits=True, seconds=50, price=None),
        choice("cheap", fits=True, seconds=3600, price=1_000_000),
        choice("unknown", fits=None, seconds=1, price=1),
        Choice("refused", None, why_not="it cannot"),
        choice("timeless", fits=True, seconds=None, price=1),
    ]
    names = [one.hardware for one in ranked(choices)]
    assert names[:5] == ["cheap", "dear", "fast", "slow", "timeless"]
    assert set(names[5:]) == {"small", "unknown", "refused"}
    assert names[-1] == "refused"


def test_what_a_plan_costs() -> None:
    time = {"seconds_at_most": 7200.0, "seconds_likely": 3600.0}
    cost = training_cost(time, 4, RATE)
    assert cost == {"currency": "EUR", "slot_hour": 3.0, "at_most": 24.0, "likely": 12.0}
    assert cost_text(cost) == "That costs about 12.00 EUR (at worst 24.00 EUR)."
    unknown = training_cost({"seconds_at_most": None, "seconds_likely": None}, 4, RATE)
    assert unknown == {"currency": "EUR", "slot_hour": 3.0, "at_most": None, "likely": None}
    assert training_cost(None, 4, RATE) == unknown
    assert training_cost(time, 4, None) is None
    for nothing in (None, unknown):
        assert cost_text(nothing) is None
