"""What several jobs have not in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.page.job_form import SECTIONS

_ALONE = ("model", "training_file", "validation_file", "seed", "priority")


def differing(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Options in which jobs differ: dotted name, and each job's value in their order."""
    names: list[str] = [*_ALONE]
    for section in SECTIONS:
        names += list(dict.fromkeys(f"{section}.{name}" for job in jobs for name in job[section] or ()))
    rows = [(name, [_value(job, name) for job in jobs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def loss_of(series: Mapping[str, Any]) -> float | None:
    """The lowest validation loss; without validation the last training loss; None: no number yet."""
    for name, best in (("valid_loss", True), ("train_loss", False)):
        if values := series.get(name, {}).get("values"):
            return min(values) if best else values[-1]
    return None


def _value(job: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return (job[section] or {}).get(key) if key else job[section]
