"""Two nodes of one attempt on this host, each with its supervisor and a real torchrun, whose ranks
need no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_service import installation
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, Start
from tests.support.attempts import wait_for
from tests.support.ports import free_port

SECONDS = 180.0
WORKERS = """
import os, pathlib, sys, time
from ft_service.host.lifetime import die_with_parent, hold_rank_lock
die_with_parent()
hold_rank_lock(sys.argv[1])
node = pathlib.Path(os.environ["FT_RANKS_LOCK"]).stem[-1]
told = pathlib.Path(sys.argv[1], f"rank-{node}-{os.environ['LOCAL_RANK']}")
told.write_text(os.environ["RANK"])
if node == "1" and os.environ["LOCAL_RANK"] == "1":
    others = [told.with_name(f"rank-{node}-{local}") for node in "01" for local in "01"]
    while not all(path.exists() for path in others):
        time.sleep(0.05)
    raise ValueError("the loss is not a number")
time.sleep(600)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "stand-in" / "workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(WORKERS)
    # Workers are taken from beside it.
    package.with_name("ft_service").symlink_to(installation.ROOT / "ft_service")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    )


def supervise(run: RunDir, node: int, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "ft_service.supervisor",
        str(run.root),
        "1",
        "--grace",
        "2",
    ]
    command += [
        "--node-rank",
        str(node),
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--address",
        "127.0.0.1",
    ]
    return subprocess.Popen(
        [*command, *(["--conclude"] if node == 0 else [])], stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_the_error_of_one_node_is_told_though_the_other_had_to_be_killed(folder: Path) -> None:
    run = RunDir(folder / "run")
    start = Start(job_id="ftjob-1", attempt=1, world_size=4, generation=1, checkpoint=None, nodes=2)
    run.write("attempts/1/start.json", start)
    port = free_port()
    nodes = [supervise(run, node, port) for node in range(2)]
    try:
        failed = wait_for(lambda: run.read("attempts/1/nodes/1/exit.json", Exit), SECONDS)
        # What a cluster does with the other pods of a Job that has failed.
        nodes[0].send_signal(signal.SIGTERM)
        assert nodes[0].wait(SECONDS) == 1
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    rank = int(run.path("rank-1-1").read_text())
    message = f"Rank {rank} (node 1) failed: ValueError: the loss is not a number"
    assert (failed.reason, failed.message) == ("worker_error", message)
    assert failed.error is not None
    assert failed.error.rank == rank
    assert "Traceback" in (failed.error.traceback or ""), (
        "its own log was found by its number on the node"
    )
    killed = run.read("attempts/1/nodes/0/exit.json", Exit)
    assert killed is not None
    assert (killed.reason, killed.message) == (
        "stop_timeout",
        "The ranks of node 0 did not stop in time and were killed.",
    )
    assert run.read("attempts/1/exit.json", Exit) == failed
