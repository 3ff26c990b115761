"""A real server process with its reconciler, real workers on a tiny base, and what `/proc` says of
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
from openai.types.fine_tuning import FineTuningJob

from ft_service.rundir.directory import RunDir
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.describing import put_descriptions

Value = TypeVar("Value")
SECONDS = 300.0
"""Long enough for several starts of two ranks on a busy machine."""


class Server:
    """`ft serve` on a free port, with a home of its own.

    Started and killed as often as a test likes.
    """

    def __init__(
        self,
        home: Path,
        models: Path,
        slots: int = 2,
        *,
        described: bool = True,
        api_only: bool = False,
        **settings: str,
    ) -> None:
        """`described`: the server finds the descriptions of its bases in its cache; False: it has
        to make them. `api_only`: a second server of the home, which moves no jobs.
        """
        self.home = home
        self._command = [
            sys.executable,
            "-m",
            "ft_service.cli",
            "serve",
            *(["--api-only"] if api_only else []),
        ]
        self._models = models if described else None
        self._environment = {
            **os.environ,
            "FT_HOME": str(home),
            "FT_MODELS": str(models),
            "FT_PORT": "0",
            "FT_SLOTS": str(slots),
            "CUDA_VISIBLE_DEVICES": "",
            # Threads that wait for each other on a busy machine cost more than they compute.
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.home / "server.json").unlink(missing_ok=True)
        if self._models is not None:
            put_descriptions(self.home, self._models)
        with (self.home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )
        wait_for(lambda: (self.home / "server.json").exists(), SECONDS)

    def client(self, **options: Any) -> openai.OpenAI:
        credentials = json.loads((self.home / "credentials").read_text())
        url = json.loads((self.home / "server.json").read_text())["url"]
        return openai.OpenAI(
            **{
                "base_url": f"{url}/v1",
                "api_key": credentials["api_key"],
                "max_retries": 5,
                **options,
            }
        )

    @property
    def url(self) -> str:
        """Base address of one that was given its FT_PORT."""
        return f"http://127.0.0.1:{self._environment['FT_PORT']}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(HANG_SECONDS)

    def run(self, job_id: str) -> RunDir:
        return RunDir(self.home / "runs" / job_id)


def upload(client: openai.OpenAI, path: Path) -> str:
    with path.open("rb") as file:
        return client.files.create(file=file, purpose="fine-tune").id


def submit(client: openai.OpenAI, data: Path, *, steps: int, **options: Any) -> FineTuningJob:
    """A QLoRA job on two ranks that checkpoints every fourth step."""
    extra = {
        "precision": {"default": "nf4"},
        "lora": {"r": 4},
        "training": {
            "max_steps": steps,
            "batch_size": 16,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
        },
        "distributed": {"nproc_per_node": 2, "replicate": 1},
        "checkpoint": {"save_steps": 4},
        **options.pop("extra", {}),
    }
    file = upload(client, data)
    return client.fine_tuning.jobs.create(
        model="tiny", training_file=file, extra_body=extra, **options
    )


def wait_until(
    client: openai.OpenAI, job_id: str, *states: str, seconds: float = SECONDS
) -> FineTuningJob:
    """The job, once it is in one of the states. Fails at once in another final state."""

    def reached() -> FineTuningJob | None:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in states:
            return job
        assert job.status not in ("succeeded", "failed", "cancelled"), f"{job.status}: {job.error}"
        return None

    return wait_for(reached, seconds, every=0.1)


def wait_until_step(client: openai.OpenAI, job_id: str, step: int, attempt: int = 1) -> int:
    """The job's step, once it has come as far as `step` in attempt `attempt` or a later one."""

    def progress() -> int | None:
        job: Any = client.fine_tuning.jobs.retrieve(job_id)
        assert job.status not in ("succeeded", "failed", "cancelled"), (
            f"{job.status} before step {step}: {job.error}"
        )
        reached = job.progress["step"] if job.progress else 0
        return reached if job.attempt >= attempt and reached >= step else None

    return wait_for(progress, SECONDS, every=0.1)


def processes_of(run: RunDir) -> dict[str, list[int]]:
    """Living processes that name this run directory on their command line: supervisors, torchruns
    and ranks.
    """
    processes: dict[str, list[int]] = {"supervisor": [], "torchrun": [], "rank": []}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if str(run.root) not in words:
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state == "Z":
            continue
        kind = (
            "supervisor"
            if "ft_service.supervisor" in words
            else "torchrun"
            if "torch.distributed.run" in words
            else "rank"
        )
        processes[kind].append(int(entry.name))
    return processes


def all_of(run: RunDir) -> set[int]:
    return {pid for pids in processes_of(run).values() for pid in pids}


def send(pids: set[int], number: signal.Signals) -> None:
    """A signal to those that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze(run: RunDir) -> set[int]:
    """Stop every process of a run in its tracks, those too that others began meanwhile.

    SIGCONT lets them go on.
    """
    stopped: set[int] = set()
    while living := all_of(run) - stopped:
        send(living, signal.SIGSTOP)
        stopped |= living
    return stopped


def nothing_left(run: RunDir) -> bool:
    return not any(processes_of(run).values())


def eventually(what: Callable[[], Value | None], *, every: float = 0.02) -> Value:
    return wait_for(what, SECONDS, every=every)
