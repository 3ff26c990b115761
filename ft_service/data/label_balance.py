"""How many answers of a file are good and bad, and which weights KTO's paper asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ft_service.spec import KtoOptions, LossOptions

MOST = 4 / 3
"""Highest weight of all good answers together as a multiple of that of all bad ones, by the paper
(arXiv 2402.01306, section 4.2); the lowest is 1.
"""


def balance_messages(
    name: str, good: int, bad: int, loss: LossOptions | None = None
) -> Iterator[tuple[Literal["info", "warn"], str]]:
    """Level and sentence for events: what a file's labels say, and what is to be changed.

    `name`: the file's; `good`, `bad`: its answers with each label; `loss`: options of the method;
    None: the defaults.
    """
    yield "info", f"{name}: {good:,} good and {bad:,} bad answers."
    if not good or not bad:
        which = "good" if good else "bad"
        instead = ": method: {type: supervised} is for good answers alone" if good else ""
        yield (
            "warn",
            f"{name}: all its answers are {which}, and KTO learns from good and bad ones{instead}.",
        )
        return
    weighted = isinstance(loss, KtoOptions)
    desirable = loss.desirable_weight if weighted else 1.0
    undesirable = loss.undesirable_weight if weighted else 1.0
    share = desirable * good / (undesirable * bad)
    if 1 <= share <= MOST:
        return
    if share < 1:
        option, least, most = "desirable_weight", desirable / share, desirable * MOST / share
    else:
        option, least, most = "undesirable_weight", undesirable * share / MOST, undesirable * share
    yield (
        "warn",
        f"{name}: good answers times desirable_weight {desirable:g} are {share:.3g} times the bad "
        f"ones times undesirable_weight {undesirable:g}. KTO's paper asks for 1 to 1.33, which "
        f"{option} from {least:.3g} to {most:.3g} gives.",
    )
