"""Evaluations as the wire shows them: what a job's model answers at a step, beside what it answered before training. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from ft_service.rundir.evaluations import Evaluation


class AnsweredView(BaseModel):
    prompt: str
    """All that the model is given, as text."""
    messages: list[dict[str, Any]] | None
    """The prompt as a conversation; null: it is bare text, or only its tokens are known."""
    reference: str | None
    """The expected answer; null: none is known."""
    base: str
    """The answer of the model that training began with."""
    tuned: str | None
    """The answer at this step; null at step 0."""
    scores: dict[str, float]
    """Of `tuned`, at step 0 of `base`, by the metrics' names."""
    base_scores: dict[str, float]


class EvaluationView(BaseModel):
    id: str
    object: Literal["fine_tuning.job.evaluation"] = "fine_tuning.job.evaluation"
    created_at: int
    step: int
    """0: before training."""
    metrics: dict[str, float]
    """Means over the samples."""
    base_metrics: dict[str, float]
    samples: list[AnsweredView]


def evaluation_id(job_id: str, step: int) -> str:
    return f"{job_id.replace('ftjob', 'fteval', 1)}-{step}"


def evaluation_view(job_id: str, found: Evaluation) -> EvaluationView:
    return EvaluationView(
        id=evaluation_id(job_id, found.step),
        created_at=int(found.time),
        step=found.step,
        metrics=found.metrics,
        base_metrics=found.base_metrics,
        samples=[AnsweredView.model_validate(sample.model_dump()) for sample in found.samples],
    )
