"""A sweep's tried values against the losses that they reached, as the page draws them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from api.page.formatting import number, option_text

_MOST_TICKS = 5
_DECADE = 10.0
"""A range this wide is drawn by its logarithm, as rates are tried."""


@dataclass(frozen=True)
class Point:
    """A job of a sweep. `x` and `y`: shares of the axes, from the lowest value."""

    x: float
    y: float
    text: str
    kind: Literal["", "best", "early"]
    """early: the job was stopped before its end."""


@dataclass(frozen=True)
class Scatter:
    """One option's values against the lowest validation losses."""

    option: str
    logarithmic: bool
    lowest: float
    """Loss at the axis's bottom."""
    highest: float
    points: tuple[Point, ...]
    ticks: tuple[tuple[float, str], ...]
    """Share of the axis → the value's text."""


def scatters_of(sweep: Mapping[str, Any]) -> list[Scatter]:
    """Return a scatter of each option of a sweep, as the API shows it, that two jobs with losses
    have tried different values of.
    """
    measured = [
        job
        for job in sweep["jobs"]
        if job["valid_loss"] is not None and math.isfinite(job["valid_loss"])
    ]
    best = (sweep["best"] or {}).get("job_id")
    found = (_scatter(option, measured, best) for option in sweep["options"])
    return [scatter for scatter in found if scatter]


def _scatter(option: str, jobs: Sequence[Mapping[str, Any]], best: str | None) -> Scatter | None:
    values = [job["values"].get(option) for job in jobs]
    texts = [option_text(value) for value in values]
    if len(set(texts)) < 2:
        return None
    losses = [job["valid_loss"] for job in jobs]
    low = min(losses)
    height = max(losses) - low or 1.0
    places, logarithmic = _places(values, texts)
    points = tuple(
        Point(
            x,
            (job["valid_loss"] - low) / height,
            f"{option} = {text}: {number(job['valid_loss'])}",
            "best" if job["id"] == best else "early" if job["stopped"] else "",
        )
        for job, x, text in zip(jobs, places, texts, strict=True)
    )
    by_place = sorted(dict(zip(places, texts, strict=True)).items())
    if len(by_place) > _MOST_TICKS:
        by_place = [by_place[0], by_place[-1]]
    return Scatter(option, logarithmic, low, max(losses), points, tuple(by_place))


def _places(values: Sequence[Any], texts: Sequence[str]) -> tuple[list[float], bool]:
    """Return each value's share of the axis, and whether that is logarithmic: numbers by size,
    anything else side by side.
    """
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        names = list(dict.fromkeys(texts))
        return [names.index(text) / (len(names) - 1) for text in texts], False
    low = min(values)
    high = max(values)
    if low > 0 and high / low >= _DECADE:
        width = math.log(high / low)
        return [math.log(value / low) / width for value in values], True
    return [(value - low) / (high - low) for value in values], False
