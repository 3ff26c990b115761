"""What is sent of a job, under which names, and when what went wrong is tried again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.rundir.events import Metrics
from ft_service.spec import Integration, JobSpec, Mlflow, Trackio, Wandb
from ft_service.store.records import JobIntegration

FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 900.0
GIVE_UP_SECONDS = 72 * 3600.0
"""After the job's end."""
TAG_LENGTH = 64
"""The longest that W&B takes."""

Wish = Literal["send", "rest", "end"]
"""send: what the job reports; rest: nothing, until it is resumed; end: what is left, and how it ended."""

_EXIT_CODE = {State.SUCCEEDED: 0, State.FAILED: 1, State.CANCELLED: 255}
"""By which W&B shows a run as finished, failed, or stopped by somebody."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """A run elsewhere."""

    kind: Literal["wandb", "mlflow", "trackio"] = "wandb"
    id: str
    """Decided by the job alone, so that whoever goes on goes on in the same run."""
    project: str
    """Of MLflow the experiment."""
    entity: str | None
    name: str | None
    """This and the rest: None for a run that was begun before, since somebody may have changed it there."""
    group: str | None
    """Of the jobs of one sweep; None: it is of none."""
    tags: tuple[str, ...] | None
    config: dict[str, Any] | None


def wish(job: Job) -> Wish:
    """What is to be done about a job that has begun."""
    if job.state in TERMINAL and job.phase is None:
        return "end"
    return "rest" if job.state is State.PAUSED else "send"


def exit_code(job: Job) -> int:
    """Exit code for W&B of a job that is over."""
    return _EXIT_CODE[job.state]


def describe(integration: JobIntegration, job: Job) -> RunDescription:
    asked = Integration.model_validate(integration.settings)
    own = asked.sent
    assert own is not None, "only what is sent has a row"
    assert asked.type != "tensorboard"
    spec = job.spec
    begun = integration.url is not None
    return RunDescription(
        kind=asked.type,
        id=job.id if integration.number == 0 else f"{job.id}-{integration.number}",
        project=own.experiment if isinstance(own, Mlflow) else own.project,
        entity=own.entity if isinstance(own, Wandb) else None,
        name=None if begun else own.name or job.id,
        group=None if begun else job.sweep_id,
        tags=None if begun else _tags([] if isinstance(own, Trackio) else own.tags, spec),
        config=None if begun else config(job, spec),
    )


def config(job: Job, spec: JobSpec) -> dict[str, Any]:
    """The resolved options, without paths of the service's hosts."""
    return {
        "job_id": job.id,
        "model": spec.parent.name if spec.parent else spec.model.name,
        "base_model": spec.model.name,
        "fine_tuned_model": spec.tuned_name,
        "training_file": job.request["training_file"],
        "validation_file": job.request.get("validation_file"),
        "seed": spec.seed,
        **{
            name: getattr(spec, name).model_dump(mode="json")
            for name in ("lora", "precision", "training", "distributed", "checkpoint")
        },
        **({"dpo": spec.dpo.model_dump(mode="json")} if spec.dpo else {}),
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": str(value)}
    return found


def point(metrics: Metrics, time: float) -> dict[str, float]:
    """What a step measured, by the names of the job's events. `_timestamp`: when, as W&B calls it."""
    own = {name: value for name, value in metrics.flat().items() if name not in ("step", "total_steps")}
    return {**own, "_timestamp": time}


def retry_after(tries: int, seconds_over: float) -> float | None:
    """Seconds until the next try after `tries` that went wrong; None: give up. `seconds_over`: since the job's end."""
    delay = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 20), MAX_RETRY_SECONDS)
    return delay if seconds_over + delay <= GIVE_UP_SECONDS else None


def _tags(given: list[str], spec: JobSpec) -> tuple[str, ...]:
    ours = (f"ft-service/{word}" for word in ("finetune", spec.model.name, spec.job_id))
    return tuple(dict.fromkeys([*given, *(tag for tag in ours if len(tag) <= TAG_LENGTH)]))
