"""How far a student's probabilities are from its teacher's, at each token over all words, with the
gradient in the student's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_service.spec import DistillationOptions

DIVERGENCE_SUMS = (
    "loss",
    "correct",
    "kl/forward",
    "kl/reverse",
    "teacher/agreement",
    "teacher/logps",
    "student/logps",
)
"""Sums over targets: the loss; targets that the student finds likeliest; KL(teacher || student) and
KL(student || teacher), in nats; targets at which both find the same token likeliest; and the
log-probabilities of the targets, in nats.
"""


@dataclass(frozen=True)
class Divergence:
    """Which one: DistillationHyperparameters.loss_type, and beta of jsd."""

    kind: str
    beta: float

    @classmethod
    def of(cls, options: DistillationOptions) -> Divergence:
        return cls(options.loss_type, options.beta)


def divergence_sums(
    student: Tensor, teacher: Tensor, targets: Tensor, divergence: Divergence
) -> Tensor:
    """DIVERGENCE_SUMS, fp64 [7].

    `student`, `teacher`: log-probabilities of all words, fp32 [targets, words]; `targets`: int64
    [targets]. With s and t the probabilities and m = beta t + (1 - beta) s:

        forward_kl  sum t log(t / s)
        reverse_kl  sum s log(s / t)
        jsd         beta sum t log(t / m) + (1 - beta) sum s log(s / m); arXiv 2306.13649
    """
    # Both sum up to 1. Where these in fp32 do not, what they lack is an error of the logarithms too,
    # which the difference takes out: else it would be of the size of a small divergence.
    own, others = student.exp(), teacher.exp()
    forward = (others * (teacher - student) + (own - others)).sum(dtype=torch.float64)
    reverse = (own * (student - teacher) + (others - own)).sum(dtype=torch.float64)
    if divergence.kind == "jsd":
        mixed = _mixture(student, teacher, divergence.beta)
        beta = divergence.beta
        both = beta * others * (teacher - mixed) + (1 - beta) * own * (student - mixed)
        loss = both.sum(dtype=torch.float64)
    else:
        loss = forward if divergence.kind == "forward_kl" else reverse
    likeliest = student.argmax(dim=-1)
    of_targets = [logs.gather(1, targets[:, None]).sum() for logs in (teacher, student)]
    return torch.stack(
        [
            loss,
            (likeliest == targets).sum().double(),
            forward,
            reverse,
            (likeliest == teacher.argmax(dim=-1)).sum().double(),
            *(value.double() for value in of_targets),
        ]
    )


def divergence_gradient(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    """The gradient of the loss in the student's logits, fp32 [targets, words].

    forward_kl: s - t. The others are f-divergences of s, whose gradient is s (g - sum s g) with g
    what a word adds: log(s / t), or (1 - beta) log(s / m).
    """
    own = student.exp()
    if divergence.kind == "forward_kl":
        return own - teacher.exp()
    if divergence.kind == "reverse_kl":
        adds = student - teacher
    else:
        adds = (1 - divergence.beta) * (student - _mixture(student, teacher, divergence.beta))
    return own * (adds - (own * adds).sum(dim=-1, keepdim=True))


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log m."""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
