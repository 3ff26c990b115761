"""Bytes on the rank that holds most. What is stored is exact; what a forward and backward need on top is an upper estimate
for micro-batches of full length whose every position is a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.plan.base import Base, Shape
from ft_service.plan.storage import COMPUTE_BYTES, FP32_BYTES, Adapter, Group, Layout, Stored
from ft_service.spec import JobSpec

LOGIT_BYTES = 12
"""Of one logit when the backward begins: its log-probability, the gradient of that, and its own gradient, fp32 each. The
forward's peak (bf16 logits, fp32 logits, log-probabilities) is below."""


@dataclass(frozen=True)
class MicroBatches:
    """What a rank runs in one optimizer step: `rounds` forwards of `samples` × `length` tokens."""

    rounds: int
    samples: int
    length: int

    @property
    def tokens(self) -> int:
        """Of one round."""
        return self.samples * self.length


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank."""

    base: dict[str, int]
    """Frozen weights by storage format, padding rows included."""
    adapters: int
    """fp32 masters."""
    gradients: int
    """Of the adapters, fp32, reduced."""
    optimizer: int
    """AdamW's two moments and step counters."""
    gather: int
    """Gathered weights at the peak: what stays gathered, and the largest layer twice while it is copied."""
    accumulation: int
    """Gradients of the adapters, unreduced: kept between the micro-batches of a step, or averaged over copies."""
    workspace: int
    """The largest weight dequantised, and gradients inside one layer."""
    activations: int
    """Kept for the backward, as the spec asks for it."""
    activations_checkpointed: int
    """The same with full activation checkpointing."""
    logits: int

    @property
    def stored(self) -> int:
        """What is there from the first to the last step, whatever the data."""
        return sum(self.base.values()) + self.adapters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.stored + self.gather + self.accumulation + self.workspace + self.activations + self.logits


def micro_batches(spec: JobSpec, layout: Layout) -> MicroBatches:
    """As `workers.data.batches` cuts a full global batch."""
    share = -(-spec.training.batch_size // layout.world)
    per_device = spec.training.per_device_train_batch_size
    return MicroBatches(-(-share // per_device), min(share, per_device), spec.training.max_length)


def rank_bytes(
    base: Base,
    spec: JobSpec,
    layout: Layout,
    stored: Sequence[Stored],
    adapters: Sequence[Adapter],
    groups: Sequence[Group],
) -> RankBytes:
    batches = micro_batches(spec, layout)
    compute = COMPUTE_BYTES[spec.precision.compute]
    by_format = dict.fromkeys(sorted({s.format for s in stored}), 0)
    for weight in stored:
        by_format[weight.format] += weight.bytes_on_rank(layout)
    numel = sum(a.numel_on_rank(layout) for a in adapters)
    whole = sum(a.numel for a in adapters)
    layers = layer_activation_bytes(base.shape, spec, adapters) * batches.tokens
    kept = compute * base.shape.hidden * batches.tokens
    casts = compute * whole if layout.shard == 1 and compute != FP32_BYTES else 0
    outside = (FP32_BYTES + compute) * base.shape.hidden * batches.tokens
    return RankBytes(
        base=by_format,
        adapters=numel * FP32_BYTES,
        gradients=numel * FP32_BYTES,
        optimizer=2 * numel * FP32_BYTES + 2 * len(adapters) * FP32_BYTES,
        gather=_gather(groups, layout, compute) if layout.shard > 1 else 0,
        accumulation=_accumulation(layout, batches, whole),
        workspace=_workspace(base.shape, stored, compute, batches.tokens),
        activations=layers * base.shape.layers + casts + outside,
        activations_checkpointed=kept * base.shape.layers + layers + casts + outside,
        logits=LOGIT_BYTES * base.shape.vocabulary * batches.samples * max(1, batches.length - 1),
    )


def layer_activation_bytes(shape: Shape, spec: JobSpec, adapters: Sequence[Adapter]) -> int:
    """Bytes that one decoder layer keeps for its backward, per token, without activation checkpointing.

    The frozen weights' own inputs are not kept (no weight gradient needs them), but the adapters' are. A norm keeps its input
    in fp32; attention its queries, keys, values, output and one log-sum a head; a gated feed-forward gate, up, the gate's
    activation and the product; every adapter its A(x).
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    norms = FP32_BYTES * (shape.norms * (shape.hidden + 1) + (shape.q + shape.kv if shape.head_norms else 0))
    inputs = 2 * compute * shape.hidden
    attention = compute * (2 * shape.q + 2 * shape.kv) + FP32_BYTES * shape.heads
    width = shape.expert_intermediate * shape.experts_per_token if shape.experts else shape.intermediate
    inner = compute * (4 if shape.gated else 2) * width
    ranks = sum(a.r for a in adapters if a.layer is not None) / max(1, shape.layers)
    return int(norms + inputs + attention + inner + compute * ranks)


def _accumulation(layout: Layout, batches: MicroBatches, adapter_numel: int) -> int:
    """Sharded: whole gradients until the last micro-batch reduces them. Else: the one buffer that averages them over copies."""
    needed = batches.rounds > 1 if layout.shard > 1 else layout.world > 1
    return adapter_numel * FP32_BYTES if needed else 0


def _gather(groups: Sequence[Group], layout: Layout, compute: int) -> int:
    """The peak over the groups: while one is copied out of the gather's flat buffer, both are there, beside what is held."""
    whole = [group.gathered_bytes_on_rank(layout, compute) * layout.shard for group in groups]
    held = sum(size for group, size in zip(groups, whole, strict=True) if group.held)
    return max(held + size * (1 if group.held else 2) for group, size in zip(groups, whole, strict=True))


def _workspace(shape: Shape, stored: Sequence[Stored], compute: int, tokens: int) -> int:
    quantised = [s for s in stored if s.format != "bf16"]
    matrices = max(1, shape.experts)
    dense = max((s.weight.numel // (matrices if s.weight.kind == "experts" else 1) for s in quantised), default=0)
    return dense * compute + 3 * compute * tokens * max(shape.hidden, shape.intermediate)
