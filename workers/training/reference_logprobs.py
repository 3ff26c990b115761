"""The reference of direct preference optimisation and of KTO: log-probabilities of the answers by
the model that training starts from.

That is the base, since a new adapter adds nothing to it, or the tuned model that the job starts
from: in both cases the model as it is before the first step. One pass over the answers that the
steps and validations read, of KTO also over the mismatched ones (kto.py), replaces a second model,
and no adapter is switched off. The values are kept in the run directory, so that every later
attempt subtracts the same numbers, on any number of ranks; they are computed again only if they are
gone, or if the data or the base have changed.

    reference.bin     fp64, little-endian: training answers, then validation answers, each followed
                      by KTO's mismatched ones; NaN: no step reads it
    reference.json    ReferenceIndex, last
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from ft_service.data.tokens.token_set import TokenSet
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import ORIGINS, Origins
from ft_service.spec import JobSpec, KtoOptions
from ft_service.wording import counted
from workers.base.rank_objects import by_first
from workers.data.micro_batches import MicroBatchLimits
from workers.output.publishing import put_document
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.context import TrainingContext
from workers.training.kto import Labelled, LabelledBatch
from workers.training.loop import Schedule
from workers.training.objective import Answers, Preference, RankShare, batch_order
from workers.training.preference import answer_log_probabilities

VALUES = "reference.bin"
INDEX = "reference.json"
Referred = Preference | Labelled
"""Objectives whose loss compares with the reference."""
ROUNDS_AT_ONCE = 16
"""Approximate number of micro-batches a rank computes between two checks for a stop."""
REPORT_SECONDS = 30.0


class ReferenceIndex(BaseModel):
    """`reference.json`."""

    key: str
    """Digest of what decides the values."""
    sha256: str
    """Digest of reference.bin."""


def key_of_reference(run: RunDir, spec: JobSpec, train: TokenSet, valid: TokenSet) -> str:
    """Return a digest of what decides the values. Requires origins.json."""
    origins = run.read(ORIGINS, Origins)
    assert origins is not None, "it is written before"
    decides = {
        "base": origins.base.digest,
        "parent": origins.parent.digest if origins.parent else None,
        "precision": spec.precision.model_dump(mode="json"),
        "max_length": spec.training.max_length,
        "samples": [[len(samples), samples.digest] for samples in (train, valid)],
    }
    if isinstance(spec.loss, KtoOptions):
        decides["mismatched"] = spec.seed
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """Items of answers, of which some are read."""

    begin: int
    """Place of the first value."""
    answers: Answers
    values: int
    """Values of all items, one for each sample."""
    read: Sequence[int]
    """Items that the job's steps and validations read, ascending."""


@dataclass(frozen=True)
class NeededAnswers:
    """The data, with the items whose reference is read."""

    parts: Sequence[Part]
    unit: str
    """What an item is: a pair, or an answer."""

    @classmethod
    def of(cls, spec: JobSpec, train: Referred, valid: Referred) -> NeededAnswers:
        """Steps read with max_steps perhaps few items of `train`; validations read all of
        `valid`.
        """
        steps = Schedule.of(spec, len(train)).total_steps
        trained = batch_order(train, spec).of_first(steps)
        parts: list[Part] = []
        values = 0
        for objective, read in ((train, trained), (valid, range(len(valid)))):
            for answers in objective.parts:
                parts.append(Part(values, answers, len(objective.samples), read))
                values += len(objective.samples)
        return cls(parts, "pair" if spec.preferences is not None else "answer")

    @property
    def values(self) -> int:
        return sum(part.values for part in self.parts)

    @property
    def items(self) -> int:
        """Items that are read."""
        return sum(len(part.read) for part in self.parts)

    def places(self) -> np.ndarray:
        """bool [values]: which values are read."""
        found = np.zeros(self.values, dtype=bool)
        for part in self.parts:
            found[part.begin + np.asarray(part.answers.members(part.read), dtype=np.int64)] = True
        return found

    def split(self, values: Tensor) -> list[Tensor]:
        """The values of each part."""
        return list(values.split([part.values for part in self.parts]))


def is_intact(run: RunDir) -> bool:
    """Whether an earlier attempt's values are there as they were written."""
    size = run.path(VALUES).stat().st_size if run.path(VALUES).is_file() else 0
    return _stored(run, size) is not None


def find_reference(run: RunDir, key: str, needed: NeededAnswers) -> list[Tensor] | None:
    """Return what an earlier attempt stored, fp64 on the CPU for each part; None if it is absent,
    damaged, or lacks a value.

    Called by all ranks together; rank 0 reads.
    """
    values = by_first(lambda: _read(run, key, needed))
    return None if values is None else needed.split(torch.from_numpy(values))


