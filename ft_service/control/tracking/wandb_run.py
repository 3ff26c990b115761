"""One run of Weights & Biases, by its SDK. Only for the process of `__main__`: the SDK starts a process of its own.

W&B's server is slow, away or of another opinion now and then: whatever the SDK then raises leaves here as a RunError.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import wandb

from ft_service.control.tracking.points import RunDescription
from ft_service.control.tracking.sender import RunError

INIT_SECONDS = 20.0
FINISH_SECONDS = 20.0
CONFIRM_WAITS = (0.0, 1.0, 3.0, 6.0)
"""Seconds before each look at whether W&B has the last step: its numbers are there a little after they have arrived."""
RESTING = 75
"""Exit code of a run that is to go on later."""
_SAID = 300


@dataclass(frozen=True)
class Account:
    base_url: str
    api_key: str = field(repr=False)
    folder: Path
    """Where the SDK keeps what it has not sent yet."""
    transmit_seconds: int
    """For how long points wait for company."""


class WandbRun:
    """An open run. `url`: where people see it; `next_step`: the first step that it does not have."""

    def __init__(self, account: Account, run: RunDescription) -> None:
        """Begin the run, or go on with it. Raises RunError."""
        self._account = account
        self._last_step = -1
        with self._errors(clean=True):
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
        """Take a step's numbers on their way; steps must rise. Raises RunError if the SDK's own process is gone."""
        with self._errors():
            self._run.log(dict(numbers), step=step, commit=True)
        self._last_step = step

    def confirm(self, step: int) -> None:
        """Raises RunError unless W&B has the step. When W&B takes nothing more, the SDK goes on and raises nothing."""
        with self._errors():
            if not self._arrived(step, waits=(0.0,)):
                raise RunError(f"step {step} has not arrived")

    def rest(self) -> None:
        """Leave the run, to go on with it later: W&B shows it as preempted. Raises RunError."""
        with self._errors():
            self._run.mark_preempting()
        self.finish(RESTING)

    def finish(self, exit_code: int) -> None:
        """Bring the rest there and end the run. Raises RunError unless W&B has the last step then."""
        with self._errors():
            self._run.finish(exit_code=exit_code)
            if not self._arrived(self._last_step, CONFIRM_WAITS):
                raise RunError(f"step {self._last_step} has not arrived")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _arrived(self, step: int, waits: Sequence[float]) -> bool:
        if step < 0:
            return True
        api = wandb.Api(overrides={"base_url": self._account.base_url}, api_key=self._account.api_key, timeout=10)
        there = api.run(self._run.path)
        for wait in waits:
            time.sleep(wait)
            if there.lastHistoryStep >= step:
                return True
        return False

    @contextlib.contextmanager
    def _errors(self, *, clean: bool = False) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            said = said.replace(self._account.api_key, "…")[:_SAID]
            raise RunError(said, clean=clean and isinstance(error, wandb.Error)) from None


def _settings(account: Account) -> wandb.Settings:
    """Nothing of this host is sent: no system metrics, output, code, environment or file. Whoever stops the run at W&B stops
    nothing here."""
    return wandb.Settings(
        base_url=account.base_url,
        api_key=account.api_key,
        root_dir=str(account.folder),
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
