from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ft_service.money import Rate
from ft_service.plan.job import training_cost
from ft_service.plan.ranking import Choice, ranked


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
