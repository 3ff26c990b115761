"""A thin client of the service's REST interface: OpenAI's wire format and what this service adds to it.

Every method is one request (lists page by themselves) and raises the errors of `ft_service.errors`, rebuilt from the answer.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2

from ft_service.client.answers import (
    Answer,
    LogLine,
    RemoteCheckpoint,
    RemoteEvaluation,
    RemoteEvent,
    RemoteExport,
    RemoteFile,
    RemoteJob,
    RemoteModel,
    RemoteSweep,
)
from ft_service.client.connection import Connection
from ft_service.client.refusals import error_of, not_ours, reaching
from ft_service.errors import NotFoundError, SpecError, UnavailableError
from ft_service.rundir.events import Metrics
from ft_service.rundir.untrusted_tar import unpack

PAGE = 100
"""Items asked for at once by methods that read whole lists."""
EVALUATIONS_AT_ONCE = 10
"""The same of evaluations, which hold whole answers."""
_NO_END = httpx2.Timeout(60.0, connect=5.0, read=None)
"""Of a stream that is silent as long as nothing happens."""
_MADE_FIRST = httpx2.Timeout(60.0, connect=5.0, read=1800.0)
"""Of what the server makes before it sends it: a checkpoint's adapter takes a process of its own that imports torch and lays
out the model, seconds on an idle host, and some minutes on one whose processors all train."""
PATIENCE = 60
"""Polls without an answer that `follow` bears before it gives up."""


Item = TypeVar("Item", bound=Answer)
Note = Callable[[int, int], object]


class Client:
    """One server, one key. Close it, or use it in a `with`."""

    def __init__(self, connection: Connection, *, transport: httpx2.BaseTransport | None = None) -> None:
        self.base_url = connection.base_url
        self._http = httpx2.Client(
            base_url=connection.base_url,
            headers={"Authorization": f"Bearer {connection.api_key}"},
            timeout=httpx2.Timeout(60.0, connect=5.0),
            transport=transport,
            trust_env=not _is_loopback(connection.base_url),  # a proxy from the environment cannot reach this host's own server
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Files and models

    def upload_file(self, path: Path, purpose: str = "fine-tune") -> RemoteFile:
        """Upload a file under its own name. Raises SpecError if it cannot be read here, or the server refuses it."""
        try:
            with path.open("rb") as body:
                answer = self._call("POST", "/files", data={"purpose": purpose}, files={"file": (path.name, body)})
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}.", param="file") from None
        return RemoteFile.model_validate(answer)

    def file(self, file_id: str) -> RemoteFile:
        return RemoteFile.model_validate(self._call("GET", f"/files/{_part(file_id)}"))

    def files_with(self, sha256: str) -> list[RemoteFile]:
        """Data files with these contents, the newest first. `sha256`: in hex."""
        params = {"sha256": sha256, "purpose": "fine-tune", "limit": PAGE}
        return [RemoteFile.model_validate(item) for item in self._call("GET", "/files", params=params)["data"]]

    def files(self, limit: int = PAGE) -> list[RemoteFile]:
        """The newest `limit` files, newest first."""
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
        """A base, an alias, or a tuned model. Raises NotFoundError, which for a base lists those that there are."""
        return RemoteModel.model_validate(self._call("GET", f"/models/{_part(name)}"))

    def sign_in_link(self, path: str) -> str:
        """The address of a page of the server's, by which a browser is signed in once. Raises NotFoundError if it has none."""
        link = self._call("POST", "/sign_in_links")["path"]
        return f"{self.base_url.rpartition('/')[0]}{link}&to={path}"

    # Jobs

    def check_job(self, body: dict[str, Any], files: dict[str, dict[str, Any]]) -> int:
        """Ask whether a job, or a sweep, would be taken; how many jobs it would be. `files`: filename and bytes of those that
        would be uploaded, by the field that would name them. Raises what its creation would."""
        return self._call("POST", "/fine_tuning/check", json={"job": body, "files": files})["jobs"]

    def create_job(self, body: dict[str, Any]) -> RemoteJob:
        """Create a job. `body`: OpenAI's create body and our additions, with file ids."""
        return RemoteJob.model_validate(self._call("POST", "/fine_tuning/jobs", json=body))

    def jobs(self, limit: int = 20) -> list[RemoteJob]:
        """The newest `limit` jobs, newest first."""
        return list(islice(self._pages("/fine_tuning/jobs", RemoteJob, min(limit, PAGE)), limit))

    def job(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("GET", _job(job_id)))

    def cancel(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("POST", f"{_job(job_id)}/cancel"))

    def pause(self, job_id: str) -> RemoteJob:
        return RemoteJob.model_validate(self._call("POST", f"{_job(job_id)}/pause"))

    def resume(self, job_id: str, ranks: int | None = None) -> RemoteJob:
        """Resume a paused job. `ranks`: to go on with; None: as many as before."""
        body = None if ranks is None else {"distributed": {"nproc_per_node": ranks}}
        return RemoteJob.model_validate(self._call("POST", f"{_job(job_id)}/resume", json=body))

    def evaluations(self, job_id: str, limit: int = PAGE) -> list[RemoteEvaluation]:
        """What the job's model answered at its newest `limit` evaluations, the newest step first."""
        pages = self._pages(f"{_job(job_id)}/evaluation", RemoteEvaluation, min(limit, EVALUATIONS_AT_ONCE))
        return list(islice(pages, limit))

    def checkpoints(self, job_id: str) -> list[RemoteCheckpoint]:
        """All of a job's complete checkpoints, newest first."""
        return list(self._pages(f"{_job(job_id)}/checkpoints", RemoteCheckpoint, PAGE))

    def metrics(self, job_id: str) -> list[Metrics]:
        """The numbers of every step that was reported, in the order of the steps; the last word on each."""
        found = (event.metrics() for event in self.events(job_id))
        by_step = {known.step: known for known in found if known is not None}
        return [by_step[step] for step in sorted(by_step)]

    def events(self, job_id: str, *, since: str | None = None, limit: int | None = None) -> list[RemoteEvent]:
        """Events in the order they happened: those after the event with the id `since`, of these the newest `limit`."""
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
        """The job and its new events, again and again (every `interval` seconds), until it is over or rests paused.

        At first only the newest PAGE events, so that joining a long job is quick. A server that stops answering is waited for,
        PATIENCE times; after that, and at the first request, UnavailableError is raised.
        """
        last: str | None = None
        silent = 0
        while True:
            try:
                job = self.job(job_id)  # before the events: what comes before the end is then never missed
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

    def logs(self, job_id: str, *, attempt: int | None = None, rank: int | None = None, lines: int = 200) -> str:
        """The last lines that an attempt's processes printed (None: the newest attempt, all ranks)."""
        asked = {"attempt": attempt, "rank": rank, "lines": lines}
        params = {name: value for name, value in asked.items() if value is not None}
        return self._send("GET", f"{_job(job_id)}/logs", params=params).text

    def follow_logs(self, job_id: str, *, rank: int | None = None, lines: int = 20) -> Iterator[LogLine]:
        """Lines that the job's processes print, from the last ones on, until the job is over or rests paused."""
        params = {"follow": True, "lines": lines} | ({} if rank is None else {"rank": rank})
        request = self._http.build_request("GET", f"{_job(job_id)}/logs", params=params, timeout=_NO_END)
        with reaching(self.base_url):
            answer = self._http.send(request, stream=True)
            try:
                if answer.is_error:
                    answer.read()
                    raise error_of(answer)
                for line in answer.iter_lines():
                    yield LogLine.model_validate_json(line)
            finally:
                answer.close()

    def download_adapter(self, job_id: str, out: Path, note: Note = lambda done, total: None) -> Path:
        """The finished job's adapter, unpacked into the folder `out`, which must not exist or be empty. `note`: called with the
        bytes that have come, and how many there are.

        Raises SpecError if it is not empty, NotFoundError if there is no adapter. `out` appears whole or not at all.
        """
        return self._download_folder(f"{_job(job_id)}/adapter", out, note)

    def download_checkpoint(self, job_id: str, step: int, out: Path, note: Note = lambda done, total: None) -> Path:
        """`download_adapter` for the job's complete checkpoint at a step. Raises NotFoundError if there is none."""
        complete = self.checkpoints(job_id)
        chosen = next((point for point in complete if point.step_number == step), None)
        if chosen is None:
            steps = ", ".join(str(point.step_number) for point in reversed(complete)) or "none yet"
            raise NotFoundError(f"Job {job_id} has no checkpoint at step {step}; it has: {steps}.", param="checkpoint")
        return self._download_folder(f"{_job(job_id)}/checkpoints/{_part(chosen.id)}/adapter", out, note, _MADE_FIRST)

    def start_export(self, job_id: str, to: str) -> RemoteExport:
        """Have a succeeded job's outcome made into another form; one that is made or under way is answered as it is."""
        return RemoteExport.model_validate(self._call("POST", f"{_job(job_id)}/exports", json={"format": to}))

    def export(self, job_id: str, to: str) -> RemoteExport:
        return RemoteExport.model_validate(self._call("GET", f"{_job(job_id)}/exports/{_part(to)}"))

    def download_export(self, job_id: str, to: str, out: Path, note: Note = lambda done, total: None) -> Path:
        """The files of an export, as `download_adapter`."""
        return self._download_folder(f"{_job(job_id)}/exports/{_part(to)}/content", out, note)

    def _download_folder(self, path: str, out: Path, note: Note, timeout: httpx2.Timeout | None = None) -> Path:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SpecError(f"{out} exists already. Name another folder with --out.", param="out")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ft-", dir=out.parent) as scratch:
            archive, unpacked = Path(scratch) / "adapter.tar", Path(scratch) / "adapter"
            self._download(path, archive, note, timeout or self._http.timeout)
            unpack(archive, unpacked)
            entries = list(unpacked.iterdir())
            top = entries[0] if len(entries) == 1 and entries[0].is_dir() else unpacked  # the archive's own folder
            top.replace(out)
        return out

    # Sweeps

    def create_sweep(self, body: dict[str, Any]) -> RemoteSweep:
        """Create a sweep with its jobs. `body`: of a job, with `sweep`."""
        return RemoteSweep.model_validate(self._call("POST", "/fine_tuning/sweeps", json=body))

    def sweeps(self, limit: int = 20) -> list[RemoteSweep]:
        """The newest `limit` sweeps, newest first."""
        return list(islice(self._pages("/fine_tuning/sweeps", RemoteSweep, min(limit, PAGE)), limit))

    def sweep(self, sweep_id: str) -> RemoteSweep:
        return RemoteSweep.model_validate(self._call("GET", f"/fine_tuning/sweeps/{_part(sweep_id)}"))

    def cancel_sweep(self, sweep_id: str) -> RemoteSweep:
        return RemoteSweep.model_validate(self._call("POST", f"/fine_tuning/sweeps/{_part(sweep_id)}/cancel"))

    def delete_sweep(self, sweep_id: str, *, keep_best: bool = False) -> None:
        """Delete a sweep that is over, with the tuned models of its jobs; `keep_best`: all but the best one's."""
        self._call("DELETE", f"/fine_tuning/sweeps/{_part(sweep_id)}", params={"keep_best": keep_best})

    # Answers

    def chat(self, body: dict[str, Any]) -> Iterator[str]:
        """A chat completion's text as it comes. `body`: OpenAI's, with `stream`, for one answer. Raises what it ends in."""
        request = self._http.build_request("POST", "/chat/completions", json=body, timeout=_NO_END)
        with reaching(self.base_url):
            answer = self._http.send(request, stream=True)
            try:
                if answer.is_error:
                    answer.read()
                    raise error_of(answer)
                yield from _texts(answer)
            finally:
                answer.close()

    # Transport

    def _pages(self, path: str, model: type[Item], limit: int) -> Iterator[Item]:
        after: dict[str, str] = {}
        while True:
            page = self._call("GET", path, params={"limit": limit, **after})
            items = [model.model_validate(item) for item in page["data"]]
            yield from items
            if not items or not page.get("has_more"):
                return
            after = {"after": items[-1].id}

    def _download(self, path: str, target: Path, note: Note, timeout: httpx2.Timeout) -> None:
        sent = self._http.stream("GET", path, timeout=timeout)
        with reaching(self.base_url), sent as answer, target.open("wb") as file:
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            total, done = int(answer.headers.get("content-length", 0)), 0
            for chunk in answer.iter_bytes():
                file.write(chunk)
                done += len(chunk)
                note(done, total)

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
    """What the events of a streamed chat completion say. Raises UnavailableError for a stream that breaks off."""
    for line in answer.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data == line:
            continue
        event = json.loads(data)
        if "error" in event:
            raise UnavailableError(str(event["error"].get("message")), code=event["error"].get("code"))
        for choice in event["choices"]:
            calls = choice["delta"].get("tool_calls")
            yield choice["delta"].get("content") or (json.dumps(calls, ensure_ascii=False) if calls else "")
    raise UnavailableError("The answer broke off: try again.")


def _is_loopback(base_url: str) -> bool:
    return httpx2.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


def _job(job_id: str) -> str:
    return f"/fine_tuning/jobs/{_part(job_id)}"


def _part(text: str) -> str:
    return quote(text, safe="")
