"""Proof that a server answers with the tuned model, by the trainer's log-probabilities, and its
report to the job's user.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel

from ft_service.errors import NotFoundError
from ft_service.host.loops import log_errors
from ft_service.jobs.states import Job
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

NOTHING_LEARNT = 0.01
"""Mean difference between tuned model and base, in nats per token, below which the two cannot be
distinguished.
"""
OTHER_PRECISION = 0.1
"""Difference from the trainer, in nats per token, that another precision may cause."""


@dataclass(frozen=True)
class Verdict:
    """`verified`: whether the tuned model answers; None: unknown."""

    verified: bool | None
    text: str


def judge(probes: Sequence[Probe], served: Sequence[Sequence[float]]) -> Verdict:
    """Compare the server's log-probabilities with the trainer's.

    `served`: for each probe, in nats per token.

    The tuned model answers if they are nearer to the trainer's with the adapter than to those
    without it, and differ from them by no more than another precision, or a fifth of the adapter's
    change, explains.
    """
    from_tuned = distance([probe.tuned for probe in probes], served)
    from_base = distance([probe.base for probe in probes], served)
    learnt = distance([probe.base for probe in probes], [probe.tuned for probe in probes])
    pictured = sum(probe.chat is not None for probe in probes)
    among = f" ({pictured} with an image)" if pictured else ""
    distances = (
        f"{len(probes)} prompts' log-probabilities{among} lie {from_tuned:.3f} nats a token from the "
        f"trainer's and {from_base:.3f} "
        "from the base's"
    )
    if learnt < NOTHING_LEARNT:
        return Verdict(
            None,
            f"cannot be verified: the adapter changes so little ({learnt:.4f} nats a token) that "
            f"{distances}",
        )
    near = max(OTHER_PRECISION, learnt / 5)
    if from_base <= min(from_tuned, near):
        return Verdict(
            False, f"the server answers with the base, not with the adapter: {distances}"
        )
    if from_tuned > near or from_base <= from_tuned:
        return Verdict(False, f"the server's answers are not the trained model's: {distances}")
    return Verdict(True, f"served, verified: {distances}")


def is_of_base(probes: Sequence[Probe], served: Sequence[Sequence[float]]) -> bool:
    """Whether the log-probabilities are those of the base, without the adapter: at most half as far
    from the trainer's without it as from those with it. What the server's precision changes is in
    both distances, so that it alone never is the reason.
    """
    from_tuned = distance([probe.tuned for probe in probes], served)
    return (
        from_tuned >= NOTHING_LEARNT
        and distance([probe.base for probe in probes], served) <= from_tuned / 2
    )


def distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean difference of log-probabilities, in nats a token. 0 without any."""
    differences = [
        abs(mine - theirs)
        for mines, others in zip(one, other, strict=True)
        for mine, theirs in zip(mines, others, strict=True)
    ]
    return fmean(differences) if differences else 0.0


class ReportedVerdict(BaseModel):
    """Document in the run directory with the verdict that the job's user was told."""

    verified: bool | None
    text: str
    replicas: list[str] = []
    """URLs of the inference servers that were judged since they loaded the adapter."""


def read_probes(run_dir: RunDir) -> list[Probe]:
    """The trainer's log-probabilities; empty for a job of a version that measured none."""
    document = run_dir.readable(PROBES, Probes)
    return document.probes if document is not None else []


def report(
    run_dir: RunDir, key: str, store: Store, job: Job, verdict: Verdict, replica: str | None = None
) -> None:
    """Add an event to the job, unless the same verdict was reported before, then remember it.

    `key`: of the document that remembers it. `replica`: URL of the inference server that was
    judged.

    Raises UnavailableError if the database does not answer; nothing is remembered then, so that the
    verdict can be reported again.
    """
    before = run_dir.readable(key, ReportedVerdict)
    replicas = [] if before is None else before.replicas
    reported = ReportedVerdict(
        verified=verdict.verified, text=verdict.text, replicas=sorted({*replicas, replica} - {None})
    )
    if before is None or before.verified != reported.verified:
        try:
            level = "info" if verdict.verified else "warn"
            store.jobs.add_events(
                job,
                [NewEvent(level=level, message=f"{verdict.text[0].upper()}{verdict.text[1:]}.")],
            )
        except NotFoundError:  # it was pruned meanwhile
            log.info("job %s is gone", job.id)
    elif replica is None or replica in replicas:
        return
    with log_errors(
        f"remembering the verdict on job {job.id}"
    ):  # after a restart it may be told again
        run_dir.write(key, reported)


def is_judged(run_dir: RunDir, key: str, replica: str) -> bool:
    """Whether a replica was judged since it loaded the adapter."""
    before = run_dir.readable(key, ReportedVerdict)
    return before is not None and replica in before.replicas


def forget_replica(run_dir: RunDir, key: str, replica: str) -> None:
    """Note that a replica, which is about to load the adapter anew, is to be judged again."""
    before = run_dir.readable(key, ReportedVerdict)
    if before is not None and replica in before.replicas:
        before.replicas.remove(replica)
        with log_errors(f"noting that {replica} loads an adapter anew"):
            run_dir.write(key, before)
