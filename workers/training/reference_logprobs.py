"""The reference of direct preference optimisation: log-probabilities of the answers by the model
that training starts from.

That is the base, since a new adapter adds nothing to it, or the tuned model that the job starts
from: in both cases the model as it is before the first step. One pass over the pairs that the steps
and validations read replaces a second model, and no adapter is switched off. The values are kept in
the run directory, so that every later attempt subtracts the same numbers, on any number of ranks;
they are computed again only if they are gone, or if the data or the base have changed.

    reference.bin     fp64, little-endian: training answers, then validation answers; NaN: no step
    reads it reference.json    Index, last
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
from ft_service.spec import DpoOptions, JobSpec
from ft_service.wording import counted
from workers.base.rank_objects import by_first
from workers.data.micro_batches import MicroBatchLimits
from workers.output.publishing import put_document
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.context import TrainingContext
from workers.training.loop import Schedule
from workers.training.objective import Preference, RankShare, batch_order
from workers.training.preference import answer_log_probabilities

VALUES = "reference.bin"
INDEX = "reference.json"
ROUNDS_AT_ONCE = 16
"""Approximate number of micro-batches a rank computes between two checks for a stop."""
REPORT_SECONDS = 30.0


class ReferenceIndex(BaseModel):
    """`reference.json`."""

    key: str
    """Digest of what decides the values."""
    sha256: str
    """Digest of reference.bin."""


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of the answers, fp64 [samples] each, on the CPU."""

    training: Tensor
    validation: Tensor


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
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class NeededPairs:
    """The data, with the numbers of the pairs whose reference is read."""

    train: TokenSet
    valid: TokenSet
    trained: Sequence[int]
    """Pairs of `train` that the job's steps read, ascending: with max_steps perhaps few.

    Validations read all of `valid`.
    """

    @classmethod
    def of(cls, spec: JobSpec, train: TokenSet, valid: TokenSet) -> NeededPairs:
        pairs = _without_values(train)
        return cls(
            train,
            valid,
            batch_order(pairs, spec).of_first(Schedule.of(spec, len(pairs)).total_steps),
        )

    @property
    def parts(self) -> Sequence[tuple[int, TokenSet, Sequence[int]]]:
        """Place of the first value, data and pairs of each of the two."""
        return (0, self.train, self.trained), (
            len(self.train),
            self.valid,
            range(len(self.valid) // 2),
        )

    @property
    def values(self) -> int:
        return len(self.train) + len(self.valid)

    @property
    def pairs(self) -> int:
        return len(self.trained) + len(self.valid) // 2

    def places(self) -> np.ndarray:
        """bool [values]: which values are read."""
        found = np.zeros(self.values, dtype=bool)
        for begin, _, items in self.parts:
            for side in (0, 1):
                found[begin + side + 2 * np.asarray(items, dtype=np.int64)] = True
        return found


def is_intact(run: RunDir) -> bool:
    """Whether an earlier attempt's values are there as they were written."""
    size = run.path(VALUES).stat().st_size if run.path(VALUES).is_file() else 0
    return _stored(run, size) is not None


def find_reference(run: RunDir, key: str, needed: NeededPairs) -> Reference | None:
    """Return what an earlier attempt stored, None if it is absent, damaged, or lacks a value.

    Called by all ranks together; rank 0 reads.
    """
    values = by_first(lambda: _read(run, key, needed))
    return None if values is None else _split(torch.from_numpy(values), len(needed.train))


def compute_reference(context: TrainingContext, key: str, needed: NeededPairs) -> Reference | None:
    """Compute and store the reference with the model as it is.

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
    for begin, samples, pairs in needed.parts:
        for items in _portions(samples, pairs, runtime.world, context.limits):
            if context.stop.agreed():
                return None
            _add(values[begin:], context, samples, items)
            done += len(items)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                of_all = counted(needed.pairs, "pair")
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
    return _split(on_host, len(needed.train))


def _which(needed: NeededPairs) -> str:
    """`all 11 pairs`, or `the 7 pairs of 15 that are read`."""
    pairs = needed.values // 2
    return (
        f"all {pairs:,} pairs"
        if needed.pairs == pairs
        else f"the {needed.pairs:,} pairs of {pairs:,} that are read"
    )


def _portions(
    samples: TokenSet, pairs: Sequence[int], world: int, limits: MicroBatchLimits
) -> Iterator[list[int]]:
    """Yield the pairs in order, as many at a time as the ranks compute in about ROUNDS_AT_ONCE
    micro-batches.
    """
    budget = ROUNDS_AT_ONCE * world * limits.tokens
    portion: list[int] = []
    tokens = 0
    lengths = samples.lengths.reshape(-1, 2).sum(axis=1)
    for number in pairs:
        length = int(lengths[number])
        if portion and tokens + length > budget:
            yield portion
            portion = []
            tokens = 0
        portion.append(number)
        tokens += length
    if portion:
        yield portion


@torch.no_grad()
def _add(values: Tensor, context: TrainingContext, samples: TokenSet, items: Sequence[int]) -> None:
    """Put this rank's share of the pairs' values in their places."""
    objective = _without_values(samples)
    share = RankShare.of(context.runtime, context.limits)
    for members, batch in zip(
        share.members(objective, items), share.batches(objective, items), strict=True
    ):
        # so many micro-batches may take longer than a job may be silent
        context.reporter.heartbeat()
        of_answers, _ = answer_log_probabilities(context.model, batch)
        values[torch.tensor(members, dtype=torch.int64, device=values.device)] = of_answers
    reshard(context.model)


def _without_values(samples: TokenSet) -> Preference:
    """Pairs of which no loss is taken."""
    return Preference(
        samples,
        torch.zeros(len(samples), dtype=torch.float64),
        DpoOptions(beta=1.0, loss_type="sigmoid"),
    )


def _split(values: Tensor, training: int) -> Reference:
    return Reference(values[:training], values[training:])


def _read(run: RunDir, key: str, needed: NeededPairs) -> np.ndarray | None:
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
