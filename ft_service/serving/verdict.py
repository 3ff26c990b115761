"""Whether what an inference server answers is the tuned model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ft_service.rundir.evaluations import Probe

NOTHING_LEARNT = 0.01
"""Nats a token between tuned model and base, on average, below which the two cannot be told apart."""
OTHER_PRECISION = 0.1
"""Nats a token from the trainer's that another precision may cost."""


@dataclass(frozen=True)
class Verdict:
    """`verified`: the tuned model answers. None: that cannot be told."""

    verified: bool | None
    text: str


def judge(probes: Sequence[Probe], served: Sequence[Sequence[float]]) -> Verdict:
    """`served`: the server's log-probabilities, as in each probe.

    It is the tuned model that answers where they lie nearer to the trainer's with the adapter than to those without, and no
    farther from them than another precision, or a fifth of what the adapter changed, explains.
    """
    from_tuned = _distance([probe.tuned for probe in probes], served)
    from_base = _distance([probe.base for probe in probes], served)
    learnt = _distance([probe.base for probe in probes], [probe.tuned for probe in probes])
    told = (
        f"{len(probes)} prompts' log-probabilities lie {from_tuned:.3f} nats a token from the trainer's and {from_base:.3f} "
        "from the base's"
    )
    if learnt < NOTHING_LEARNT:
        return Verdict(None, f"cannot be verified: the adapter changes so little ({learnt:.4f} nats a token) that {told}")
    near = max(OTHER_PRECISION, learnt / 5)
    if from_base <= min(from_tuned, near):
        return Verdict(False, f"the server answers with the base, not with the adapter: {told}")
    if from_tuned > near or from_base <= from_tuned:
        return Verdict(False, f"the server's answers are not the trained model's: {told}")
    return Verdict(True, f"served, verified: {told}")


def _distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    differences = [
        abs(mine - theirs) for mines, others in zip(one, other, strict=True) for mine, theirs in zip(mines, others, strict=True)
    ]
    return fmean(differences) if differences else 0.0
