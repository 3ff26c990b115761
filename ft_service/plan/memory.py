"""Bytes on the rank that holds most. Stored bytes are exact; the rest, of a forward and backward, is an upper estimate for the
largest micro-batch, whose every position is a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.bases.logit_chunks import chunk_rows
from ft_service.plan.base import BaseShape, Shape
from ft_service.plan.storage import COMPUTE_BYTES, FP32_BYTES, AdapterShape, GatherGroup, Layout, Stored
from ft_service.spec import JobSpec

LOGIT_BYTES = 12
"""Of one logit at the peak: fp32, its exponential while these are summed, and in the compute type. Where logits are not made in
chunks: its log-probability, the gradient of that, and its own gradient, fp32 each."""

ROW_BYTES = 2 * (3 * 8 + 2 * 4)
"""Of one token of a micro-batch: id, label and position, its sample's number and its key for dropout; of this one and of the
next, which is put together beside the step."""
FP8_BACKWARD_BYTES = 12
"""Of one number of the gradient that an FP8 product's backward rounds: in fp32, times the weight's scales, and absolute."""
DROPOUT_BYTES = 16
"""Of one number that dropout decides on: its hash and what the hash is computed with, the mask, and the input without what is
dropped."""
UNKNOWN_BUDGET = 8192
"""Tokens of a micro-batch where they are still to be chosen and the machine is not known."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a rank in one optimizer step, were all samples of one length."""

    rounds: int
    samples: int
    """Of one round."""
    length: int
    """Of every sample, in tokens."""
    tokens: int
    """Of one round, at most: of samples that are shorter more go into it, up to the budget."""
    step_tokens: int
    """Of all rounds."""


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
    activations_by_mode: dict[str, int]
    """The same for every value of distributed.activation_checkpointing."""
    rows: int
    """The micro-batch itself, the next one, and what turns positions into angles."""
    logits: int
    offloaded: bool
    """What is stored lies in the host's memory, and only what is gathered and computed in the GPU's."""

    @property
    def stored(self) -> int:
        """Bytes held from the first to the last step, whatever the data."""
        return sum(self.base.values()) + self.adapters + self.gradients + self.optimizer

    @property
    def resident(self) -> int:
        """The stored and gathered bytes on the computing device: needed whatever the data."""
        return (0 if self.offloaded else self.stored) + self.gather

    @property
    def total(self) -> int:
        return self.resident + self.accumulation + self.workspace + self.activations + self.rows + self.logits


