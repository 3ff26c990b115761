"""Documents about a model's answers and its quality.

    evaluations/step-<s>-a<n>.json    Evaluation, by rank 0, written whole and never again: answers
                                      at a step to the job's prompts, with those before training
    served.json                       ServedQuality: quality of the adapter by how it is served
    forgetting.json                   Forgetting: what the tuned model has lost of what its base
                                      knew
    suites.json                       Suites, by the service: accuracies that lm-eval has measured
                                      (`ft eval --suite`)
    probes.json                       Probes: the trainer's log-probabilities of a few token
                                      sequences, with the adapter and without, to verify a server of
                                      the adapter

Of a step that was trained again, the newest attempt's evaluation counts. Step 0 is before training.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.wording import counted

EVALUATIONS = "evaluations"
SUITES = "suites.json"
MOST_TASKS = 64
MOST_QUESTIONS = 20_000
"""Most tasks whose results a job keeps, and most questions of one."""
_NAME = re.compile(EVALUATIONS + r"/step-(\d{1,9})-a(\d{1,6})\.json")


MOST_NATS = 100.0
"""Nats that a document holds at most: a model that knows nothing loses an eighth of them on a token
of 256,000 words.
"""


def finite_nats(nats: float) -> float:
    """Nats as JSON can hold them: MOST_NATS for more, and for what is no number, which is as
    bad.
    """
    return MOST_NATS if math.isnan(nats) else min(nats, MOST_NATS)


class _QualityDocument(BaseModel):
    model_config = ConfigDict(frozen=True)


class EvaluatedPrompt(_QualityDocument):
    """One prompt with its answers."""

    prompt: str
    """Whole input of the model as text, without special tokens."""
    messages: list[dict[str, Any]] | None = None
    """Prompt as a conversation; None: it is plain text, or only its tokens are known."""
    reference: str | None
    """Expected answer; None: unknown."""
    base: str
    """Answer of the model that training began with: the base, or the tuned model that the job
    continues.
    """
    tuned: str | None
    """Answer of the tuned model; None at step 0."""
    scores: dict[str, float]
    """Scores of `tuned` by metric; at step 0 those of `base`.

    Metrics that need a reference are left out without one.
    """
    base_scores: dict[str, float]


def prompt_turns(
    prompt: str, messages: Sequence[Mapping[str, Any]] | None
) -> tuple[tuple[str, str], ...]:
    """Return (role, text) of each turn of a prompt, for display; the role of plain text is
    empty.
    """
    if not messages:
        return (("", prompt),)
    turns = ((str(turn.get("role", "")), turn.get("content")) for turn in messages)
    return tuple(
        (role, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
        for role, text in turns
    )


class Evaluation(_QualityDocument):
    """All prompts at one step."""

    step: int
    time: float
    """Seconds since the epoch, on the writer's clock."""
    metrics: dict[str, float]
    """Means of the samples' scores."""
    base_metrics: dict[str, float]
    samples: list[EvaluatedPrompt]


def by_name(metrics: dict[str, float]) -> dict[str, float]:
    """Return an evaluation's metrics under their names among a step's (Metrics.more)."""
    return {f"evaluation/{name}": value for name, value in metrics.items()}


SERVED = "served.json"
"""Key in the run directory, written with the outcome."""
AS_TRAINED = "as_trained"
ADAPTER_ON_BF16 = "adapter_on_bf16_base"
MERGED = "merged"
BOUND = 0.02
"""Nats by which a loss may be higher than as trained: 2 % of perplexity, more than NF4 itself
usually costs a base. What is beyond is not rounding: the adapter has learned to compensate for the
format that it was trained on; or, where the sum was rounded, it was not trained for that form.
"""


class ServedQuality(_QualityDocument):
    """Quality of the adapter by how it is served: `as_trained`, `adapter_on_bf16_base` (for a base
    that was in another format during training) and `merged` (in bf16).
    """

    step: int
    """Step of the adapter."""
    samples: int
    """Samples of the validation file, the same for each way."""
    loss: dict[str, float]
    """Validation loss by way."""
    bound: float
    """Nats by which a loss may exceed that of `as_trained` without a warning."""
    answers: dict[str, list[str]]
    """Answers to the prompts of the job's evaluation, in their order; empty without one."""
    metrics: dict[str, dict[str, float]]
    """Scores of the answers."""

    @property
    def beyond(self) -> list[str]:
        """Ways whose loss exceeds that of `as_trained` by more than the bound."""
        return [way for way, loss in self.loss.items() if loss - self.loss[AS_TRAINED] > self.bound]


FORGETTING = "forgetting.json"
"""Key in the run directory, written with the outcome."""
MOST_PERPLEXITY_RISE = 0.10
"""Share by which perplexity on general text may rise without a warning; a convention of this
service.
"""
MOST_DIVERGENCE = 0.5
"""Nats per token by which the tuned model may diverge from its base, on the base's own answers,
without a warning; a convention of this service. That forgetting follows from this divergence: arXiv
2509.04259, on the new task's inputs.
"""


