"""Answers of the API as the page's tables show them: evaluations of a job, differences of jobs,
sums of usage. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.page.job_form import SECTIONS
from ft_service.jobs.method_options import method_options
from ft_service.rundir.evaluations import (
    ADAPTER_ON_BF16,
    AS_TRAINED,
    BOUND,
    MERGED,
    prompt_turns,
)

_TOP_LEVEL = ("model", "training_file", "validation_file", "seed", "priority")
_RESULT_FIELDS = {
    "tokens": "trained_tokens",
    "gpu_seconds": "gpu_seconds",
    "bytes": "uploaded_bytes",
    "jobs": "num_jobs",
    "joules": "energy_joules",
    "grams": "co2_grams",
}
AMOUNTS: Mapping[str, str] = {
    "gpu_seconds": "GPU hours",
    "tokens": "Trained tokens",
    "bytes": "Uploaded bytes",
    "jobs": "Jobs",
    "cost": "Cost",
    "joules": "Energy",
}
"""Field of `Use` → its label."""


@dataclass(frozen=True)
class AnswerRow:
    """A prompt and the answers to it."""

    turns: tuple[tuple[str, str], ...]
    """Role and text of each message of the prompt; the role of bare text is empty."""
    reference: str | None
    """The expected answer; None: not known."""
    before: str
    after: str | None
    """The answer at the step shown; None: no step was evaluated yet."""


@dataclass(frozen=True)
class Answers:
    """Answers before training and at a step, side by side."""

    steps: tuple[int, ...]
    """Evaluated steps, ascending, without step 0."""
    shown: int | None
    """The step whose answers these are; None: only the answers before training exist."""
    scores: Mapping[str, tuple[float | None, ...]]
    """Name of a metric → its mean before training, then at each step."""
    prompts: tuple[AnswerRow, ...]


def answers_of(evaluations: Sequence[Mapping[str, Any]], step: int | None) -> Answers | None:
    """Return the answers in a job's evaluations as the API lists them.

    `step`: the one to show; the newest one if it is None or was not evaluated.
    """
    by_step = {
        evaluation["step"]: evaluation
        for evaluation in sorted(evaluations, key=lambda entry: entry["step"])
    }
    if not by_step:
        return None
    steps = tuple(number for number in by_step if number)
    shown = step if step in steps else (steps[-1] if steps else None)
    current = by_step[shown or 0]
    columns = [
        current["base_metrics"] or current["metrics"],
        *(by_step[number]["metrics"] for number in steps),
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    prompts = (
        AnswerRow(
            prompt_turns(row["prompt"], row["messages"]),
            row["reference"],
            row["base"],
            row["tuned"],
        )
        for row in current["samples"]
    )
    return Answers(
        steps,
        shown,
        {name: tuple(column.get(name) for column in columns) for name in names},
        tuple(prompts),
    )


@dataclass(frozen=True)
class ServedLoss:
    """Validation loss of the tuned model in one way of serving it."""

    way: str
    as_trained: float
    """Over the same samples, in nats."""
    served: float
    is_beyond: bool
    """Whether the loss increased by more than rounding explains."""


_BASE_AS_TRAINED = "adapter_on_base_as_trained"
"""In an export's report."""
_WAYS = {ADAPTER_ON_BF16: "the adapter on the base in bf16", MERGED: "merged, in bf16"}