def compute_reference(
    context: TrainingContext, key: str, needed: NeededAnswers
) -> list[Tensor] | None:
    """Compute and store the reference with the model as it is, fp64 on the CPU for each part.

    Called by all ranks together, before the first step.

    Returns None, and stores nothing, if the job was stopped meanwhile.
    """
    runtime = context.runtime
    model = context.model
    values = torch.zeros(needed.values, dtype=torch.float64, device=runtime.device)
    done = 0
    began = time.monotonic()
    reported = began
    model.eval()
    for part in needed.parts:
        for items in _portions(part, runtime.world, context.limits):
            if context.stop.agreed():
                return None
            _add(values[part.begin :], context, part.answers, items)
            done += len(items)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                of_all = counted(needed.items, needed.unit)
                context.reporter.message(
                    f"Reference log-probabilities of {done:,} of {of_all} are computed."
                )
    model.train()
    if runtime.world > 1:
        dist.all_reduce(values)
    on_host = values.cpu()
    # So that a step that read one would not go unnoticed.
    on_host[torch.from_numpy(~needed.places())] = torch.nan
    by_first(lambda: _write(runtime, key, on_host.numpy()))
    seconds = time.monotonic() - began
    context.reporter.message(
        f"Reference log-probabilities of {_which(needed)} are computed, in {seconds:.0f} seconds."
    )
    return needed.split(on_host)


def _which(needed: NeededAnswers) -> str:
    """`all 11 pairs`, or `the 7 pairs of 15 that are read`."""
    total = sum(len(part.answers) for part in needed.parts)
    return (
        f"all {total:,} {needed.unit}s"
        if needed.items == total
        else f"the {needed.items:,} {needed.unit}s of {total:,} that are read"
    )


def _portions(part: Part, world: int, limits: MicroBatchLimits) -> Iterator[list[int]]:
    """Yield the items in order, as many at a time as the ranks compute in about ROUNDS_AT_ONCE
    micro-batches.
    """
    budget = ROUNDS_AT_ONCE * world * limits.tokens
    portion: list[int] = []
    tokens = 0
    lengths = part.answers.lengths(part.read)
    for number, length in zip(part.read, lengths, strict=True):
        if portion and tokens + length > budget:
            yield portion
            portion = []
            tokens = 0
        portion.append(number)
        tokens += length
    if portion:
        yield portion


@torch.no_grad()
def _add(values: Tensor, context: TrainingContext, answers: Answers, items: Sequence[int]) -> None:
    """Put this rank's share of the items' values in their places."""
    share = RankShare.of(context.runtime, context.limits)
    for members, batch in zip(
        share.members(answers, items), share.batches(answers, items), strict=True
    ):
        # so many micro-batches may take longer than a job may be silent
        context.reporter.heartbeat()
        own = batch.answers if isinstance(batch, LabelledBatch) else batch
        of_answers, _ = answer_log_probabilities(context.model, own)
        if own.batch.shared is not None and not own.batch.shared.reports:
            continue  # all ranks' values are added
        values[torch.tensor(members, dtype=torch.int64, device=values.device)] = of_answers
    reshard(context.model)


def _read(run: RunDir, key: str, needed: NeededAnswers) -> np.ndarray | None:
    stored = _stored(run, 8 * needed.values)
    if stored is None or stored[0].key != key or len(stored[1]) != needed.values:
        return None
    return None if np.isnan(stored[1][needed.places()]).any() else stored[1]


def _stored(run: RunDir, most: int) -> tuple[ReferenceIndex, np.ndarray] | None:
    """What is stored, of at most so many bytes; None if it is absent or damaged."""
    index = run.readable(INDEX, ReferenceIndex)
    body = run.readable_bytes(VALUES, most)
    if (
        index is None
        or body is None
        or len(body) % 8
        or hashlib.sha256(body).hexdigest() != index.sha256
    ):
        return None
    return index, np.frombuffer(body, "<f8").astype(np.float64)


def _write(runtime: Runtime, key: str, values: np.ndarray) -> None:
    body = values.astype("<f8").tobytes()
    index = ReferenceIndex(key=key, sha256=hashlib.sha256(body).hexdigest())
    put_document(runtime.run, VALUES, body, runtime.fence)
    put_document(
        runtime.run, INDEX, index.model_dump_json(indent=2).encode() + b"\n", runtime.fence
    )