class Forgetting(_QualityDocument):
    """What the tuned model has lost of what its base knew, compared with the base alone (the
    adapter switched off).
    """

    step: int
    """Step of the adapter."""
    tokens: int = 0
    """Tokens of general text that were predicted: the beginning of the text if time was short."""
    base_perplexity: float | None = None
    """exp(mean cross entropy) of that text by the base; None: left out."""
    perplexity: float | None = None
    """The same by the tuned model."""
    answer_tokens: int = 0
    """Tokens of the base's greedy answers to general prompts."""
    divergence: float | None = None
    """Mean KL(base || tuned) of the next token's distribution over these tokens, in nats; None:
    left out.
    """
    agreement: float | None = None
    """Share of these tokens that are the tuned model's likeliest too."""
    seconds: float = 0.0
    """Time that measuring took."""
    left_out: str | None = None
    """What was left out, and why; None: nothing."""

    @property
    def perplexity_rise(self) -> float | None:
        """Share by which perplexity rose; below zero, it fell."""
        if self.perplexity is None or self.base_perplexity is None:
            return None
        return self.perplexity / self.base_perplexity - 1

    @property
    def figures(self) -> list[tuple[str, str]]:
        """(name, value) of what was measured, for display."""
        rise = self.perplexity_rise
        found = []
        if rise is not None:
            text = (
                f"{self.perplexity:.4g} (base: {self.base_perplexity:.4g}, {rise:+.1%}), "
                f"{self.tokens:,} tokens"
            )
            found.append(("perplexity on general text", text))
        if self.divergence is not None:
            text = (
                f"{self.divergence:.3f} nats per token, {self.agreement or 0:.1%} of "
                f"{self.answer_tokens:,} tokens the same"
            )
            found.append(("divergence from the base's own answers", text))
        return found

    @property
    def warnings(self) -> list[str]:
        """A sentence for each figure beyond its threshold."""
        found = []
        if (rise := self.perplexity_rise) is not None and rise > MOST_PERPLEXITY_RISE:
            found.append(
                f"Perplexity on general text is {rise:.0%} higher than the base's, more than "
                f"{MOST_PERPLEXITY_RISE:.0%}"
            )
        if self.divergence is not None and self.divergence > MOST_DIVERGENCE:
            found.append(
                f"On the base's own answers, the model diverges from it by {self.divergence:.2f} "
                "nats per token, more than "
                f"{MOST_DIVERGENCE:g}"
            )
        return [
            f"{text}: it has forgotten some of what the base knew. {_REMEMBER}" for text in found
        ]


_REMEMBER = (
    "If it is to answer other questions too, train with a lower learning_rate or fewer "
    "epochs, or mix in general data."
)

PROBES = "probes.json"
"""Key in the run directory, written with the outcome; see Probes."""
MOST_PROBES = 4
MOST_TOKENS = 64


class Probe(_QualityDocument):
    """One sequence, with the trainer's log-probability in nats of each token except the first."""

    tokens: list[int]
    tuned: list[float]
    base: list[float]
    chat: list[dict[str, Any]] | None = None
    """A conversation with a picture, as OpenAI's chat completions take it, whose rendered tokens
    end with `tokens`; None: `tokens` are the whole sequence.
    """


class Probes(_QualityDocument):
    step: int
    """Step that the adapter was trained to."""
    probes: list[Probe]


def evaluation_key(step: int, attempt: int) -> str:
    return f"{EVALUATIONS}/step-{step}-a{attempt}.json"


def evaluated_steps(run: RunDir) -> dict[int, str]:
    """Return step → key of its newest document, in order of the steps."""
    newest: dict[int, int] = {}
    for key in run.list(EVALUATIONS):
        if match := _NAME.fullmatch(key):
            step = int(match[1])
            attempt = int(match[2])
            newest[step] = max(newest.get(step, 0), attempt)
    return {step: evaluation_key(step, newest[step]) for step in sorted(newest)}


def read_evaluation(run: RunDir, key: str) -> Evaluation | None:
    """Read an evaluation; None: it does not exist, or is unreadable."""
    return run.readable(key, Evaluation)


def read_served(run: RunDir) -> ServedQuality | None:
    """Read served.json; None: it does not exist (yet), or is unreadable."""
    return run.readable(SERVED, ServedQuality)


class SuiteAccuracy(_QualityDocument):
    """Accuracy of a model in a task."""

    accuracy: Annotated[float, Field(ge=0, le=1)]
    """Share of questions whose right choice is the likeliest."""
    error: Annotated[float | None, Field(ge=0, le=1)] = None
    """Standard error of the accuracy; None: a single question."""


class SuiteTask(_QualityDocument):
    """Accuracies in one task of a suite."""

    questions: Annotated[int, Field(ge=1, le=MOST_QUESTIONS)]
    base: SuiteAccuracy
    tuned: SuiteAccuracy

    @property
    def text(self) -> str:
        """The accuracies, for display."""
        return (
            f"{self.tuned.accuracy:.3f} (base: {self.base.accuracy:.3f}), "
            f"{counted(self.questions, 'question')}"
        )


class Suites(_QualityDocument):
    """Newest result of each task that was run on the job's tuned model and on its base."""

    tasks: Annotated[
        dict[Annotated[str, Field(pattern=r"^\w{1,64}$")], SuiteTask], Field(max_length=MOST_TASKS)
    ]
    """By name."""


def add_suites(run: RunDir, found: Suites) -> Suites:
    """Write suites.json with newer results, and return it.

    Raises SpecError for more than MOST_TASKS tasks together.
    """
    before = run.readable(SUITES, Suites)
    tasks = {**(before.tasks if before else {}), **found.tasks}
    if len(tasks) > MOST_TASKS:
        raise SpecError(
            f"tasks: the job would have results of {len(tasks)} tasks, and {MOST_TASKS} are kept.",
            param="tasks",
        )
    run.write(SUITES, Suites(tasks=tasks))
    return Suites(tasks=tasks)


def read_suites(run: RunDir) -> Suites | None:
    """Read suites.json; None: it does not exist, or is unreadable."""
    return run.readable(SUITES, Suites)


def read_forgetting(run: RunDir) -> Forgetting | None:
    """Read forgetting.json; None: it does not exist (yet), or is unreadable."""
    return run.readable(FORGETTING, Forgetting)
