"""The training state of one job: adapters, optimizer, and position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from ft_service.spec import TrainingOptions
from workers.job.adamw import AdamOptions, AdamW


class Validations(BaseModel):
    """Summary of all validations up to a step."""

    model_config = ConfigDict(frozen=True)

    last_step: int = 0
    """Step of the newest validation; 0: not validated yet."""
    last_loss: float | None = None
    """Loss of the newest validation; None: not finite, or not validated yet."""
    best_step: int = 0
    """Step of the lowest loss, the first of equal ones; 0: no finite loss yet."""
    best_loss: float | None = None
    undercut: float | None = None
    """Loss that a validation must undercut by more than the threshold to count as progress."""
    without_progress: int = 0
    """Number of consecutive validations without progress."""

    def after(
        self, step: int, loss: float, threshold: float, *, counts: bool = True
    ) -> Validations:
        """Return the summary with one more validation.

        `threshold`: training.early_stopping_threshold. `counts`: whether it is one of those that
        training.early_stopping_patience counts.
        """
        finite = math.isfinite(loss)
        best = finite and (self.best_loss is None or loss < self.best_loss)
        progress = finite and (self.undercut is None or loss < self.undercut - threshold)
        return Validations(
            last_step=step,
            last_loss=loss if finite else None,
            best_step=step if best else self.best_step,
            best_loss=loss if best else self.best_loss,
            undercut=loss if progress and counts else self.undercut,
            without_progress=(0 if progress else self.without_progress + 1)
            if counts
            else self.without_progress,
        )

    def loss_at(self, step: int) -> float | None:
        """Return the loss of the newest validation if it was at this step, else None."""
        return self.last_loss if step == self.last_step else None


DECAY_RATIO = 0.1
"""Default of training.decay_ratio."""


class JobState:
    """Adapters (fp32 masters, sharded or not), their AdamW, and the position in training.

    A checkpoint contains all of it.

    Learning rate, sample order and all random numbers are functions of the step, so the step is
    nearly the whole position.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: TrainingOptions,
        changed: Callable[[], None] | None = None,
    ) -> None:
        """`changed`: called after each change of the parameters; None: nothing follows from
        them.
        """
        self._changed = changed or _nothing
        self.parameters = dict(parameters)
        self.optimizer = AdamW(
            self.parameters,
            AdamOptions.of(options),
            options.loraplus_lr_ratio or 1.0,
            in_8_bits=options.optim == "adamw_8bit",
        )
        self.step = 0
        """Optimizer steps done."""
        self.trained_tokens = 0
        self.validations = Validations()
        self.command = -1
        """Number of the newest command that changed the parameters or the optimizer
        (ft_service/tinker); -1: none has.
        """
        self.updates = 0
        """Optimizer steps since the moments began: `step` unless others were loaded, or a gradient
        was not finite.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint, by names that depend neither on wrappers nor on the
        world size.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"adapter/{name}"] = parameter.detach()
            for kind, tensor in self.optimizer.state(name).items():
                tensors[f"{kind}/{name}"] = tensor
        return tensors

    def resume_at(
        self, step: int, trained_tokens: int, validations: Validations, *, updates: int
    ) -> None:
        """Continue after optimizer step `step`; `tensors()` were filled in place before.

        `updates`: those of the moments.
        """
        self.step = step
        self.trained_tokens = trained_tokens
        self.validations = validations
        self.take_loaded(updates)

    def take_loaded(self, updates: int) -> None:
        """Continue with tensors that were filled in place.

        `updates`: those of their moments; 0: there are none.
        """
        self.updates = updates
        self.optimizer.steps.fill_(float(updates))
        if not updates:
            self.optimizer.forget()
        self._changed()

    def update(
        self, learning_rate: float, max_grad_norm: float, options: AdamOptions | None = None
    ) -> Tensor:
        """Clip, step, and clear the gradients.

        Returns their global 2-norm before clipping: fp32 [], on the parameters' device.

        It does not wait for the device. `options`: of this step; None: the job's. If the norm is
        not finite, neither parameters nor moments change; the step is counted anyway, because the
        reader of the norm ends the job.
        """
        norm = self.optimizer.step(learning_rate, max_grad_norm, options)
        self.step += 1
        self.updates += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        self._changed()
        return norm


def _nothing() -> None:
    """Do nothing."""


def learning_rate_at(step: int, total_steps: int, options: TrainingOptions) -> float:
    """Return the learning rate of step `step` (from 0): a linear warm-up, then the schedule, which
    ends at 0, or at min_lr_ratio, behind the last step.
    """
    warmup = (
        math.ceil(options.warmup_ratio * total_steps)
        if options.warmup_steps is None
        else options.warmup_steps
    )
    if step < warmup:
        return options.rate * (step + 1) / warmup
    least = options.min_lr_ratio or 0.0
    return options.rate * (
        least + (1.0 - least) * _share(step - warmup, total_steps - warmup, total_steps, options)
    )


def _share(step: int, steps: int, total_steps: int, options: TrainingOptions) -> float:
    """Return the share of the fall that is still to come, 1 to 0, at step `step` of `steps` behind
    the warm-up.
    """
    if options.lr_scheduler_type == "warmup_stable_decay":
        decay = math.ceil(
            (DECAY_RATIO if options.decay_ratio is None else options.decay_ratio) * total_steps
        )
        return min(1.0, (steps - step) / min(decay, steps))
    progress = step / max(1, steps)
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[options.lr_scheduler_type]
