"""A run of Weights & Biases, by its SDK.

Only for the process of `__main__`: the SDK starts a process of its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import wandb

from ft_service.control.tracking.metric_points import RunDescription, RunError, run_errors

INIT_SECONDS = 20.0
FINISH_SECONDS = 20.0
CONFIRM_WAITS = (0.0, 1.0, 3.0, 6.0)
"""Seconds before each check that W&B has the last step, which it shows a little after it has
arrived.
"""
RESTING = 75
"""Exit code of a run that will be continued."""


@dataclass(frozen=True)
class Account:
    base_url: str
    api_key: str = field(repr=False)
    folder: str
    """The SDK's folder for data that it has not sent yet and for what is temporary.

    Whoever starts the process removes it.
    """
    transmit_seconds: int
    """How long metrics are collected before they are sent together."""


class WandbRun:
    """An open run; see `Run`."""

    def __init__(self, account: Account, run: RunDescription) -> None:
        """Begin or continue the run. Raises RunError."""
        self._account = account
        self._last_step = -1
        with run_errors(self._account.api_key):
            self._run = wandb.init(
                project=run.project,
                entity=run.entity,
                id=run.id,
                resume="allow",
                name=run.name,
                group=run.group,
                tags=run.tags,
                config=run.config,
                settings=_settings(account),
            )
        self._folder = Path(self._run.dir).parent
        self.url = self._run.url or ""
        self.next_step = self._run.starting_step

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a step's metrics; steps must rise.

        Raises RunError if the SDK's own process is gone.
        """
        with run_errors(self._account.api_key):
            self._run.log(dict(numbers), step=step, commit=True)
        self._last_step = step

    def confirm(self, step: int) -> None:
        """Raise RunError unless W&B has the step.

        The SDK itself raises nothing when W&B stops taking metrics.
        """
        with run_errors(self._account.api_key):
            if not self._arrived(step, waits=(0.0,)):
                raise RunError(f"step {step} has not arrived")

    def rest(self) -> None:
        """Leave the run, to continue it later; W&B shows it as preempted. Raises RunError."""
        with run_errors(self._account.api_key):
            self._run.mark_preempting()
        self.finish(RESTING)

    def finish(self, exit_code: int) -> None:
        """Send the rest and end the run. Raises RunError unless W&B then has the last step."""
        with run_errors(self._account.api_key):
            self._run.finish(exit_code=exit_code)
            if not self._arrived(self._last_step, CONFIRM_WAITS):
                raise RunError(f"step {self._last_step} has not arrived")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _arrived(self, step: int, waits: Sequence[float]) -> bool:
        if step < 0:
            return True
        api = wandb.Api(
            overrides={"base_url": self._account.base_url},
            api_key=self._account.api_key,
            timeout=10,
        )
        there = api.run(self._run.path)
        for wait in waits:
            time.sleep(wait)
            if there.lastHistoryStep >= step:
                return True
        return False


def _settings(account: Account) -> wandb.Settings:
    """Settings that send nothing of this host (no system metrics, output, code, environment or
    file) and ignore a stop of the run at W&B.
    """
    return wandb.Settings(
        base_url=account.base_url,
        api_key=account.api_key,
        root_dir=account.folder,
        reinit="create_new",
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        stop_fn=lambda: None,
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        ignore_globs=("*",),
        program="ft-service",
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_file_stream_transmit_interval=account.transmit_seconds,
        x_save_requirements=False,
    )
