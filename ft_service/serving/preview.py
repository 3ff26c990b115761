"""The preview on this host: a process of its own that answers chat completions, started by the first one.

    route ──submit──▶ Preview ──lines of JSON──▶ python -m workers.serving      (a thread here reads the answers)

It holds one base in one storage format, with any number of adapters, and a slot of this host that no job holds. Training comes
first: when a job is to start on that slot, the process has LEAVE_SECONDS to finish what it is at, and is then ended. It also is
when nothing was asked for a while, when another base is asked for, and with the server, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_service.bases.cache_folder import FOLDER, folder_of
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.hardware import default_slots, gpu_count, visible_gpus
from ft_service.host.processes import without_secrets
from ft_service.launcher.local import host_id
from ft_service.settings import Settings
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "workers.serving")
LEAVE_SECONDS = 1.0
"""Between a job's turn and the end of the process that is in its way."""
BUSY_SECONDS = 30.0
"""How long a request waits for a base while another one is being asked."""
MOST_REQUESTS = 256
"""Under way or waiting, at once."""
RETRY_SECONDS = 10
"""When to come again after training has taken the slots."""
POLL_SECONDS = 0.1

Deliver = Callable[[dict[str, Any]], None]
"""Called with each part of an answer, from any thread."""


@dataclass(frozen=True)
class Served:
    """What one process holds: a base in its stored formats."""

    path: str
    precision: str
    """PrecisionOptions as JSON."""


@dataclass
class Ticket:
    """A request that was submitted."""

    served: Served | None
    """None: the base in whatever formats it is loaded, or else as it is published."""
    path: str
    order: dict[str, Any]
    deliver: Deliver
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.monotonic)


class Preview:
    """At most one process. Any thread may submit, cancel and ask it to make way; `run` belongs to a thread of its own, whose
    end is that of the process.
    """

    def __init__(self, settings: Settings, store: Store, command: Sequence[str] = WORKER) -> None:
        """`command`: what is started, with a descriptor and a process id behind it."""
        self._settings, self._store, self._command = settings, store, command
        self._slots = settings.slots or default_slots()
        self._host = host_id()
        self._guard = threading.Lock()
        self._stirred = threading.Event()
        self._waiting: list[Ticket] = []
        self._process: _Process | None = None
        self._closed = False

    # Whoever asks

    def submit(self, path: str, precision: Mapping[str, Any] | None, order: dict[str, Any], deliver: Deliver) -> Ticket:
        """Ask for an answer; its parts are delivered. Raises UnavailableError while training has the slots, or too many ask.

        `path`: the base's folder. `precision`: the formats that an adapter was trained on; None: whichever the base is in.
        """
        served = None if precision is None else Served(path, json.dumps(precision, sort_keys=True))
        ticket = Ticket(served, path, order, deliver)
        with self._guard:
            if self._closed:
                raise _stepped_aside("The service is ending.")
            process = self._process
            if process is not None and process.leaving:
                raise _stepped_aside("The preview has made way for a training job.")
            if len(self._waiting) + (len(process.tickets) if process else 0) >= MOST_REQUESTS:
                raise _stepped_aside(f"{MOST_REQUESTS} requests are under way.")
            if process is not None and _fits(ticket, process.served):
                process.ask(ticket)
            else:
                self._waiting.append(ticket)
        self._stirred.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more."""
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif self._process is not None:
                self._process.drop(ticket)

    # The reconciler

    def make_way(self, slots: Collection[int]) -> bool:
        """Whether nothing of the preview's is on these slots, which a job is about to use. If something is, it begins to leave:
        ask again.
        """
        with self._guard:
            process = self._process
            if process is None:
                return True
            if process.slot not in slots:
                process.be_modest()
                return True
            if process.leaving is None:
                process.leaving = time.monotonic() + LEAVE_SECONDS
        self._stirred.set()
        return False

    # Its own thread

    def run(self, stop: threading.Event) -> None:
        """Start and end processes as they are needed, until `stop` is set."""
        try:
            while not stop.is_set():
                self._look()
                self._stirred.wait(POLL_SECONDS if self._process or self._waiting else 2 * POLL_SECONDS)
                self._stirred.clear()
        finally:
            with self._guard:
                self._closed = True
                waiting, self._waiting = self._waiting, []
            for ticket in waiting:
                ticket.deliver(_error(_stepped_aside("The service is ending.")))
            self._end("The service is ending.")

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none."""
        process = self._process
        return process.popen.pid if process else None

    def _look(self) -> None:
        process, now = self._process, time.monotonic()
        if process is not None:
            why = self._why_end(process, now)
            if why is not None:
                self._end(why)
        if self._process is None:
            self._start_next()
        late = [ticket for ticket in self._waiting if now - ticket.since > BUSY_SECONDS]
        self._refuse(late, _stepped_aside("The preview is busy with another base."))

    def _why_end(self, process: _Process, now: float) -> str | None:
        """What to tell those whose answers end with the process. None: it stays."""
        if process.popen.poll() is not None:
            return "The preview's process has ended before its answer: ask again."
        if process.leaving is not None and (not process.tickets or now >= process.leaving):
            return "The preview has made way for a training job."
        if process.tickets:
            return None
        others = any(not _fits(ticket, process.served) for ticket in self._waiting)
        return "" if others or now - process.used_at > self._settings.preview_idle_seconds else None

    def _start_next(self) -> None:
        with self._guard:
            first = self._waiting[0] if self._waiting else None
        if first is None:
            return
        try:
            process = self._started(first.served or Served(first.path, "{}"))
        except FtError as error:
            self._refuse([ticket for ticket in self._waiting if ticket.path == first.path], error)
            return
        if process.slot not in self._store.free_slots(self._host, self._slots):  # a job has taken it and did not see us
            self._end("Training has taken the slot.")
            return
        with self._guard:
            for ticket in [ticket for ticket in self._waiting if _fits(ticket, process.served)]:
                self._waiting.remove(ticket)
                process.ask(ticket)

    def _started(self, served: Served) -> _Process:
        free = self._store.free_slots(self._host, self._slots)
        if not free:
            raise _stepped_aside(f"Training has all {self._slots} slots of this host.")
        slot = free[-1]  # jobs take the lowest
        threads = _threads(len(free), self._slots)
        process = _Process(self._command, served, slot, self._environment(slot), threads)
        with self._guard:
            self._process = process
        log.info("the preview has started: process %d, slot %d, %s", process.popen.pid, slot, served.path)
        return process

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {**without_secrets(os.environ), "PYTHONSAFEPATH": "1"}
        cache = folder_of(os.environ, self._settings.home)
        environment[FOLDER] = str(cache) if cache else ""
        if gpu_count():
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[slot]
        return environment

    def _refuse(self, tickets: list[Ticket], error: FtError) -> None:
        with self._guard:
            gone = [ticket for ticket in tickets if ticket in self._waiting]
            self._waiting = [ticket for ticket in self._waiting if ticket not in gone]
        for ticket in gone:
            ticket.deliver(_error(error))

    def _end(self, why: str) -> None:
        with self._guard:
            process = self._process
        if process is None:
            return
        process.end()
        with self._guard:
            self._process = None
            left = list(process.tickets.values())
            process.tickets.clear()
        log.info("the preview has ended: process %d", process.popen.pid)
        for ticket in left:
            ticket.deliver(_error(process.failure or _stepped_aside(why)))


