"""Numbers, times and names in the page's notation. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from api.page.job_form import SECTIONS
from ft_service.money import energy_text, grams_text, micros, money_text
from ft_service.spec.tuned_name import TunedName
from ft_service.wording import counted

_LARGE = 10**15
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
NONE = "\u2013"
"""Text in place of a missing value."""
METHOD_NAMES: Mapping[str, str] = {
    "supervised": "Good answers (SFT)",
    "dpo": "Preferences (DPO)",
    "simpo": "Preferences (SimPO)",
    "orpo": "Preferences (ORPO)",
    "kto": "Thumbs up and down (KTO)",
    "distillation": "A teacher (distillation)",
    "reinforcement": "Rewards (GRPO)",
    "tinker": "Your own loop (Tinker)",
}
STATES: Mapping[str, str] = {
    "validating_files": "Checking files",
    "queued": "Queued",
    "running": "Running",
    "paused": "Paused",
    "succeeded": "Succeeded",
    "failed": "Failed",
    "cancelled": "Cancelled",
}
NAVIGATION_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "/projects": ("/projects", "/changes"),
}
"""Entry of the navigation → beginnings of the paths that it is current for, if there are more than
its own.
"""
ENDED = frozenset({"succeeded", "failed", "cancelled"})


def byte_text(count: float | None) -> str:
    """Return `3.2 GiB`."""
    if count is None:
        return NONE
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count = count / 1024
        unit = unit + 1
    return (
        f"{count:.0f} {_UNITS[unit]}"
        if unit == 0 or count >= 100
        else f"{count:.1f} {_UNITS[unit]}"
    )


def byte_count(text: str) -> int | str:
    """Return the bytes that a text such as `3.2 GiB` or `1,000` means; any other text unchanged."""
    number, _, unit = text.partition(" ")
    try:
        return int(float(number.replace(",", "")) * 1024 ** _UNITS.index(unit.strip() or "B"))
    except (ValueError, OverflowError):
        return text


def number(value: Any, digits: int = 4) -> str:
    """Return a number with `digits` significant digits and separated thousands; a power of ten
    where it has many digits.
    """
    if value is None:
        return NONE
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if abs(value) < _LARGE and (isinstance(value, int) or abs(value) >= 10**digits):
        return f"{value:,.0f}"
    if value and not 1e-3 <= abs(value) < _LARGE:
        # Integers beyond any float too.
        mantissa, _, exponent = f"{Decimal(value):.{digits - 2}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def money(amount: Mapping[str, Any] | None) -> str:
    """Return an amount of the API to the cent; a dash where there is none."""
    return money_text(micros(amount["value"]), amount["currency"]) if amount else NONE


def plan_cost(plan: Mapping[str, Any]) -> str:
    """Return the likely cost of a plan of the API, or the highest; empty: it is not known."""
    cost = plan.get("cost")
    if not cost or cost["at_most"] is None:
        return ""
    most = "≤ " if cost["likely"] is None else ""
    value = cost["at_most"] if cost["likely"] is None else cost["likely"]
    return f"{most}{money({'value': value, 'currency': cost['currency']})}"


def energy(measured: Mapping[str, Any] | None) -> str:
    """Return the energy of the API; a dash where none was measured."""
    return energy_text(measured["joules"]) if measured else NONE


def duration(seconds: float | None) -> str:
    """Return `2 h 5 min`: the two largest units."""
    if seconds is None:
        return NONE
    left = max(0, round(seconds))
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {name}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 ")) or "0 s"


def moment(seconds: float | None) -> str:
    """Return the value of `<time datetime>`, which a script shows in the reader's language and time
    zone.
    """
    return (
        ""
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )


def plain_time(seconds: float | None) -> str:
    """Return the text of a time that is shown until the script has run."""
    return (
        NONE
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    )


def segment(text: object) -> str:
    """Return a name as one segment of a path."""
    return quote(str(text), safe="")


def coded(text: str) -> Markup:
    """Return a sentence with what stands between backticks as code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # one of them has no other end
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def breakable(name: str) -> Markup:
    """Return a name that breaks lines after underscores only."""
    return Markup("_<wbr>").join(name.split("_"))


