"""Work per token, bytes on the wire per optimizer step, and the tokens per second that follow from a machine's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.plan.base import BaseShape
from ft_service.plan.machines import EFFICIENCY, LINK_EFFICIENCY, Machine
from ft_service.plan.memory import MicroBatches
from ft_service.plan.storage import COMPUTE_BYTES, AdapterShape, GatherGroup, Layout, Stored
from ft_service.spec import JobSpec


@dataclass(frozen=True)
class Wire:
    """What one rank's collectives carry in one optimizer step: bytes that it receives from other ranks."""

    gather: int
    reduce: int
    all_reduce: int
    """Between copies of the model."""
    gathers: int
    """Number of all-gathers."""
    reduces: int
    """Number of reductions inside a copy (reduce-scatter)."""

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.all_reduce


@dataclass(frozen=True)
class Speed:
    """An estimate at full length; None: the machine's figures are not known."""

    tokens_per_second: float
    """Over all ranks."""
    step_seconds: float
    compute_seconds: float
    dequantise_seconds: float
    wire_seconds: float


@dataclass(frozen=True)
class Work:
    """A whole training, over all ranks."""

    flops: float
    seconds: float | None
    """None: the machine's figures are not known."""


def whole_training(tokens: int, flops_per_token: int, speed: Speed | None) -> Work:
    return Work(float(tokens) * flops_per_token, tokens / speed.tokens_per_second if speed else None)


def wire_bytes(groups: Sequence[GatherGroup], spec: JobSpec, layout: Layout, rounds: int) -> Wire:
    """Bytes on the wire in one optimizer step.

    A layer is gathered for its forward and, when it was freed, again for its backward, in every micro-batch; with
    keep_unsharded once a step. Gradients of adapters are reduced once a step, inside a copy of the model and then between
    copies (in a ring: twice the bytes but for a rank's own part).
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    reduced = [group.reduced_bytes_on_rank(layout) for group in groups if group.adapters]
    between = 2 * (layout.replicate - 1) * sum(reduced) // layout.replicate
    if layout.shard == 1:
        return Wire(0, 0, between, 0, 0)
    times = 1 if spec.distributed.keep_unsharded else rounds
    received = [_received(group, group.gathered_bytes_on_rank(layout, compute), layout.shard) for group in groups]
    return Wire(
        gather=times * sum(map(sum, received)),
        reduce=(layout.shard - 1) * sum(reduced),
        all_reduce=between,
        gathers=times * sum(map(len, received)),
        reduces=len(reduced),
    )


def _received(group: GatherGroup, own: int, shard: int) -> list[int]:
    """Bytes that each gather of a micro-batch brings to a rank which puts `own` into one over all."""
    forward = (shard - 1) * own
    if group.held or not group.in_backward:
        return [forward]
    ranks = group.kept_over or shard
    return [forward, (ranks - 1) * (own * shard // ranks)]


def flops_per_token(base: BaseShape, adapters: Sequence[AdapterShape], length: int, *, checkpointed: bool) -> int:
    """FLOP of forward and backward of one token, with a frozen base: no weight gradients but the adapters'.

    N parameters of the layers' matrices that a token meets, H of the head, A of the adapters, L layers, q = heads × head size,
    s tokens a sample, causal attention: 4 (N + H) + 6 A + 6 L s q; with full activation checkpointing, whose backward runs
    the layers' forward again, 6 N + 4 H + 8 A + 8 L s q.
    """
    shape = base.shape
    n = sum(_met_by_token(base, weight.numel, weight.kind) for weight in base.quantizable())
    h = shape.vocabulary * shape.hidden
    a = sum(adapter.numel for adapter in adapters)
    attention = shape.layers * length * shape.q
    if checkpointed:
        return 6 * n + 4 * h + 8 * a + 8 * attention
    return 4 * (n + h) + 6 * a + 6 * attention


def speed_on(
    machine: Machine, flops: int, stored: Sequence[Stored], wire: Wire, batches: MicroBatches, layout: Layout, *, passes: int
) -> Speed | None:
    """The speed on a machine. `passes`: how often a micro-batch dequantises every weight. Gathers run beside the arithmetic, so
    that the slower of the two counts.
    """
    if machine.flops is None or machine.memory_bandwidth is None or machine.link_bandwidth is None:
        return None
    quantised = [s for s in stored if s.format != "bf16"]
    moved = sum(s.bytes_whole + 2 * s.weight.numel for s in quantised)  # codes are read, bf16 is written
    compute = batches.step_tokens * flops / (machine.flops * EFFICIENCY)
    dequantise = batches.rounds * passes * moved / machine.memory_bandwidth
    wired = wire.total / (machine.link_bandwidth * LINK_EFFICIENCY)
    step = max(compute + dequantise, wired)
    return Speed(layout.world * batches.step_tokens / step, step, compute, dequantise, wired)


def _met_by_token(base: BaseShape, numel: int, kind: str) -> int:
    if kind != "experts":
        return numel
    return numel * base.shape.experts_per_token // base.shape.experts
