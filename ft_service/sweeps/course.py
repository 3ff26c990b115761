"""How far a job of a sweep has come, as its sweep compares it: folded from its metrics, one after the other. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ft_service.rundir.events import Metrics


@dataclass(frozen=True)
class Course:
    """Losses are validation losses in nats a token; NaN counts as one that was measured, and is the worst."""

    step: int = 0
    total_steps: int = 0
    valid_loss: float | None = None
    """Of the last validation; None: there was none."""
    best_loss: float | None = None
    """The lowest so far."""
    best_step: int | None = None
    rungs: Mapping[int, float] = field(default_factory=dict)
    """Number of a rung, from 0 → loss there. A rung at which the job was not validated before the next one is missing."""

    @classmethod
    def read(cls, document: Mapping[str, Any] | None) -> Course:
        """From what `document` made; None: nothing was reported yet."""
        if document is None:
            return cls()
        rungs = {int(rung): _loss(value) for rung, value in document["rungs"].items()}
        return cls(**{**document, "rungs": rungs})

    def document(self) -> dict[str, Any]:
        """As JSON, where NaN is null."""
        rungs = {str(rung): loss if math.isfinite(loss) else None for rung, loss in self.rungs.items()}
        return {**asdict(self), "rungs": rungs}

    def after(self, metrics: Metrics, rung_steps: Sequence[int]) -> Course:
        """The course after a step was reported. `rung_steps`: of the job's rungs, ascending."""
        course = replace(self, step=metrics.step, total_steps=metrics.total_steps)
        loss = metrics.valid_loss
        if loss is None:
            return course
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            course = replace(course, best_loss=loss, best_step=metrics.step)
        course = replace(course, valid_loss=loss if math.isfinite(loss) else None)
        reached = [rung for rung, step in enumerate(rung_steps) if metrics.step >= step]
        if not reached or metrics.step >= metrics.total_steps or reached[-1] in self.rungs:
            return course
        return replace(course, rungs={**self.rungs, reached[-1]: loss})


def _loss(value: float | None) -> float:
    return math.nan if value is None else value
