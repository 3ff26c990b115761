"""Each loss against its formula written out, number by number, with the gradient by differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from workers.tinker.losses import LOSSES, SIZES

LP = [-0.2, -1.5, -3.0, -0.7]
INPUTS = {
    "logprobs": [-0.4, -1.0, -3.0, -2.0],
    "advantages": [1.0, -2.0, 0.5, 3.0],
    "weights": [1.0, -0.5, 0.0, 2.0],
}
CONFIG: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.3},
}

Scalar = Callable[[float, float, float, float], float]


def clip(ratio: float) -> float:
    return min(max(ratio, 0.8), 1.2)


VALUE: Mapping[str, Scalar] = {
    "cross_entropy": lambda lp, q, a, w: -w * lp,
    "importance_sampling": lambda lp, q, a, w: -math.exp(lp - q) * a,
    "ppo": lambda lp, q, a, w: -min(math.exp(lp - q) * a, clip(math.exp(lp - q)) * a),
    "cispo": lambda lp, q, a, w: -clip(math.exp(lp - q)) * lp * a,
    "dro": lambda lp, q, a, w: -(lp * a - 0.15 * (lp - q) ** 2),
}
SLOPE: Mapping[str, Scalar] = {
    "cross_entropy": lambda lp, q, a, w: -w,
    "importance_sampling": lambda lp, q, a, w: -math.exp(lp - q) * a,
    # No gradient where clipping holds the smaller of the two.
    "ppo": lambda lp, q, a, w: (
        -math.exp(lp - q) * a if math.exp(lp - q) * a <= clip(math.exp(lp - q)) * a else 0.0
    ),
    "cispo": lambda lp, q, a, w: -clip(math.exp(lp - q)) * a,
    "dro": lambda lp, q, a, w: -(a - 0.3 * (lp - q)),
}


@pytest.mark.parametrize("name", CONFIG)
def test_values_and_gradients(name: str) -> None:
    logs = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    inputs = {key: torch.tensor(values, dtype=torch.float64) for key, values in INPUTS.items()}
    losses = LOSSES[name](logs, inputs, CONFIG[name])
    losses.sum().backward()
    places = list(zip(LP, INPUTS["logprobs"], INPUTS["advantages"], INPUTS["weights"], strict=True))
    assert losses.tolist() == pytest.approx([VALUE[name](*place) for place in places])
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([SLOPE[name](*place) for place in places])


@pytest.mark.parametrize("high", [1.2, 1.5])
def test_gspo_has_one_ratio_for_an_answer(high: float) -> None:
    """Equation 5 of its paper, with plain autograd: two answers, the first behind a prompt."""
    sizes = [5, 3]
    answers = [slice(2, 5), slice(5, 8)]
    rewards = [1.5, -0.5]
    logs = torch.tensor([-9, -9, -0.2, -1.5, -0.4, -0.7, -2.0, -1.0], dtype=torch.float64)
    sampled = torch.tensor([0, 0, -0.4, -1.9, -1.0, -0.6, -1.5, -1.2], dtype=torch.float64)
    of_tokens = torch.tensor([0, 0, *[0.5] * 3, *[-0.5 / 3] * 3], dtype=torch.float64)
    ours = logs.clone().requires_grad_()
    theirs = logs.clone().requires_grad_()
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": high}
    inputs = {"logprobs": sampled, "advantages": of_tokens, SIZES: torch.tensor(sizes)}
    losses = LOSSES["gspo"](ours, inputs, config)
    losses.sum().backward()
    truth = torch.zeros((), dtype=torch.float64)
    for answer, reward in zip(answers, rewards, strict=True):
        ratio = (theirs[answer] - sampled[answer]).mean().exp()
        truth = truth - torch.minimum(ratio * reward, ratio.clamp(0.5, high) * reward)
    truth.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert losses.sum().item() == pytest.approx(truth.item())
    assert ours.grad.tolist() == pytest.approx(theirs.grad.tolist())
    assert (ours.grad[2] == 0) == (high == 1.2), "the first answer's ratio is 1.49"


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_tokens_without_an_advantage_count_nothing(name: str) -> None:
    """Such as those of a prompt, for which a client puts any log-probability: this ratio is
    infinite.
    """
    logs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1000.0, -1.0]), "advantages": torch.tensor([0.0, 1.0])}
    losses = LOSSES[name](logs, inputs, CONFIG[name])
    losses.sum().backward()
    assert losses[0] == 0
    assert logs.grad is not None
    assert logs.grad.tolist() == [0.0, -1.0]