def served_losses(
    evaluations: Sequence[Mapping[str, Any]], exports: Mapping[str, Mapping[str, Any]]
) -> list[ServedLoss]:
    """Return what each way of serving costs: those that the job has compared after training, or
    the adapter on the base in bf16 as the first export has measured it; and the merged forms that
    were made.

    `evaluations`, `exports`: as the API lists them, exports by their form.
    """
    compared = next((one["served"]["loss"] for one in evaluations if one["served"]), None)
    reports = {form: (export["report"] or {}) for form, export in exports.items()}
    measured = {
        form: report["validation_loss"]
        for form, report in reports.items()
        if report.get("validation_loss")
    }
    if compared is not None:
        before = compared[AS_TRAINED]
        losses = [
            _served(title, before, compared[way]) for way, title in _WAYS.items() if way in compared
        ]
    else:
        losses = [
            _served(_WAYS[ADAPTER_ON_BF16], own[_BASE_AS_TRAINED], own[ADAPTER_ON_BF16])
            for own in list(measured.values())[:1]
        ]
    return losses + [
        _served(form, own[_BASE_AS_TRAINED], own[MERGED]) for form, own in measured.items()
    ]


def _served(way: str, before: float, served: float) -> ServedLoss:
    return ServedLoss(way, before, served, served > before + BOUND)


@dataclass(frozen=True)
class GradedOverTime:
    """Answers of reinforcement learning with their rewards."""

    shown: Mapping[str, Any] | None
    """A step with answers to train on, as the API shows it."""
    steps: tuple[int, ...]
    """Steps that may be shown, ascending."""
    columns: tuple[int, ...]
    """Numbers of steps after which the validation file was answered, ascending."""
    means: tuple[float | None, ...]
    """Mean reward of each column."""
    rows: tuple[tuple[str, tuple[Mapping[str, Any] | None, ...]], ...]
    """Each validation prompt, and its first answer in each column."""


def graded_over_time(
    rollouts: Sequence[Mapping[str, Any]], step: int | None = None, most: int = 4
) -> GradedOverTime | None:
    """Return what the page shows of a job's rollouts, the newest first.

    None: there are none. `step`: the one to show; the newest one if it is None or not among them.
    `most`: columns.
    """
    if not rollouts:
        return None
    trained = {own["step"]: own for own in rollouts if own["prompts"]}
    shown = trained.get(step or 0) or next(iter(trained.values()), None)
    evaluated = [own for own in rollouts if own["validation"]][:most][::-1]
    by_prompt: dict[int, tuple[str, list[Mapping[str, Any] | None]]] = {}
    for place, own in enumerate(evaluated):
        for prompt in own["validation"]:
            _, cells = by_prompt.setdefault(
                prompt["prompt"], (prompt["text"], [None] * len(evaluated))
            )
            cells[place] = prompt["answers"][0] if prompt["answers"] else None
    rows = tuple((text, tuple(cells)) for text, cells in by_prompt.values())
    columns = tuple(own["step"] - 1 for own in evaluated)
    means = tuple(own["valid_mean_reward"] for own in evaluated)
    return GradedOverTime(shown, tuple(sorted(trained)), columns, means, rows)


