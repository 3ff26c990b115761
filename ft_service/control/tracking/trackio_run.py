"""A run of trackio, in a folder of this host or on a trackio server.

Only for the process of `__main__`: the package reads the environment when it is imported, and may
block.

Steps are sent with the calls below trackio's own `log`, which neither waits nor reports what has
not arrived. trackio identifies a run by its id, here the job's, and an entry by its own, so that an
entry sent twice is stored once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, cast
from urllib.parse import quote, unquote, urlsplit

from ft_service.control.tracking.metric_points import RunDescription, RunError, run_errors

AT_ONCE = 500
"""Steps per request."""
REQUEST_SECONDS = 15.0


@dataclass(frozen=True)
class TrackioAccount:
    url: str
    """http(s)://… of a trackio server, or file:///… of a folder."""
    token: str | None = field(repr=False)
    """The server's token for writing."""
    transmit_seconds: float
    """How long metrics are collected before they are sent together."""

    @property
    def folder(self) -> str | None:
        """The folder of this host that holds trackio's files; None: a server holds them."""
        parts = urlsplit(self.url)
        return unquote(parts.path) if parts.scheme == "file" else None

    def enter(self) -> None:
        """Set the environment variables that the package reads when it is imported."""
        if self.folder is not None:
            os.environ["TRACKIO_DIR"] = self.folder


@dataclass(frozen=True)
class SentRun:
    """The part of a run that a target has."""

    name: str | None
    last_step: int | None


class TrackioTarget(Protocol):
    """A folder or a server with runs."""

    def known(self, project: str, run_id: str) -> SentRun: ...
    def send(self, entries: list[dict[str, Any]]) -> None: ...


class TrackioRun:
    """An open run; see `Run`."""

    def __init__(
        self, account: TrackioAccount, run: RunDescription, place: TrackioTarget | None = None
    ) -> None:
        """Begin or continue the run. Raises RunError."""
        self._account = account
        self._waiting: list[dict[str, Any]] = []
        self._sent_at = float("-inf")
        self._id = run.id
        self._project = run.project
        with run_errors(self._account.token):
            self._place = place or (_Folder() if account.folder is not None else _Server(account))
            known = self._place.known(run.project, run.id)
        self._name = known.name or run.name or run.id
        self._config = None if known.last_step is not None or run.config is None else _config(run)
        self.next_step = 0 if known.last_step is None else known.last_step + 1
        self.url = f"{account.url.rstrip('/')}/?project={quote(run.project)}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a step's metrics; steps must rise. Raises RunError."""
        at = datetime.fromtimestamp(numbers.get("_timestamp", time.time()), UTC).isoformat()
        entry: dict[str, Any] = {
            "project": self._project,
            "run": self._name,
            "run_id": self._id,
            "step": step,
        }
        entry |= {
            "metrics": {name: value for name, value in numbers.items() if name != "_timestamp"}
        }
        entry |= {"timestamp": at, "log_id": f"{self._id}-{step}", "config": self._config}
        self._config = None  # with the run's first step
        self._waiting.append(entry)
        if time.monotonic() - self._sent_at >= self._account.transmit_seconds:
            self._send()

    def confirm(self, step: int) -> None:
        """Raises RunError unless trackio has the step."""
        self._send()
        with run_errors(self._account.token):
            last = self._place.known(self._project, self._id).last_step
        if last is None or last < step:
            raise RunError(f"step {step} has not arrived")

    def rest(self) -> None:
        """Leave the run, to continue it later: trackio's runs have no state. Raises RunError."""
        self._send()

    def finish(self, exit_code: int) -> None:
        """Send the rest. Raises RunError unless trackio then has the last step."""
        last = self._waiting[-1]["step"] if self._waiting else self.next_step - 1
        if last >= 0:
            self.confirm(last)

    def _send(self) -> None:
        while self._waiting:
            with run_errors(self._account.token):
                self._place.send(self._waiting[:AT_ONCE])
            del self._waiting[:AT_ONCE]
        self._sent_at = time.monotonic()


class _Folder:
    """A folder of this host, in the layout that `trackio show` reads."""

    def __init__(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage

    def known(self, project: str, run_id: str) -> SentRun:
        named = [
            record["name"]
            for record in self._storage.get_run_records(project)
            if record["id"] == run_id
        ]
        return SentRun(
            named[0] if named else None, self._storage.get_max_step_for_run(project, run_id=run_id)
        )

    def send(self, entries: list[dict[str, Any]]) -> None:
        config = next((entry["config"] for entry in entries if entry["config"] is not None), None)
        self._storage.bulk_log(
            project=entries[0]["project"],
            run=entries[0]["run"],
            run_id=entries[0]["run_id"],
            metrics_list=[entry["metrics"] for entry in entries],
            steps=[entry["step"] for entry in entries],
            timestamps=[entry["timestamp"] for entry in entries],
            log_ids=[entry["log_id"] for entry in entries],
            config=config,
        )


class _Server:
    """A self-hosted trackio server."""

    def __init__(self, account: TrackioAccount) -> None:
        from trackio.remote_client import RemoteClient

        timeout = {"timeout": REQUEST_SECONDS}
        self._client = RemoteClient(account.url, write_token=account.token, httpx_kwargs=timeout)

    def known(self, project: str, run_id: str) -> SentRun:
        found = cast(
            "dict[str, Any]",
            self._client.predict(project=project, run_id=run_id, api_name="/get_run_summary"),
        )
        return SentRun(found["run"], found["last_step"])

    def send(self, entries: list[dict[str, Any]]) -> None:
        self._client.predict(logs=entries, hf_token=None, api_name="/bulk_log")


def _config(run: RunDescription) -> dict[str, Any]:
    """The options, with the fields that trackio's dashboard reads."""
    own = {"_Username": None, "_Created": datetime.now(UTC).isoformat(), "_Group": run.group}
    return {**(run.config or {}), **own}
