"""The training state of one job: adapters, optimizer, and position."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from ft_service.spec import TrainingOptions
from workers.job.adamw import AdamW
from workers.job.validation import Validations

DECAY_RATIO = 0.1
"""training.decay_ratio where it is not given."""


class JobState:
    """Adapters (fp32 masters, sharded or not), their AdamW, and the position in training. All of it is in a checkpoint.

    Learning rate, sample order and everything random are functions of the step, so that the step is nearly the whole position.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainingOptions) -> None:
        self.parameters = dict(parameters)
        self.optimizer = AdamW(self.parameters, options.weight_decay, options.loraplus_lr_ratio or 1.0)
        self.step = 0
        """Optimizer steps done."""
        self.trained_tokens = 0
        self.validations = Validations()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, by names that depend neither on wrappers nor on the world size."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"adapter/{name}"] = parameter.detach()
            tensors[f"exp_avg/{name}"] = self.optimizer.exp_avg[name]
            tensors[f"exp_avg_sq/{name}"] = self.optimizer.exp_avg_sq[name]
        return tensors

    def resume_at(self, step: int, trained_tokens: int, validations: Validations) -> None:
        """Continue after optimizer step `step`; `tensors()` were filled in place before."""
        self.step = step
        self.trained_tokens = trained_tokens
        self.validations = validations
        self.optimizer.steps.fill_(float(step))

    def update(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip, step, and clear the gradients. Returns their global 2-norm before clipping: fp32 [], on the parameters' device.

        Nothing waits for the device. If the norm is not finite, neither parameters nor moments change; the step counts all the
        same, for whoever reads the norm ends the job.
        """
        norm = self.optimizer.step(learning_rate, max_grad_norm)
        self.step += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm


def learning_rate_at(step: int, total_steps: int, options: TrainingOptions) -> float:
    """Rate of optimizer step `step` (from 0): a linear warm-up, then the schedule down to 0 after the last step."""
    warmup = math.ceil(options.warmup_ratio * total_steps) if options.warmup_steps is None else options.warmup_steps
    if step < warmup:
        return options.rate * (step + 1) / warmup
    if options.lr_scheduler_type == "warmup_stable_decay":
        decay = math.ceil((DECAY_RATIO if options.decay_ratio is None else options.decay_ratio) * total_steps)
        return options.rate * min(1.0, (total_steps - step) / decay)
    progress = (step - warmup) / max(1, total_steps - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[options.lr_scheduler_type]
    return options.rate * factor
