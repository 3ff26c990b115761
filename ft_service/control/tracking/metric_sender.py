"""Sends the stored metrics of jobs to their trackers: each step once and in order, even if
processes end in between.

    MetricsSender ──claims──▶ RunSender, a thread for each run ──requests──▶ a process for each run
    (__main__.py)

Of several servers on one database, the one that has claimed a run sends it until its lease ends. A
tracker that does not answer costs its job nothing: the process ends after a while, an event tells
the user once, and sending is tried again later.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ft_service.control.tracking.integration_check import NAMES, SETTING, configured, installed
from ft_service.control.tracking.metric_points import (
    RunError,
    describe,
    exit_code,
    next_task,
    point,
    retry_after,
    without_users,
)
from ft_service.errors import NotFoundError, UnavailableError
from ft_service.host.environment import NETWORK
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program
from ft_service.host.loops import every
from ft_service.jobs.states import Job
from ft_service.logs import about
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.records import JobIntegration, NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "ft_service.control.tracking")
LEASE_SECONDS = 120.0
POLL_SECONDS = 2.0
"""Interval of the search for jobs with metrics to send."""
TURN_SECONDS = 1.0
"""Interval at which a job's new metrics are read."""
TRANSMIT_SECONDS = 5
"""How long metrics are collected before they are sent together."""
REQUEST_SECONDS = 120.0
"""Limit of one request to the process, its first imports included."""
CHECK_SECONDS = 300.0
"""Interval of the check that sent metrics have arrived."""
GRACE_SECONDS = 5.0
"""Limit of the time that a process takes to end after its last request."""
STEPS_AT_ONCE = 500
AT_ONCE = 64
"""Limit of runs sent at the same time, each by a process; further ones wait."""


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Send metrics until `stop` is set. Returns at once if no tracker is configured."""
    for kind in configured(settings):
        if not installed(kind):
            log.warning(
                "the package for %s is missing: pip install 'ft-service[%s]'", NAMES[kind], kind
            )
    if not any(installed(kind) for kind in configured(settings)):
        return
    sender = MetricsSender(settings, store)
    every(POLL_SECONDS, sender.look, stop, "sending metrics")
    sender.stop()


class MetricsSender:
    """Everything that this server has claimed. For one thread."""

    def __init__(self, settings: Settings, store: Store, command: Sequence[str] = COMMAND) -> None:
        """`command`: the program that sends one run."""
        self._settings = settings
        self._store = store
        self._command = command
        self._owner = uuid.uuid4().hex
        self._pool = ThreadPoolExecutor(AT_ONCE, "tracking")
        self._running: dict[tuple[str, int], tuple[RunSender, Future[None]]] = {}
        self._folder = settings.home / "wandb" / socket.gethostname()
        shutil.rmtree(self._folder, ignore_errors=True)  # what a server that was killed has left

    @property
    def pids(self) -> list[int]:
        """Ids of the sending processes."""
        return [
            process.pid
            for sender, _ in self._running.values()
            if (process := sender.process) is not None
        ]

    def look(self) -> None:
        """Start senders for claimed runs.

        Raises UnavailableError if the database does not answer.
        """
        now = time.monotonic()
        self._running = {
            key: running for key, running in self._running.items() if not running[0].over
        }
        for sender, _ in self._running.values():
            if now - sender.claimed_at >= LEASE_SECONDS:
                log.warning("a lease has run out: another server may send now")
                sender.stop()
        for integration in self._store.integrations.claim_integrations(
            self._owner, lease_seconds=LEASE_SECONDS
        ):
            key = (integration.job_id, integration.number)
            if key not in self._running:
                # With a folder of its own: the one before, of a job that was paused, may still be
                # removing its.
                program = self._program(
                    self._folder
                    / f"{integration.job_id}-{integration.number}-{uuid.uuid4().hex[:8]}"
                )
                sender = RunSender(self._settings, self._store, self._owner, program, integration)
                self._running[key] = sender, self._pool.submit(sender.run)
            self._running[key][0].claimed_at = now

    def stop(self) -> None:
        """End all processes, and let other servers continue."""
        for sender, _ in self._running.values():
            sender.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([future for _, future in self._running.values()], 2 * GRACE_SECONDS)
        for sender, future in self._running.values():
            if not future.done() and sender.process is not None:
                sender.process.kill()
        self._pool.shutdown()
        with contextlib.suppress(UnavailableError):  # then the leases end by themselves
            self._store.integrations.release_integrations(self._owner)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _program(self, folder: Path) -> Program:
        """The program that sends one run.

        W&B's SDK reads nothing from the server's environment, writes only to `folder`, and reports
        no usage.
        """
        folders = {f"WANDB_{kind}_DIR": str(folder) for kind in ("CACHE", "CONFIG", "DATA")}
        quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        return Program(
            command=self._command,
            needs=NETWORK,
            variables={**folders, **quiet},
            folder=self._settings.home,
        )


class RunSender:
    """One run of one job that this server has claimed. `run` belongs to a thread, `stop` to any."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        owner: str,
        program: Program,
        integration: JobIntegration,
    ) -> None:
        self._settings = settings
        self._store = store
        self._owner = owner
        self._program = program
        self._integration = integration
        self._folder = Path(program.variables["WANDB_DATA_DIR"])
        self._stopped = threading.Event()
        self._job: Job | None = None
        self.process: HelperProcess | None = None
        self.claimed_at = time.monotonic()
        self.over = False
        """Whether it has released the run."""

    def stop(self) -> None:
        """Leave the run as it is."""
        self._stopped.set()
        if (process := self.process) is not None:
            process.close_input()

    def run(self) -> None:
        with about(job_id=self._integration.job_id):
            try:
                self._send_or_report()
            except (UnavailableError, NotFoundError) as error:
                log.warning("%s", error.message)
            except Exception:
                log.exception("sending metrics has failed")
            finally:
                self.over = True
                if self.process is not None:
                    self.process.end(GRACE_SECONDS)
                shutil.rmtree(self._folder, ignore_errors=True)

    def _send_or_report(self) -> None:
        try:
            self._send()
        except (RunError, HelperFailed) as error:
            if not self._stopped.is_set():
                self._fail(str(error), is_lost=_was_killed(error))

    def _send(self) -> None:
        """Send until the job is paused or over. Raises RunError, HelperFailed, UnavailableError."""
        job, task = self._read_job()
        if task == "rest" or job.attempt == 0:  # a job that never began has no metrics
            self._release(retry_seconds=0.0 if task == "rest" else None)
            return
        next_step = self._open(job)
        position = 0
        checked_at = time.monotonic()
        sent_then = -1
        while not self._stopped.is_set():
            job, task = self._read_job()  # before its steps, so that none comes after its end
            position, next_step = self._feed(position, next_step)
            if task != "send":
                self._ask(
                    {"do": "rest"}
                    if task == "rest"
                    else {"do": "finish", "exit_code": exit_code(job)}
                )
                self._release(retry_seconds=0.0 if task == "rest" else None)
                return
            if time.monotonic() - checked_at >= CHECK_SECONDS:
                if sent_then >= 0:
                    self._ask({"do": "confirm", "step": sent_then})
                checked_at = time.monotonic()
                sent_then = next_step - 1
            self._stopped.wait(TURN_SECONDS)
            self._require_process()

    def _read_job(self) -> tuple[Job, str]:
        self._job = self._store.jobs.get_job(self._integration.project_id, self._integration.job_id)
        return self._job, next_task(self._job)

    def _open(self, job: Job) -> int:
        """Start the process and open the run.

        Returns the first step that the tracker does not have.
        """
        integration = self._integration
        run = describe(integration, job)
        account = account_of(run.kind, self._settings, self._folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.process = HelperProcess(self._program)
        opened = self._ask({"do": "open", "account": account, "run": asdict(run)})
        url = without_users(opened["url"])
        events = (
            []
            if url == integration.url
            else [NewEvent(level="info", message=f"{_label(integration)} run: {url}")]
        )
        if not self._store.integrations.begin_integration(integration, self._owner, url, events):
            self.stop()
        self._integration = replace(integration, url=url)
        log.info("sending to %s from step %d on", url, opened["next_step"])
        return opened["next_step"]

    def _feed(self, position: int, next_step: int) -> tuple[int, int]:
        """Send the metrics stored after `position`, from `next_step` on, since an attempt repeats
        the steps after its checkpoint.
        """
        while not self._stopped.is_set():
            found = self._store.integrations.list_metrics(
                self._integration.job_id, after=position, limit=STEPS_AT_ONCE
            )
            points = []
            for place, created_at, metrics in found:
                if metrics.step >= next_step:
                    points.append((metrics.step, point(metrics, created_at)))
                    next_step = metrics.step + 1
                position = place
            if points:
                self._ask({"do": "log", "points": points})
            if len(found) < STEPS_AT_ONCE:
                break
        return position, next_step

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        if self._stopped.is_set():
            raise RunError("it was stopped")
        reply = self.process.ask(request, REQUEST_SECONDS)
        if "failed" in reply:
            raise RunError(reply["failed"])
        return reply

    def _require_process(self) -> None:
        """Raise HelperFailed if the process has ended by itself."""
        assert self.process is not None
        if self.process.exit_code is not None:
            self.process.receive(GRACE_SECONDS)

    def _release(self, *, retry_seconds: float | None) -> None:
        self.over = True
        self._store.integrations.end_integration(
            self._integration, self._owner, retry_seconds=retry_seconds
        )

    def _fail(self, why: str, *, is_lost: bool) -> None:
        """`is_lost`: the host is at fault and not the tracker, which is not given up for that."""
        integration = self._integration
        job = self._job
        for secret in _secrets(self._settings):
            why = why.replace(secret, "…")
        why = without_users(why)
        over_since = job.finished_at if job is not None and not is_lost else None
        retry = retry_after(
            integration.tries + 1, self._store.now() - over_since if over_since else 0.0
        )
        log.warning("%s, try %d: %s", _label(integration), integration.tries + 1, why)
        self.over = True
        events = _failure_events(integration, why, retry, is_lost=is_lost)
        self._store.integrations.end_integration(
            integration, self._owner, events, error=why, retry_seconds=retry
        )


def account_of(kind: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Address and secrets of a tracker, which the process gets on stdin, not as arguments or
    environment. `folder`: for unsent data of W&B's SDK. Raises RunError if the tracker is no longer
    configured.
    """
    if kind not in configured(settings):
        raise RunError(f"the server has no {SETTING[kind]} any more")
    key = settings.wandb_api_key
    token = settings.mlflow_token
    writing = settings.trackio_token
    if kind == "wandb":
        own: dict[str, Any] = {
            "base_url": settings.wandb_base_url,
            "api_key": key and key.get_secret_value(),
            "folder": str(folder),
        }
    elif kind == "mlflow":
        own = {
            "tracking_uri": settings.mlflow_tracking_uri,
            "token": token and token.get_secret_value(),
        }
    else:
        own = {"url": settings.trackio_url, "token": writing and writing.get_secret_value()}
    return {**own, "transmit_seconds": TRANSMIT_SECONDS}


def _was_killed(error: Exception) -> bool:
    """Whether the host ended the process. One that took too long may have waited for the
    tracker.
    """
    return isinstance(error, HelperFailed) and error.is_lost and error.failure is not Failure.TIME


def _secrets(settings: Settings) -> list[str]:
    given = (settings.wandb_api_key, settings.mlflow_token, settings.trackio_token)
    return [secret.get_secret_value() for secret in given if secret is not None]


def _failure_events(
    integration: JobIntegration, why: str, retry: float | None, *, is_lost: bool
) -> list[NewEvent]:
    """Events about a failure: one the first time, one when sending is given up."""
    label = _label(integration)
    if retry is None:
        message = f"{label}: not all metrics are there, and it is not tried any more: {why}"
    elif integration.error is None:
        does = "gets the job's metrics later" if is_lost else "does not take the job's metrics now"
        message = f"{label} {does}: {why}. It is tried again; training continues without it."
    else:
        return []
    return [NewEvent(level="warn", message=message)]


def _label(integration: JobIntegration) -> str:
    """Name of an integration's tracker in events."""
    return {"mlflow": "MLflow", "trackio": "trackio"}.get(
        str(integration.settings.get("type")), "W&B"
    )
