"""`ft run` on two hosts without a cluster: two calls over one run directory; and two network
namespaces as two hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, Result, Start
from tests.support.ports import free_port
from tests.support.service import SECONDS, eventually

NAMESPACE_PREFIX = "ft-test"


def write_spec(folder: Path, models: Path, data: Path, steps: int, **distributed: int) -> Path:
    body = {
        "model": str(models / "tiny"),
        "training_file": str(data),
        "lora": {"r": 4},
        "training": {"max_steps": steps, "batch_size": 8, "learning_rate": 1e-3},
        "distributed": {"nnodes": 2, "nproc_per_node": 1, **distributed},
        "checkpoint": {"save_steps": 5},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


@contextmanager
def two_hosts(
    spec: Path,
    run_dir: Path,
    endpoint: str,
    options: list[list[str]],
    prefixes: list[list[str]],
    env: dict[str, str],
):
    """`ft run` on both; killed if they still run in the end."""
    command = [
        sys.executable,
        "-m",
        "ft_service.cli",
        "run",
        str(spec),
        "--run-dir",
        str(run_dir),
        "--json",
    ]
    command += ["--rdzv-endpoint", endpoint]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    hosts = [
        subprocess.Popen(
            [*prefixes[rank], *command, "--node-rank", str(rank), *options[rank]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (1, 0)  # in any order
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            if host.poll() is None:
                host.kill()
            host.communicate()


@pytest.mark.slow
def test_two_hosts_share_a_run_directory(models: Path, data: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, models, data, steps=10)
    run = RunDir(tmp_path / "run")
    endpoint = f"127.0.0.1:{free_port()}"
    local = {"GLOO_SOCKET_IFNAME": "lo", "FT_HOME": str(tmp_path / "home")}
    with two_hosts(
        spec, run.root, endpoint, [["--address", "127.0.0.1"]] * 2, [[], []], local
    ) as hosts:
        ended = [json.loads(host.communicate(timeout=SECONDS)[0]) for host in hosts]
    assert [(end["reason"], host.returncode) for end, host in zip(ended, hosts, strict=True)] == [
        ("succeeded", 0)
    ] * 2
    result = run.read("result.json", Result)
    assert result is not None
    assert (result.attempt, result.steps) == (1, 10)
    assert run.get("attempts/1/nodes/1/exit.json") is not None


# Network namespaces
# ------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two hosts on one cable: 10.77.0.1 and 10.77.0.2, in network namespaces that nothing else is
    in.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"{NAMESPACE_PREFIX}-{os.getpid()}-{index}" for index in range(2)]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("netns", "add", names[1])
        ip(
            "link",
            "add",
            "cable0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable1",
            "netns",
            names[1],
        )
        for index, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", f"cable{index}")
            ip("-n", name, "link", "set", f"cable{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def on_namespaces(namespaces: list[str], spec: Path, run: RunDir, folder: Path):
    """`ft run` in each."""
    before = [
        ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=cable{rank}"]
        for rank, name in enumerate(namespaces)
    ]
    addresses = [["--address", f"10.77.0.{rank + 1}"] for rank in range(2)]
    return two_hosts(
        spec,
        run.root,
        f"10.77.0.1:{free_port()}",
        addresses,
        before,
        {"FT_HOME": str(folder / "home")},
    )


@pytest.mark.slow
def test_a_cut_of_the_network_is_outlived(
    namespaces: list[str], models: Path, data: Path, tmp_path: Path
) -> None:
    """TCP sends again what was lost: training stands still while one host is away, and
    continues.
    """
    spec = write_spec(tmp_path, models, data, steps=120)
    run = RunDir(tmp_path / "run")
    with on_namespaces(namespaces, spec, run, tmp_path) as hosts:
        eventually(lambda: bool(complete_checkpoints(run)))
        ip("-n", namespaces[1], "link", "set", "cable1", "down")
        cut_at = len(run.list("attempts/1/events"))
        time.sleep(4)  # the cut itself: nothing in it can be waited for
        assert len(run.list("attempts/1/events")) <= cut_at + 2, (
            "a host does not train without the other"
        )
        ip("-n", namespaces[1], "link", "set", "cable1", "up")
        ended = [json.loads(host.communicate(timeout=SECONDS)[0]) for host in hosts]
    assert [end["reason"] for end in ended] == ["succeeded"] * 2
    result = run.read("result.json", Result)
    assert result is not None
    assert (result.attempt, result.steps) == (1, 120)


@pytest.mark.slow
def test_a_cut_that_outlasts_the_limit_ends_both_hosts_and_the_same_commands_go_on(
    namespaces: list[str], models: Path, data: Path, tmp_path: Path
) -> None:
    """Nothing of either host is left while the network is still down, each says why, and no step is
    lost but those since the last checkpoint.
    """
    spec = write_spec(tmp_path, models, data, steps=60, collective_timeout_seconds=10)
    run = RunDir(tmp_path / "run")
    with on_namespaces(namespaces, spec, run, tmp_path) as hosts:
        eventually(lambda: bool(complete_checkpoints(run)))
        ip("-n", namespaces[1], "link", "set", "cable1", "down")
        ended = [json.loads(host.communicate(timeout=SECONDS)[0]) for host in hosts]
        codes = [host.returncode for host in hosts]
    assert [end["reason"] for end in ended] == ["worker_error"] * 2
    assert all("cannot be reached: the others waited 10 seconds" in end["message"] for end in ended)
    assert codes == [1, 1]
    assert [
        subprocess.check_output(["ip", "netns", "pids", name], text=True) for name in namespaces
    ] == ["", ""]
    outcome = run.read("attempts/1/outcome.json", Outcome)
    assert outcome is not None
    assert outcome.error is not None
    assert outcome.error.code == "collective_timeout"
    ip("-n", namespaces[1], "link", "set", "cable1", "up")
    with on_namespaces(namespaces, spec, run, tmp_path) as hosts:
        ended = [json.loads(host.communicate(timeout=SECONDS)[0]) for host in hosts]
    assert [end["reason"] for end in ended] == ["succeeded"] * 2
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint is not None
