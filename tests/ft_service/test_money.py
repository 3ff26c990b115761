from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from ft_service.money import (
    MICROS,
    amount,
    co2_grams,
    cost_of,
    energy_text,
    grams_text,
    micros,
    money_text,
)

HOUR = 3600.0


@pytest.mark.parametrize(
    ("slot_seconds", "price", "cost"),
    [
        (0.0, "2.50", "0"),
        (HOUR, "2.50", "2.50"),
        (8 * HOUR, "2.99", "23.92"),
        (1.0, "3.60", "0.001"),
        (1 / 1024, "3.6864", "0.000001"),
        (10_000_000.0, "98.123456", "272565.155556"),
        (1e9, "55000", "15277777777.777778"),  # beyond what a float holds exactly
    ],
)
def test_a_cost_is_slot_seconds_times_price(slot_seconds: float, price: str, cost: str) -> None:
    assert cost_of(slot_seconds, micros(Decimal(price))) == micros(Decimal(cost))


def test_a_cost_is_rounded_once_half_to_even() -> None:
    ticks = [1, 2, 3, 5, 1023, 3601, 999_983]
    prices = [1, 1_843_200, 3_686_400, 5_529_600, 2_500_001]
    for each in ticks:
        for price in prices:
            assert cost_of(each / 1024, price) == round(Fraction(each * price, 3600 * 1024))
    assert [cost_of(ticks / 1024, 1_843_200) for ticks in (1, 3, 5)] == [0, 2, 2]


def test_without_a_price_nothing_costs() -> None:
    assert cost_of(HOUR, None) == 0
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="slot_seconds"):
            cost_of(wrong, 1)


@pytest.mark.parametrize("attempts", [[7200.0], [1800.0, 5400.0], [0.125, 7199.875], [900.5] * 8])
@pytest.mark.parametrize("price", ["2.50", "0.01", "1.234567"])
def test_pauses_do_not_change_the_cents(attempts: list[float], price: str) -> None:
    """Each attempt is rounded for itself, by half a millionth at most."""
    parts = sum(cost_of(seconds, micros(Decimal(price))) for seconds in attempts)
    whole = cost_of(sum(attempts), micros(Decimal(price)))
    assert abs(parts - whole) <= len(attempts) / 2
    assert money_text(parts, "EUR") == money_text(whole, "EUR")


@pytest.mark.parametrize(
    ("money", "text"),
    [
        (0, "0.00 EUR"),
        (1, "less than 0.01 EUR"),
        (9_999, "less than 0.01 EUR"),
        (10_000, "0.01 EUR"),
        (14_999, "0.01 EUR"),
        (15_000, "0.02 EUR"),
        (1_234_567_890_000, "1,234,567.89 EUR"),
    ],
)
def test_money_is_shown_to_the_cent(money: int, text: str) -> None:
    assert money_text(money, "EUR") == text
    assert micros(amount(money)) == money


def test_energy_and_its_weight() -> None:
    assert [energy_text(joules) for joules in (0, 900, 3600, 360_000, 9e6)] == [
        "0 J",
        "900 J",
        "1 Wh",
        "0.10 kWh",
        "2.50 kWh",
    ]
    assert co2_grams(3.6e6, 340.0) == 340.0
    assert co2_grams(3.6e6, None) is None
    assert [grams_text(grams) for grams in (12.4, 1500.0)] == ["12 g", "1.50 kg"]
    assert micros(0.1) == MICROS // 10
