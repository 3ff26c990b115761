"""The losses of a client's training loop, per target token, whose sum is taken. Pure.

lp is the log-probability of a token by the model that is trained, q that by the model that sampled
it, A its advantage, and r = exp(lp - q). All are tensors of one shape, in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ft_service.tinker.loss_calls import CLIP_HIGH, CLIP_LOW

Inputs = Mapping[str, Tensor]
"""Arrays beside the targets (LOSS_INPUTS of ft_service/tinker/loss_calls.py), and SIZES."""
SIZES = "sizes"
"""int64 [data]: targets of each datum."""
Config = Mapping[str, float]


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-w lp. Weights of any sign: a client's own loss comes as its gradient by lp, negated."""
    return -inputs["weights"] * lp


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-r A: the policy gradient of samples of another model (off-policy REINFORCE; Degris, White
    and Sutton, 2012).
    """
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-min(r A, clip(r) A): Schulman et al., 2017, equation 7."""
    ratio = _ratio(lp, inputs)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sg(clip(r)) lp A, where sg lets no gradient through: MiniMax-M1, 2025, equation 4."""
    return -_clipped(_ratio(lp, inputs), config).detach() * lp * inputs["advantages"]


def dro(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-(lp A - beta/2 (lp - q)^2): Richemond et al., 2024, equation 4, with the advantage in place
    of reward less value.
    """
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * (lp - inputs["logprobs"]).square())


def gspo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-min(s A, clip(s) A), with s = sg(exp(mean(lp - q)) / p) p, where p = exp(lp), and the mean
    is over the tokens of the datum whose A is not 0, those of its answer: GSPO (Zheng et al., 2025,
    arXiv 2507.18071) in its form for tokens. Where A is an answer's, divided by its tokens, the sum
    over these is the loss of the answer with one ratio for all of it.
    """
    advantages = inputs["advantages"]
    learned = advantages != 0
    gained = (lp.detach() - inputs["logprobs"]).where(learned, 0.0)
    sizes = inputs[SIZES].tolist()
    ratios = [
        (own.sum() / counted.sum().clamp(min=1)).exp().expand(len(own))
        for own, counted in zip(gained.split(sizes), learned.split(sizes), strict=True)
    ]
    ratio = torch.cat(ratios) * (lp - lp.detach()).where(learned, 0.0).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)


LOSSES: Mapping[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def _ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    """r, but 1 where A is 0: nothing is learned there, and a ratio too large for a number, times 0,
    would be none.
    """
    return (lp - inputs["logprobs"]).where(inputs["advantages"] != 0, 0.0).exp()


def _clipped(ratio: Tensor, config: Config) -> Tensor:
    return ratio.clamp(config[CLIP_LOW], config[CLIP_HIGH])
