"""The agent of a host: runs what the rows say is to run there, and tells what has become of it.

    beat      the host is there (every BEAT_SECONDS)
    end       processes that no row wants any more, before anything else is started or the host counts as there again
    start     the nodes that were ordered; before that it says so, as the agent that it is, and only then
    report    what runs, and what has ended

Supervisors outlive the agent, and training goes on without the database: an agent that starts anew finds its attempts by their
locks. Two agents of one name exclude each other in the table of hosts. An agent that was away for so long that its attempts
were given to others ends them when it is back; by then their seal has ended them already, wherever the run directory is seen.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ft_service.errors import ConflictError, FtError, UnavailableError
from ft_service.host.lifetime import is_locked, require_linux
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Running
from ft_service.launcher.base import LaunchError
from ft_service.launcher.processes import Share
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import Start
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from ft_service.store.fleet.hosts import HostRow, HostStore, NodeRow
from ft_service.supervisor.command_line import DEFAULT_GRACE_SECONDS
from ft_service.supervisor.node import Node

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
TURN_SECONDS = 0.3
RETRY_SECONDS = 2.0
"""Until the database is tried again."""
UNSEEN_SECONDS = 60.0
"""How long a file that was just written elsewhere may take to be seen here."""
_LOCK = re.compile(r"(?P<job>.+)-(?P<attempt>\d+)-(?P<node>\d+)\.lock")

Key = tuple[str, int, int]
"""Job, attempt and node."""


@dataclass(frozen=True)
class Equipment:
    """How an agent starts attempts on its host."""

    scratch: Path
    """Folder of this host's own, for locks and sockets; it must outlive the agent."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    lease_seconds: float = 30.0
    mirror: str = ""
    """Object storage that run directories are kept the same as; empty: they lie where every host sees them."""
    worker_command: Sequence[str] = ()
    """What supervisors run instead of torchrun with our workers."""


class _Beats:
    """Says that the host is there, in a thread of its own: a start or an end may take longer than a lease.

    After a pause in which the host may have been taken for lost it says nothing more until `resume`.
    """

    def __init__(self, store: HostStore, host: str, agent: str, lease_seconds: float) -> None:
        self._store, self._host, self._agent, self._lease = store, host, agent, lease_seconds
        self._last = _now()
        self._over = threading.Event()
        self.is_displaced = False
        """Another agent speaks for this host."""
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    @property
    def has_paused(self) -> bool:
        return _now() - self._last > self._lease / 2

    def resume(self) -> None:
        self._beat()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS) and not self.is_displaced:
            if not self.has_paused:
                with contextlib.suppress(UnavailableError):  # logged; whoever reads it finds the database away too
                    self._beat()

    def _beat(self) -> None:
        began = _now()
        if self._store.beat(self._host, self._agent):
            self._last = began
        else:
            self.is_displaced = True


