"""Advantages of answers from the rewards of their group, and their weights in the loss. Pure.

The policy gradient of a group of answers to one prompt takes the group's mean reward as its
baseline (GRPO: Shao et al., DeepSeekMath, 2024, equation 3; without its division by the standard
deviation: Liu et al., Dr. GRPO, 2025, section 3). Where each step of an answer has a reward, the
baseline is the mean over all steps of the group (process supervision: DeepSeekMath, section 4.1.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ft_service.spec.methods import ReinforcementLoss

LEAST_DEVIATION = 1e-4
"""Added to the standard deviation that divides, as TRL's GRPOTrainer does."""
SAME = 1e-9
"""Difference up to which rewards are the same, of them and in all: a sum of scores is rounded (0.1
+ 0.2 is not 0.3).
"""


def advantages(rewards: Sequence[float | None], scale: Literal["none", "group"]) -> list[float]:
    """The advantage of each answer of a group.

    Answers without a reward (None) count for nothing: their advantage is 0.

    All are 0 if fewer than two answers have a reward, or all have the same within rounding.
    """
    known = iter(_normalised([reward for reward in rewards if reward is not None], scale))
    return [0.0 if reward is None else next(known) for reward in rewards]


def step_advantages(
    rewards: Sequence[Sequence[float]], scale: Literal["none", "group"]
) -> list[list[float]]:
    """The advantage of each step of each answer of a group: the sum of the normalised rewards of
    this step and of later ones.

    `rewards`: of each answer those of its steps, in their order; an answer that has none counts for
    nothing. All are 0 if fewer than two answers have any, or all are the same within rounding.
    """
    known = [reward for own in rewards for reward in own]
    if sum(map(bool, rewards)) < 2:
        return [[0.0] * len(own) for own in rewards]
    normalised = iter(_normalised(known, scale))
    parts = [[next(normalised) for _ in own] for own in rewards]
    return [[math.fsum(own[place:]) for place in range(len(own))] for own in parts]


def _normalised(rewards: Sequence[float], scale: Literal["none", "group"]) -> list[float]:
    """Rewards less their mean, and divided by their deviation if `scale` is group; zeros if they
    are fewer than two, or the same within rounding.
    """
    if len(rewards) < 2 or math.isclose(min(rewards), max(rewards), rel_tol=SAME, abs_tol=SAME):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    divisor = 1.0
    if scale == "group":  # the sample's, with Bessel's correction, as torch's std
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
        divisor = math.sqrt(variance) + LEAST_DEVIATION
    return [(reward - mean) / divisor for reward in rewards]


def weights(lengths: Sequence[int], loss_type: ReinforcementLoss, longest: int) -> list[float]:
    """The weight of each token of an answer in the step's loss, which is a sum.

    `lengths`: tokens of all answers of the step with a reward, also of those whose advantage is 0;
    0 for those that are left out; `longest`: most tokens of an answer.

    dapo: one over all tokens (Yu et al., DAPO, 2025, equation 8). grpo: one over answers times the
    answer's tokens (DeepSeekMath, equation 3). dr_grpo: one over answers times the most tokens (Dr.
    GRPO, section 3.2). gspo: as grpo (Zheng et al., GSPO, 2025, equation 5).
    """
    count = max(1, len(lengths))
    tokens = max(1, sum(lengths))
    match loss_type:
        case "dapo":
            return [1.0 / tokens] * len(lengths)
        case "grpo" | "gspo":
            return [1.0 / (count * max(1, length)) for length in lengths]
        case "dr_grpo":
            return [1.0 / (count * longest)] * len(lengths)
