"""What slots cost, and what their energy weighs: the only place of this arithmetic. Pure.

Money is a whole number of millionths of the operator's currency. Slot-seconds are recorded in steps
of 1/1024 s (`exact` in ft_service/store/tenants/usage.py). So a cost is a quotient of two whole
numbers, rounded once, half to even: each attempt's cost is off by at most half a millionth.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

MICROS = 1_000_000
"""Units of money in one of the currency."""
TICKS = 1024
"""Steps in a slot-second."""
JOULES_OF_KWH = 3_600_000
_CENT = Decimal("0.01")
_HOUR_TICKS = 3600 * TICKS


@dataclass(frozen=True)
class Rate:
    """What a place takes for its slots."""

    price: int
    """Of a slot-hour, in millionths of `currency`."""
    currency: str
    """Its three letters (ISO 4217), such as EUR."""
    grams_per_kwh: float | None = None
    """Grams of CO2 of a kWh there; None: not known."""


def micros(amount: Decimal | float) -> int:
    """Millionths of an amount of the currency, half to even."""
    return round(Decimal(str(amount)) * MICROS)


def amount(money: int) -> float:
    """Money in the currency, for the wire: exact below 9 billion."""
    return money / MICROS


def cost_of(slot_seconds: float, price: int | None) -> int:
    """What slot-seconds cost, in millionths. `price`: of a slot-hour; None: none, and so no cost.

    Raises ValueError for a negative or infinite number of slot-seconds.
    """
    if price is None:
        return 0
    if not 0 <= slot_seconds < float("inf"):
        raise ValueError(f"slot_seconds = {slot_seconds}: must be at least 0")
    whole, rest = divmod(round(slot_seconds * TICKS) * price, _HOUR_TICKS)
    up = 2 * rest > _HOUR_TICKS or (2 * rest == _HOUR_TICKS and whole % 2)
    return whole + bool(up)


def money_text(money: int, currency: str) -> str:
    """`12.40 EUR`, to the cent, half up; `less than 0.01 EUR` for a smaller sum above 0."""
    if 0 < money < MICROS // 100:
        return f"less than 0.01 {currency}"
    return f"{(Decimal(money) / MICROS).quantize(_CENT, ROUND_HALF_UP):,} {currency}"


def co2_grams(joules: float, grams_per_kwh: float | None) -> float | None:
    """Grams of CO2 of so much energy; None: it is not known what a kWh weighs."""
    return None if grams_per_kwh is None else joules / JOULES_OF_KWH * grams_per_kwh


def energy_text(joules: float) -> str:
    """`1.25 kWh`, below a tenth of one `84 Wh`, below one of these `120 J`."""
    watt_hours = joules / 3600
    if watt_hours < 1:
        return f"{joules:.0f} J"
    return f"{watt_hours:.0f} Wh" if watt_hours < 100 else f"{watt_hours / 1000:,.2f} kWh"


def grams_text(grams: float) -> str:
    """`1.25 kg`, below one `84 g`."""
    return f"{grams:.0f} g" if grams < 1000 else f"{grams / 1000:,.2f} kg"
