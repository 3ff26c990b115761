"""Several hosts with agents, as a user runs them: a server, two `ft agent` on this machine, PostgreSQL, and real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
import torch
from safetensors.torch import load_file

from ft_service.rundir.attempt import Attempt, last_attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Result
from tests.e2e.kills import uninterrupted
from tests.support.attempts import family, signal_all
from tests.support.databases import emptied_postgres_url, migrated_postgres_url, postgres_url
from tests.support.service import Server, all_of, eventually, nothing_left, submit, wait_until, wait_until_step
from tests.support.storage import local_s3, new_bucket

__all__ = ["emptied_postgres_url", "migrated_postgres_url", "postgres_url"]

Begin = Callable[..., subprocess.Popen[bytes]]
OWN_HOME = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$FT_HOME" && exec "$@"', "sh"]
"""Before a command: it finds an empty FT_HOME, which nobody else sees."""


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Object storage in place of a shared folder; to be asked for before the server."""
    done = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"a host with a folder of its own cannot be played here: {done.stderr.decode().strip()}")
    with local_s3():
        monkeypatch.setenv("FT_STORAGE", new_bucket())
        yield


@pytest.fixture
def server(models: Path, tmp_path: Path, emptied_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    settings = {"FT_LAUNCHER": "agents", "FT_DATABASE_URL": emptied_postgres_url, "FT_HOST_LEASE_SECONDS": "10"}
    for name, value in {**settings, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "home", models)
    server.home.mkdir()
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def begin(server: Server, models: Path, tmp_path: Path) -> Iterator[Begin]:
    """`ft agent` of a host."""
    shared = {"FT_HOME": str(server.home), "FT_MODELS": str(models), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def begin(name: str, slots: int, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
            command = [*before, sys.executable, "-m", "ft_service.cli", "agent", "--name", name, "--slots", str(slots)]
            command += ["--address", "127.0.0.1", "--scratch", str(tmp_path / f"scratch-{name}")]
            log = stack.enter_context((tmp_path / f"agent-{name}.log").open("wb"))
            process = subprocess.Popen(command, env={**os.environ, **shared}, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            eventually(lambda: f"Host {name}" in (tmp_path / f"agent-{name}.log").read_text())
            return process

        yield begin


def messages(client: openai.OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id, limit=100)]


def same_adapters(ours: RunDir, theirs: RunDir) -> bool:
    one, other = (load_file(run.path("adapter/adapter_model.safetensors")) for run in (ours, theirs))
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_a_host_dies_with_all_that_runs_there_and_the_result_is_bitwise_the_same(
    server: Server, begin: Begin, data: Path, tmp_path: Path
) -> None:
    agents = {name: begin(name, 2) for name in ("one", "two")}
    client = server.client()
    job = submit(client, data, steps=24)
    wait_until_step(client, job.id, 6)
    run = server.run(job.id)
    first = Attempt(run, 1).read_start()
    assert first is not None
    [lost] = first.hosts
    signal_all([*family(agents[lost].pid), *all_of(run)], signal.SIGKILL)
    wait_until(client, job.id, "succeeded")
    told = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert any(f"Host {lost} does not answer any more" in message for message in told)
    assert last_attempt(run) == 2
    second = Attempt(run, 2).read_start()
    assert second is not None
    assert second.hosts == [name for name in agents if name != lost]
    assert second.checkpoint is not None
    assert same_adapters(run, uninterrupted(run, tmp_path / "whole"))
    eventually(lambda: nothing_left(run))


@pytest.mark.slow
def test_a_job_of_two_nodes_trains_on_two_hosts(server: Server, begin: Begin, data: Path) -> None:
    begin("one", 1)
    begin("two", 1)
    client = server.client()
    job = submit(client, data, steps=4, extra={"distributed": {"nnodes": 2, "nproc_per_node": 1, "replicate": 1}})
    wait_until(client, job.id, "succeeded")
    run = server.run(job.id)
    start = Attempt(run, 1).read_start()
    assert start is not None
    assert (start.hosts, start.nodes, start.world_size) == (["one", "two"], 2, 2)
    assert len(Attempt(run, 1).read_node_exits(2)) == 2
    result = run.read("result.json", Result)
    assert result is not None
    assert result.steps == 4


@pytest.mark.slow
def test_hosts_share_object_storage_and_no_folder(stored: None, server: Server, begin: Begin, data: Path) -> None:
    """One host dies, and the other goes on from a checkpoint that it has never seen."""
    agents = {name: begin(name, 2, OWN_HOME) for name in ("one", "two")}
    client = server.client()
    job = submit(client, data, steps=16)
    wait_until_step(client, job.id, 6)
    assert not (server.home / "runs" / job.id / "checkpoints").exists(), "a folder is shared"
    run = server.run(job.id)
    lost = next(name for name in agents if f"2 slots of {name}." in "".join(messages(client, job.id)))
    signal_all([*family(agents[lost].pid), *all_of(run)], signal.SIGKILL)
    wait_until(client, job.id, "succeeded")
    done: Any = client.fine_tuning.jobs.retrieve(job.id)
    assert done.attempt == 2
    assert any(f"Host {lost} does not answer any more" in message for message in messages(client, job.id))
    steps = [e.data["step"] for e in client.fine_tuning.jobs.list_events(job.id, limit=100) if e.type == "metrics"]  # pyright: ignore
    assert set(steps) == set(range(1, 17))
    address = f"{client.base_url}fine_tuning/jobs/{job.id}/adapter"
    with urlopen(Request(address, headers={"authorization": f"Bearer {client.api_key}"})) as archive:
        assert b"adapter_model.safetensors" in archive.read()
    eventually(lambda: nothing_left(run))
