"""What a job's model answers at a step to the prompts that it is asked, beside what it answered before training.

    evaluations/step-<s>-a<n>.json    Evaluation, by rank 0, written whole and never again

A step that was trained again counts as its newest attempt saw it. Step 0 is before training.

    served.json    Served: what the adapter is worth where it is served
    probes.json    Probes: log-probabilities of a few token sequences by the trainer, with the adapter and without; by these
                   whoever serves it is verified
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from ft_service.rundir.directory import RunDir

EVALUATIONS = "evaluations"
_NAME = re.compile(EVALUATIONS + r"/step-(\d{1,9})-a(\d{1,6})\.json")


class Answered(BaseModel):
    """One prompt with its answers."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    """All that the model is given, as text, without special tokens."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as a conversation; None: it is bare text, or only its tokens are known."""
    reference: str | None
    """The answer that is expected; None: none is known."""
    base: str
    """By the model that training began with: the base, or the tuned model that the job goes on from."""
    tuned: str | None
    """None at step 0."""
    scores: dict[str, float]
    """Of `tuned`, by the metrics' names; at step 0 of `base`. A metric that needs a reference is left out without one."""
    base_scores: dict[str, float]


def asked(prompt: str, messages: Sequence[Mapping[str, Any]] | None) -> tuple[tuple[str, str], ...]:
    """What the model was asked, wherever it is shown: who says what; of bare text nobody does."""
    if not messages:
        return (("", prompt),)
    said = ((str(turn.get("role", "")), turn.get("content")) for turn in messages)
    return tuple((role, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)) for role, text in said)


class Evaluation(BaseModel):
    """All prompts at one step."""

    model_config = ConfigDict(frozen=True)

    step: int
    time: float
    """Seconds since the epoch, on the writer's clock."""
    metrics: dict[str, float]
    """Means of the samples' scores."""
    base_metrics: dict[str, float]
    samples: list[Answered]


def by_name(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of an evaluation by their names among those of a step (Metrics.more)."""
    return {f"evaluation/{name}": value for name, value in metrics.items()}


SERVED = "served.json"
"""In the run directory, with the outcome."""
AS_TRAINED, ADAPTER_ON_BF16, MERGED = "as_trained", "adapter_on_bf16_base", "merged"


class Served(BaseModel):
    """What the adapter is worth by how it is served: `as_trained`, `adapter_on_bf16_base` (of a base that was trained on in
    another format) and `merged` (in bf16)."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Of the adapter."""
    samples: int
    """Of the validation file, the same each time."""
    loss: dict[str, float]
    """Validation loss."""
    bound: float
    """Nats: one that is higher than as trained by more is told of by a warning."""
    answers: dict[str, list[str]]
    """To the prompts of the job's evaluation, in their order; empty without one."""
    metrics: dict[str, dict[str, float]]
    """Their scores."""

    @property
    def beyond(self) -> list[str]:
        """Ways to serve it that are worse than as trained by more than the bound."""
        return [way for way, loss in self.loss.items() if loss - self.loss[AS_TRAINED] > self.bound]


PROBES = "probes.json"
"""In the run directory, written with the outcome."""
MOST_PROBES = 4
MOST_TOKENS = 64


class Probe(BaseModel):
    """One sequence. Log-probabilities are in nats, of each token but the first, by the trainer."""

    model_config = ConfigDict(frozen=True)

    tokens: list[int]
    tuned: list[float]
    base: list[float]


class Probes(BaseModel):
    model_config = ConfigDict(frozen=True)

    step: int
    """Of the adapter."""
    probes: list[Probe]


def evaluation_key(step: int, attempt: int) -> str:
    return f"{EVALUATIONS}/step-{step}-a{attempt}.json"


def evaluated_steps(run: RunDir) -> dict[int, str]:
    """Step → key of its newest document, in order of the steps."""
    newest: dict[int, int] = {}
    for key in run.list(EVALUATIONS):
        if match := _NAME.fullmatch(key):
            step, attempt = int(match[1]), int(match[2])
            newest[step] = max(newest.get(step, 0), attempt)
    return {step: evaluation_key(step, newest[step]) for step in sorted(newest)}


def read_evaluation(run: RunDir, key: str) -> Evaluation | None:
    """One of them. None: it is gone, or cannot be read."""
    return run.readable(key, Evaluation)


def read_served(run: RunDir) -> Served | None:
    """None: it was not compared, or not yet, or it cannot be read."""
    return run.readable(SERVED, Served)
