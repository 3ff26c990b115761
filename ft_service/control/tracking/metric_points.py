"""Data of a job that trackers receive, and the times at which failed requests are repeated.

Pure.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.rundir.events import Metrics
from ft_service.shared_work.losses import pause_seconds
from ft_service.spec import (
    DistillationOptions,
    Integration,
    JobSpec,
    LossOptions,
    Mlflow,
    Trackio,
    Wandb,
)
from ft_service.store.records import JobIntegration

FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 900.0
GIVE_UP_SECONDS = 72 * 3600.0
"""Seconds after the job's end during which failed requests are repeated."""
ERROR_LENGTH = 300
TAG_LENGTH = 64
"""Limit of W&B, in characters."""

Task = Literal["send", "rest", "end"]
"""send: send what the job reports; rest: wait until the job is resumed; end: send the remaining
steps and the outcome.
"""

_USER = re.compile(r"(?<=://)[^/\s]*@")
_EXIT_CODE = {State.SUCCEEDED: 0, State.FAILED: 1, State.CANCELLED: 255}
"""Exit codes that W&B shows as finished, failed, and stopped by a user."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """A run to begin or continue at a tracker."""

    kind: Literal["wandb", "mlflow", "trackio"] = "wandb"
    id: str
    """Derived from the job alone, so that every process continues the same run."""
    project: str
    """Project, or experiment of MLflow."""
    entity: str | None
    name: str | None
    """This and the following fields are None for a run that was begun before, since a user may have
    changed them.
    """
    group: str | None
    """Id of the job's sweep; None too if it is not part of one."""
    tags: Sequence[str] | None
    config: dict[str, Any] | None


class Run(Protocol):
    """An open run at a tracker (WandbRun, MlflowRun, TrackioRun).

    Methods raise RunError if the tracker fails.
    """

    url: str
    next_step: int
    """The first step that the tracker does not have."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def confirm(self, step: int) -> None: ...
    def rest(self) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class RunError(Exception):
    """A request to the tracker failed; the message says why, without the key."""


@contextlib.contextmanager
def run_errors(secret: str | None) -> Iterator[None]:
    """Raise errors of a tracker's package as RunError, without the secret, and without users of
    addresses, in their message.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        message = without_users(" ".join(str(error).split()) or type(error).__name__)
        raise RunError(
            (message.replace(secret, "…") if secret else message)[:ERROR_LENGTH]
        ) from None


def without_users(text: str) -> str:
    """Return a text without user and password of the addresses in it: https://user:password@host/ →
    https://host/.
    """
    return _USER.sub("", text)


def next_task(job: Job) -> Task:
    """Return what to do now for a job that has begun."""
    if job.state in TERMINAL and job.phase is None:
        return "end"
    return "rest" if job.state is State.PAUSED else "send"


def exit_code(job: Job) -> int:
    """Return the exit code of an ended job, for W&B."""
    return _EXIT_CODE[job.state]


def describe(integration: JobIntegration, job: Job) -> RunDescription:
    """Return the run of a job's integration."""
    settings = Integration.model_validate(integration.settings)
    own = settings.sent
    assert own is not None, "only integrations that the server sends have a row"
    assert settings.type != "tensorboard"
    spec = job.spec
    begun = integration.url is not None
    return RunDescription(
        kind=settings.type,
        id=job.id if integration.number == 0 else f"{job.id}-{integration.number}",
        project=own.experiment if isinstance(own, Mlflow) else own.project,
        entity=own.entity if isinstance(own, Wandb) else None,
        name=None if begun else own.name or job.id,
        group=None if begun else job.sweep_id,
        tags=None if begun else _tags([] if isinstance(own, Trackio) else own.tags, spec),
        config=None if begun else config(job, spec),
    )


def config(job: Job, spec: JobSpec) -> dict[str, Any]:
    """Return the resolved options, without paths of the service's hosts."""
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
        **({loss.type: _without_paths(loss)} if (loss := spec.loss) else {}),
        # A grader may have the answers that are right, and both have addresses.
        **(
            {
                "reinforcement" if spec.sampled_for == "rewards" else "sampling": rl.model_dump(
                    mode="json", exclude={"grader", "environment"}
                )
            }
            if (rl := spec.reinforcement)
            else {}
        ),
    }


def _without_paths(loss: LossOptions) -> dict[str, Any]:
    options = loss.model_dump(mode="json", exclude={"type", "teacher"})
    teacher = loss.teacher if isinstance(loss, DistillationOptions) else None
    return options if teacher is None else {**options, "teacher": teacher.name}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return options as text by dotted name.

    What a user's patterns name (precision.overrides) is one option, as JSON.
    """
    options: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and all(key.isidentifier() for key in value):
            options |= flat(value, f"{prefix}{name}.")
        else:
            options[f"{prefix}{name}"] = (
                json.dumps(value) if isinstance(value, Mapping) else str(value)
            )
    return options


def tag_name(tag: str) -> str:
    """Return a tag as a name that MLflow takes, with _ for other characters; names of its own and
    of ours are changed too.
    """
    name = re.sub(r"[^\w\-. :/]", "_", tag)
    is_plain = posixpath.normpath(name) == name and not name.startswith(
        ("/", ".", "mlflow.", "ft_service.")
    )
    return name if is_plain else re.sub(r"[./]", "_", name)


def point(metrics: Metrics, time: float) -> dict[str, float]:
    """Return the metrics of a step under the names of the job's events, with its time as
    `_timestamp`, as W&B calls it.
    """
    own = {
        name: value for name, value in metrics.flat().items() if name not in ("step", "total_steps")
    }
    return {**own, "_timestamp": time}


def retry_after(tries: int, seconds_over: float) -> float | None:
    """Return the seconds until the next try after `tries` failed ones; None: give up.

    `seconds_over`: since the job's end.
    """
    delay = pause_seconds(tries, first=FIRST_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
    return delay if seconds_over + delay <= GIVE_UP_SECONDS else None


def _tags(given: list[str], spec: JobSpec) -> tuple[str, ...]:
    ours = (f"ft-service/{word}" for word in ("finetune", spec.model.name, spec.job_id))
    return tuple(dict.fromkeys([*given, *(tag for tag in ours if len(tag) <= TAG_LENGTH)]))
