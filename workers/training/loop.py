"""The loop over optimizer steps: train, validate, report, checkpoint, stop on request.

`Schedule` decides what happens when.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ft_service.rundir.evaluations import by_name
from ft_service.rundir.events import BEFORE_VALID_LOSS, Metrics
from ft_service.spec import JobSpec
from workers.data.batches import BatchOrder, steps_per_epoch, total_steps
from workers.job.training_state import JobState, Validations, learning_rate_at
from workers.layers.dropout import key_of
from workers.layers.served import first_rounded_step, unrounded
from workers.output.checkpoint_pruning import keeps_best
from workers.output.checkpoint_saver import Saver
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import gather_first
from workers.training.context import TrainingContext
from workers.training.evaluation_answers import Evaluator
from workers.training.guards import AdapterWatch, check_step
from workers.training.objective import (
    BatchSums,
    Objective,
    RankShare,
    Shared,
    batch_order,
    loss_with_baseline,
)
from workers.training.step import LossOf, evaluate, forward_backward


class DeviceEvent:
    """The end of all work that this thread has handed to the device so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until that work is done. On the CPU it is done already."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceEvent) -> float:
        """Seconds of the device between two moments that have passed."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._time - earlier._time


@dataclass(frozen=True)
class Schedule:
    """The steps at which things happen. Steps are counted when done: from 1."""

    total_steps: int
    steps_per_epoch: int
    eval_steps: int | None
    save_steps: int
    keep_every: int | None = None
    keeps_best: bool = False
    patience: int | None = None
    rungs: tuple[int, ...] = ()
    """Where a sweep compares its jobs."""

    @classmethod
    def of(cls, spec: JobSpec, samples: int) -> Schedule:
        """`samples`: or pairs, what training.batch_size counts."""
        options = spec.training
        steps = total_steps(samples, options.batch, options.epochs, options.max_steps)
        of_epoch = steps_per_epoch(samples, options.batch)
        return cls(
            total_steps=steps,
            steps_per_epoch=of_epoch,
            eval_steps=options.eval_steps,
            save_steps=spec.checkpoint.interval(of_epoch, steps),
            keep_every=spec.checkpoint.keep_every,
            keeps_best=keeps_best(spec),
            patience=options.early_stopping_patience,
            rungs=spec.rung_steps(steps),
        )

    def ends_at(self, step: int, validations: Validations) -> bool:
        """Whether training is done: at its last step, or before."""
        return step >= self.total_steps or (
            self.patience is not None and validations.without_progress >= self.patience
        )

    def validates_at(self, step: int) -> bool:
        return self.counts_at(step) or step in self.rungs

    def counts_at(self, step: int) -> bool:
        """Whether a validation is one of those that the job asks for, whose progress its patience
        counts.
        """
        return step == self.total_steps or step % (self.eval_steps or self.steps_per_epoch) == 0

    def saves_at(self, step: int, validations: Validations) -> bool:
        """Whether a checkpoint is due. The last step always has one besides."""
        due = step % self.save_steps == 0
        due = due or (self.keep_every is not None and step % self.keep_every == 0)
        return due or (self.keeps_best and step == validations.best_step)


@dataclass(frozen=True)
class StepBegun:
    """A step whose work is queued on the device, and what is known of it before that is done."""

    step: int
    """Counted from 1."""
    rate: float
    items: list[int]
    """Items of its global batch."""
    tokens: int
    trained_tokens: int
    numbers: Tensor
    """fp64 [sums + 1], in the host's memory once `ended` has passed: the objective's sums, and the
    norm of the gradients.
    """
    began: DeviceEvent
    ended: DeviceEvent


@dataclass(frozen=True)
class Trainer:
    """One attempt's loop over the parts that were built for it.

    The host hands a GPU the next step before it reads what the last one made, so that the GPU never
    waits for it.
    """

    context: TrainingContext
    job: JobState
    train: Objective
    valid: Objective
    schedule: Schedule
    saver: Saver
    watch: AdapterWatch
    evaluator: Evaluator | None = None
    """Asked at the last step, and with `on_validation` at every validation."""

    @property
    def runtime(self) -> Runtime:
        return self.context.runtime

    def fit(self) -> str | None:
        """Train to the end, or until a stop is agreed on.

        Returns the checkpoint to resume from; None: training is done.
        """
        late = self.runtime.reads_late
        unread: StepBegun | None = None
        # A job that is resumed has done so in an earlier attempt.
        before = self._validate() if self.job.step == 0 and len(self.valid) else None
        ended = DeviceEvent(self.runtime.device)
        while not self._done:
            begun = self._begin(ended)
            ended = begun.ended
            if unread is not None:
                self._report(unread, self._check(unread), None, before=before)
                before = None
            unread = begun
            stopping = self.context.stop.agreed()
            if late and not stopping and not self._pauses:
                continue
            unread = None
            metrics = self._validated(begun, before)
            before = None
            if stopping or self._done:
                name = self.saver.save_last(self.job, metrics)
                return name if not self._done else None
            if self.schedule.saves_at(self.job.step, self.job.validations):
                self.saver.save(self.job, metrics)
            # Validations and checkpoints are no time of steps.
            ended = DeviceEvent(self.runtime.device)
        return None

    @property
    def _done(self) -> bool:
        return self.schedule.ends_at(self.job.step, self.job.validations)

    @cached_property
    def _order(self) -> BatchOrder:
        return batch_order(self.train, self.runtime.spec)

    @property
    def _pauses(self) -> bool:
        """Whether something follows the step that was just begun and needs its numbers."""
        step = self.job.step
        saves = self.schedule.saves_at(step, self.job.validations)
        return saves or self._done or self._validates

    @property
    def _validates(self) -> bool:
        return len(self.valid) > 0 and self.schedule.validates_at(self.job.step)

    def _begin(self, began: DeviceEvent) -> StepBegun:
        options = self.runtime.spec.training
        distributed = self.runtime.spec.distributed
        batch = self._order.of_step(self.job.step)
        rate = learning_rate_at(self.job.step, self.schedule.total_steps, options)
        tokens = int(self.train.samples.lengths[self.train.members(batch)].sum())
        loss_of = self._loss_of(self.train, batch)
        if distributed.prefetch is not None:
            gather_first(self.context.model)  # while the batch is put together
        mine = self._mine(self.train, batch, self.job.step)
        with unrounded(self.context.model, self._unrounded()):
            sums = forward_backward(
                self.context.model,
                mine,
                self.train.divisor(batch),
                self.runtime.world,
                loss_of=loss_of,
                gradients=self.context.gradients,
            )
        norm = self.job.update(rate, options.max_grad_norm)
        self.job.trained_tokens += tokens
        numbers = _to_host(torch.cat([sums, norm.detach().double().reshape(1)]))
        ended = DeviceEvent(self.runtime.device)
        return StepBegun(
            self.job.step, rate, batch, tokens, self.job.trained_tokens, numbers, began, ended
        )

    def _unrounded(self) -> bool:
        """Whether the step to come is one before precision.served_from_step, the end of which is
        reported.
        """
        precision = self.runtime.spec.precision
        first = first_rounded_step(precision, self.schedule.total_steps)
        if first and self.job.step == first:
            self.context.reporter.message(
                f"From step {first + 1} of {self.schedule.total_steps} on, layers are rounded to "
                f"{precision.served_as} with their adapter (precision.served_from_step)."
            )
        return self.job.step < first

    def _check(self, begun: StepBegun) -> tuple[BatchSums, float]:
        """The step's numbers, once they are there. Raises TrainingError if they are impossible."""
        begun.ended.wait()
        *numbers, norm = begun.numbers.tolist()
        sums = self.train.read(numbers, begun.items)
        check_step(begun.step, sums, norm)
        self.watch.after_step(begun.rate)
        return sums, norm

    def _validated(self, begun: StepBegun, before: BatchSums | None) -> Metrics:
        """Report the newest step, with a validation if one is due. `before`: as of `_report`."""
        numbers = self._check(begun)
        valid = self._validate() if self._validates else None
        if valid is not None:
            threshold = self.runtime.spec.training.early_stopping_threshold
            counts = self.schedule.counts_at(self.job.step)
            self.job.validations = self.job.validations.after(
                self.job.step, valid.mean_loss, threshold, counts=counts
            )
        answered = self._answered(validated=valid is not None)
        return self._report(begun, numbers, valid, answered, before)

    def _answered(self, *, validated: bool) -> dict[str, float]:
        """Metrics of the answers at the newest step, if it is time for them."""
        due = self.evaluator is not None and (
            self._done or (validated and self.evaluator.on_validation)
        )
        if self.evaluator is None or not due:
            return {}
        return by_name(self.evaluator.at(self.job.step, last=self._done) or {})

    def _report(
        self,
        begun: StepBegun,
        numbers: tuple[BatchSums, float],
        valid: BatchSums | None,
        answered: dict[str, float] | None = None,
        before: BatchSums | None = None,
    ) -> Metrics:
        """Report a step. `before`: the validation before the first step, told with that step."""
        sums, norm = numbers
        metrics = Metrics(
            step=begun.step,
            total_steps=self.schedule.total_steps,
            train_loss=sums.mean_loss,
            train_mean_token_accuracy=sums.accuracy,
            valid_loss=valid.mean_loss if valid else None,
            valid_mean_token_accuracy=valid.accuracy if valid else None,
            learning_rate=begun.rate,
            grad_norm=norm,
            tokens=begun.tokens,
            trained_tokens=begun.trained_tokens,
            step_seconds=begun.ended.since(begun.began),
            epoch=begun.step / self.schedule.steps_per_epoch,
            more=_together(sums.more, valid.more if valid else None, answered, before),
        )
        self.context.reporter.metrics(metrics)
        return metrics

    def _validate(self) -> BatchSums:
        items = list(range(len(self.valid)))
        model = self.context.model
        model.eval()
        loss_of = self._loss_of(self.valid, items)
        sums = evaluate(model, self._mine(self.valid, items), self.runtime.world, loss_of)
        model.train()
        return self.valid.read(sums.tolist(), items)

    def _loss_of(self, objective: Objective, items: Sequence[int]) -> LossOf[Any]:
        return loss_with_baseline(
            self.context.model, objective, items, self.runtime.world, self._mine
        )

    def _mine(
        self, objective: Shared, items: Sequence[int], step: int | None = None
    ) -> Iterator[Any]:
        """Yield this rank's micro-batches of a global batch.

        `step`: the optimizer step (from 0) that trains on it, if any.

        That it goes on is reported meanwhile: a step or a validation may take longer than a job may
        be silent.
        """
        spec = self.runtime.spec
        runtime = self.runtime
        random = spec.lora.lora_dropout > 0 or spec.training.neftune_noise_alpha is not None
        key = partial(key_of, "sample", spec.seed, step) if random and step is not None else None
        for batch in RankShare.of(runtime, self.context.limits).batches(objective, items, key):
            self.context.reporter.heartbeat()
            yield batch


def _together(
    train: dict[str, float] | None,
    valid: dict[str, float] | None,
    answered: dict[str, float] | None,
    before: BatchSums | None,
) -> dict[str, float] | None:
    """Metrics.more of a step, of its validation, of its answers and of the time before it."""
    of_valid = {f"valid_{name}": value for name, value in (valid or {}).items()}
    of_before = {} if before is None else {BEFORE_VALID_LOSS: before.mean_loss}
    return {**(train or {}), **of_valid, **(answered or {}), **of_before} or None


def _to_host(numbers: Tensor) -> Tensor:
    """A copy in the host's memory, which a GPU fills when it comes to it."""
    if numbers.device.type == "cpu":
        return numbers
    return torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(
        numbers, non_blocking=True
    )
