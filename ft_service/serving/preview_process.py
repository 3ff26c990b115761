"""The preview's process as the server sees it: what it holds, and whose answers it makes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.jobs.states import Job
from ft_service.spec import PrecisionOptions

RETRY_SECONDS = 10
"""When to come again after training has taken the slots."""

Deliver = Callable[[dict[str, Any]], None]
"""Called with each part of an answer, from any thread."""


@dataclass(frozen=True)
class Served:
    """What one process holds: a base in its stored formats."""

    path: str
    precision: str
    """PrecisionOptions as JSON."""

    @classmethod
    def of(cls, path: str, precision: Mapping[str, Any], *, gpu: bool) -> Served:
        """Without what makes no difference to the process, so that what is loaded serves for as many as it can: processors
        choose what they compute in by their memory, and nothing is compared with what was trained."""
        same: dict[str, Any] = {"compare_served": "off"} if gpu else {"compare_served": "off", "compute": "bf16"}
        told = PrecisionOptions.model_validate({**precision, **same}).model_dump(mode="json")
        return cls(path, json.dumps(told, sort_keys=True))


@dataclass
class Ticket:
    """A request that was submitted."""

    served: Served | None
    """None: the base in whatever formats it is loaded, or else as it is published."""
    path: str
    order: dict[str, Any]
    deliver: Deliver
    job: Job | None
    """Whose outcome it asks; None: nobody's."""
    project_id: str
    """Whose key has asked."""
    beside: bool = False
    """Whether the processor may answer, beside training that has every slot."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.monotonic)


class PreviewProcess:
    """The process, and this end of its socket. But for `end` its methods are called under the guard of who keeps it."""

    def __init__(self, command: Sequence[str], slot: int | None, environment: Mapping[str, str], used_at: float) -> None:
        """`slot`: None: it holds none, and works beside training with what that leaves."""
        self.slot, self.used_at = slot, used_at
        self.served: Served | None = None
        self.tickets: dict[str, Ticket] = {}
        self.probed: list[tuple[Job, list[list[float]]]] = []
        """What it thinks of jobs' probes (rundir/evaluations.py), and nobody has judged yet."""
        self.leaving: float | None = None
        """When it is ended at the latest, having to make way."""
        self._loads = 0
        self._jobs: dict[str, Job] = {}
        """By the folders of their adapters."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for us
            )
        if slot is None:
            _give_way(self.popen.pid)
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Not yet written; None: there will be no more."""
        self._threads = [
            threading.Thread(target=self._read, name="preview answers", daemon=True),
            threading.Thread(target=self._send, name="preview orders", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def load(self, served: Served, threads: int, memory: int | None = None) -> None:
        """Hold this base and no other from now on. Whoever asks for it hears why, if it cannot. `memory`: bytes that it may
        take where it is on a processor; None: half of all."""
        self.served = served
        self._loads += 1
        precision = json.loads(served.precision)
        wanted = {"path": served.path, "precision": precision, "threads": threads, "memory": memory}
        self._write({"op": "base", "load": self._loads, **wanted})

    def fits(self, ticket: Ticket) -> bool:
        """Whether it holds what the request needs."""
        held = self.served
        return held is not None and (held == ticket.served or (ticket.served is None and held.path == ticket.path))

    def ask(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        if ticket.job is not None and ticket.order["adapter"] is not None:
            self._jobs[ticket.order["adapter"]] = ticket.job
        self._write({"op": "complete", "id": ticket.id, **ticket.order})

    def expect(self, job: Job, adapter: str, probes: list[list[int]]) -> None:
        """Read an adapter before it is asked for, and say what its model thinks of the probes."""
        self._jobs[adapter] = job
        self._write({"op": "adapter", "adapter": adapter, "probes": probes})

    def drop(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.id, None) is not None:
            self._write({"op": "cancel", "id": ticket.id})
            self.used_at = time.monotonic()

    def be_modest(self) -> None:
        """Leave the processors to a job that starts beside it."""
        self._write({"op": "threads", "n": 1})

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._orders.put(None)
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _write(self, message: dict[str, Any]) -> None:
        """Waits for nothing: a process that reads nothing must not hold up who keeps it, nor the jobs that it makes way for."""
        self._orders.put(json.dumps(message).encode() + b"\n")

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, which its keeper will see
            while (order := self._orders.get()) is not None:
                self._socket.sendall(order)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "failed" and message["load"] == self._loads:
            self.served = None  # those who ask next have it tried again
        if message["kind"] == "probed" and (job := self._jobs.get(message["adapter"])) is not None:
            self.probed.append((job, message["logprobs"]))
        ticket = self.tickets.get(message.get("id", ""))
        if ticket is None:
            return
        if message["kind"] in ("done", "error"):
            self.used_at = time.monotonic()
            self.tickets.pop(ticket.id, None)
        ticket.deliver(message if message["kind"] != "error" else as_part(_told(message)))


def _give_way(pid: int) -> None:
    """Let a process that has just begun have only what others leave of processors, and be the first to go where memory ends."""
    with contextlib.suppress(OSError):  # it has ended, or the host does not let us: then it is like any other
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def stepped_aside(why: str) -> UnavailableError:
    return UnavailableError(f"{why or 'The preview has ended.'} Try again.", code="preview_busy", retry_after=RETRY_SECONDS)


def as_part(error: FtError) -> dict[str, Any]:
    """The last part of an answer that ends in an error."""
    return {"kind": "error", "error": error}


def _told(message: Mapping[str, Any]) -> FtError:
    kind = SpecError if message["wrong"] else FtError
    return kind(message["message"], param=message["param"], code=message["code"])
