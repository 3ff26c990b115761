"""Jobs by the worker's own main path, in this process: a run directory in, events out."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, Start
from ft_service.rundir.events import Event, Metrics, read_segments
from ft_service.spec import JobSpec
from workers.attempt import attempt as attempts
from workers.attempt import prepared_model
from workers.model.build import BuiltModel
from workers.output.report import Reporter
from workers.ranks.runtime import surroundings
from workers.training.context import StopRequest

OnStep = Callable[[int], None]
"""Called on rank 0 when a step's numbers are reported, with its number, from 1."""


class StepReporter(Reporter):
    """A reporter that also calls a function at every step."""

    on_step: OnStep | None = None

    def metrics(self, metrics: Metrics) -> None:
        super().metrics(metrics)
        if self.on_step is not None:
            self.on_step(metrics.step)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process only, unless it is in one: gloo for all devices, which needs
    no library of the GPU's.
    """
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def prepare(
    folder: Path, spec: JobSpec, world: int = 1, checkpoint: str | None = None, attempt: int = 1
) -> RunDir:
    """A run directory in which an attempt is to be started."""
    run = RunDir(folder)
    run.write("spec.json", spec)
    Attempt(run, attempt).write_start(
        Start(
            job_id=spec.job_id,
            attempt=attempt,
            world_size=world,
            generation=1,
            checkpoint=checkpoint,
        )
    )
    return run


def train_on(
    device: torch.device, run: RunDir, attempt: int = 1, on_step: OnStep | None = None
) -> Outcome:
    """One rank of an attempt, in the process group that this process is in."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with StepReporter(run, attempt, active=dist.get_rank() == 0) as reporter:
        reporter.on_step = on_step
        runtime = surroundings(run, attempt, device)
        return attempts.train(runtime, reporter, StopRequest(runtime), prepared_model.prepare_alone)


def train_on_rank(rank: int, world: int, root: str, attempt: int, device: str) -> Outcome:
    """What every process of several on one device does. gloo: NCCL wants a device a rank."""
    os.environ["FT_CACHE"] = ""
    return train_on(
        torch.device(device, 0) if device == "cuda" else torch.device(device), RunDir(root), attempt
    )


def events_of(run: RunDir, attempt: int = 1) -> list[Event]:
    return [event for segment in read_segments(run, attempt) for event in segment.events]


def steps_of(run: RunDir, attempt: int = 1) -> list[tuple[float, Metrics]]:
    """When each step was reported, seconds since the epoch, and its numbers."""
    return [
        (event.time, event.metrics)
        for event in events_of(run, attempt)
        if event.kind == "metrics" and event.metrics
    ]


def losses_of(run: RunDir, attempt: int = 1) -> list[float]:
    return [metrics.train_loss or 0.0 for _, metrics in steps_of(run, attempt)]


def adapter_bytes(run: RunDir) -> bytes:
    """The file of the adapter that a job ended with."""
    return run.path("adapter/adapter_model.safetensors").read_bytes()


def warnings_of(run: RunDir, attempt: int = 1) -> str:
    return "; ".join(event.message for event in events_of(run, attempt) if event.level != "info")


@contextmanager
def steps_alone() -> Iterator[None]:
    """Jobs inside end with their last step: what follows, such as another process that reads the
    adapter, is not measured.
    """
    with ExitStack() as stack:
        for name in ("measure", "pictured_probe"):
            stack.enter_context(patch.object(attempts, name, lambda *_: []))
        for name in ("measure_forgetting", "publish"):
            stack.enter_context(patch.object(attempts, name, lambda *_: None))
        yield


@contextmanager
def built_once(on_built: Callable[[], None]) -> Iterator[None]:
    """Jobs inside that have one base, format, kind of checkpointing and value of
    distributed.compile train on one model, built by the first of them: the base is not read again.

    `on_built`: called before the first step of every job.
    """
    models: dict[tuple[Any, ...], BuiltModel] = {}
    construct = prepared_model.construct

    def kept(spec: JobSpec, *arguments: Any, **options: Any) -> BuiltModel:
        how = spec.distributed
        kind = spec.model.path, spec.precision.format, how.checkpointing, how.compile is True
        if kind not in models:
            models.clear()  # one at a time in the device's memory
            gc.collect()
            models[kind] = construct(spec, *arguments, **options)
        on_built()
        return models[kind]

    with patch.object(prepared_model, "construct", kept):
        yield
