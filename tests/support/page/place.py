"""A service that a browser can look at: a server that can be stopped and started again, and jobs
that only seem to train.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from api.app import create_app
from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.jobs.states import Job, Running
from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.checkpoints import checkpoint_name, marker_key
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, ExitReason, Result
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey, Principal
from ft_service.store.sql import Store, migrate, open_store
from tests.support.describing import at_once
from tests.support.fake_launcher import FakeLauncher
from tests.support.page.seeded import new_settings
from tests.support.ports import free_port
from tests.support.rest.service import wait_until

PROJECT = "default"
TOTAL = 40
PLAYED = (sys.executable, str(Path(__file__).parents[1] / "programs/scripted_preview.py"))
"""In place of the preview's own process."""


@dataclass
class Place:
    """The service. Only its tests move what its attempts do."""

    home: Path
    preview_command: Sequence[str] = PLAYED
    moves: bool = True
    """False: jobs stay as they are."""
    more_settings: dict[str, Any] = field(default_factory=dict)
    settings: Settings = field(init=False)
    store: Store = field(init=False)
    key: str = field(init=False)
    holder: Principal = field(init=False)
    preview: Preview | None = field(init=False)
    launcher: FakeLauncher = field(default_factory=lambda: FakeLauncher(slots=8))
    port: int = field(default_factory=free_port)
    """One that is still free when it serves again."""

    def __post_init__(self) -> None:
        self.settings = new_settings(self.home, **self.more_settings)
        migrate(self.settings.resolved_database_url())
        self.store = open_store(self.settings.resolved_database_url())
        self.store.projects.ensure_project(PROJECT, "local")
        _, self.key = self.store.keys.create_key(
            NewKey(project_id=PROJECT, name="test", scope="admin")
        )
        holder = self.store.keys.authenticate(self.key)
        assert holder is not None
        self.holder = holder
        self._stop_moving = threading.Event()
        self.preview = Preview(self.settings, self.store, command=self.preview_command)
        self._threads = [
            threading.Thread(target=self._move),
            threading.Thread(target=self.preview.run, args=(self._stop_moving,)),
        ]
        for thread in self._threads:
            thread.start()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        app = create_app(self.settings, self.store, preview=self.preview, descriptions=at_once())
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        )
        self._serving = threading.Thread(target=self._server.run, args=([self._listener],))
        self._serving.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._serving.join()
        self._listener.close()

    def close(self) -> None:
        self.stop()
        self._stop_moving.set()
        for thread in self._threads:
            thread.join()
        self.store.close()

    def _move(self) -> None:
        check = lambda job, examiner, tell: Checked()  # noqa: E731
        reconciler = Reconciler(
            self.store,
            self.launcher,
            Places(self.home),
            ReconcilerOptions(check=check, idle_seconds=0.25),
        )
        if self.moves:
            reconciler.run(self._stop_moving)

    # What a job's workers would do

    def run_of(self, job: Job) -> RunDir:
        return RunDir(self.settings.runs_dir / job.id)

    def begun(self, job_id: str, attempt: int) -> Job:
        """The job, once the attempt was started."""
        wait_until(lambda: (job_id, attempt) in self.launcher.started)
        return self.store.jobs.get_job(PROJECT, job_id)

    def train(self, job: Job, attempt: int, steps: range) -> None:
        """Report steps, as a segment of events."""
        run = self.run_of(job)
        events = []
        for step in steps:
            numbers = Metrics(
                step=step,
                total_steps=TOTAL,
                train_loss=3.0 / step + 0.2,
                learning_rate=1e-4,
                grad_norm=1.0,
                tokens=100,
                trained_tokens=100 * step,
                step_seconds=0.5,
            )
            events.append(
                Event(
                    time=time.time(),
                    kind="metrics",
                    message=f"Step {step}/{TOTAL}",
                    metrics=numbers,
                )
            )
        write_segment(run, attempt, len(run.list(AttemptKeys(attempt).events)), events)
        self.launcher.set(job.id, attempt, Running(reported=True))

    def save(self, job: Job, attempt: int, step: int) -> None:
        """Leave a checkpoint."""
        run = self.run_of(job)
        name = checkpoint_name(step, attempt)
        run.write(
            marker_key(name), CheckpointMarker(step=step, attempt=attempt, world_size=1, files=[])
        )
        numbers = Metrics(step=step, total_steps=TOTAL, train_loss=1.0)
        event = Event(
            time=time.time(),
            kind="checkpoint",
            message=f"Checkpoint {name}",
            metrics=numbers,
            checkpoint=name,
        )
        write_segment(run, attempt, len(run.list(AttemptKeys(attempt).events)), [event])

    def rest(self, job: Job, attempt: int, step: int) -> None:
        """Stop at a checkpoint, as asked."""
        stopped = exit_of(
            ExitReason.STOPPED,
            f"Training has stopped at checkpoint {checkpoint_name(step, attempt)}.",
        )
        self.launcher.end(job.id, attempt, stopped, checkpoint_step=step)

    def succeed(self, job: Job, attempt: int) -> None:
        run = self.run_of(job)
        run.put("adapter/adapter_config.json", b"{}")
        run.put("metrics.csv", b"step,train_loss\n1,1.0\n")
        run.write(
            "result.json",
            Result(
                attempt=attempt, steps=TOTAL, trained_tokens=4000, train_loss=0.3, valid_loss=None
            ),
        )
        self.launcher.end(
            job.id,
            attempt,
            exit_of(ExitReason.SUCCEEDED, "Training has finished."),
            checkpoint_step=TOTAL,
        )
