"""Evaluations as the wire shows them: what a job's model answers at a step, beside what it answered before training. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from ft_service.rundir.evaluations import Answered, Evaluation, Served


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
    served: dict[str, str]
    """The answers by how the adapter may be served, where that was compared: adapter_on_bf16_base, merged."""


class ServedView(BaseModel):
    """How the adapter does by how it is served: as_trained, adapter_on_bf16_base, merged."""

    loss: dict[str, float]
    """Validation loss."""
    samples: int
    """Of the validation file, the same each time."""
    bound: float
    """One that is higher than as trained by more is no rounding."""
    beyond: list[str]
    """Those that are."""
    metrics: dict[str, dict[str, float]]


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
    served: ServedView | None
    """At the step of the job's adapter, where it was compared."""


def evaluation_id(job_id: str, step: int) -> str:
    return f"{job_id.replace('ftjob', 'fteval', 1)}-{step}"


def evaluation_view(job_id: str, found: Evaluation, served: Served | None) -> EvaluationView:
    """`served`: of the job's adapter."""
    own = served if served is not None and served.step == found.step else None
    return EvaluationView(
        id=evaluation_id(job_id, found.step),
        created_at=int(found.time),
        step=found.step,
        metrics=found.metrics,
        base_metrics=found.base_metrics,
        samples=[_answered(sample, number, own) for number, sample in enumerate(found.samples)],
        served=ServedView(**own.model_dump(exclude={"step", "answers"}), beyond=own.beyond) if own is not None else None,
    )


def _answered(sample: Answered, number: int, served: Served | None) -> AnsweredView:
    said = {way: answers[number] for way, answers in served.answers.items() if number < len(answers)} if served else {}
    return AnsweredView(**sample.model_dump(), served=said)
