"""Attempts that start from preloaded workers: the same numbers as cold ones, and nothing that outlives anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.host.lifetime import RANKS_LOCK, is_locked
from ft_service.jobs.states import Ended
from ft_service.launcher.local import LocalLauncher
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, Start
from ft_service.spec import JobSpec
from ft_service.supervisor.warm_start import Standby
from tests.support.attempts import gone, supervisor_of, wait_for
from tests.support.secrets import SECRETS
from tests.support.training.models import save_chat_base, save_chats, spec_for

SECONDS = 300.0
"""Importing PyTorch on a busy machine."""


@pytest.fixture
def standby() -> Iterator[Standby]:
    standby = Standby(5.0, refill_seconds=0.0)
    yield standby
    standby.close()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    return spec_for(
        save_chat_base(folder / "base"),
        save_chats(folder / "train.jsonl", 8),
        ranks=2,
        precision={"default": "nf4", "compute": "bf16"},
        training={"max_steps": 3, "batch_size": 4, "learning_rate": 1e-2},
        lora={"r": 4},
    )


def prepared(folder: Path, spec: JobSpec, steps: int = 3) -> RunDir:
    run = RunDir(folder)
    run.write("spec.json", spec.model_copy(update={"training": spec.training.model_copy(update={"max_steps": steps})}))
    run.write("attempts/1/start.json", Start(job_id=spec.job_id, attempt=1, world_size=2, generation=1, checkpoint=None))
    return run


def ended(launcher: LocalLauncher, run: RunDir) -> Exit | None:
    seen = wait_for(lambda: seen if isinstance(seen := launcher.observe(Attempt(run, 1)), Ended) else None, SECONDS)
    return seen.exit


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def supervisor_log(run: RunDir) -> str:
    return run.path("attempts/1/logs/supervisor.log").read_text()


def test_a_warm_attempt_is_bitwise_a_cold_one(standby: Standby, spec: JobSpec, tmp_path: Path) -> None:
    wait_for(standby.is_ready, SECONDS)
    results = {}
    for name, launcher in (("warm", LocalLauncher(2, standby=standby)), ("cold", LocalLauncher(2))):
        run = prepared(tmp_path / name, spec)
        launcher.start(Attempt(run, 1))
        exit = ended(launcher, run)
        assert exit is not None
        assert exit.reason == "succeeded", exit
        assert ("which was preloaded" in supervisor_log(run)) is (name == "warm")
        results[name] = run.path("adapter/adapter_model.safetensors").read_bytes()
        standby.close()
    assert results["warm"] == results["cold"]
    assert list((tmp_path / "warm/attempts/1/logs").glob("*/attempt_0/1/stderr.log")), "where torchrun's ranks write"


def test_nothing_that_an_agent_imports_begins_cuda() -> None:
    program = Path(__file__).parents[1] / "support/programs/preload_beside_gpus.py"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[3])}
    printed = subprocess.run([sys.executable, program], env=environment, stdout=subprocess.PIPE, check=True).stdout
    seen = json.loads(printed.splitlines()[-1])
    assert (seen["asked"], seen["unsafe"]) == ([], None)
    assert seen["libraries"] == ["libbitsandbytes_cuda128.so"], "its operators on GPUs are there all the same"


def test_whoever_is_killed_no_rank_outlives_the_attempt_and_none_waits_on(
    standby: Standby, spec: JobSpec, tmp_path: Path
) -> None:
    wait_for(standby.is_ready, SECONDS)
    launcher = LocalLauncher(2, standby=standby)
    run = prepared(tmp_path / "run", spec, steps=100_000)
    launcher.start(Attempt(run, 1))
    supervisor = supervisor_of(run)
    (agent,) = wait_for(lambda: children(supervisor.pid), SECONDS)
    ranks = wait_for(lambda: found if len(found := children(agent)) == 2 else None, SECONDS)
    wait_for(lambda: complete_checkpoints(run), SECONDS)
    os.kill(ranks[1], signal.SIGKILL)
    exit = ended(launcher, run)
    assert exit is not None
    assert (exit.reason, exit.error and exit.error.rank) == ("worker_killed", 1)
    assert not is_locked(run.path(RANKS_LOCK))
    wait_for(lambda: gone([supervisor]))

    wait_for(standby.is_ready, SECONDS)
    again = prepared(tmp_path / "again", spec, steps=100_000)
    launcher.start(Attempt(again, 1))
    (agent,) = wait_for(lambda: children(supervisor_of(again).pid), SECONDS)
    wait_for(lambda: len(children(agent)) == 2, SECONDS)
    os.kill(agent, signal.SIGKILL)
    exit = ended(launcher, again)
    assert exit is not None
    assert exit.reason == "worker_killed"
    assert not is_locked(again.path(RANKS_LOCK))


def test_the_one_that_waits_has_no_secret_and_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    standby: Standby = request.getfixturevalue("standby")
    wait_for(standby.is_ready, SECONDS)

    def only_one() -> list[int] | None:
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_ours(entry)]
        return found if len(found) == 1 else None  # those of the tests before are on their way out

    waiting = wait_for(only_one, SECONDS)
    family = [processes.of(pid) for pid in (*waiting, *children(waiting[0]))]
    assert len(family) == 2
    assert not any(b"secret-of-the-server" in Path(f"/proc/{process.pid}/environ").read_bytes() for process in family)
    standby.close()
    wait_for(lambda: gone(family), 30)


def is_ours(process: Path) -> bool:
    """Return whether a process is a waiting supervisor that this test process started: others may run beside it."""
    mark = f"FT_TEST_RUN={os.environ['FT_TEST_RUN']}".encode()
    try:
        return b"--standby" in (process / "cmdline").read_bytes() and mark in (process / "environ").read_bytes()
    except OSError:
        return False
