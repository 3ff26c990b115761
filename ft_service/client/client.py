"""Client of the service's REST interface: OpenAI's wire format and this service's additions.

Every method makes one request (lists fetch all their pages) and raises the errors of
`ft_service.errors`, rebuilt from the response.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx2

from ft_service.client.connection import Connection, error_of, is_loopback, not_ours, reaching
from ft_service.client.responses import (
    LogLine,
    RemoteChat,
    RemoteCheckpoint,
    RemoteEngine,
    RemoteEvaluation,
    RemoteEvent,
    RemoteExport,
    RemoteFile,
    RemoteJob,
    RemoteModel,
    RemoteObject,
    RemoteSweep,
)
from ft_service.errors import NotFoundError, SpecError, UnavailableError
from ft_service.rundir.evaluations import Suites
from ft_service.rundir.events import Metrics
from ft_service.rundir.untrusted_tar import unpack

PAGE = 100
"""Items per page in methods that read whole lists."""
EVALUATIONS_AT_ONCE = 10
"""Items per page of evaluations, which contain whole answers."""
_NO_END = httpx2.Timeout(60.0, connect=5.0, read=None)
"""Timeout of a stream, which may be silent for any time."""
_MADE_FIRST = httpx2.Timeout(60.0, connect=5.0, read=1800.0)
"""Timeout of a response that the server must produce first: a checkpoint's adapter needs a process
that imports torch and builds the model, which takes seconds on an idle host and minutes while all
processors train.
"""
PATIENCE = 60
"""Failed polls in a row after which `follow` gives up."""


Item = TypeVar("Item", bound=RemoteObject)
Note = Callable[[int, int], object]


class Client:
    """Client of one server with one key. Close it, or use it in a `with`."""

    def __init__(
        self, connection: Connection, *, transport: httpx2.BaseTransport | None = None
    ) -> None:
        self.base_url = connection.base_url
        self._http = httpx2.Client(
            base_url=connection.base_url,
            headers={"Authorization": f"Bearer {connection.api_key}"},
            timeout=httpx2.Timeout(60.0, connect=5.0),
            transport=transport,
            trust_env=not is_loopback(connection.base_url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Files and models

    def upload_file(self, path: Path, purpose: str = "fine-tune") -> RemoteFile:
        """Upload a file under its own name.

        Raises SpecError if it cannot be read, or the server refuses it.
        """
        try:
            with path.open("rb") as body:
                answer = self._call(
                    "POST", "/files", data={"purpose": purpose}, files={"file": (path.name, body)}
                )
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}.", param="file") from None
        return RemoteFile.model_validate(answer)

    def file(self, file_id: str) -> RemoteFile:
        return RemoteFile.model_validate(self._call("GET", f"/files/{_part(file_id)}"))

    def files_with(self, sha256: str) -> list[RemoteFile]:
        """Return the data files with these contents, the newest first. `sha256`: in hex."""
        params = {"sha256": sha256, "purpose": "fine-tune", "limit": PAGE}
        return [
            RemoteFile.model_validate(item)
            for item in self._call("GET", "/files", params=params)["data"]
        ]

    def files(self, limit: int = PAGE) -> list[RemoteFile]:
        """Return the newest `limit` files, newest first."""
        return list(islice(self._pages("/files", RemoteFile, min(limit, PAGE)), limit))

    def file_content(self, file_id: str) -> bytes:
        return self._send("GET", f"/files/{_part(file_id)}/content").content

    def delete_file(self, file_id: str) -> None:
        self._call("DELETE", f"/files/{_part(file_id)}")

    def delete_model(self, name: str) -> None:
        """Delete a tuned model. Raises NotFoundError, or SpecError for a base."""
        self._call("DELETE", f"/models/{_part(name)}")

    def models(self) -> list[RemoteModel]:
        return [RemoteModel.model_validate(item) for item in self._call("GET", "/models")["data"]]

    def model(self, name: str) -> RemoteModel:
        """Return a base, an alias, or a tuned model.

        Raises NotFoundError, which for a base lists the available ones.
        """
        return RemoteModel.model_validate(self._call("GET", f"/models/{_part(name)}"))

    def model_description(self, name: str) -> bytes | None:
        """Return a base's description as JSON; None: the server has none yet.

        Raises NotFoundError.
        """
        description = self._call("GET", f"/models/{_part(name)}?include=description")["description"]
        return None if description is None else json.dumps(description).encode()

    def sign_in_link(self, path: str) -> str:
        """Return a link to a page of the server that signs a browser in once. Raises NotFoundError
        if the server has no page."""
        link = self._call("POST", "/sign_in_links")["path"]
        return f"{self.base_url.rpartition('/')[0]}{link}&to={path}"

    # Jobs

    def check_job(self, body: dict[str, Any], files: dict[str, dict[str, Any]]) -> int:
        """Check whether a job, or a sweep, would be accepted, and return the number of jobs.

        `files`: name and bytes of the files to be uploaded, by the field that would name them.
        Raises the errors of its creation.
        """
        return self._call("POST", "/fine_tuning/check", json={"job": body, "files": files})["jobs"]

    def create_job(self, body: dict[str, Any]) -> RemoteJob:
        """Create a job. `body`: OpenAI's create body with our additions, and file ids."""
        return RemoteJob.model_validate(self._call("POST", "/fine_tuning/jobs", json=body))

    def jobs(self, limit: int = 20, **filters: str | None) -> list[RemoteJob]:
        """Return the newest `limit` jobs, newest first.

        `filters`: parameters of the list, as `status`; None: not given.
        """
        given = {name: value for name, value in filters.items() if value is not None}
        return list(
            islice(self._pages("/fine_tuning/jobs", RemoteJob, min(limit, PAGE), **given), limit)
        )

    def engines(self) -> list[RemoteEngine]:
        """Return the engines that hold slots, oldest first."""
        return [RemoteEngine.model_validate(item) for item in self._call("GET", "/engines")["data"]]

    def job(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("GET", _job(job_id)))

    def cancel(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("POST", f"{_job(job_id)}/cancel"))

    def delete_job(self, job_id: str) -> list[str]:
        """Delete a job that is over, with all that it has made.

        Returns the names of its models. Raises NotFoundError, and SpecError for one that is not
        over.
        """
        return self._call("DELETE", _job(job_id))["deleted_models"]

    def call_job(self, job_id: str, texts: Mapping[str, str | None]) -> RemoteJob:
        """Change `name` or `note` of a job; None: it has none any more."""
        return RemoteJob.model_validate(self._call("POST", _job(job_id), json=dict(texts)))

    def pause(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("POST", f"{_job(job_id)}/pause"))

    def resume(
        self, job_id: str, ranks: int | None = None, max_cost: float | None = None
    ) -> RemoteJob:
        """Resume a paused job.

        `ranks`: new number of ranks; `max_cost`: new limit of its cost; None: as before.
        """
        body: dict[str, Any] = {}
        if ranks is not None:
            body["distributed"] = {"nproc_per_node": ranks}
        if max_cost is not None:
            body["max_cost"] = max_cost
        return RemoteJob.model_validate(
            self._call("POST", f"{_job(job_id)}/resume", json=body or None)
        )

    def keep_suites(self, job_id: str, found: Suites) -> RemoteJob:
        """Keep accuracies in tasks with a job that has succeeded."""
        return RemoteJob.model_validate(
            self._call("POST", f"{_job(job_id)}/suites", json=found.model_dump())
        )

    def chats(self, **filters: str) -> Iterator[RemoteChat]:
        """Chats that are kept, with their messages, the oldest first. `filters`: parameters of the
        list.
        """
        return self._pages("/chat/completions", RemoteChat, PAGE, include="messages", **filters)

    def evaluations(self, job_id: str, limit: int = PAGE) -> list[RemoteEvaluation]:
        """Return the job's newest `limit` evaluations, the newest step first."""
        pages = self._pages(
            f"{_job(job_id)}/evaluation", RemoteEvaluation, min(limit, EVALUATIONS_AT_ONCE)
        )
        return list(islice(pages, limit))

    def rollouts(self, job_id: str, step: int | None, prompts: int) -> dict[str, Any] | None:
        """Return what was sampled for a step, with its first `prompts`, and as many answers.

        `step` None: the newest. None: there is nothing of it.
        """
        query = {"limit": "1" if step is None else "20", "prompts": str(prompts)}
        while True:
            page = self._call("GET", f"{_job(job_id)}/rollouts?{urlencode(query)}")
            for found in page["data"]:
                if step is None or found["step"] == step:
                    return found
            if not page["has_more"]:
                return None
            query["after"] = page["last_id"]

    def checkpoints(self, job_id: str) -> list[RemoteCheckpoint]:
        """Return all of a job's complete checkpoints, newest first."""
        return list(self._pages(f"{_job(job_id)}/checkpoints", RemoteCheckpoint, PAGE))

    def metrics(self, job_id: str) -> list[Metrics]:
        """Return the latest metrics of every reported step, in order of the steps."""
        by_step = {
            metrics.step: metrics
            for event in self.events(job_id)
            if (metrics := event.metrics()) is not None
        }
        return [by_step[step] for step in sorted(by_step)]

    def events(
        self, job_id: str, *, since: str | None = None, limit: int | None = None
    ) -> list[RemoteEvent]:
        """Return events in the order they happened: those after the event with the id `since`, of
        these the newest `limit`.
        """
        newest: list[RemoteEvent] = []
        for event in self._pages(f"{_job(job_id)}/events", RemoteEvent, PAGE):
            if event.id == since:
                break
            newest.append(event)
            if len(newest) == limit:
                break
        return newest[::-1]

    def follow(
        self, job_id: str, *, interval: float = 1.0, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[tuple[RemoteJob, list[RemoteEvent]]]:
        """Yield the job and its new events every `interval` seconds, until the job is over or
        paused.

        The first time, only the newest PAGE events, so that joining a long job is quick. If the
        server stops answering, PATIENCE polls may fail before UnavailableError is raised; the first
        request may not.
        """
        last: str | None = None
        silent = 0
        while True:
            try:
                # Before the events, so that no event before the job's end is missed.
                job = self.job(job_id)
                events = self.events(job_id, since=last, limit=None if last else PAGE)
            except UnavailableError:
                silent += 1
                if last is None or silent > PATIENCE:
                    raise
                sleep(interval)
                continue
            silent = 0
            last = events[-1].id if events else last
            yield job, events
            if job.over or job.paused:
                return
            sleep(interval)

    def logs(
        self, job_id: str, *, attempt: int | None = None, rank: int | None = None, lines: int = 200
    ) -> str:
        """Return the last lines of an attempt's processes (None: the newest attempt, all ranks)."""
        query = {"attempt": attempt, "rank": rank, "lines": lines}
        params = {name: value for name, value in query.items() if value is not None}
        return self._send("GET", f"{_job(job_id)}/logs", params=params).text

    def follow_logs(
        self, job_id: str, *, rank: int | None = None, lines: int = 20
    ) -> Iterator[LogLine]:
        """Yield lines that the job's processes print, from the last ones on, until the job is over
        or paused.
        """
        params = {"follow": True, "lines": lines} | ({} if rank is None else {"rank": rank})
        with self._streamed("GET", f"{_job(job_id)}/logs", _NO_END, params=params) as answer:
            for line in _lines(answer):
                yield LogLine.model_validate_json(line)

    def download_adapter(
        self, job_id: str, out: Path, note: Note = lambda done, total: None
    ) -> Path:
        """Download the finished job's adapter into the folder `out`, which must not exist or be
        empty, and return `out`. `note`: called with the received and the total bytes.

        Raises SpecError if it is not empty, NotFoundError if there is no adapter. `out` appears
        complete or not at all.
        """
        return self._download_folder(f"{_job(job_id)}/adapter", out, note)

    def download_checkpoint(
        self, job_id: str, step: int, out: Path, note: Note = lambda done, total: None
    ) -> Path:
        """Download the adapter of a job's checkpoint, as `download_adapter`. Raises NotFoundError
        if there is no complete one at this step."""
        complete = self.checkpoints(job_id)
        chosen = next((point for point in complete if point.step_number == step), None)
        if chosen is None:
            steps = ", ".join(str(point.step_number) for point in reversed(complete)) or "none yet"
            raise NotFoundError(
                f"Job {job_id} has no checkpoint at step {step}; it has: {steps}.",
                param="checkpoint",
            )
        return self._download_folder(
            f"{_job(job_id)}/checkpoints/{_part(chosen.id)}/adapter", out, note, _MADE_FIRST
        )

    def start_export(self, job_id: str, to: str) -> RemoteExport:
        """Start an export of a succeeded job; returns the existing one if it was started before."""
        return RemoteExport.model_validate(
            self._call("POST", f"{_job(job_id)}/exports", json={"format": to})
        )

    def export(self, job_id: str, to: str) -> RemoteExport:
        return RemoteExport.model_validate(self._call("GET", f"{_job(job_id)}/exports/{_part(to)}"))

    def download_export(
        self, job_id: str, to: str, out: Path, note: Note = lambda done, total: None
    ) -> Path:
        """Download the files of an export, as `download_adapter`."""
        return self._download_folder(f"{_job(job_id)}/exports/{_part(to)}/content", out, note)

    def _download_folder(
        self, path: str, out: Path, note: Note, timeout: httpx2.Timeout | None = None
    ) -> Path:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SpecError(f"{out} exists already. Name another folder with --out.", param="out")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ft-", dir=out.parent) as scratch:
            archive = Path(scratch) / "adapter.tar"
            unpacked = Path(scratch) / "adapter"
            self._download(path, archive, note, timeout or self._http.timeout)
            unpack(archive, unpacked)
            entries = list(unpacked.iterdir())
            # The archive's own folder.
            top = entries[0] if len(entries) == 1 and entries[0].is_dir() else unpacked
            top.replace(out)
        return out

    # Sweeps

    def create_sweep(self, body: dict[str, Any]) -> RemoteSweep:
        """Create a sweep with its jobs. `body`: that of a job, with `sweep`."""
        return RemoteSweep.model_validate(self._call("POST", "/fine_tuning/sweeps", json=body))

    def sweeps(self, limit: int = 20) -> list[RemoteSweep]:
        """Return the newest `limit` sweeps, newest first."""
        return list(
            islice(self._pages("/fine_tuning/sweeps", RemoteSweep, min(limit, PAGE)), limit)
        )

    def sweep(self, sweep_id: str) -> RemoteSweep:
        return RemoteSweep.model_validate(
            self._call("GET", f"/fine_tuning/sweeps/{_part(sweep_id)}")
        )

    def cancel_sweep(self, sweep_id: str) -> RemoteSweep:
        return RemoteSweep.model_validate(
            self._call("POST", f"/fine_tuning/sweeps/{_part(sweep_id)}/cancel")
        )

    def delete_sweep(self, sweep_id: str, *, keep_best: bool = False) -> None:
        """Delete a sweep that is over, with the tuned models of its jobs; `keep_best`: all but the
        best one's.
        """
        self._call(
            "DELETE", f"/fine_tuning/sweeps/{_part(sweep_id)}", params={"keep_best": keep_best}
        )

    # Answers

    def chat(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield a chat completion's text as it arrives.

        `body`: OpenAI's, with `stream`, for one answer. Raises its error.
        """
        with self._streamed("POST", "/chat/completions", _NO_END, json=body) as answer:
            yield from _texts(answer)

    # Transport

    def _pages(self, path: str, item: type[Item], limit: int, /, **filters: str) -> Iterator[Item]:
        after: dict[str, str] = {}
        while True:
            page = self._call("GET", path, params={"limit": limit, **filters, **after})
            items = [item.model_validate(one) for one in page["data"]]
            yield from items
            if not items or not page.get("has_more"):
                return
            after = {"after": items[-1].id}

    def _download(self, path: str, target: Path, note: Note, timeout: httpx2.Timeout) -> None:
        with self._streamed("GET", path, timeout) as answer, target.open("wb") as file:
            total = int(answer.headers.get("content-length", 0))
            done = 0
            for chunk in answer.iter_bytes():
                file.write(chunk)
                done += len(chunk)
                note(done, total)

    @contextlib.contextmanager
    def _streamed(
        self, method: str, path: str, timeout: httpx2.Timeout, **arguments: Any
    ) -> Iterator[httpx2.Response]:
        """Send a request and yield the response, whose body is read while it arrives.

        Raises its error.
        """
        with (
            reaching(self.base_url),
            self._http.stream(method, path, timeout=timeout, **arguments) as answer,
        ):
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            yield answer

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        answer = self._send(method, path, **arguments)
        try:
            return answer.json()
        except ValueError:
            raise not_ours(answer) from None

    def _send(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        with reaching(self.base_url):
            answer = self._http.request(method, path, **arguments)
        if not answer.is_success:
            raise error_of(answer)
        return answer


def _texts(answer: httpx2.Response) -> Iterator[str]:
    """Yield the text of a streamed chat completion's events.

    Raises UnavailableError if the stream is cut off.
    """
    for line in _lines(answer):
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data == line:
            continue
        event = json.loads(data)
        if "error" in event:
            raise UnavailableError(
                str(event["error"].get("message")), code=event["error"].get("code")
            )
        for choice in event["choices"]:
            calls = choice["delta"].get("tool_calls")
            yield choice["delta"].get("content") or (
                json.dumps(calls, ensure_ascii=False) if calls else ""
            )
    raise UnavailableError("The answer was cut off. Try again.")


def _lines(answer: httpx2.Response) -> Iterator[str]:
    """Yield the lines of a streamed answer.

    Other separators than line feeds, such as U+2028, may stand in JSON.
    """
    left = ""
    for text in answer.iter_text():
        *whole, left = (left + text).split("\n")
        yield from (line.removesuffix("\r") for line in whole)
    if left:
        yield left


def _job(job_id: str) -> str:
    return f"/fine_tuning/jobs/{_part(job_id)}"


def _part(text: str) -> str:
    return quote(text, safe="")
