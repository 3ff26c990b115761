"""Limits of costs: of a job (max_cost), and of a project in a month (max_cost_per_month)."""

from __future__ import annotations

from ft_service.control.places.price_list import price_list
from ft_service.errors import LimitError, SpecError
from ft_service.jobs.states import Job
from ft_service.money import micros, money_text
from ft_service.settings import Settings
from ft_service.store.sql import Store
from ft_service.store.tenants.usage import Spent

CODE = "insufficient_quota"
"""OpenAI's code for a budget that is used up."""


def spent_text(spent: Spent) -> str | None:
    """A sentence that a project has spent what it may; None: it may spend more."""
    if spent.limit is None or spent.cost < micros(spent.limit):
        return None
    currency = spent.currency or ""
    return (
        f"The project has spent {money_text(spent.cost, currency)} in this month (UTC), and may "
        f"spend {money_text(micros(spent.limit), currency)} (its limit max_cost_per_month). Have "
        "the limit raised, or wait for the next month."
    )


def refuse_without_price(job: Job) -> None:
    """Raise SpecError for a limit of the cost of a job whose slots have no price."""
    if job.price is None:
        raise SpecError(
            "max_cost: slots have no price here, by which costs could be counted. Leave it out, or "
            "limit the time (max_seconds); the operator sets prices in FT_PRICES.",
            param="max_cost",
            code="no_price",
        )


def refuse_limit_without_prices(limit: float | None, settings: Settings) -> None:
    """Raise SpecError for a limit max_cost_per_month of a service without prices."""
    if limit is not None and price_list(settings).currency is None:
        raise SpecError(
            "limits.max_cost_per_month: no prices are known here by which costs could be counted "
            "(FT_PRICES). Set it as the server has it, or leave the limit out.",
            param="limits.max_cost_per_month",
            code="no_price",
        )


def refuse_spent(store: Store, project_id: str, limit: float | None) -> None:
    """Raise LimitError if a project has spent what it may. `limit`: None: it has none."""
    if limit is None:
        return
    if (why := spent_text(store.usage.spent(project_id))) is not None:
        raise LimitError(why, code=CODE)
