"""Engines on real gloo ranks, and what their jobs leave, compared bit for bit with the same jobs
alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, Start
from ft_service.rundir.engine import ENGINE, SeatOrder, seat_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.events import read_segments
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import (
    adapter,
    as_given,
    give_description,
    losses,
    run_attempt,
)
from tests.support.training.kept_tokens import give_tokens
from workers.engine.engine import TrainingEngine, load_described_base
from workers.ranks.runtime import surroundings
from workers.training.context import StopRequest

CPU = torch.device("cpu")


def ran_alone(spec: JobSpec, folder: Path, world: int) -> RunDir:
    run = RunDir(folder)
    run.write("spec.json", spec)
    assert run_attempt(run, 1, world).kind == "succeeded"
    return run


def prepare(
    spec: JobSpec, run: RunDir, engine: RunDir, attempt: int = 1, checkpoint: str | None = None
) -> None:
    """Write what the service writes for a job that takes a seat."""
    run.write("spec.json", spec)
    give_tokens(run, spec)
    start = Start(
        job_id=spec.job_id,
        attempt=attempt,
        world_size=2,
        generation=1,
        checkpoint=checkpoint,
        engine=str(engine.root),
    )
    run.write(f"attempts/{attempt}/start.json", start)
    order = SeatOrder(job_id=spec.job_id, attempt=attempt, run_dir=str(run.root))
    engine.write(seat_key(spec.job_id, attempt), order)


def new_engine(folder: Path, spec: JobSpec, world: int = 2) -> RunDir:
    engine = RunDir(folder)
    limits = {"most_seats": 8, "idle_seconds": 0.3}
    give_description(engine, spec.model.path)
    engine.write(ENGINE, EngineSpec(engine_id="engine-1", project_id="proj", spec=spec, **limits))
    engine.write(
        "attempts/1/start.json",
        Start(job_id="engine-1", attempt=1, world_size=world, generation=1, checkpoint=None),
    )
    return engine


def engine_on_rank(rank: int, world: int, root: str) -> None:
    """What a rank of an engine does."""
    run = RunDir(root)
    spec = run.read(ENGINE, EngineSpec)
    assert spec is not None
    runtime = surroundings(run, 1, CPU, spec=spec.spec)
    with as_given(run):
        base = load_described_base(spec.spec, runtime.mesh, CPU)
        TrainingEngine(spec, runtime, base, StopRequest(runtime)).run()


def has_reported(run: RunDir, step: int) -> bool:
    """Whether the first attempt of a job has reported this step or a later one."""
    with contextlib.suppress(OSError):
        events = [event for segment in read_segments(run, 1) for event in segment.events]
        return any(event.metrics is not None and event.metrics.step >= step for event in events)
    return False


def follow(run: RunDir, step: int, act: Callable[[], None]) -> threading.Thread:
    """Act once an attempt has reported a step."""

    def wait() -> None:
        while not has_reported(run, step):
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def state_of(run: RunDir, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    reader = FileSystemReader(run.path(f"checkpoints/{name}"))
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(held.size) for key, held in found.items()}
    with warnings.catch_warnings(action="ignore"):  # that it loads in one process
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def exit_of(run: RunDir, attempt: int = 1) -> Exit:
    ended = Attempt(run, attempt).read_exit()
    assert ended is not None
    return ended


def assert_same(found: RunDir, expected: RunDir) -> None:
    """Losses, adapter and optimizer state, bit for bit."""
    assert losses(found) == losses(expected)
    assert losses(found, "valid_loss") == losses(expected, "valid_loss")
    assert losses(found, "grad_norm") == losses(expected, "grad_norm")
    whole = adapter(expected)
    assert adapter(found).keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(found).items())
    last = complete_checkpoints(expected)[-1]
    states = [state_of(run, complete_checkpoints(run)[-1]) for run in (found, expected)]
    assert complete_checkpoints(found)[-1].split("-a")[0] == last.split("-a")[0]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def run_together(specs: Sequence[JobSpec], folder: Path, world: int = 2) -> list[RunDir]:
    engine = new_engine(folder / "engine", specs[0], world)
    runs = [RunDir(folder / spec.job_id) for spec in specs]
    for spec, run in zip(specs, runs, strict=True):
        prepare(spec, run, engine)
    run_on_ranks(engine_on_rank, world, str(engine.root))
    return runs


def changed(spec: JobSpec, **training: Any) -> JobSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})
