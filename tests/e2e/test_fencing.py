"""An attempt whose processes cannot be reached for a while, as on a node that froze: it ends by
itself and changes nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.jobs.reasons import Reason
from ft_service.rundir.attempt_outcome import killed_exit
from ft_service.rundir.checkpoints import complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Exit, Result, Start
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, parse_request, resolve
from tests.support.attempts import digests, family, gone, signal_all
from tests.support.service import SECONDS, eventually

OUTCOME = ("checkpoints", "adapter", "metrics.csv", "manifest.json", "result.json")


def new_run(folder: Path, models: Path, data: Path, steps: int) -> RunDir:
    run = RunDir(folder / "run")
    body = {
        "model": "tiny",
        "training_file": "file-1",
        "lora": {"r": 4},
        "training": {
            "max_steps": steps,
            "batch_size": 16,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
        },
        "distributed": {"nproc_per_node": 2, "replicate": 1},
        "checkpoint": {"save_steps": 10, "save_total_limit": 1},
    }
    spec = resolve(
        parse_request(body),
        JobContext(
            job_id="ftjob-1",
            organization="local",
            model=BaseModelRef(name="tiny", path=str(models / "tiny")),
            training_data=DataFileRef(name=data.name, path=str(data), sha256=sha256_of(data)),
            validation_data=None,
            seed=1,
            gpus=0,
        ),
    )
    run.write("spec.json", spec)
    return run


@contextmanager
def attempt(run: RunDir, number: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An attempt on a host of its own, as far as locks and sockets go."""
    start = Start(
        job_id="ftjob-1",
        attempt=number,
        world_size=2,
        generation=1,
        checkpoint=newest_checkpoint(run),
    )
    run.write(f"attempts/{number}/start.json", start)
    command = [sys.executable, "-P", "-m", "ft_service.supervisor", str(run.root), str(number)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "FT_HOME": str(folder / "home"),
    }
    command += ["--scratch", str(folder / f"host-{number}")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        left = family(process.pid)
        process.kill()
        process.wait()
        signal_all(left[1:], signal.SIGKILL)


@pytest.mark.slow
def test_ranks_whose_supervisor_is_stopped_end_themselves(
    models: Path, data: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, models, data, steps=100_000)
    with attempt(run, 1, tmp_path) as supervisor:
        eventually(lambda: bool(complete_checkpoints(run)))
        ranks = [processes.of(pid) for pid in family(supervisor.pid)[1:]]
        assert len(ranks) >= 3, "torchrun and two ranks"
        supervisor.send_signal(signal.SIGSTOP)
        newest = complete_checkpoints(run)
        eventually(
            lambda: complete_checkpoints(run) != newest and len(complete_checkpoints(run)) == 1
        )
        sealed = killed_exit(Reason.WORKER_KILLED)
        run.write("attempts/1/exit.json", sealed)
        before = markers(run)
        eventually(lambda: gone(ranks))
        assert markers(run) == before
        assert run.get("result.json") is None
        supervisor.send_signal(signal.SIGCONT)
        assert supervisor.wait(SECONDS) == 1
    assert run.read("attempts/1/exit.json", Exit) == sealed


def markers(run: RunDir) -> list[str]:
    return [key for key in run.list("checkpoints") if key.endswith("/COMPLETE")]


@pytest.mark.slow
def test_an_attempt_that_slept_through_the_next_one_changes_nothing_of_it(
    models: Path, data: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, models, data, steps=40)
    with attempt(run, 1, tmp_path) as supervisor:
        eventually(lambda: bool(complete_checkpoints(run)))
        everybody = family(supervisor.pid)
        signal_all(everybody, signal.SIGSTOP)
        frozen = [processes.of(pid) for pid in everybody]
        assert run.get("result.json") is None, "it was stopped on its way"
        with attempt(run, 2, tmp_path) as following:
            assert following.wait(SECONDS) == 0
        before = digests(run.root, *OUTCOME)
        result = run.read("result.json", Result)
        assert result is not None
        assert result.attempt == 2
        assert "adapter/adapter_model.safetensors" in before
        signal_all(everybody[::-1], signal.SIGCONT)  # ranks first: they are to see it themselves
        assert supervisor.wait(SECONDS) == 1
        eventually(lambda: gone(frozen))
    assert digests(run.root, *OUTCOME) == before
    assert not list(run.root.glob("adapter.tmp*"))
