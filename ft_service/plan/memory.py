"""Bytes on the rank that holds most, for the largest micro-batch, whose every position is a target.

What is stored is there from the first step to the last. Of a micro-batch most is there at one of three moments, and the largest
of them counts. T tokens, c bytes of a number in compute, h hidden, i the feed-forward's width, L layers, K what a layer keeps:

    the head              all that the layers keep, T (L K + c h), a chunk's logits, and the head's input twice: its targets'
                          rows and their gradient
    the last norm         the same without the head's part, and five fp32 copies of its input: PyTorch's RMS norm is a power, a
                          mean and two products, whose backward makes one each
    the last feed-forward T (L K - 4 h), the gradient that came in, c h, and with a gate three of c i, less the one that is
                          done with; or, in the product before, one of c i beside the weight, dequantised

With activation checkpointing L K is what is kept of the layers before, and K of the one that was computed again.
`tests/workers/test_live_bytes.py` counts what PyTorch allocates, block by block. A processor's allocator needs more than that:
`ft_service.plan.machines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ft_service.bases.logit_chunks import chunk_rows
from ft_service.plan.base import BaseShape, Shape
from ft_service.plan.machines import Machine
from ft_service.plan.storage import COMPUTE_BYTES, FP32_BYTES, AdapterShape, GatherGroup, Layout, Stored
from ft_service.spec import JobSpec

LOGIT_BYTES = 8
"""Of one logit of a chunk at the peak: itself and its log-probability, fp32 each. On a GPU in bf16 it is 6: its kernel reads
logits as they are."""
WHOLE_LOGIT_BYTES = 12
"""Where logits are not made in chunks: the log-probability, the gradient of that, and the logit's own gradient, fp32 each."""

