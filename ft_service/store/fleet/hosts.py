"""Hosts with agents: who is there, what it has, what of each attempt is to run there, and what has become of that.

Whoever writes for a host names the agent that it is: once another agent has joined for the same host, the first one's writes
change nothing. Times are the database's; how long a host was silent is for its readers to judge.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import RowMapping, delete, exists, select, update

from ft_service.errors import ConflictError, NotFoundError
from ft_service.jobs.line import Host
from ft_service.plan.machines import USABLE
from ft_service.store.database import Database, database_time, upsert
from ft_service.store.fleet.tables import attempt_nodes, hosts
from ft_service.store.tables import jobs, slots

AGENTS = "agents"
"""The place of all hosts that agents tell of: whichever process looks, it sees the same."""
FLEET_SECONDS = 5.0
State = Literal["ordered", "running", "ended"]


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """A host that an agent has told of."""

    host: str
    slots: int
    address: str
    kind: str
    gpus: int
    memory: int | None
    """Bytes of one GPU; without GPUs of the host. None: not known."""
    silent_seconds: float = 0.0
    """Since its agent was last heard."""
    seen_at: float = 0.0
    agent: str = ""
    drained_at: float | None = None
    joined_at: float = 0.0
    held: int = 0
    """Slots that jobs hold."""

    def in_queue(self) -> Host:
        """The host as the queue sees it."""
        memory = None if self.memory is None else int(self.memory * USABLE)
        return Host(slots=self.slots, place=AGENTS, kind=self.kind, memory=memory, shared_memory=not self.gpus)


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """What a host is to run of an attempt."""

    job_id: str
    attempt: int
    node: int
    host: str
    wanted: Literal["run", "end"] = "run"
    state: State = "ordered"
    endpoint: str | None = None
    fault: str | None = None


_LIST = select(hosts, (database_time() - hosts.c.seen_at).label("silent")).where(hosts.c.place == AGENTS).order_by(hosts.c.host)
_NODE = [attempt_nodes.c[name] for name in NodeRow.__dataclass_fields__]


def to_host(row: RowMapping) -> HostRow:
    """A host with an agent."""
    return HostRow(
        host=row["host"],
        slots=row["slots"],
        address=row["address"] or "",
        kind=row["kind"] or "",
        gpus=row["gpus"] or 0,
        memory=row["memory"],
        # Heard in the future, by a clock that went back since: as long ago as that is off, until it is heard again.
        silent_seconds=abs(row["silent"]),
        seen_at=row["seen_at"],
        agent=row["agent"] or "",
        drained_at=row["drained_at"],
        joined_at=row["joined_at"] or 0.0,
    )


class HostStore(Database):
    """Hosts, and the nodes of attempts on them."""

    _fleet: tuple[float, list[HostRow]] | None = None

    def join_host(self, host: HostRow, lease_seconds: float) -> str:
        """Tell of a host, by an agent that has just started; returns the agent's name in later calls. Raises ConflictError if
        another agent speaks for it and was heard within the lease."""
        agent = secrets.token_hex(8)
        row = {
            "host": host.host,
            "slots": host.slots,
            "place": AGENTS,
            "address": host.address,
            "kind": host.kind,
            "gpus": host.gpus,
            "memory": host.memory,
            "agent": agent,
            "seen_at": database_time(),
        }
        with self.writing() as connection:
            query = select(hosts.c.agent, hosts.c.place, database_time() - hosts.c.seen_at).where(hosts.c.host == host.host)
            there = connection.execute(query.with_for_update()).one_or_none()
            if there is not None and (there[1] is None or there[0]) and abs(there[2]) < lease_seconds:
                raise ConflictError(
                    f"Host {host.host} has an agent already, heard {abs(there[2]):.0f} s ago: two must not have one name. Stop "
                    f"it, or give this one another (--name). One that was killed is forgotten {lease_seconds:.0f} s after."
                )
            statement = upsert(connection, hosts).values({**row, "joined_at": database_time()})
            connection.execute(statement.on_conflict_do_update(index_elements=["host"], set_=row))
        return agent

    def beat(self, host: str, agent: str) -> bool:
        """Say that a host is there. False: another agent speaks for it now, or it was removed."""
        mine = (hosts.c.host == host, hosts.c.agent == agent)
        with self.writing() as connection:
            return connection.execute(update(hosts).where(*mine).values(seen_at=database_time())).rowcount == 1

    def leave_host(self, host: str, agent: str) -> None:
        """An agent ends in order: the next one of this host need not wait for its lease. What it started goes on."""
        mine = (hosts.c.host == host, hosts.c.agent == agent)
        with self.writing() as connection:
            connection.execute(update(hosts).where(*mine).values(agent=None))

    def list_hosts(self) -> list[HostRow]:
        """All hosts that an agent has told of, by name."""
        with self.reading() as connection:
            rows = connection.execute(_LIST).mappings().all()
            held = list(connection.scalars(select(slots.c.host)))
        return [replace(to_host(row), held=held.count(row["host"])) for row in rows]

    def fleet(self) -> list[HostRow]:
        """The same, as it was at most FLEET_SECONDS ago: for what is asked with every request."""
        moment = time.monotonic()
        if self._fleet is None or moment >= self._fleet[0]:
            self._fleet = (moment + FLEET_SECONDS, self.list_hosts())
        return self._fleet[1]

    def drain_host(self, host: str, drained: bool = True) -> None:
        """Place nothing on a host any more and move what runs there, or end that. Raises NotFoundError."""
        values = {"drained_at": database_time() if drained else None}
        with self.writing() as connection:
            known = (hosts.c.host == host, hosts.c.place == AGENTS)
            if not connection.execute(update(hosts).where(*known).values(values)).rowcount:
                raise _no_host(host)
        self.stirred.set()

    def remove_host(self, host: str) -> None:
        """Forget a host. Raises NotFoundError, ConflictError while jobs hold slots of it."""
        with self.writing() as connection:
            if connection.scalars(select(slots.c.slot).where(slots.c.host == host).limit(1)).one_or_none() is not None:
                raise ConflictError(f"Jobs hold slots of {host}. Drain it first: ft agent drain {host}")
            if not connection.execute(delete(hosts).where(hosts.c.host == host, hosts.c.place == AGENTS)).rowcount:
                raise _no_host(host)

    def order_nodes(self, job_id: str, attempt: int, on: Sequence[str]) -> None:
        """Ask agents to run the nodes of an attempt. `on`: the host of each. Repeating it does nothing."""
        nodes = [NodeRow(job_id=job_id, attempt=attempt, node=node, host=host) for node, host in enumerate(on)]
        with self.writing() as connection:
            project = connection.scalars(select(jobs.c.project_id).where(jobs.c.id == job_id)).one()
            rows = [{**vars(node), "project_id": project} for node in nodes]
            connection.execute(upsert(connection, attempt_nodes).on_conflict_do_nothing(), rows)

    def nodes_of(self, job_id: str, attempt: int) -> list[NodeRow]:
        """The nodes of an attempt, in their order; empty: it was not ordered, or is over."""
        mine = (attempt_nodes.c.job_id == job_id, attempt_nodes.c.attempt == attempt)
        with self.reading() as connection:
            rows = connection.execute(select(*_NODE).where(*mine).order_by(attempt_nodes.c.node)).mappings()
            return [NodeRow(**row) for row in rows]

    def nodes_on(self, host: str) -> list[NodeRow]:
        """What a host is to run or to end, and node 0 of those attempts wherever it is."""
        other = attempt_nodes.alias()
        same = (other.c.job_id == attempt_nodes.c.job_id, other.c.attempt == attempt_nodes.c.attempt, other.c.host == host)
        query = select(*_NODE).where((attempt_nodes.c.node == 0) | (attempt_nodes.c.host == host), exists().where(*same))
        with self.reading() as connection:
            return [NodeRow(**row) for row in connection.execute(query).mappings()]

    def report_node(self, node: NodeRow, agent: str) -> bool:
        """Write what a host's agent says of a node: state, endpoint and fault. False: it is not this agent's to say, or the
        attempt is over."""
        mine = [attempt_nodes.c[name] == getattr(node, name) for name in ("job_id", "attempt", "node", "host")]
        speaks = exists().where(hosts.c.host == node.host, hosts.c.agent == agent)
        values = {"state": node.state, "endpoint": node.endpoint, "fault": node.fault}
        with self.writing() as connection:
            return connection.execute(update(attempt_nodes).where(*mine, speaks).values(values)).rowcount == 1

    def end_nodes(self, job_id: str, attempt: int) -> None:
        """Ask agents to end an attempt's processes. Nodes that nobody has begun are over."""
        mine = (attempt_nodes.c.job_id == job_id, attempt_nodes.c.attempt == attempt)
        with self.writing() as connection:
            connection.execute(update(attempt_nodes).where(*mine).values(wanted="end"))

    def remove_nodes(self, job_id: str, attempt: int) -> None:
        """The attempt is over, on every host that answers."""
        mine = (attempt_nodes.c.job_id == job_id, attempt_nodes.c.attempt == attempt)
        with self.writing() as connection:
            connection.execute(delete(attempt_nodes).where(*mine))


def _no_host(host: str) -> NotFoundError:
    return NotFoundError(f"No agent has told of a host {host!r}. `ft agents` lists them.")
