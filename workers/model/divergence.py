"""How far a student's probabilities are from its teacher's, at each token over all words, with the
gradient in the student's logits.

Of a teacher only the likeliest words may be kept. All others are then one word more, with the sum
of their probabilities, on both sides: the divergence is that of two whole distributions, at most
the one over all words, and a student that moves probability out of these words is seen. Without
such a word reverse KL has no lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "teacher/kept",
)
"""Sums over targets: the loss; targets that the student finds likeliest; KL(teacher || student) and
KL(student || teacher), in nats; targets at which both find the same token likeliest; the
log-probabilities of the targets, in nats; and the teacher's probability of the words that are
compared one by one.
"""


_FAR = 60.0
"""Nats by which a word's probabilities differ at most in a mixture: beyond, the smaller one adds
nothing, and its exponential would be no number in fp32.
"""


LEAST = torch.finfo(torch.float32).tiny
"""Probability that other words have at least together."""
LEAST_TOLD = 1e-6
"""The same where it is what a server's words, whose log-probabilities are fp32, leave of 1."""


@dataclass(frozen=True)
class Divergence:
    """Which one: DistillationHyperparameters.loss_type, beta of jsd, and top_k."""

    kind: str
    beta: float
    top_k: int | None = None

    @classmethod
    def of(cls, options: DistillationOptions) -> Divergence:
        return cls(options.loss_type, options.beta, options.top_k)


@dataclass(frozen=True)
class Likeliest:
    """What is kept of a teacher's probabilities: its likeliest words."""

    words: Tensor
    """int64 [targets, k], the likeliest first."""
    logs: Tensor
    """fp32 [targets, k + 1]: their log-probabilities, and last that of all other words together."""
    targets: Tensor
    """fp32 [targets]: log-probabilities of the targets."""

    @classmethod
    def of(cls, logs: Tensor, targets: Tensor, k: int) -> Likeliest:
        """`logs`: log-probabilities of all words, fp32 [targets, words]; `targets`: int64
        [targets].
        """
        words = logs.topk(min(k, logs.shape[1]), dim=1).indices
        return cls(words, _grouped(logs, words), logs.gather(1, targets[:, None]).squeeze(1))

    @classmethod
    def of_told(cls, words: Tensor, logs: Tensor, targets: Tensor) -> Likeliest:
        """What a server has told. `words`: int64 [targets, k]; `logs`: fp32 [targets, k], theirs;
        `targets`: fp32 [targets], those of the targets. All others' is what is missing to 1, of
        which log-probabilities in fp32 leave no more digits than LEAST_TOLD.
        """
        order = logs.argsort(dim=1, descending=True, stable=True)
        words, logs = words.gather(1, order), logs.gather(1, order)
        others = 1 - logs.double().exp().sum(dim=1, keepdim=True)
        rest = others.clamp(min=LEAST_TOLD).log().float()
        return cls(words, torch.cat([logs, rest], dim=1), targets)

    @classmethod
    def together(cls, parts: Sequence[Likeliest], k: int) -> Likeliest:
        """Those of several samples' targets, one after the other; without samples of none."""
        if not parts:
            words = torch.zeros(0, k, dtype=torch.int64)
            return cls(words, torch.zeros(0, k + 1), torch.zeros(0))
        return cls(
            torch.cat([part.words for part in parts]),
            torch.cat([part.logs for part in parts]),
            torch.cat([part.targets for part in parts]),
        )

    def to(self, device: torch.device) -> Likeliest:
        """The same on a device."""
        return Likeliest(self.words.to(device), self.logs.to(device), self.targets.to(device))

    def rows(self, rows: slice) -> Likeliest:
        """The same of some targets."""
        return Likeliest(self.words[rows], self.logs[rows], self.targets[rows])


def _grouped(logs: Tensor, words: Tensor) -> Tensor:
    """Log-probabilities of words [targets, k] and of all others together, fp32 [targets, k + 1].

    The others' are added up, since what is missing to 1 has no digits left where it is small.
    """
    others = logs.exp().scatter(1, words, 0.0).sum(dim=1, keepdim=True)
    return torch.cat([logs.gather(1, words), others.clamp(min=LEAST).log()], dim=1)


def divergence_sums(
    student: Tensor, teacher: Tensor | Likeliest, targets: Tensor, divergence: Divergence
) -> Tensor:
    """DIVERGENCE_SUMS, fp64 [8].

    `student`, `teacher`: log-probabilities of all words, fp32 [targets, words], or of the teacher
    its likeliest ones; `targets`: int64 [targets]. With s and t the probabilities and m = beta t +
    (1 - beta) s:

        forward_kl  sum t log(t / s)
        reverse_kl  sum s log(s / t)
        jsd         beta sum t log(t / m) + (1 - beta) sum s log(s / m); arXiv 2306.13649
    """
    likeliest = student.argmax(dim=-1)
    of_student = student.gather(1, targets[:, None]).squeeze(1)
    if isinstance(teacher, Likeliest):
        found, of_teacher = teacher.words[:, 0], teacher.targets
        kept = teacher.logs[:, :-1].exp().sum()
        student, teacher = _grouped(student, teacher.words), teacher.logs
    else:
        found, of_teacher = teacher.argmax(dim=-1), teacher.gather(1, targets[:, None]).squeeze(1)
        kept = torch.tensor(float(len(targets)), device=student.device)
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
            from_teacher = beta * others * _above_mixture(-apart, 1 - beta)
            from_student = (1 - beta) * own * _above_mixture(apart, beta)
            loss = (from_teacher + from_student).sum(dtype=torch.float64)
    return torch.stack(
        [
            loss,
            (likeliest == targets).sum().double(),
            forward,
            reverse,
            (likeliest == found).sum().double(),
            *(value.sum().double() for value in (of_teacher, of_student, kept)),
        ]
    )


def divergence_gradient(
    student: Tensor, teacher: Tensor | Likeliest, divergence: Divergence
) -> Tensor:
    """The gradient of the loss in the student's logits, fp32 [targets, words].

    forward_kl: s - t. The others are f-divergences of s, whose gradient is s (g - sum s g) with g
    what a word adds: log(s / t), or (1 - beta) log(s / m). Words that are one together share its
    gradient by their probabilities.
    """
    if isinstance(teacher, Likeliest):
        grouped = _grouped(student, teacher.words)
        of_groups = divergence_gradient(grouped, teacher.logs, divergence)
        shared = (student - grouped[:, -1:]).exp() * of_groups[:, -1:]
        return shared.scatter_(1, teacher.words, of_groups[:, :-1])
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