class _Process:
    """The process, this end of its socket, and whose answers it makes. But for `end` its methods are called under the guard."""

    def __init__(self, command: Sequence[str], served: Served, slot: int, environment: Mapping[str, str], threads: int) -> None:
        self.served, self.slot = served, slot
        self.tickets: dict[str, Ticket] = {}
        self.leaving: float | None = None
        """When it is ended at the latest, having to make way."""
        self.failure: FtError | None = None
        """Why it could not load the base."""
        self.used_at = time.monotonic()
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
        self._write({"path": served.path, "precision": json.loads(served.precision), "threads": threads})
        self._reader = threading.Thread(target=self._read, name="preview answers", daemon=True)
        self._reader.start()

    def ask(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        self._write({"op": "complete", "id": ticket.id, **ticket.order})

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
        self._reader.join()
        self._socket.close()

    def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which its keeper will see
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "failed":
            self.failure = _told(message)
        ticket = self.tickets.get(message.get("id", ""))
        if ticket is None:
            return
        if message["kind"] in ("done", "error"):
            self.used_at = time.monotonic()
            self.tickets.pop(ticket.id, None)
        ticket.deliver(message if message["kind"] != "error" else _error(_told(message)))


def _fits(ticket: Ticket, served: Served) -> bool:
    return served == ticket.served or (ticket.served is None and served.path == ticket.path)


def _threads(free: int, slots: int) -> int:
    """Of the process, on a host without a GPU: the processors' share of the slots that no job holds."""
    return max(1, (os.cpu_count() or 1) * free // slots)


def _stepped_aside(why: str) -> UnavailableError:
    return UnavailableError(f"{why or 'The preview has ended.'} Try again.", code="preview_busy", retry_after=RETRY_SECONDS)


def _told(message: Mapping[str, Any]) -> FtError:
    kind = SpecError if message["wrong"] else FtError
    return kind(message["message"], param=message["param"], code=message["code"])


def _error(error: FtError) -> dict[str, Any]:
    return {"kind": "error", "error": error}
