"""Two hosts with an agent each, as processes; their attempts follow a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ft_service.control.reconciler import Reconciler
from ft_service.errors import ConflictError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.jobs.verbs import Verb
from ft_service.launcher.agents import AgentsLauncher
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.spec import BaseModelRef, DistributedOptions
from ft_service.store.fleet.hosts import HostRow, NodeRow
from ft_service.store.sql import Store, open_store
from tests.support.attempts import all_processes, family, gone, kill_leftovers, signal_all, starts, wait_for
from tests.support.programs import agent as program
from tests.support.reconciling import PROJECT, add_job, get, messages, new_reconciler, step_until

Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def store(emptied_postgres_url: str, tmp_path: Path) -> Iterator[Store]:
    store = open_store(emptied_postgres_url)
    store.ensure_project(PROJECT, "local")
    yield store
    store.close()
    kill_leftovers(tmp_path)


@pytest.fixture
def begin(emptied_postgres_url: str, tmp_path: Path) -> Iterator[Begin]:
    """Start a host's agent."""
    with ExitStack() as stack:

        def begin(host: str, script: str, slots: int = 2) -> subprocess.Popen[bytes]:
            words = [emptied_postgres_url, str(tmp_path), host, str(slots), script]
            process = subprocess.Popen([sys.executable, "-m", "tests.support.programs.agent", *words])
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


@pytest.fixture
def reconciler(tmp_path: Path, store: Store) -> Iterator[Reconciler]:
    launcher = AgentsLauncher(store, program.LEASE_SECONDS)
    reconciler = new_reconciler(tmp_path, store, launcher, lease_seconds=2.0)
    yield reconciler
    reconciler.close()


def joined(store: Store, *hosts: str) -> bool:
    return {host.host for host in store.list_hosts() if host.silent_seconds < 1} >= set(hosts)


def submit(store: Store, folder: Path, job_id: str = "ftjob-1", nodes: int = 1) -> RunDir:
    base = BaseModelRef(name="tiny", path=str(folder))
    options = DistributedOptions(nnodes=nodes, nproc_per_node=2)
    add_job(store, job_id, slots=2 * nodes, nodes=nodes, model=base, distributed=options)
    return RunDir(folder / "runs" / job_id)


def trains(reconciler: Reconciler, store: Store, job_id: str = "ftjob-1") -> None:
    wait_for(lambda: reconciler.step() and get(store, job_id).phase is Phase.TRAINING)


def test_a_job_of_a_host_that_is_killed_goes_on_at_another(
    tmp_path: Path, store: Store, begin: Begin, reconciler: Reconciler
) -> None:
    """With everything that ran there; then the host is back, and starts nothing twice."""
    script = "event,checkpoint=4,hang/event,succeed"
    first = begin("a", script)
    wait_for(lambda: joined(store, "a"))
    run = submit(store, tmp_path)
    trains(reconciler, store)
    wait_for(lambda: run.get("checkpoints/step-4-a1/COMPLETE"))
    lost = all_processes(run)
    begin("b", script)
    signal_all([*family(first.pid), *(process.pid for process in lost)], signal.SIGKILL)
    job = step_until(reconciler, store)
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 1)
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert (start.hosts, start.checkpoint) == (["b"], "step-4-a1")
    assert any("A host that the job ran on was lost. Host a does not answer any more." in text for text in messages(store))
    assert store.nodes_of(job.id, 1) == store.nodes_of(job.id, 2) == []
    again = begin("a", script)
    wait_for(lambda: joined(store, "a") and reconciler.step() is False)
    assert again.poll() is None
    assert (starts(run, 1), starts(run, 2)) == (1, 1)


@pytest.mark.slow
def test_a_host_that_comes_back_ends_what_it_has_lost(
    tmp_path: Path, store: Store, begin: Begin, reconciler: Reconciler
) -> None:
    """It and all its processes stand still for longer than its lease, and go on."""
    script = "event,hang/event,succeed"
    agent = begin("a", script)
    wait_for(lambda: joined(store, "a"))
    run = submit(store, tmp_path)
    trains(reconciler, store)
    zombies = all_processes(run)
    pids = [*family(agent.pid), *(process.pid for process in zombies)]
    signal_all(pids, signal.SIGSTOP)
    begin("b", script)
    assert step_until(reconciler, store).attempt == 2
    assert not gone(zombies)
    signal_all(pids, signal.SIGCONT)
    wait_for(lambda: gone(zombies))
    wait_for(lambda: joined(store, "a"))
    assert starts(run, 1) == 1
    assert agent.poll() is None
    assert {host.held for host in store.list_hosts()} == {0}


def test_a_drained_host_is_left_at_a_checkpoint_and_gets_nothing_more(
    tmp_path: Path, store: Store, begin: Begin, reconciler: Reconciler
) -> None:
    script = "event,wait/event,succeed"
    begin("a", script)
    wait_for(lambda: joined(store, "a"))
    run = submit(store, tmp_path)
    trains(reconciler, store)
    begin("b", script)
    wait_for(lambda: joined(store, "b"))
    store.drain_host("a")
    job = step_until(reconciler, store)
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 0)
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.hosts == ["b"]
    assert any("Its host a is drained: it stops at a checkpoint, and goes on elsewhere." in text for text in messages(store))


@pytest.mark.slow
def test_an_agent_that_is_killed_alone_finds_its_attempt_again(
    tmp_path: Path, store: Store, begin: Begin, reconciler: Reconciler
) -> None:
    first = begin("a", "event,wait")
    wait_for(lambda: joined(store, "a"))
    run = submit(store, tmp_path)
    trains(reconciler, store)
    first.kill()
    first.wait()
    with pytest.raises(ConflictError, match="Host a has an agent already"):
        store.join_host(HostRow(host="a", slots=2, address="", kind="cpu", gpus=0, memory=None), program.LEASE_SECONDS)
    wait_for(lambda: store.list_hosts()[0].silent_seconds > 1.0)
    with store.writing() as connection:  # as if it had ended in order
        connection.exec_driver_sql("UPDATE hosts SET agent = NULL")
    begin("a", "event,wait")
    wait_for(lambda: joined(store, "a"))
    store.request(PROJECT, "ftjob-1", Verb.PAUSE)
    job = step_until(reconciler, store, State.PAUSED)
    assert job.attempt == 1
    assert starts(run, 1) == 1
    assert job.reason is not Reason.HOST_LOST


@pytest.mark.slow
def test_nodes_on_two_hosts_meet_where_the_first_says(
    tmp_path: Path, store: Store, begin: Begin, reconciler: Reconciler
) -> None:
    begin("a", "event,hang")
    begin("b", "event,hang")
    wait_for(lambda: joined(store, "a", "b"))
    run = submit(store, tmp_path, nodes=2)
    trains(reconciler, store)

    def run_on_both() -> list[NodeRow] | None:
        found = store.nodes_of("ftjob-1", 1)
        return found if [node.state for node in found] == ["running", "running"] else None

    nodes = wait_for(run_on_both)
    assert [(node.node, node.host) for node in nodes] == [(0, "a"), (1, "b")]
    assert nodes[0].endpoint is not None
    shares = [Attempt(run, 1).node(index, 2) for index in range(2)]
    supervisors = [wait_for(share.read_supervisor).pid for share in shares]
    for index, pid in enumerate(supervisors):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        assert words[words.index("--rdzv-endpoint") + 1] == nodes[0].endpoint
        assert words[words.index("--node-rank") + 1] == str(index)
    os.kill(supervisors[1], signal.SIGKILL)
    wait_for(lambda: reconciler.step() and get(store).state is State.QUEUED)
    assert get(store).failures == 1
