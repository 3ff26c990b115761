"""Whole jobs, from a create body to what their ranks leave: taken as the service takes them,
trained by real gloo ranks.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ft_service.data.data_file import DataReport
from ft_service.data.examiner import Examiner, data_files
from ft_service.data.formats.reading import estimate_samples
from ft_service.data.statistics import DataStatistics
from ft_service.data.token_folder import FOLDER
from ft_service.plan.admit import admit
from ft_service.plan.machines import host_cpu
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind, Start
from ft_service.spec import (
    AdapterRef,
    BaseModelRef,
    JobContext,
    JobSpec,
    inherit,
    parse_request,
    resolve,
)
from tests.support.bases import describe
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import attempt_on_rank, run_spec
from tests.support.training.checks import REREAD_BY_PEFT
from tests.support.training.combinations import Body, merged, save_base, save_data
from workers.output.checkpoint_saver import WITH_ADAPTERS
from workers.training.loop import Trainer

PARENT: Body = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "precision": {"default": "nf4", "compute": "fp32"},
}
CLOCKS = ("step_seconds", "checkpoint_stall_seconds", "checkpoint_seconds")


@dataclass(frozen=True)
class Job:
    """A job that was admitted, and what its data are like."""

    spec: JobSpec
    statistics: DataStatistics


@dataclass
class Workshop:
    """The bases, data and tuned models that jobs name, made when the first one names them."""

    folder: Path
    examiner: Examiner
    parents: dict[str, AdapterRef] = field(default_factory=dict)

    @property
    def tokens(self) -> Path:
        """The tokens that the examiner keeps."""
        return self.folder / "tokens"

    def admitted(self, body: Body, base: str, data: str) -> Job:
        """A create body as the service takes it: resolved, planned, its files read.

        Raises SpecError.
        """
        request = parse_request(body)
        parent = None
        if request.model == "parent":
            parent = self._parent(base)
            request = inherit(request, run_spec(RunDir(Path(parent.path).parent)), parent.name)
        files = self._data(data)
        training = files["training"]
        spec = resolve(
            request,
            JobContext(
                job_id="ftjob-test",
                organization="local",
                model=BaseModelRef(name=base, path=str(self._base(base))),
                training_data=training,
                validation_data=files[request.validation_file] if request.validation_file else None,
                seed=7,
                gpus=0,
                parent=parent,
                date="2026-01-01",
                samples=estimate_samples(Path(training.path), most=100)
                if request.counts_samples
                else None,
            ),
        )
        lengths = SampleLengths.of_size(Path(training.path).stat().st_size)
        spec = admit(describe(spec.model.path), spec, host_cpu(), lengths).spec
        for param, file in data_files(spec):
            report = self.examiner.examine_file(param, file, Path(file.path), spec, print)
            assert isinstance(report, DataReport), report
        statistics = self.examiner.measure_job(spec)
        assert isinstance(statistics, DataStatistics), statistics
        return Job(spec, statistics)

    def _base(self, name: str) -> Path:
        path = self.folder / "bases" / name
        return path if path.exists() else save_base(path, name)

    def _data(self, kind: str) -> dict[str, Any]:
        return save_data(self.folder / "data" / kind, kind)

    def _parent(self, base: str) -> AdapterRef:
        """A tuned model of a base, after two steps."""
        if base not in self.parents:
            run = RunDir(self.folder / "parents" / base)
            short = {
                "model": base,
                "training_file": "training",
                "training": {"max_steps": 2, "learning_rate": 5e-3},
            }
            run.write("spec.json", self.admitted(merged(PARENT, short), base, "chats").spec)
            train([Run(run)], 1)
            parent = {
                "name": f"ft:{base}:local::parent",
                "job_id": "ftjob-test",
                "path": str(run.path("adapter")),
            }
            self.parents[base] = AdapterRef(**parent, shared_experts=run_spec(run).shared_experts)
        return self.parents[base]


@dataclass(frozen=True)
class Run:
    """A run directory with its spec.json, and how its attempts go."""

    directory: RunDir
    pause: int | None = None
    """The step after which the first attempt is asked to stop; a second one continues from
    there.
    """
    tokens: Path | None = None
    """Where the service has kept tokens; None: the ranks make them."""
    with_adapters: bool = False
    """Checkpoints hold adapters too, as for a service without torch."""


def train(runs: Iterable[Run], world: int) -> None:
    """Train each to its end, on ranks that are started once."""
    run_on_ranks(_train, world, list(runs))


def _train(rank: int, world: int, runs: list[Run]) -> None:
    for own in runs:
        environment = {
            FOLDER: str(own.tokens or ""),
            WITH_ADAPTERS: "1" if own.with_adapters else "",
        }
        with patch.dict(os.environ, environment), REREAD_BY_PEFT:
            checkpoint = None
            if own.pause is not None:
                with patch("workers.attempt.attempt.Trainer", _Paused(own.pause)):
                    outcome = _attempt(rank, world, own.directory, 1, None)
                assert outcome.kind is OutcomeKind.STOPPED, outcome
                checkpoint = outcome.checkpoint
                assert checkpoint is not None
            outcome = _attempt(
                rank, world, own.directory, 1 if checkpoint is None else 2, checkpoint
            )
        assert outcome.kind is OutcomeKind.SUCCEEDED, outcome


def _attempt(rank: int, world: int, run: RunDir, attempt: int, checkpoint: str | None) -> Outcome:
    if rank == 0:
        start = Start(
            job_id=run_spec(run).job_id,
            attempt=attempt,
            world_size=world,
            generation=1,
            checkpoint=checkpoint,
        )
        run.write(f"attempts/{attempt}/start.json", start)
    torch.distributed.barrier()
    return attempt_on_rank(rank, world, str(run.root), attempt)


@dataclass(frozen=True)
class _Paused:
    """Makes a Trainer that is asked to stop after a step."""

    step: int

    def __call__(self, *parts: Any, **more: Any) -> Trainer:
        trainer = Trainer(*parts, **more)
        stop: Any = _StopAt(trainer, self.step)
        return replace(trainer, context=replace(trainer.context, stop=stop))


@dataclass(frozen=True)
class _StopAt:
    trainer: Trainer
    step: int

    def agreed(self) -> bool:
        return self.trainer.job.step == self.step


def table(run: RunDir) -> list[dict[str, str]]:
    """metrics.csv without what clocks measured."""
    with run.path("metrics.csv").open() as file:
        return [
            {name: value for name, value in row.items() if name not in CLOCKS}
            for row in csv.DictReader(file)
        ]
