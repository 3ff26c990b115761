"""The reference of direct preference optimisation: log-probabilities of all answers by the model that training starts from.

That is the base, for a new adapter adds nothing to it; or the tuned model that the job goes on from. Either way it is the model
as it stands before the first step. So one pass over the data before that takes the place of a second model, and no adapter is
ever switched off. The outcome is kept in the run directory, so that every later attempt subtracts the same numbers, whatever
its ranks; it is made anew only where it is gone, or the data or the base are others.

    reference.bin     fp64, little-endian: training answers, then validation answers
    reference.json    Index, last
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from ft_service.data.tokens.token_set import TokenSet
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import ORIGINS, Origins
from ft_service.spec import DpoOptions, JobSpec
from workers.base.agreement import from_first
from workers.data.sharing import Limits
from workers.output.publishing import put_document
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.objective import Preference, batches_of_rank
from workers.training.preference import answer_log_probabilities

VALUES = "reference.bin"
INDEX = "reference.json"
ROUNDS_AT_ONCE = 16
"""About so many micro-batches a rank between two looks whether to stop."""
TELL_SECONDS = 30.0


class Index(BaseModel):
    """`reference.json`."""

    key: str
    """Of all that decides the values."""
    sha256: str
    """Of reference.bin."""


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of the answers, fp64 [samples] each, on the CPU."""

    training: Tensor
    validation: Tensor


def key_of_reference(run: RunDir, spec: JobSpec, train: TokenSet, valid: TokenSet) -> str:
    """A digest of all that decides the values. origins.json is there."""
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
    """What an earlier attempt kept, as rank 0 reads it; called by all ranks together. None: nothing whole."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    values = from_first(_read(run, key, len(train) + len(valid)) if rank == 0 else None)
    return None if values is None else _split(torch.from_numpy(values), len(train))


def compute_reference(
    runtime: Runtime,
    model: nn.Module,
    key: str,
    train: TokenSet,
    valid: TokenSet,
    limits: Limits,
    *,
    tell: Callable[[str], None],
    stops: Callable[[], bool],
) -> Reference | None:
    """Compute and keep the reference with the model as it stands. Called by all ranks together, before the first step.

    `tell`: called with a sentence now and then. `stops`: asked often, on all ranks, whether to stop; then None is returned, and
    nothing is kept.
    """
    values = torch.zeros(len(train) + len(valid), dtype=torch.float64, device=runtime.device)
    pairs, done, began = len(values) // 2, 0, time.monotonic()
    told = began
    model.eval()
    for begin, samples in ((0, train), (len(train), valid)):
        for items in _portions(samples, runtime.world, limits):
            if stops():
                return None
            _add(values[begin:], model, samples, items, runtime, limits)
            done += len(items)
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                tell(f"Reference log-probabilities of {done:,} of {pairs:,} pairs are computed.")
    model.train()
    if runtime.world > 1:
        dist.all_reduce(values)
    found = values.cpu()
    if runtime.rank == 0:
        _write(runtime, key, found.numpy())
    tell(f"Reference log-probabilities of all {pairs:,} pairs are computed, in {time.monotonic() - began:.0f} seconds.")
    return _split(found, len(train))


def _portions(samples: TokenSet, world: int, limits: Limits) -> Iterator[list[int]]:
    """All pairs in order, as many at once as the ranks compute in about ROUNDS_AT_ONCE micro-batches."""
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
def _add(values: Tensor, model: nn.Module, samples: TokenSet, items: Sequence[int], runtime: Runtime, limits: Limits) -> None:
    """Put this rank's share of the pairs' values in their places."""
    unknown = torch.zeros(len(samples), dtype=torch.float64)
    objective = Preference(samples, unknown, _ANY)
    shares = objective.share_out(items, runtime.world, limits)
    batches = batches_of_rank(objective, items, runtime.rank, runtime.world, limits, runtime.device)
    for micro, batch in zip(shares, batches, strict=True):
        members = objective.members([items[i] for i in micro[runtime.rank]])
        of_answers, _ = answer_log_probabilities(model, batch)
        values[torch.tensor(members, dtype=torch.int64, device=values.device)] = of_answers
    reshard(model)


_ANY = DpoOptions(beta=1.0, loss_type="sigmoid")
"""No loss is taken."""


def _split(values: Tensor, training: int) -> Reference:
    return Reference(values[:training], values[training:])


def _read(run: RunDir, key: str, count: int) -> np.ndarray | None:
    index, body = run.readable(INDEX, Index), run.readable_bytes(VALUES, 8 * count)
    if index is None or body is None or index.key != key or len(body) != 8 * count:
        return None
    if hashlib.sha256(body).hexdigest() != index.sha256:
        return None
    return np.frombuffer(body, "<f8").astype(np.float64)


def _write(runtime: Runtime, key: str, values: np.ndarray) -> None:
    body = values.astype("<f8").tobytes()
    index = Index(key=key, sha256=hashlib.sha256(body).hexdigest())
    put_document(runtime.run, VALUES, body, runtime.fence)
    put_document(runtime.run, INDEX, index.model_dump_json(indent=2).encode() + b"\n", runtime.fence)
