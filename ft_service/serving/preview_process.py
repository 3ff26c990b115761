"""The preview's process in the server: the base that it holds, and the requests that it answers."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.helper_process import HelperFailed, HelperProcess, Program
from ft_service.jobs.states import Job
from ft_service.spec import PrecisionOptions

RETRY_SECONDS = 10
"""Seconds after which a client should try again when training has taken the slots."""

Deliver = Callable[[dict[str, Any]], None]
"""Called with each part of an answer, from any thread."""


@dataclass(frozen=True)
class LoadedBase:
    """A base with the formats that its weights are stored in."""

    path: str
    precision: str
    """PrecisionOptions as JSON."""

    @classmethod
    def of(cls, path: str, precision: Mapping[str, Any], *, gpu: bool) -> LoadedBase:
        """A loaded base, without options that make no difference to the process, so that more
        requests share it: on a CPU the compute dtype follows from the memory, and nothing is
        compared with training.
        """
        same: dict[str, Any] = (
            {"compare_served": "off"} if gpu else {"compare_served": "off", "compute": "bf16"}
        )
        options = PrecisionOptions.model_validate({**precision, **same}).model_dump(mode="json")
        return cls(path, json.dumps(options, sort_keys=True))


@dataclass
class Ticket:
    """A submitted request."""

    served: LoadedBase | None
    """None: the base in the formats in which it is loaded, or else as published."""
    path: str
    order: dict[str, Any]
    deliver: Deliver
    job: Job | None
    """The job whose outcome answers, if any."""
    project_id: str
    """The project of the client."""
    on_processor: bool = False
    """Whether the CPU may answer while training has every slot."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.monotonic)
    """Since when it waits for its base."""
    is_suspect: bool = False
    """Whether the process says when it is at it, alone: it was under way when one has ended by
    itself.
    """

    @property
    def work(self) -> str:
        """What is asked for, by which it is known when it is asked for again."""
        order = {name: value for name, value in self.order.items() if name != "probes"}
        return hashlib.sha256(
            json.dumps([self.project_id, self.path, order], sort_keys=True).encode()
        ).hexdigest()


