from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_service import installation
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, Start
from ft_service.rundir.engine import ENGINE
from ft_service.supervisor import torchrun
from ft_service.supervisor.torchrun import Node
from tests.support.attempts import new_run, process_of, supervisor_of, wait_for
from tests.support.ports import listening_sockets

WORKERS = """
import os, pathlib, signal, sys, time
from ft_service.host.lifetime import die_with_parent, hold_rank_lock
die_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ignores it, and would wait half a minute for ranks that do so too
hold_rank_lock(sys.argv[1])
pids = pathlib.Path(sys.argv[1], "pids")
pids.mkdir(exist_ok=True)
rank = os.environ["RANK"]
(pids / f".{rank}").write_text(str(os.getpid()))
(pids / f".{rank}").rename(pids / f"1-{rank}")
print("cwd", os.getcwd(), "init", os.environ["FT_INIT_METHOD"], flush=True)
time.sleep(600)
"""


def start_of(**changes: object) -> Start:
    values = {"job_id": "j", "attempt": 3, "world_size": 2, "generation": 1, "checkpoint": None}
    return Start.model_validate({**values, **changes})


def test_the_environment_keeps_what_the_caller_set_and_fixes_what_safety_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "OMP_NUM_THREADS": "7",
        "NCCL_SOCKET_IFNAME": "eth1",
        "PYTHONSAFEPATH": "",
        "HOME": "/home/me",
    }
    found = torchrun.environment(given, start_of(), RunDir(tmp_path), Node())
    assert (found["OMP_NUM_THREADS"], found["NCCL_SOCKET_IFNAME"], found["HOME"]) == (
        "7",
        "eth1",
        "/home/me",
    )
    assert found["PYTHONSAFEPATH"] == "1"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr("ft_service.supervisor.torchrun.core_count", lambda: 6)
    assert torchrun.environment({}, start_of(), RunDir(tmp_path), Node())["OMP_NUM_THREADS"] == "3"
    assert (
        torchrun.environment({"FT_HOME": "/state"}, start_of(), RunDir(tmp_path), Node())[
            "FT_CACHE"
        ]
        == "/state/cache"
    )
    assert (
        torchrun.environment(
            {"FT_HOME": "/state", "FT_CACHE": ""}, start_of(), RunDir(tmp_path), Node()
        )["FT_CACHE"]
        == ""
    )
    assert (
        torchrun.environment({}, start_of(world_size=1000), RunDir(tmp_path), Node())[
            "OMP_NUM_THREADS"
        ]
        == "1"
    )


@pytest.mark.parametrize("own", torchrun.ALLOCATOR)
def test_gpu_memory_is_taken_in_segments_that_grow_unless_the_caller_says_otherwise(
    tmp_path: Path, own: str
) -> None:
    found = torchrun.environment({}, start_of(), RunDir(tmp_path), Node())
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    found = torchrun.environment(
        {own: "max_split_size_mb:64"}, start_of(), RunDir(tmp_path), Node()
    )
    assert {name: found[name] for name in torchrun.ALLOCATOR if name in found} == {
        own: "max_split_size_mb:64"
    }


def test_an_engines_directory_is_run_by_the_engines_ranks(tmp_path: Path) -> None:
    assert torchrun.command(start_of(), RunDir(tmp_path), Node())[-2:] == ["-m", "workers.train"]
    RunDir(tmp_path).put(ENGINE, b"{}")
    assert torchrun.command(start_of(), RunDir(tmp_path), Node())[-2:] == ["-m", "workers.engine"]


def test_several_nodes_meet_at_the_first_and_are_not_bound_to_the_loopback_interface(
    tmp_path: Path,
) -> None:
    start = start_of(world_size=8, nodes=2)
    run = RunDir(tmp_path)
    first, second = (
        Node(index, endpoint="host-0:29400", address=f"10.0.0.{index}") for index in range(2)
    )
    words = torchrun.command(start, run, first)
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--rdzv-endpoint") + 1] == "host-0:29400"
    assert words[words.index("--local-addr") + 1] == "10.0.0.0"
    assert "is_host=1,join_timeout=900" in words
    assert "is_host=0,join_timeout=900" in torchrun.command(start, run, second)
    found = torchrun.environment({}, start, run, second)
    assert not found.keys() & {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", torchrun.INIT_METHOD}
    assert found["FT_RANKS_LOCK"] == str(tmp_path / "ranks-1.lock")


@pytest.mark.parametrize(
    ("gpus", "slots", "expected"),
    [
        (["0", "1", "2", "3"], [2, 3], "2,3"),
        (["4", "GPU-abc"], [1], "GPU-abc"),
        (["0", "1"], [], None),
        ([], [0, 1], None),
    ],
)
def test_ranks_see_the_gpus_of_their_slots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    slots: list[int],
    expected: str | None,
) -> None:
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: gpus)
    assert (
        torchrun.environment({}, start_of(slots=slots), RunDir(tmp_path), Node()).get(
            "CUDA_VISIBLE_DEVICES"
        )
        == expected
    )


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert torchrun.tail(log, 3) == ""
    log.write_text("".join(f"line {n}\n" for n in range(50_000)))
    assert torchrun.tail(log, 3) == "line 49997\nline 49998\nline 49999"
    assert len(torchrun.tail(log, 100_000)) <= torchrun.TAIL_BYTES


def test_the_guilty_ranks_errors_come_before_torchruns_own(tmp_path: Path) -> None:
    (tmp_path / torchrun.LOG).write_text("torchrun's")
    folder = tmp_path / "attempt-1_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    assert torchrun.guilty_tail(tmp_path, 1) == "torchrun's"
    (folder / "stderr.log").write_text("rank 1's")
    assert torchrun.guilty_tail(tmp_path, 1) == "rank 1's"
    assert torchrun.guilty_tail(tmp_path, None) == "torchrun's"


def test_a_real_torchrun_listens_on_nothing_and_says_which_rank_was_killed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path_factory.mktemp("stand-in")
    (stand_in / "workers").mkdir()
    (stand_in / "workers" / "__init__.py").touch()
    (stand_in / "workers" / "train.py").write_text(WORKERS)
    # Workers are taken from beside it.
    (stand_in / "ft_service").symlink_to(installation.ROOT / "ft_service")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])
    )
    run = new_run(folder)
    (run.root / "workers").mkdir()
    (run.root / "workers" / "__init__.py").touch()
    (run.root / "workers" / "train.py").write_text(
        "raise SystemExit('shadowed by the working directory')"
    )
    LocalLauncher(2).start(Attempt(run, 1))
    ranks = [process_of(run, f"1-{rank}") for rank in range(2)]
    torchrun_pid = parent_of(ranks[0].pid)
    assert parent_of(torchrun_pid) == supervisor_of(run).pid
    assert listening_sockets(torchrun_pid) == {}
    output = wait_for(lambda: rank_output(run, 0))  # which a rank writes after its number
    assert f"cwd {run.root} init file://{run.root}/attempts/1/rendezvous/ranks" in output
    os.kill(ranks[1].pid, 9)
    found = wait_for(lambda: run.read("attempts/1/exit.json", Exit))
    assert (found.reason, found.message) == ("worker_killed", "Rank 1 was killed by SIGKILL.")


def rank_output(run: RunDir, rank: int) -> str:
    return "".join(
        path.read_text() for path in run.root.glob(f"attempts/1/logs/*/attempt_0/{rank}/stdout.log")
    )


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