class Agent:
    """For one thread."""

    def __init__(self, store: HostStore, places: Places, host: HostRow, equipment: Equipment) -> None:
        """Raises UnavailableError off Linux."""
        require_linux()
        self._store, self._places, self._host, self._equipment = store, places, host, equipment
        self._name = ""
        self._missed_since: dict[Key, float] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. Raises ConflictError if another agent has this host's name."""
        self._equipment.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._end_strays(self._store.nodes_on(self._host.host))
        self._name = self._store.join_host(self._host, self._equipment.lease_seconds)
        log.info("host %s has joined with %d slots (%s)", self._host.host, self._host.slots, self._host.kind)
        beats = _Beats(self._store, self._host.host, self._name, self._equipment.lease_seconds)
        try:
            while not stop.is_set():
                try:
                    self._turn(beats)
                except UnavailableError as error:  # what runs goes on; nobody can be told of it now
                    log.warning("the database or the storage is away: %s", error.message)
                    stop.wait(RETRY_SECONDS)
                stop.wait(TURN_SECONDS)
        finally:
            beats.close()
        self._store.leave_host(self._host.host, self._name)

    def _turn(self, beats: _Beats) -> None:
        """End, start and report what is due. Raises ConflictError if another agent speaks for this host now."""
        if beats.is_displaced:
            raise ConflictError(
                f"Another agent speaks for host {self._host.host} now, or the host was removed. What runs here goes on."
            )
        nodes = self._store.nodes_on(self._host.host)
        self._end_strays(nodes)
        if beats.has_paused:
            log.warning("this host, or the database, was away for a while")
            beats.resume()
            return
        first = {(node.job_id, node.attempt): node for node in nodes if node.node == 0}
        for node in nodes:
            if node.host == self._host.host and node.state != "ended":
                self._tend(node, first.get((node.job_id, node.attempt)))

    def _tend(self, node: NodeRow, first: NodeRow | None) -> None:
        try:
            attempt, start = self._read(node)
        except UnreadableDocumentError as error:
            self._report(replace(node, state="ended", fault=error.message))
            return
        if start is None:
            self._miss(node, f"{attempt.run.root}/{attempt.keys.start} is not seen here: FT_HOME must be the service's folder.")
            return
        share = self._share(node, attempt, start, first)
        if node.wanted == "end":
            if not share.is_alive() or share.kill(Reason.WORKER_KILLED):
                self._report(replace(node, state="ended"))
            return
        match share.observe():
            case Absent():
                self._start(node, share, start, first)
            case Running() if node.state == "ordered":
                self._report(replace(node, state="running"))
            case Ended() if not share.is_supervised():  # until then what the attempt leaves is on its way to object storage
                self._report(replace(node, state="ended"))
            case _:
                pass

    def _start(self, node: NodeRow, share: Share, start: Start, first: NodeRow | None) -> None:
        if start.nodes > 1 and node.node == 0 and node.endpoint is None:
            node = replace(node, endpoint=f"{self._host.address}:{_free_port(self._host.address)}")
            first = node
        endpoint = first.endpoint if first is not None else None
        if start.nodes > 1 and endpoint is None:  # node 0 has not said where
            return
        if (missing := self._missing_base(share.attempt)) is not None:
            self._report(replace(node, state="ended", fault=missing))
            return
        if not self._report(replace(node, state="running")):
            return
        options = {
            "grace_seconds": self._equipment.grace_seconds,
            "scratch": str(self._equipment.scratch),
            "mirror": self._equipment.mirror,
            "worker_command": self._equipment.worker_command,
        }
        if start.nodes > 1:
            options |= {"node_rank": node.node, "rdzv_endpoint": endpoint or "", "address": self._host.address}
        share.attempt.run.root.mkdir(parents=True, exist_ok=True)
        try:
            share.start(options)
        except LaunchError as error:
            log.warning("%s: %s", share.attempt, error)
            self._report(replace(node, state="ended", fault=str(error)))

    def _read(self, node: NodeRow) -> tuple[Attempt, Start | None]:
        """The attempt in this host's run directory, and what it starts from, wherever that is.

        Raises UnreadableDocumentError.
        """
        start = Attempt(self._places.run(node.job_id), node.attempt, job_id=node.job_id).read_start()
        return self._attempt(node), start

    def _attempt(self, node: NodeRow) -> Attempt:
        return Attempt(RunDir(self._places.run(node.job_id).root), node.attempt, job_id=node.job_id)

    def _share(self, node: NodeRow, attempt: Attempt, start: Start, first: NodeRow | None) -> Share:
        endpoint = (first.endpoint if first is not None else None) or ""
        place = Node(node.node, endpoint, self._host.address, self._equipment.scratch)
        return Share.of_node(attempt, place, start)

    def _missing_base(self, attempt: Attempt) -> str | None:
        spec = self._places.run(attempt.job_id).readable("spec.json", JobSpec)
        if spec is None or Path(spec.model.path).is_dir():
            return None
        return f"there is no folder {spec.model.path} here. The bases must lie at the same paths on every host (FT_MODELS)."

    def _miss(self, node: NodeRow, what: str) -> None:
        key = (node.job_id, node.attempt, node.node)
        since = self._missed_since.setdefault(key, time.monotonic())
        if node.wanted == "end" or time.monotonic() >= since + UNSEEN_SECONDS:
            self._report(replace(node, state="ended", fault=what))
            self._missed_since.pop(key, None)

    def _report(self, node: NodeRow) -> bool:
        return self._store.report_node(node, self._name)

    def _end_strays(self, nodes: Sequence[NodeRow]) -> None:
        """End what lives here and no row asks for, and remove what over attempts have left in the scratch folder."""
        rows = {(node.job_id, node.attempt, node.node): node for node in nodes if node.host == self._host.host}
        jobs = {job_id for job_id, _, _ in rows}
        for lock in self._equipment.scratch.glob("*.lock"):
            match = _LOCK.fullmatch(lock.name)
            if match is None or (match["job"], int(match["attempt"]), int(match["node"])) in rows:
                continue
            stray = NodeRow(job_id=match["job"], attempt=int(match["attempt"]), node=int(match["node"]), host=self._host.host)
            if self._end_stray(stray):
                lock.unlink(missing_ok=True)
                shutil.rmtree(lock.with_name(f"{lock.stem}-rendezvous"), ignore_errors=True)
                ranks = lock.with_name(f"{stray.job_id}-{stray.node}-ranks.lock")
                if stray.job_id not in jobs and not is_locked(ranks):
                    ranks.unlink(missing_ok=True)

    def _end_stray(self, stray: NodeRow) -> bool:
        """True: nothing of it lives."""
        try:
            attempt, start = self._read(stray)
        except UnreadableDocumentError:
            attempt, start = self._attempt(stray), None
        share = self._share(stray, attempt, start or _unknown_start(stray), None)
        if not share.is_alive():
            return True
        log.warning("%s, node %d: it is not this host's any more, and is ended", attempt, stray.node)
        with contextlib.suppress(OSError):  # the folder is away; its supervisor finds the seal when it is back
            return share.kill(Reason.WORKER_KILLED)
        return False


def _now() -> float:
    """Seconds; goes on while this machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _unknown_start(node: NodeRow) -> Start:
    return Start(job_id=node.job_id, attempt=node.attempt, world_size=1, generation=0, checkpoint=None)


def _free_port(address: str) -> int:
    """A port that nobody listens on now. Raises FtError if the address is not this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise FtError(f"address = {address!r}: this host cannot listen there ({error.strerror}). Give --address.") from None
        return probe.getsockname()[1]