def differing_options(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the options in which jobs differ: dotted name, and each job's value in the order of
    the jobs.
    """
    names: list[str] = [*_TOP_LEVEL]
    for section in SECTIONS:
        names += list(
            dict.fromkeys(f"{section}.{name}" for job in jobs for name in job[section] or ())
        )
    rows = [(name, [_option(job, name) for job in jobs]) for name in names]
    methods = [method_options(job["method"]) for job in jobs]
    rows += [
        (name, [own.get(name) for own in methods])
        for name in dict.fromkeys(name for own in methods for name in own)
    ]
    differing = [(name, own) for name, own in rows if any(value != own[0] for value in own)]
    # Drawn for each job, where it is not given.
    return sorted(differing, key=lambda row: row[0] == "seed")


@dataclass(frozen=True)
class Result:
    """What a job has reached."""

    value: float
    measure: str
    """`loss` (less is better) or `reward` (more is better)."""


def best_validated(series: Mapping[str, Any]) -> Result | None:
    """Return the lowest validation loss, of a job with rewards the highest mean reward on the
    validation file; None without either.
    """
    if rewards := _values(series, "valid_mean_reward"):
        return Result(max(rewards), "reward")
    losses = _values(series, "valid_loss")
    return Result(min(losses), "loss") if losses else None


def results_by_one_measure(
    series_by_job: Mapping[str, Mapping[str, Any]], *, rewarded: bool
) -> tuple[str, dict[str, float | None]]:
    """Return the name of the measure, and each job's value by it; None: it was not measured.

    The best on the validation file where each job that has numbers was validated; else the last
    value of training, for all of them.
    """
    noun, valid, train, best = ("loss", "valid_loss", "train_loss", min)
    if rewarded:
        noun, valid, train, best = ("reward", "valid_mean_reward", "train_mean_reward", max)
    measured = [own for own in series_by_job.values() if _values(own, valid) or _values(own, train)]
    if measured and all(_values(own, valid) for own in measured):
        by_job = {
            job: best(_values(own, valid), default=None) for job, own in series_by_job.items()
        }
        return f"{'Highest' if rewarded else 'Lowest'} validation {noun}", by_job
    last = {job: next(reversed(_values(own, train)), None) for job, own in series_by_job.items()}
    return f"Last training {noun}", last


def _values(series: Mapping[str, Any], name: str) -> list[float]:
    return series.get(name, {}).get("values") or []


def _option(job: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return (job[section] or {}).get(key) if key else job[section]


@dataclass
class Use:
    """Sums of amounts."""

    tokens: int = 0
    gpu_seconds: float = 0.0
    bytes: int = 0
    jobs: int = 0
    cost: float = 0.0
    """In the service's currency."""
    joules: float = 0.0
    grams: float = 0.0
    """Of CO2."""

    def add(self, result: Mapping[str, Any]) -> None:
        for name, theirs in _RESULT_FIELDS.items():
            setattr(self, name, getattr(self, name) + (result[theirs] or 0))
        self.cost += result["cost"]["value"] if result["cost"] else 0.0


@dataclass
class UsageSummary:
    """Usage over some days."""

    total: Use = field(default_factory=Use)
    days: dict[int, Use] = field(default_factory=dict)
    """Begin of a day, in seconds since the epoch → its usage; days without usage too."""
    projects: dict[str, Use] = field(default_factory=dict)
    keys: dict[tuple[str, str], Use] = field(default_factory=dict)
    """Project and key → usage; the key is empty where it is not known."""
    currency: str | None = None
    """That of all costs; None: nothing had a price."""

    @property
    def amounts(self) -> dict[str, str]:
        """The amounts that there are: field of `Use` → its label."""
        left_out = {"cost"} if self.currency is None else set()
        left_out |= set() if self.total.joules else {"joules"}
        return {name: label for name, label in AMOUNTS.items() if name not in left_out}


def usage_summary(buckets: Sequence[Mapping[str, Any]]) -> UsageSummary:
    """Sum the API's buckets, which are grouped by project and key.

    The heaviest projects and keys come first.
    """
    summary = UsageSummary()
    for bucket in buckets:
        day = summary.days.setdefault(bucket["start_time"], Use())
        for result in bucket["results"]:
            project = result["project_id"] or ""
            key = result["api_key_id"] or ""
            if result["cost"]:
                summary.currency = result["cost"]["currency"]
            of_project = summary.projects.setdefault(project, Use())
            for use in (
                summary.total,
                day,
                of_project,
                summary.keys.setdefault((project, key), Use()),
            ):
                use.add(result)
    summary.projects = dict(sorted(summary.projects.items(), key=lambda item: -item[1].gpu_seconds))
    summary.keys = dict(sorted(summary.keys.items(), key=lambda item: -item[1].gpu_seconds))
    return summary


def usage_bars(days: Mapping[int, Use], amount: str) -> list[dict[str, Any]]:
    """Return each day's amount, and its share of the largest day's."""
    values = {day: getattr(use, amount) for day, use in days.items()}
    most = max(values.values(), default=0)
    return [
        {"day": day, "value": value, "share": value / most if most else 0.0}
        for day, value in values.items()
    ]
