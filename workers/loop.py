"""The loop over optimizer steps: train, validate, report, checkpoint, stop when asked. What happens when is decided by
`Schedule`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ft_service.events import Metrics
from ft_service.spec import JobSpec
from workers import checkpoint
from workers.data.batches import Batch, Tokens, batch_of_step, collate, micro_batches, steps_per_epoch, total_steps
from workers.guards import AdapterWatch, check_step
from workers.optim import JobState, learning_rate_at
from workers.parallel import gather_first
from workers.report import Reporter
from workers.runtime import Runtime
from workers.step import Sums, evaluate, forward_backward
from workers.stop import StopRequest


@dataclass(frozen=True)
class Schedule:
    """When what happens. Steps are counted as done: from 1."""

    total_steps: int
    steps_per_epoch: int
    eval_steps: int | None
    save_steps: int | None

    @classmethod
    def of(cls, spec: JobSpec, samples: int) -> Schedule:
        options = spec.training
        return cls(
            total_steps=total_steps(samples, options.batch_size, options.n_epochs, options.max_steps),
            steps_per_epoch=steps_per_epoch(samples, options.batch_size),
            eval_steps=options.eval_steps,
            save_steps=spec.checkpoint.save_steps,
        )

    def validates_at(self, step: int) -> bool:
        return step == self.total_steps or step % (self.eval_steps or self.steps_per_epoch) == 0

    def saves_at(self, step: int) -> bool:
        return step == self.total_steps or step % (self.save_steps or self.steps_per_epoch) == 0


@dataclass(frozen=True)
class Trainer:
    """One attempt's loop over the parts that were built for it."""

    runtime: Runtime
    model: nn.Module
    job: JobState
    train: Sequence[Tokens]
    valid: Sequence[Tokens]
    schedule: Schedule
    reporter: Reporter
    stop: StopRequest
    watch: AdapterWatch

    def fit(self) -> str | None:
        """Train to the end, or until a stop is agreed on; the checkpoint to go on from, None when training is done."""
        while self.job.step < self.schedule.total_steps:
            metrics = self._step()
            done = self.job.step == self.schedule.total_steps
            stopping = not done and self.stop.agreed()
            if not (stopping or self.schedule.saves_at(self.job.step)):
                continue
            name = self._save(metrics)
            if stopping:
                return name
        return None

    def _step(self) -> Metrics:
        started = time.perf_counter()
        options = self.runtime.spec.training
        step = self.job.step + 1
        batch = batch_of_step(self.job.step, len(self.train), options.batch_size, self.runtime.spec.seed)
        rate = learning_rate_at(self.job.step, self.schedule.total_steps, options)
        targets = sum(self.train[i].target_count for i in batch)
        distributed = self.runtime.spec.distributed
        if distributed.prefetch is not None:
            gather_first(self.model)  # while the batch is put together
        mine = self._mine(self.train, batch)
        sums = forward_backward(self.model, mine, targets, self.runtime.world, keep_unsharded=distributed.keep_unsharded)
        norm = self.job.update(rate, options.max_grad_norm)
        check_step(step, sums, norm)
        self.watch.after_step(rate)
        tokens = sum(len(self.train[i].ids) for i in batch)
        self.job.trained_tokens += tokens
        seconds = time.perf_counter() - started
        valid = self._validate() if self.valid and self.schedule.validates_at(self.job.step) else None
        metrics = Metrics(
            step=self.job.step,
            total_steps=self.schedule.total_steps,
            train_loss=sums.mean_loss,
            train_mean_token_accuracy=sums.accuracy,
            valid_loss=valid.mean_loss if valid else None,
            valid_mean_token_accuracy=valid.accuracy if valid else None,
            learning_rate=rate,
            grad_norm=norm,
            tokens=tokens,
            trained_tokens=self.job.trained_tokens,
            step_seconds=seconds,
            epoch=self.job.step / self.schedule.steps_per_epoch,
        )
        self.reporter.metrics(metrics)
        return metrics

    def _validate(self) -> Sums:
        self.model.eval()
        sums = evaluate(self.model, self._mine(self.valid, range(len(self.valid))), self.runtime.world)
        self.model.train()
        return sums

    def _save(self, metrics: Metrics) -> str:
        name = checkpoint.save(self.job, self.runtime.run, self.runtime.start.attempt, self.runtime.spec)
        self.reporter.checkpoint(name, metrics)
        return name

    def _mine(self, samples: Sequence[Tokens], batch: Sequence[int]) -> list[Batch]:
        """This rank's micro-batches of a global batch."""
        size = self.runtime.spec.training.per_device_train_batch_size
        parts = micro_batches(batch, self.runtime.rank, self.runtime.world, size)
        return [collate([samples[i] for i in part], self.runtime.device) for part in parts]
