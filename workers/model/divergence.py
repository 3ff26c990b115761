"""How far a student's probabilities are from its teacher's, at each token over all words, with the
gradient in the student's logits.
"""

from __future__ import annotations

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


_FAR = 60.0
"""Nats by which a word's probabilities differ at most in a mixture: beyond, the smaller one adds
nothing, and its exponential would be no number in fp32.
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
    apart = teacher - student
    own, others = student.exp(), teacher.exp()
    # Probabilities sum up to 1. Where those in fp32 do not, what they lack is an error of their
    # logarithms too, which the difference takes out: else it has the size of a small divergence.
    forward = (others * apart + (own - others)).sum(dtype=torch.float64)
    reverse = ((others - own) - own * apart).sum(dtype=torch.float64)
    match divergence.kind:
        case "forward_kl":
            loss = forward
        case "reverse_kl":
            loss = reverse
        case _:
            beta = divergence.beta
            of_teacher = beta * others * _above_mixture(-apart, 1 - beta)
            of_student = (1 - beta) * own * _above_mixture(apart, beta)
            loss = (of_teacher + of_student).sum(dtype=torch.float64)
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
        beta = divergence.beta
        adds = (1 - beta) * _above_mixture(teacher - student, beta)
    return own * (adds - (own * adds).sum(dim=-1, keepdim=True))


def _above_mixture(other: Tensor, weight: float) -> Tensor:
    """log(p / m) of m = (1 - weight) p + weight q, from `other` = log(q / p): exact where they are
    nearly the same.
    """
    return -torch.log1p(weight * torch.expm1(other.clamp(-_FAR, _FAR)))