ROW_BYTES = 2 * (3 * 8 + 2 * 4)
"""Of one token of a micro-batch: id, label and position, its sample's number and its key for dropout; of this one and of the
next, which is put together beside the step."""
FP8_BACKWARD_BYTES = 3
"""Of one number of the gradient that an FP8 product's backward rounds: times the weight's scales, in bf16, and rounded."""
NORM_BACKWARD_COPIES = 5
"""fp32 copies of a norm's input that its backward makes: of the product's gradient, the mean's, and three of the power's."""
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
    activations: int
    """Kept for the backward when the loss is taken, as the spec asks for it."""
    activations_by_mode: dict[str, int]
    """The same for every value of distributed.activation_checkpointing."""
    workspace: int
    """What the backward needs beside `activations` where it needs most: it begins when the logits are gone."""
    workspace_by_mode: dict[str, int]
    rows: int
    """The micro-batch itself, the next one, and what turns positions into angles."""
    logits: int
    """A chunk's, and the head's input; gone when the backward begins."""
    offloaded: bool
    """What is stored lies in the host's memory, and only what is gathered and computed in the GPU's."""
    allocator_share: float = 0.0
    allocator_bytes: int = 0
    """What an allocator holds beside live tensors: a share of those in its heap, and bytes whatever they are."""
    logits_apart: bool = False
    """The allocator takes a chunk's logits from the system, and keeps what the backward before had for the next."""
    mapped: int = 0
    """Of what is stored and of a chunk's logits, what comes from the system: beside the heap, and with no gaps."""
    remade: int = 0
    """What a layer that is computed again cannot have of the place where it lay the first time."""
    remade_by_mode: dict[str, int] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Bytes held from the first to the last step, whatever the data."""
        return sum(self.base.values()) + self.adapters + self.gradients + self.optimizer

    @property
    def resident(self) -> int:
        """The stored and gathered bytes on the computing device: needed whatever the data."""
        return (0 if self.offloaded else self.stored) + self.gather

    @property
    def live(self) -> int:
        """Bytes of tensors at the peak."""
        return self.resident + self.accumulation + self.activations + self.rows + max(self.logits, self.workspace)

    @property
    def gaps(self) -> int:
        """Bytes that the allocator holds at the peak beside those of tensors."""
        kept = min(self.logits, self.workspace) if self.logits_apart else 0
        heap = max(0, self.live + kept - self.mapped)
        return kept + self.remade + self.allocator_bytes + int(self.allocator_share * heap)

    @property
    def total(self) -> int:
        return self.live + self.gaps

    def in_mode(self, mode: str) -> RankBytes:
        """The same with another distributed.activation_checkpointing."""
        return replace(
            self,
            activations=self.activations_by_mode[mode],
            workspace=self.workspace_by_mode[mode],
            remade=self.remade_by_mode[mode],
        )


def planned_micro_batches(spec: JobSpec, layout: Layout, length: int | None = None) -> MicroBatches:
    """Micro-batches of a full global batch of samples of `length` tokens (None: training.max_length), as `workers.data` cuts
    it: a sample goes alone where it is longer than the budget.
    """
    training = spec.training
    length = training.max_length if length is None else max(1, min(length, training.max_length))
    together = 1 if spec.dpo is None else 2  # batches count pairs, of which both samples are in one micro-batch
    share = together * -(-training.batch // layout.world)
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
    machine: Machine,
) -> RankBytes:
    """The bytes of a job whose options are chosen (`ft_service.plan.choose`)."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    by_format = dict.fromkeys(sorted({s.format for s in stored}), 0)
    for weight in stored:
        by_format[weight.format] += weight.bytes_on_rank(layout)
    numel = sum(a.numel_on_rank(layout) for a in adapters)
    whole = sum(a.numel for a in adapters)
    kept = _kept_by_mode(base.shape, spec, adapters, layout, batches.tokens)
    rows = max(1, min(batches.tokens - batches.samples, chunk_rows(base.shape.vocabulary)))
    block = FP32_BYTES * base.shape.vocabulary * rows
    beside = _beside_product(base.shape, spec, [] if machine.shared_memory else stored, adapters) * batches.tokens
    dense = _dense(base.shape, spec, stored)
    backward = _backward_by_mode(base.shape, spec, adapters, layout, batches.tokens, dense + beside)
    workspace = {mode: max(0, backward[mode] - kept[mode]) for mode in kept}
    mode = spec.distributed.activation_checkpointing
    layer = layer_activation_bytes(base.shape, spec, adapters) * batches.tokens if machine.refits_badly else 0
    remade = {mode: 0 if mode == "none" else layer for mode in kept}
    apart = machine.mapped_above is not None and block > machine.mapped_above
    return RankBytes(
        base=by_format,
        adapters=numel * FP32_BYTES,
        gradients=numel * FP32_BYTES,
        optimizer=2 * numel * FP32_BYTES + 2 * len(adapters) * FP32_BYTES,
        gather=_gather(groups, layout, compute, spec) if layout.shard > 1 else 0,
        accumulation=_accumulation(layout, batches, whole),
        activations=kept[mode],
        activations_by_mode=kept,
        workspace=workspace[mode],
        workspace_by_mode=workspace,
        rows=batches.tokens * (ROW_BYTES + 2 * compute * base.shape.q // base.shape.heads),
        logits=_logits(base, compute, batches),
        offloaded=spec.distributed.offload,
        allocator_share=machine.allocator_share,
        allocator_bytes=machine.allocator_bytes,
        logits_apart=apart,
        mapped=_mapped(stored, layout, machine) + (LOGIT_BYTES // FP32_BYTES * block if apart and base.loss_in_chunks else 0),
        remade=remade[mode],
        remade_by_mode=remade,
    )


def _mapped(stored: Sequence[Stored], layout: Layout, machine: Machine) -> int:
    """Bytes of the weights that are so large that the allocator takes each from the system."""
    if machine.mapped_above is None:
        return 0
    sizes = [weight.bytes_on_rank(layout) for weight in stored]
    return sum(size for size in sizes if size > machine.mapped_above)


def _logits(base: BaseShape, compute: int, batches: MicroBatches) -> int:
    """Bytes when the loss is taken: logits of one chunk beside the targets' rows of the head's input, and their gradient; or
    logits of all targets, where chunks do not work.
    """
    targets = max(1, batches.tokens - batches.samples)
    if not base.loss_in_chunks:
        return WHOLE_LOGIT_BYTES * base.shape.vocabulary * batches.tokens
    rows = min(targets, chunk_rows(base.shape.vocabulary))
    return LOGIT_BYTES * base.shape.vocabulary * rows + 2 * compute * base.shape.hidden * targets


def _kept_by_mode(shape: Shape, spec: JobSpec, adapters: Sequence[AdapterShape], layout: Layout, tokens: int) -> dict[str, int]:
    """Bytes kept for the backward when the loss is taken, the last norm's output among them.

    The first layer's first norm keeps nothing, since the embedding has no gradient: without checkpointing that is as much as
    the last norm keeps.
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    layer = layer_activation_bytes(shape, spec, adapters)
    inputs = compute * shape.hidden
    last_norm = FP32_BYTES * shape.hidden
    per_token = {
        "none": layer * shape.layers,
        "full": inputs * shape.layers + last_norm,
        "selective": (inputs + _product_bytes(shape, spec, adapters)) * shape.layers + last_norm,
    }
    casts = _casts(spec, adapters, layout)
    return {mode: (count + inputs) * tokens + (casts if mode == "none" else 0) for mode, count in per_token.items()}


def _backward_by_mode(
    shape: Shape, spec: JobSpec, adapters: Sequence[AdapterShape], layout: Layout, tokens: int, beside: int
) -> dict[str, int]:
    """Bytes where the backward needs most: in the last norm, in the last layer's feed-forward, or in the product before that.
    `beside`: what the product has beside its result.
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    layer = layer_activation_bytes(shape, spec, adapters)
    inputs, norm = compute * shape.hidden, FP32_BYTES * shape.hidden
    inner = compute * _inner_width(shape)
    of_norm = tokens * (NORM_BACKWARD_COPIES + 1) * norm
    of_layer = tokens * (layer + inputs) + max(tokens * (2 if shape.gated else 1) * inner, tokens * inner + beside)
    casts = _casts(spec, adapters, layout)
    own_casts = casts // max(1, shape.layers)
    before = tokens * (shape.layers - 1)
    products = before * _product_bytes(shape, spec, adapters)
    first = tokens * norm  # which the first layer's norm does not keep
    same = tokens * norm if compute == FP32_BYTES else 0  # in fp32 a norm keeps its input itself, and no copy
    recomputed = tokens * inputs * shape.layers - same + own_casts
    return {
        "none": casts + before * layer - first + max(of_layer, tokens * layer + of_norm),
        "full": recomputed + max(of_layer, of_norm),
        "selective": recomputed + products + max(of_layer, of_norm),
    }


def _casts(spec: JobSpec, adapters: Sequence[AdapterShape], layout: Layout) -> int:
    """Bytes of the adapters in the compute type, kept beside the masters; sharded ones are gathered in it."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    return compute * sum(a.numel for a in adapters) if layout.shard == 1 and compute != FP32_BYTES else 0


def _dense(shape: Shape, spec: JobSpec, stored: Sequence[Stored]) -> int:
    """Bytes of the largest weight dequantised; of one expert's where there are several."""
    quantised = [s for s in stored if s.format != "bf16"]
    matrices = max(1, shape.experts)
    numel = max((s.weight.numel // (matrices if s.weight.kind == "experts" else 1) for s in quantised), default=0)
    return numel * COMPUTE_BYTES[spec.precision.compute]


def _beside_product(shape: Shape, spec: JobSpec, stored: Sequence[Stored], adapters: Sequence[AdapterShape]) -> int:
    """Bytes a token that the backward of a layer's last product makes beside its result: a mask of dropout and the input
    without what is dropped; for an FP8 product its gradient, scaled and rounded, and the last input that was rounded.
    """
    compute = COMPUTE_BYTES[spec.precision.compute]
    decided = max((a.cols for a in adapters), default=0) if spec.lora.lora_dropout else 0
    in_fp8 = spec.precision.fp8_products == "auto" and spec.precision.compute == "bf16"
    rounded = max((s.weight.numel_of_row for s in stored if in_fp8 and s.format == "fp8"), default=0)
    return (1 + compute) * decided + (FP8_BACKWARD_BYTES * shape.hidden + rounded if rounded else 0)


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
