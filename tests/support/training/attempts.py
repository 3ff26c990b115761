"""Attempts of real workers in run directories."""

from __future__ import annotations

import contextlib
import csv
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from ft_service.errors import FtError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind, Start
from ft_service.rundir.events import read_segments
from ft_service.spec import JobSpec
from tests.support.bases import describe
from tests.support.ranks import run_on_ranks
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.rendered_here import renders_here
from workers.attempt.attempt import train
from workers.attempt.prepared_model import prepare_alone
from workers.output.report import Reporter
from workers.ranks.runtime import surroundings
from workers.training.context import StopRequest


def supervise(run: RunDir, attempt: int, checkpoint: str | None, world: int = 1) -> int:
    """Exit code of an attempt's supervisor, which starts torchrun and real ranks."""
    start = Start(
        job_id="ftjob-test", attempt=attempt, world_size=world, generation=1, checkpoint=checkpoint
    )
    run.write(f"attempts/{attempt}/start.json", start)
    command = [sys.executable, "-m", "ft_service.supervisor", str(run.root), str(attempt)]
    environment: dict[str, Any] = {
        **os.environ,
        "FT_CACHE": "",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    return subprocess.run(command, env=environment, timeout=300).returncode


def give_description(run: RunDir, base: str) -> None:
    """Put the description of a base, which the service has made, where `as_given` finds it.

    Without it each rank describes the base. That is left to the ranks if the base is refused.
    """
    with contextlib.suppress(FtError):
        _description_for(run).write_bytes(pickle.dumps({base: describe(base)}))


@contextlib.contextmanager
def as_given(run: RunDir) -> Iterator[None]:
    """Have a rank find what `give_description` has put there in place of this host's cache, and
    render with chat templates itself.
    """
    file = _description_for(run)
    known: dict[str, Any] = pickle.loads(file.read_bytes()) if file.is_file() else {}
    with (
        patch("workers.attempt.attempt.cached_description", known.get),
        patch("workers.engine.engine.cached_description", known.get),
        renders_here("workers.training.evaluation_prompts", "workers.tinker.offered_prompts"),
    ):
        yield


def _description_for(run: RunDir) -> Path:
    """Beside the run directory, of which it is no part."""
    return run.root.with_name(f"{run.root.name}.description")


def attempt_on_rank(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """What a worker's process does, on a rank of `run_on_ranks`."""
    runtime = surroundings(RunDir(root), attempt, torch.device("cpu"))
    with (
        as_given(runtime.run),
        Reporter(runtime.run, attempt, active=rank == 0) as reporter,
    ):
        return train(runtime, reporter, StopRequest(runtime), prepare_alone)


def run_attempt(
    run: RunDir,
    attempt: int,
    world: int,
    checkpoint: str | None = None,
    on_rank: Callable[[int, int, str, int], Outcome] = attempt_on_rank,
) -> Outcome:
    """Outcome of an attempt on `world` ranks, the same on all of them."""
    spec = run_spec(run)
    give_tokens(run, spec)
    give_description(run, spec.model.path)
    start = Start(
        job_id=spec.job_id, attempt=attempt, world_size=world, generation=1, checkpoint=checkpoint
    )
    run.write(f"attempts/{attempt}/start.json", start)
    outcomes = run_on_ranks(on_rank, world, str(run.root), attempt)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def run_spec(run: RunDir) -> JobSpec:
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    return spec


def trained(spec: JobSpec, folder: Path, world: int) -> RunDir:
    """The run directory of a job that has succeeded on `world` ranks."""
    run = RunDir(folder)
    run.write("spec.json", spec)
    assert run_attempt(run, 1, world) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def table(run: RunDir) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with run.path("metrics.csv").open() as file:
        return list(csv.DictReader(file))


def messages(run: RunDir) -> list[str]:
    """What the first attempt reported."""
    return [event.message for segment in read_segments(run, 1) for event in segment.events]


def losses(run: RunDir, column: str = "train_loss") -> dict[int, float]:
    """A column of metrics.csv by step."""
    return {int(row["step"]): float(row[column]) for row in table(run) if row[column]}


def adapter(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.path("adapter/adapter_model.safetensors"))