def unused_options(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a job that have no effect → the option that replaced them.

    Dotted names.
    """
    pairs = (("n_epochs", "max_steps"), ("warmup_ratio", "warmup_steps"))
    return {
        f"training.{unused}": used
        for unused, used in pairs
        if job["training"].get(used) is not None
    }


@dataclass(frozen=True)
class JobOption:
    """An option of a job, as its settings show it."""

    section: str
    key: str
    value: Any
    given: bool
    """Whether the create body sets it."""
    chosen: str
    """Why it has its value, where the service chose it; empty: the service did not."""
    replaced_by: str
    """The option that decides in its place; empty: it has an effect."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def is_decided(self) -> bool:
        return self.given or bool(self.chosen)


@dataclass(frozen=True)
class JobOptions:
    """A job's options by who decided them."""

    decided: Sequence[JobOption]
    """Those that were given or chosen."""
    rest: Mapping[str, Sequence[JobOption]]
    """Section → its options that have their defaults."""


def options_of(job: Mapping[str, Any], given: Collection[str]) -> JobOptions:
    """Return a job's options. `given`: dotted names of those that its create body sets."""
    unused = unused_options(job)
    every = [
        JobOption(
            section,
            key,
            value,
            given=name in given,
            chosen=job["chosen"].get(name, ""),
            replaced_by=unused.get(name, ""),
        )
        for section in SECTIONS
        for key, value in (job[section] or {}).items()
        for name in [f"{section}.{key}"]
    ]
    rest: dict[str, list[JobOption]] = {}
    for option in every:
        if not option.is_decided:
            rest.setdefault(option.section, []).append(option)
    return JobOptions([option for option in every if option.is_decided], rest)


def model_title(model: Mapping[str, Any]) -> str:
    """Return the suffix of a tuned model's name; without one, its base."""
    try:
        return TunedName.parse(model["id"]).suffix or str(model["root"])
    except ValueError:  # of another release
        return str(model["id"])


def job_title(job: Mapping[str, Any]) -> str:
    """Return a job's name or suffix, by which `ft get` finds it; without one, the name of its
    base.
    """
    called = job.get("name") or job.get("suffix")
    return str(called or str(job["model"]).split("/")[-1])


def mean_reward(answers: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean reward of a group's answers that have one; None: none has."""
    rewards = [own["reward"] for own in answers if own["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def share_done(job: Mapping[str, Any]) -> float:
    """Return the share of a job's steps that are done, in [0, 1]."""
    if job["status"] == "succeeded":
        return 1.0
    progress = job["progress"]
    return min(1.0, progress["step"] / max(1, progress["total_steps"])) if progress else 0.0


def percent_done(job: Mapping[str, Any]) -> int:
    """Return `share_done` in whole percent; 100 with the last step, and not before."""
    share = share_done(job)
    return 100 if share == 1 else min(99, round(100 * share))


def share_of(seat: Mapping[str, Any], engine: Mapping[str, Any]) -> float:
    """Return the share, in [0, 1], of an engine's time that one of its jobs had, of what all its
    present jobs had.
    """
    whole = sum(other["slot_seconds"] for other in engine["jobs"])
    return seat["slot_seconds"] / whole if whole else 1 / len(engine["jobs"])


def row_key(
    job: Mapping[str, Any], losses: Sequence[float] | None, foreign: bool
) -> tuple[object, ...] | None:
    """Return a cache key of the row of a job that is over; None for other jobs, whose rows
    change.
    """
    if job["status"] not in ENDED or job["phase"]:
        return None
    seen = job["id"], job["status"], job["finished_at"], job.get("name")
    return (*seen, tuple(losses or ()), foreign)


def option_text(value: Any) -> str:
    """Return an option's value as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return number(value, 6)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sparkline(values: Sequence[float], width: int = 96, height: int = 24) -> str:
    """Return the points of an SVG polyline through values at equal distances, within a box."""
    if not values:
        return ""
    low = min(values)
    high = max(values)
    scale = (height - 4) / (high - low) if high > low else 0.0
    step = width / max(1, len(values) - 1)
    return " ".join(
        f"{place * step:.1f},{2 + (high - value) * scale:.1f}" for place, value in enumerate(values)
    )


def length_bars(samples: Sequence[Mapping[str, Any]], most: int = 24) -> dict[str, Any] | None:
    """Return a histogram of samples' lengths in tokens; None if no sample has tokens.

    `most`: bars at most.
    """
    lengths = sorted(sample["total"] for sample in samples if sample["total"])
    if not lengths:
        return None
    width = -(-lengths[-1] // most)
    counts = [0] * -(-lengths[-1] // width)
    for length in lengths:
        counts[(length - 1) // width] += 1
    bars = [
        {
            "low": place * width + 1,
            "high": (place + 1) * width,
            "count": count,
            "share": count / max(counts),
        }
        for place, count in enumerate(counts)
    ]
    learned = sum(sample["learned"] for sample in samples) / sum(lengths)
    middle = lengths[(len(lengths) - 1) // 2]
    return {
        "count": len(lengths),
        "longest": lengths[-1],
        "median": middle,
        "learned": learned,
        "bars": bars,
    }


FILTERS: Mapping[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(number, percent, money, energy, duration, moment, plain_time, segment),
        *(breakable, coded, option_text),
    )
} | {"bytes": byte_text, "counted": counted, "grams": grams_text}
GLOBALS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        job_title,
        mean_reward,
        model_title,
        options_of,
        plan_cost,
        share_done,
        percent_done,
        share_of,
        row_key,
        sparkline,
    )
} | {
    "NAVIGATION_PREFIXES": NAVIGATION_PREFIXES,
    "STATES": STATES,
    "ENDED": ENDED,
    "METHOD_NAMES": METHOD_NAMES,
}
