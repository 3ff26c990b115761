"""The prompts of each step, and what is due at it. Pure. Steps are optimizer steps, from 1."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from ft_service.spec import JobSpec

MOST_EVAL_INTERVAL = 20
"""Steps between two evaluations at most with eval_interval "auto"."""


@dataclass(frozen=True)
class RolloutSchedule:
    """The steps of a job."""

    prompts: int
    """Number of prompts to train on."""
    batch: int
    """Prompts of a step; the last step of an epoch may have fewer."""
    total_steps: int
    eval_interval: int
    save_interval: int
    keep_every: int | None
    validates: bool
    steps_ahead: int
    seed: int

    @classmethod
    def of(cls, spec: JobSpec, prompts: int, validation: int) -> RolloutSchedule:
        """`prompts`, `validation`: numbers of prompts."""
        options = spec.reinforcement
        assert options is not None, "the job's answers are sampled"
        training = spec.training
        of_epoch = math.ceil(prompts / training.batch)
        steps = training.max_steps or training.epochs * of_epoch
        return cls(
            prompts=prompts,
            batch=training.batch,
            total_steps=steps,
            eval_interval=min(MOST_EVAL_INTERVAL, of_epoch)
            if options.eval_interval is None
            else options.eval_interval,
            save_interval=spec.checkpoint.interval(of_epoch, steps),
            keep_every=spec.checkpoint.keep_every,
            validates=validation > 0,
            steps_ahead=options.steps_ahead,
            seed=spec.seed,
        )

    @property
    def steps_of_epoch(self) -> int:
        return math.ceil(self.prompts / self.batch)

    def prompts_of(self, step: int) -> list[int]:
        """Numbers of a step's prompts. Each epoch has another order, which the seed decides."""
        epoch, place = divmod(step - 1, self.steps_of_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.prompts)
        return [int(number) for number in order[place * self.batch : (place + 1) * self.batch]]

    def sampled_from(self, step: int) -> int:
        """Number of steps after which the weights were saved that a step's answers are sampled
        from.
        """
        return max(0, step - 1 - (self.steps_ahead if step <= self.total_steps else 0))

    def is_evaluated(self, after: int) -> bool:
        """Whether the weights after so many steps answer the validation file."""
        return self.validates and (after % self.eval_interval == 0 or after == self.total_steps)

    def is_saved(self, after: int) -> bool:
        """Whether a checkpoint is due after so many steps. There is always one at the end."""
        intervals = (self.save_interval, *([self.keep_every] if self.keep_every else []))
        return 0 < after < self.total_steps and any(after % interval == 0 for interval in intervals)


def seed_of(seed: int, step: int, prompt: int) -> int:
    """The seed with which a prompt's answers are drawn. `step`: 0 and below: of an evaluation."""
    return zlib.crc32(f"{seed}/{step}/{prompt}".encode())
