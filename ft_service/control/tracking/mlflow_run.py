"""One run of MLflow, by its own client. Only for the process of `__main__`: the client reads its environment, and may wait.

What the tracking server has is said by a tag of the run, which goes there with the numbers: whoever opens the run again goes on
behind it. Whatever the client raises leaves here as a RunError.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from ft_service.control.tracking.points import RunDescription, flat
from ft_service.control.tracking.sender import RunError

AT_ONCE = 900
"""Numbers in a request; a server takes at most 1,000."""
PARAMS_AT_ONCE = 100
LONGEST_PARAM = 500
"""Characters: what servers of earlier versions take of a parameter."""
OURS, STEP, SWEEP = "ft_service.run", "ft_service.step", "ft_service.sweep"
_SAID = 300
_STATUS = {0: "FINISHED", 1: "FAILED", 255: "KILLED"}


@dataclass(frozen=True)
class MlflowAccount:
    tracking_uri: str
    token: str | None = field(repr=False)
    transmit_seconds: float
    """For how long numbers wait for company."""

    def enter(self) -> None:
        """Set what the client reads of this process's environment."""
        if self.token is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = self.token
        os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # else a folder of this host is refused, whose place databases take


class MlflowRun:
    """An open run. `url`: where people see it; `next_step`: the first step that it does not have."""

    def __init__(self, account: MlflowAccount, run: RunDescription) -> None:
        """Begin the run, or go on with it. Raises RunError."""
        self._account = account
        self._waiting: list[tuple[int, list[Metric]]] = []
        self._sent_at = float("-inf")
        with self._errors():
            self._client = MlflowClient(tracking_uri=account.tracking_uri)
            known = self._client.get_experiment_by_name(run.project)
            experiment = known.experiment_id if known else self._client.create_experiment(run.project)
            found = self._client.search_runs([experiment], f"tags.`{OURS}` = '{run.id}'", max_results=1)
            self._run = found[0] if found else self._begun(experiment, run)
            self._id = self._run.info.run_id
            if found:
                self._client.update_run(self._id, status="RUNNING")
        self.next_step = int(self._run.data.tags.get(STEP, -1)) + 1
        there = account.tracking_uri.rstrip("/")
        self.url = f"{there}/#/experiments/{experiment}/runs/{self._id}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take a step's numbers on their way; steps must rise. Raises RunError."""
        at = int(1000 * numbers.get("_timestamp", time.time()))
        metrics = [Metric(name, float(value), at, step) for name, value in numbers.items() if name != "_timestamp"]
        self._waiting.append((step, metrics))
        if time.monotonic() - self._sent_at >= self._account.transmit_seconds:
            self._send()

    def confirm(self, step: int) -> None:
        """Raises RunError unless MLflow has the step."""
        self._send()
        with self._errors():
            if int(self._client.get_run(self._id).data.tags.get(STEP, -1)) < step:
                raise RunError(f"step {step} has not arrived")

    def rest(self) -> None:
        """Leave the run, to go on with it later. Raises RunError."""
        self._send()
        with self._errors():
            self._client.update_run(self._id, status="SCHEDULED")

    def finish(self, exit_code: int) -> None:
        """Bring the rest there and end the run. Raises RunError."""
        self._send()
        with self._errors():
            self._client.set_terminated(self._id, _STATUS.get(exit_code, "FAILED"))

    def _begun(self, experiment: str, run: RunDescription) -> Any:
        tags = {OURS: run.id, **dict.fromkeys(run.tags or (), ""), **({SWEEP: run.group} if run.group else {})}
        begun = self._client.create_run(experiment, run_name=run.name or run.id, tags=tags)
        params = [Param(name, text[:LONGEST_PARAM]) for name, text in flat(run.config or {}).items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(begun.info.run_id, params=params[first : first + PARAMS_AT_ONCE])
        return begun

    def _send(self) -> None:
        """All that waits, whole steps at once."""
        while self._waiting:
            count, numbers = 0, list[Metric]()
            for _, metrics in self._waiting:
                if numbers and len(numbers) + len(metrics) > AT_ONCE:
                    break
                numbers += metrics
                count += 1
            with self._errors():
                self._client.log_batch(self._id, numbers, tags=[RunTag(STEP, str(self._waiting[count - 1][0]))])
            del self._waiting[:count]
        self._sent_at = time.monotonic()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            secret = self._account.token
            raise RunError((said.replace(secret, "…") if secret else said)[:_SAID], clean=True) from None