def planned_micro_batches(spec: JobSpec, layout: Layout, length: int | None = None) -> MicroBatches:
    """Micro-batches of a full global batch of samples of `length` tokens (None: training.max_length), as `workers.data` cuts
    it: a sample goes alone where it is longer than the budget.
    """
    training = spec.training
    length = training.max_length if length is None else max(1, min(length, training.max_length))
    together = 1 if spec.dpo is None else 2  # batches count pairs, of which both samples are in one micro-batch
    share = together * -(-training.batch_size // layout.world)
    most = min(share, together * (training.per_device_train_batch_size or share))
    budget = training.tokens_per_micro_batch
    budget = max(together * length, UNKNOWN_BUDGET if budget == "auto" else budget)
    samples = min(most, budget // length)
    return MicroBatches(-(-share // samples), samples, length, min(most * length, budget), share * length)


def rank_bytes(
    base: BaseShape,
    spec: JobSpec,
    layout: Layout,
    stored: Sequence[Stored],
    adapters: Sequence[AdapterShape],
    groups: Sequence[GatherGroup],
    batches: MicroBatches,
) -> RankBytes:
    """The bytes of a job whose options are chosen (`ft_service.plan.choose`)."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    by_format = dict.fromkeys(sorted({s.format for s in stored}), 0)
    for weight in stored:
        by_format[weight.format] += weight.bytes_on_rank(layout)
    numel = sum(a.numel_on_rank(layout) for a in adapters)
    whole = sum(a.numel for a in adapters)
    by_mode = _activations_by_mode(base.shape, spec, adapters, layout, batches.tokens)
    return RankBytes(
        base=by_format,
        adapters=numel * FP32_BYTES,
        gradients=numel * FP32_BYTES,
        optimizer=2 * numel * FP32_BYTES + 2 * len(adapters) * FP32_BYTES,
        gather=_gather(groups, layout, compute, spec) if layout.shard > 1 else 0,
        accumulation=_accumulation(layout, batches, whole),
        workspace=_workspace(base.shape, spec, stored, adapters, batches.tokens),
        activations=by_mode[spec.distributed.activation_checkpointing],
        activations_by_mode=by_mode,
        rows=batches.tokens * (ROW_BYTES + 2 * compute * base.shape.q // base.shape.heads),
        logits=_logits(base, compute, batches),
        offloaded=spec.distributed.offload,
    )


def _logits(base: BaseShape, compute: int, batches: MicroBatches) -> int:
    """Bytes at the peak: logits of one chunk beside the gradient of the head's input; or of all targets, where chunks do not
    work.
    """
    targets = max(1, batches.tokens - batches.samples)
    if not base.loss_in_chunks:
        return LOGIT_BYTES * base.shape.vocabulary * batches.tokens
    rows = min(targets, chunk_rows(base.shape.vocabulary))
    return LOGIT_BYTES * base.shape.vocabulary * rows + compute * base.shape.hidden * targets


def _activations_by_mode(
    shape: Shape, spec: JobSpec, adapters: Sequence[AdapterShape], layout: Layout, tokens: int
) -> dict[str, int]:
    """Bytes of activations. Checkpointed, a layer keeps less, and needs everything while its backward runs."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    whole = layer_activation_bytes(shape, spec, adapters)
    inputs = compute * shape.hidden
    casts = compute * sum(a.numel for a in adapters) if layout.shard == 1 and compute != FP32_BYTES else 0
    outside = (FP32_BYTES + compute) * shape.hidden * tokens + casts
    per_token = {
        "none": whole * shape.layers,
        "full": inputs * shape.layers + whole,
        "selective": (inputs + _product_bytes(shape, spec, adapters)) * shape.layers + whole,
    }
    return {mode: count * tokens + outside for mode, count in per_token.items()}


def _product_bytes(shape: Shape, spec: JobSpec, adapters: Sequence[AdapterShape]) -> int:
    """Results of matrix products and attention in one layer, per token: the part that "selective" keeps."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    width = (2 if shape.gated else 1) * _inner_width(shape)
    return (
        compute * int(2 * shape.q + 2 * shape.kv + 2 * shape.hidden + width + _ranks(shape, adapters))
        + FP32_BYTES * shape.heads
    )


def _inner_width(shape: Shape) -> int:
    return shape.expert_intermediate * shape.experts_per_token if shape.experts else shape.intermediate


def _ranks(shape: Shape, adapters: Sequence[AdapterShape]) -> float:
    """Sum of r over the adapters of one layer."""
    chosen = shape.experts_per_token
    return sum(a.r / a.experts * (chosen if a.experts > 1 else 1) for a in adapters if a.layer is not None) / max(
        1, shape.layers
    )


def layer_activation_bytes(shape: Shape, spec: JobSpec, adapters: Sequence[AdapterShape]) -> int:
    """Bytes that one decoder layer keeps for its backward, per token, without activation checkpointing.

    The frozen weights' own inputs are not kept (no weight gradient needs them), but the adapters' are. A norm keeps its input
    in fp32; attention its queries, keys, values, output and one log-sum a head; a gated feed-forward gate, up, the gate's
    activation and the product; every adapter its A(x).
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    norms = FP32_BYTES * (shape.norms * (shape.hidden + 1) + (shape.q + shape.kv if shape.head_norms else 0))
    inputs = 2 * compute * shape.hidden
    attention = compute * (2 * shape.q + 2 * shape.kv) + FP32_BYTES * shape.heads
    inner = compute * (4 if shape.gated else 2) * _inner_width(shape)
    return int(norms + inputs + attention + inner + compute * _ranks(shape, adapters))


def _accumulation(layout: Layout, batches: MicroBatches, adapter_numel: int) -> int:
    """Bytes of accumulated gradients. Sharded: whole gradients until the last micro-batch reduces them. Else: one buffer that
    averages them over copies.
    """
    needed = batches.rounds > 1 if layout.shard > 1 else layout.world > 1
    return adapter_numel * FP32_BYTES if needed else 0


def _gather(groups: Sequence[GatherGroup], layout: Layout, compute: int, spec: JobSpec) -> int:
    """The peak over the groups: while one is copied out of the gather's flat buffer, both exist, beside held weights, weights
    that stay sharded over fewer ranks, and those gathered further ahead.
    """
    whole = {group.name: group.gathered_bytes_on_rank(layout, compute) * layout.shard for group in groups}
    held = sum(whole[group.name] for group in groups if group.held)
    kept = sum(whole[group.name] // group.kept_over for group in groups if group.kept_over)
    prefetch = spec.distributed.prefetch
    ahead = 0 if prefetch is None else max(prefetch.forward, prefetch.backward) - 1
    largest = max((size for group, size in zip(groups, whole.values(), strict=True) if not group.held), default=0)
    copied = max(((1 if group.held else 2) * whole[group.name] for group in groups), default=0)
    return held + kept + copied + ahead * largest


def _workspace(shape: Shape, spec: JobSpec, stored: Sequence[Stored], adapters: Sequence[AdapterShape], tokens: int) -> int:
    """Bytes that live within one product: the largest weight dequantised, gradients inside a layer, and what FP8 products and
    dropout compute with.
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    quantised = [s for s in stored if s.format != "bf16"]
    matrices = max(1, shape.experts)
    dense = max((s.weight.numel // (matrices if s.weight.kind == "experts" else 1) for s in quantised), default=0)
    in_fp8 = spec.precision.fp8_products == "auto" and spec.precision.compute == "bf16"
    rounded = max((s.weight.rows for s in stored if in_fp8 and s.format == "fp8" and s.weight.kind == "linear"), default=0)
    decided = max((a.cols for a in adapters), default=0) if spec.lora.lora_dropout else 0
    inside = 3 * compute * max(shape.hidden, shape.intermediate)
    return dense * compute + tokens * (inside + max(FP8_BACKWARD_BYTES * rounded, DROPOUT_BYTES * decided))
