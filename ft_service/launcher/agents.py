"""The reconciler's side: attempts as rows that the agents of hosts act on and report on.

    start     one row for each node, on the hosts whose slots the attempt holds
    signal    control.json, which the supervisors read
    kill      control.json, the attempt's seal, and rows that ask agents to end what is left
    observe   what the rows say; and where a host is gone, that the attempt is over

A host is gone when its agent was not heard for the lease, on the database's clock and on this process's own: a database that
was away itself has made nobody silent. What such a host still runs cannot be ended from here, and need not be: the seal
(`ft_service/rundir/fence.py`) ends it as soon as it can see the run directory, and before that it can publish nothing. Nothing
new is placed on it until its agent is heard again, and that agent has first ended what is not its own any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ft_service.jobs.line import Host
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running
from ft_service.launcher.hearing import Hearing
from ft_service.launcher.silence import Silence
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.documents import Control, Desired, ErrorInfo, Exit, ExitReason
from ft_service.spec import JobSpec
from ft_service.store.fleet.hosts import AGENTS, HostRow, HostStore, NodeRow
from ft_service.supervisor.verdict import conclude, exit_of, killed_exit

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How long a look at all hosts is good for."""
RECORD_SECONDS = 5.0
"""How long a node's exit record is waited for after its agent has said that it ended."""


class AgentsLauncher:
    """All hosts with agents as one place. For one thread, but for `away_seconds`."""

    def __init__(self, store: HostStore, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._hearing = Hearing(lease_seconds, clock)
        self._silence = Silence(clock)
        self._rows: dict[str, HostRow] = {}
        self._looked_at = float("-inf")
        self._wordless_since: dict[tuple[str, int], float] = {}
        """Attempt → since when an agent says that a node has ended, and its record is not seen."""

    @property
    def host(self) -> str:
        """The same for whichever replica of the service looks."""
        return AGENTS

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    @property
    def hosts(self) -> Mapping[str, Host]:
        """Hosts that answer and are not drained."""
        return {
            name: row.in_queue()
            for name, row in self._look().items()
            if row.drained_at is None and not self._hearing.is_doubtful(row)
        }

    @property
    def away_seconds(self) -> float:
        """0: it is the database, which everybody asks."""
        return 0.0

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        start = attempt.read_start()
        if start is None or attempt.has_exit():
            return
        self._store.order_nodes(attempt.job_id, attempt.number, start.hosts)

    def observe(self, attempt: Attempt) -> Observation:
        nodes = self._store.nodes_of(attempt.job_id, attempt.number)
        if not nodes:
            ended = attempt.read_exit()
            return Absent() if ended is None else Ended(ended, newest_step(attempt.run))
        rows = self._look()
        gone = [node for node in nodes if self._hearing.is_gone(rows.get(node.host))]
        open_nodes = [node for node in nodes if node.state != "ended" and node not in gone]
        failed = self._failed(attempt, nodes)
        if failed is not None and failed.fault is None and not gone and self._may_still_be_seen(attempt):
            return self._running(attempt, nodes, rows)
        if not open_nodes and not any(node.state != "ended" for node in gone):
            return self._ended(attempt, nodes)
        lost = [node for node in gone if node.state != "ended"]
        if lost:
            self._end(attempt, _gone(lost[0].host, attempt))
        elif failed is not None:
            self._end(attempt, None if failed.fault is None else _unstarted(failed))
        if not open_nodes:
            return self._ended(attempt, nodes)
        return self._running(attempt, nodes, rows)

    def signal(self, attempt: Attempt, control: Control) -> None:
        attempt.write_control(control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        self._end(attempt, _result(attempt) or killed_exit(reason))

    def clean(self, attempt: Attempt) -> None:
        self._wordless_since.pop((attempt.job_id, attempt.number), None)
        self._silence.forget(attempt)
        self._store.remove_nodes(attempt.job_id, attempt.number)

    def _running(self, attempt: Attempt, nodes: list[NodeRow], rows: Mapping[str, HostRow]) -> Running:
        seen = self._silence.running(attempt)
        drained = sorted({node.host for node in nodes if node.host in rows and rows[node.host].drained_at is not None})
        if drained:
            return replace(seen, leaving=f"Its host {drained[0]} is drained")
        return seen

    def _ended(self, attempt: Attempt, nodes: list[NodeRow]) -> Ended:
        """No node runs any more, or can."""
        ended = attempt.read_exit()
        if ended is None:
            ended = _result(attempt) or self._concluded(attempt, nodes)
            if ended is not None:
                attempt.write_exit(ended)
        return Ended(ended, newest_step(attempt.run))

    def _concluded(self, attempt: Attempt, nodes: list[NodeRow]) -> Exit | None:
        fault = next((node for node in nodes if node.fault is not None), None)
        if fault is not None:
            return _unstarted(fault)
        exits = attempt.read_node_exits(len(nodes))
        return conclude(len(nodes), exits, attempt.read_outcome(), None) if exits else None

    def _failed(self, attempt: Attempt, nodes: list[NodeRow]) -> NodeRow | None:
        """A node that has ended without a word, so that the others wait for it in vain; None: there is none, or it is known how
        the attempt ends."""
        if attempt.has_exit() or _result(attempt) is not None:
            return None
        ended = (node for node in nodes if node.state == "ended")
        return next(
            (node for node in ended if node.fault is not None or not attempt.node(node.node, len(nodes)).has_exit()), None
        )

    def _may_still_be_seen(self, attempt: Attempt) -> bool:
        """Whether a record that a node has left may not be seen here yet: shared folders show what is new a moment later."""
        key = (attempt.job_id, attempt.number)
        return self._clock() - self._wordless_since.setdefault(key, self._clock()) < RECORD_SECONDS

    def _end(self, attempt: Attempt, ended: Exit | None) -> None:
        """Seal an attempt and have what is left of it ended: by supervisors that see this, or by the agents."""
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        attempt.write_exit(ended or exit_of(ExitReason.WORKER_KILLED, "A supervisor vanished without an exit record."))
        self._store.end_nodes(attempt.job_id, attempt.number)

    def _look(self) -> Mapping[str, HostRow]:
        if self._clock() - self._looked_at >= LOOK_SECONDS:
            self._rows = {row.host: row for row in self._store.list_hosts()}
            self._looked_at = self._clock()
            self._hearing.note(self._rows.values())
        return self._rows


def _result(attempt: Attempt) -> Exit | None:
    result = attempt.read_result()
    if result is None:
        return None
    return exit_of(ExitReason.SUCCEEDED, f"Training has finished after {result.steps} steps.")


def _gone(host: str, attempt: Attempt) -> Exit:
    said = f"Host {host} does not answer any more."
    return _result(attempt) or exit_of(ExitReason.HOST_LOST, said, ErrorInfo(code="worker_lost", message=said))


def _unstarted(node: NodeRow) -> Exit:
    said = f"On host {node.host}: {node.fault}"
    return exit_of(ExitReason.WORKER_ERROR, said, ErrorInfo(code="launch_failed", message=said))