class PreviewProcess:
    """The process. All methods but `end` are called under the guard of the Preview that keeps
    it.
    """

    def __init__(
        self,
        command: Sequence[str],
        slot: int | None,
        environment: Mapping[str, str],
        used_at: float,
    ) -> None:
        """`slot`: None: it runs on the CPU at low priority, next to training."""
        self.slot = slot
        self.used_at = used_at
        self.served: LoadedBase | None = None
        self.tickets: dict[str, Ticket] = {}
        self.probed: list[tuple[Job, list[list[float]]]] = []
        """Log-probabilities of jobs' probes (rundir/evaluations.py) that are not judged yet."""
        self.leaving: float | None = None
        """Latest time of its end, once a job needs its slot."""
        self.ending = False
        """Whether it is being ended, and answers nobody any more."""
        self.failure: HelperFailed | None = None
        """How it has ended by itself."""
        self.at: str | None = None
        """The suspect that it is at."""
        self.has_answered = False
        self.ready_at: float | None = None
        """Since when it holds its base; None: it loads it."""
        self.load_seconds = 0.0
        self._loads = 0
        self._loads_since = 0.0
        self._jobs: dict[str, Job] = {}
        """Folder of an adapter → job."""
        low = slot is None  # lowest CPU priority, and the first to be killed when memory runs out
        program = Program(
            command=command,
            niceness=19 if low else 0,
            expendable=low,
            variables=environment,
            own_errors=False,
        )
        self._helper = HelperProcess(program)
        self._reader = threading.Thread(target=self._read, name="preview answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._helper.pid

    @property
    def has_ended(self) -> bool:
        return self._helper.exit_code is not None

    def load(self, served: LoadedBase, threads: int, memory: int | None = None) -> None:
        """Load a base in place of the current one; requests for it get the error if that fails.

        Those for the current one are answered on when it is loaded again. `memory`: limit in bytes
        on a CPU; None: half of all.
        """
        now = time.monotonic()
        for ticket in self.present():
            ticket.since = now
        self.served = served
        self.ready_at = None
        self._loads_since = now
        self._loads += 1
        precision = json.loads(served.precision)
        wanted = {"path": served.path, "precision": precision, "threads": threads, "memory": memory}
        self._write({"op": "base", "load": self._loads, **wanted})

    def fits(self, ticket: Ticket) -> bool:
        """Whether it holds the base that a request needs, and is not being ended."""
        held = self.served if not self.ending else None
        return held is not None and (
            held == ticket.served or (ticket.served is None and held.path == ticket.path)
        )

    def present(self) -> list[Ticket]:
        """The requests that are answered by the base that it holds."""
        return [ticket for ticket in list(self.tickets.values()) if ticket.served == self.served]

    def ask(self, ticket: Ticket) -> None:
        """Have a request answered that `fits`."""
        ticket.served = self.served
        self.tickets[ticket.id] = ticket
        if ticket.job is not None and ticket.order["adapter"] is not None:
            self._jobs[ticket.order["adapter"]] = ticket.job
        whose = {"id": ticket.id, "project": ticket.project_id, "apart": ticket.is_suspect}
        self._write({"op": "complete", **whose, **ticket.order})

    def expect(self, job: Job, adapter: str, probes: list[list[int]]) -> None:
        """Load an adapter before it is requested, and compute the probes' log-probabilities."""
        self._jobs[adapter] = job
        self._write({"op": "adapter", "adapter": adapter, "probes": probes})

    def drop(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.id, None) is not None:
            self._write({"op": "cancel", "id": ticket.id})
            self.used_at = time.monotonic()

    def reduce_threads(self) -> None:
        """Leave the CPU to a job that starts on other slots."""
        self._write({"op": "threads", "n": 1})

    def end(self) -> None:
        self._helper.kill()
        self._reader.join()
        self._helper.close()

    def _write(self, message: dict[str, Any]) -> None:
        """Send a message without waiting: a process that does not read must not delay the server or
        the jobs that need its slot.
        """
        self._helper.send(message)

    def _read(self) -> None:
        try:
            while (line := self._helper.receive()) is not None:
                self._take(json.loads(line))
        except HelperFailed as failure:  # it has ended, which the Preview notices
            self.failure = failure

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] in ("ready", "failed") and message["load"] == self._loads:
            self.ready_at = time.monotonic()
            self.load_seconds = self.ready_at - self._loads_since
            if message["kind"] == "failed":
                self.served = None  # the next request tries again
        if message["kind"] == "at":
            self.at = message["id"]
            return
        if message["kind"] == "probed" and (job := self._jobs.get(message["adapter"])) is not None:
            self.probed.append((job, message["logprobs"]))
        ticket = self.tickets.get(message.get("id", ""))
        if ticket is None:
            return
        if message["kind"] in ("done", "error"):
            self.used_at = time.monotonic()
            self.tickets.pop(ticket.id, None)
            self.has_answered = True
        ticket.deliver(message if message["kind"] != "error" else as_part(_error(message)))


class ProjectFullError(UnavailableError):
    """A project has as many requests under way as one may have; those of others are taken."""


def stepped_aside(why: str, kind: type[UnavailableError] = UnavailableError) -> UnavailableError:
    return kind(
        f"{why or 'The preview has ended.'} Try again.",
        code="preview_busy",
        retry_after=RETRY_SECONDS,
    )


def as_part(error: FtError) -> dict[str, Any]:
    """The last part of an answer that ends in an error."""
    return {"kind": "error", "error": error}


def _error(message: Mapping[str, Any]) -> FtError:
    if message.get("later") is not None:
        return UnavailableError(
            message["message"],
            param=message["param"],
            code=message["code"],
            retry_after=message["later"],
        )
    kind = SpecError if message["wrong"] else FtError
    return kind(message["message"], param=message["param"], code=message["code"])
