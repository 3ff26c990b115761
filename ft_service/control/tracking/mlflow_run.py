"""A run of MLflow, by its own client.

Only for the process of `__main__`: the client reads the environment and may block.

A tag of the run, which is sent with the metrics, names the last step that the tracking server has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from ft_service.control.tracking.metric_points import (
    RunDescription,
    RunError,
    flat,
    run_errors,
    tag_name,
)

AT_ONCE = 900
"""Metrics per request; a server takes at most 1,000."""
PARAMS_AT_ONCE = 100
LONGEST_PARAM = 500
"""Limit of a parameter in characters, of servers of earlier versions."""
OURS = "ft_service.run"
STEP = "ft_service.step"
SWEEP = "ft_service.sweep"
_STATUS = {0: "FINISHED", 1: "FAILED", 255: "KILLED"}


@dataclass(frozen=True)
class MlflowAccount:
    tracking_uri: str
    token: str | None = field(repr=False)
    transmit_seconds: float
    """How long metrics are collected before they are sent together."""

    def enter(self) -> None:
        """Set the environment variables that the client reads."""
        if self.token is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = self.token
        os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = (
            "true"  # else the client refuses a folder of this host
        )


class MlflowRun:
    """An open run; see `Run`."""

    def __init__(self, account: MlflowAccount, run: RunDescription) -> None:
        """Begin or continue the run. Raises RunError."""
        self._account = account
        self._waiting: list[tuple[int, list[Metric]]] = []
        self._sent_at = float("-inf")
        with run_errors(self._account.token):
            self._client = MlflowClient(tracking_uri=account.tracking_uri)
            known = self._client.get_experiment_by_name(run.project)
            experiment = (
                known.experiment_id if known else self._client.create_experiment(run.project)
            )
            runs = self._client.search_runs(
                [experiment], f"tags.`{OURS}` = '{run.id}'", max_results=1
            )
            self._run = runs[0] if runs else self._begun(experiment, run)
            self._id = self._run.info.run_id
            self._add_params(run)
            if runs:
                self._client.update_run(self._id, status="RUNNING")
        self.next_step = int(self._run.data.tags.get(STEP, -1)) + 1
        there = account.tracking_uri.rstrip("/")
        self.url = f"{there}/#/experiments/{experiment}/runs/{self._id}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a step's metrics; steps must rise. Raises RunError."""
        at = int(1000 * numbers.get("_timestamp", time.time()))
        metrics = [
            Metric(name, float(value), at, step)
            for name, value in numbers.items()
            if name != "_timestamp"
        ]
        self._waiting.append((step, metrics))
        if time.monotonic() - self._sent_at >= self._account.transmit_seconds:
            self._send()

    def confirm(self, step: int) -> None:
        """Raises RunError unless MLflow has the step."""
        self._send()
        with run_errors(self._account.token):
            if int(self._client.get_run(self._id).data.tags.get(STEP, -1)) < step:
                raise RunError(f"step {step} has not arrived")

    def rest(self) -> None:
        """Leave the run, to continue it later. Raises RunError."""
        self._send()
        with run_errors(self._account.token):
            self._client.update_run(self._id, status="SCHEDULED")

    def finish(self, exit_code: int) -> None:
        """Send the rest and end the run. Raises RunError."""
        self._send()
        with run_errors(self._account.token):
            self._client.set_terminated(self._id, _STATUS.get(exit_code, "FAILED"))

    def _begun(self, experiment: str, run: RunDescription) -> Any:
        given = dict.fromkeys(map(tag_name, run.tags or ()), "")
        tags = {**given, OURS: run.id, **({SWEEP: run.group} if run.group else {})}
        return self._client.create_run(experiment, run_name=run.name or run.id, tags=tags)

    def _add_params(self, run: RunDescription) -> None:
        """Add what the run does not have yet, as if a process had ended right after it began the
        run.
        """
        there = self._run.data.params
        params = [
            Param(name, text[:LONGEST_PARAM])
            for name, text in flat(run.config or {}).items()
            if name not in there
        ]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])

    def _send(self) -> None:
        """Send all queued steps; a step is never split between requests."""
        while self._waiting:
            count = 0
            numbers = list[Metric]()
            for _, metrics in self._waiting:
                if numbers and len(numbers) + len(metrics) > AT_ONCE:
                    break
                numbers += metrics
                count += 1
            with run_errors(self._account.token):
                self._client.log_batch(
                    self._id, numbers, tags=[RunTag(STEP, str(self._waiting[count - 1][0]))]
                )
            del self._waiting[:count]
        self._sent_at = time.monotonic()
