"""The reference of direct preference optimisation: log-probabilities of all answers by the model that training starts from.

That is the base, since a new adapter adds nothing to it, or the tuned model that the job starts from: in both cases the model
as it is before the first step. One pass over the data before that step replaces a second model, and no adapter is switched off.
The values are kept in the run directory, so that every later attempt subtracts the same numbers, on any number of ranks;
they are computed again only if they are gone, or if the data or the base have changed.

    reference.bin     fp64, little-endian: training answers, then validation answers
    reference.json    Index, last
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
from workers.base.rank_objects import by_first
from workers.data.micro_batches import MicroBatchLimits
from workers.output.publishing import put_document
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.context import TrainingContext
from workers.training.objective import Preference, RankShare
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


def find_reference(run: RunDir, key: str, train: TokenSet, valid: TokenSet) -> Reference | None:
    """Return what an earlier attempt stored, None if it is absent or damaged. Called by all ranks together; rank 0 reads."""
    values = by_first(lambda: _read(run, key, len(train) + len(valid)))
    return None if values is None else _split(torch.from_numpy(values), len(train))


def compute_reference(context: TrainingContext, key: str, train: TokenSet, valid: TokenSet) -> Reference | None:
    """Compute and store the reference with the model as it is. Called by all ranks together, before the first step.

    Returns None, and stores nothing, if the job was stopped meanwhile.
    """
    runtime, model = context.runtime, context.model
    values = torch.zeros(len(train) + len(valid), dtype=torch.float64, device=runtime.device)
    pairs, done, began = len(values) // 2, 0, time.monotonic()
    reported = began
    model.eval()
    for begin, samples in ((0, train), (len(train), valid)):
        for items in _portions(samples, runtime.world, context.limits):
            if context.stop.agreed():
                return None
            _add(values[begin:], context, samples, items)
            done += len(items)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                context.reporter.message(f"Reference log-probabilities of {done:,} of {pairs:,} pairs are computed.")
    model.train()
    if runtime.world > 1:
        dist.all_reduce(values)
    on_host = values.cpu()
    by_first(lambda: _write(runtime, key, on_host.numpy()))
    seconds = time.monotonic() - began
    context.reporter.message(f"Reference log-probabilities of all {pairs:,} pairs are computed, in {seconds:.0f} seconds.")
    return _split(on_host, len(train))


def _portions(samples: TokenSet, world: int, limits: MicroBatchLimits) -> Iterator[list[int]]:
    """Yield all pairs in order, as many at a time as the ranks compute in about ROUNDS_AT_ONCE micro-batches."""
    budget = ROUNDS_AT_ONCE * world * limits.tokens
    portion: list[int] = []
    tokens = 0
    for number, length in enumerate(samples.lengths.reshape(-1, 2).sum(axis=1).tolist()):
        if portion and tokens + length > budget:
            yield portion
            portion, tokens = [], 0
        portion.append(number)
        tokens += length
    if portion:
        yield portion


@torch.no_grad()
def _add(values: Tensor, context: TrainingContext, samples: TokenSet, items: Sequence[int]) -> None:
    """Put this rank's share of the pairs' values in their places."""
    objective = Preference(samples, torch.zeros(len(samples), dtype=torch.float64), _ANY)
    share = RankShare.of(context.runtime, context.limits)
    for members, batch in zip(share.members(objective, items), share.batches(objective, items), strict=True):
        of_answers, _ = answer_log_probabilities(context.model, batch)
        values[torch.tensor(members, dtype=torch.int64, device=values.device)] = of_answers
    reshard(context.model)


_ANY = DpoOptions(beta=1.0, loss_type="sigmoid")
"""Options of a preference of which no loss is taken."""


def _split(values: Tensor, training: int) -> Reference:
    return Reference(values[:training], values[training:])


def _read(run: RunDir, key: str, count: int) -> np.ndarray | None:
    index, body = run.readable(INDEX, ReferenceIndex), run.readable_bytes(VALUES, 8 * count)
    if index is None or body is None or index.key != key or len(body) != 8 * count:
        return None
    if hashlib.sha256(body).hexdigest() != index.sha256:
        return None
    return np.frombuffer(body, "<f8").astype(np.float64)


def _write(runtime: Runtime, key: str, values: np.ndarray) -> None:
    body = values.astype("<f8").tobytes()
    index = ReferenceIndex(key=key, sha256=hashlib.sha256(body).hexdigest())
    put_document(runtime.run, VALUES, body, runtime.fence)
    put_document(runtime.run, INDEX, index.model_dump_json(indent=2).encode() + b"\n", runtime.fence)
