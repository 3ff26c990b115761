"""Bytes on the rank that holds most, for the largest micro-batch, every position of which is a
target.

Stored bytes are there from the first step to the last. The bytes of a micro-batch peak at one of
three moments, and the largest peak counts. T tokens, c bytes of a number in compute, h hidden, i
the feed-forward's width, L layers, K bytes kept by a layer:

    the head              all that the layers keep, T (L K + c h), a chunk's logits, and the head's
                          input twice: its targets' rows and their gradient
    the last norm         the same without the head's part, and five fp32 copies of its input:
                          PyTorch's RMS norm is a power, a mean and two products, whose backward
                          makes one each; a fused kernel makes the gradient alone
    the last feed-forward T (L K - 4 h), the incoming gradient, c h, and with a gate three of c i,
    less the one that is no
                          longer needed; or, in the product before, one of c i and the dequantised
                          weight, and on a processor that computes bf16 by fp32 4 i for the result
                          in it
    the experts' shares   with experts, k of which a token meets: T (L K - 4 h), the incoming
                          gradient, c k h for that of the experts' results, and three of h, one of
                          them in fp32; or, at the gates of wide experts, what a feed-forward
                          needs, less c k h

With experts K has the k results that their shares multiply, c k h, and i is k times an expert's
width, apart from that of shared experts, which every token passes. Experts without adapters keep
gate and up, and the gate's activation unless it is SiLU; not the product.

With activation checkpointing L K is what the layers before keep, plus K of the layer that was
computed again. K is less where fused kernels compute norms and feed-forwards
(`layer_activation_bytes`): on GPUs where they are known to, if the job wants them and compiles no
layer ("auto" compiles none then). What a compiler keeps is planned as what the model's own
operations keep. `tests/workers/test_live_bytes.py` counts what PyTorch allocates, block by block. A
process on a processor takes more than that: `HEAP_FACTOR` in `ft_service.plan.machines`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ft_service.bases.description import Description, Dimensions, FusedParts
from ft_service.head_shares import HeadShares, head_shares
from ft_service.kernel_limits import (
    attends_by_cudnn,
    copied_by_lots,
    cudnn_workspace_bytes,
    dropout_bytes,
    flash_workspace_bytes,
    fp8_backward_bytes,
    fp8_fits,
    gate_kept,
    grouped_fits,
    head_bytes,
    matrices_at_a_time,
    norm_backward_bytes,
    norm_kept_bytes,
    offloaded_bytes,
    served_bytes,
    tiles_of,
    whole_logits_bytes,
)
from ft_service.plan.long_samples import DEVICE_INPUTS, LayerBytes, backward_by_tiles
from ft_service.plan.machines import Machine
from ft_service.plan.teacher import teaching_adapter_bytes, teaching_job
from ft_service.plan.weight_storage import (
    FP32_BYTES,
    ShardedJob,
    ShardLayout,
    WeightStorage,
    trained_head,
)
from ft_service.spec import DistillationOptions, JobSpec

ROW_BYTES = 2 * (3 * 8 + 2 * 4)
"""Bytes per token of a micro-batch: id, label, position, number of the sample and key for dropout;
twice, since the next micro-batch is put together during the step.
"""
CHOICE_BYTES = 4 * 8 + 4 + 4
"""Bytes per token and expert that it meets: the expert's number, three orders of the rows, and its
share twice.
"""
UNKNOWN_BUDGET = 8192
"""Tokens per micro-batch as long as they are not chosen and the machine is not known."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a rank in one optimizer step, were all samples of one length."""

    rounds: int
    """Number of micro-batches."""
    samples: int
    """Samples per micro-batch."""
    length: int
    """Tokens of every sample."""
    tokens: int
    """Most tokens of a micro-batch: it takes more samples where they are shorter, up to the
    budget.
    """
    step_tokens: int
    """Tokens of all micro-batches."""
    ranks: int = 1
    """Ranks that share each micro-batch, each with so many `tokens`: `samples` are in all parts
    together.
    """


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank."""

    base: dict[str, int]
    """Frozen weights by storage format, padding rows included."""
    adapters: int
    """fp32 masters."""
    gradients: int
    """Reduced gradients of the adapters, fp32."""
    optimizer: int
    """AdamW's two moments and step counters."""
    gather: int
    """Gathered weights at the peak: what stays gathered, and the largest layer twice while it is
    copied.
    """
    accumulation: int
    """Gradients of the adapters, unreduced: kept between the micro-batches of a step, or averaged
    over copies.
    """
    activations: int
    """Bytes kept for the backward when the loss is taken, with the spec's activation
    checkpointing.
    """
    activations_by_mode: dict[str, int]
    """The same for every value of distributed.activation_checkpointing."""
    workspace: int
    """Most bytes that the backward needs in addition to `activations`: it begins when the logits
    are gone.
    """
    workspace_by_mode: dict[str, int]
    host: int
    """Pinned bytes of the host's memory for layers' inputs, with the spec's activation
    checkpointing; they are in no sum here.
    """
    host_by_mode: dict[str, int]
    rows: int
    """The micro-batch, the next one, and the rotary angles of its positions."""
    logits: int
    """Logits of a chunk, and the head's input; gone when the backward begins."""
    offloaded: bool
    """Whether stored bytes lie in the host's memory, and only gathered and computed ones in the
    GPU's.
    """
    heap_factor: float = 1.0
    """Memory that the process takes, as a multiple of live tensors."""
    teacher: int = 0
    """Weights of a teacher beside the base: another base, or the adapter of a tuned model."""
    tower: int = 0
    """Weights of the base's tower in fp32, whole on the computing device of every
    rank, if the job trains adapters on it.
    """

    @property
    def stored(self) -> int:
        """Bytes held from the first to the last step, whatever the data."""
        of_job = self.adapters + self.gradients + self.optimizer
        return sum(self.base.values()) + self.teacher + of_job

    @property
    def resident(self) -> int:
        """The stored and gathered bytes on the computing device: needed whatever the data."""
        return (0 if self.offloaded else self.stored) + self.tower + self.gather

    @property
    def live(self) -> int:
        """Bytes of tensors at the peak."""
        return (
            self.resident
            + self.accumulation
            + self.activations
            + self.rows
            + max(self.logits, self.workspace)
        )

    @property
    def gaps(self) -> int:
        """Bytes that the process takes at the peak in addition to those of tensors."""
        return int((self.heap_factor - 1) * self.live)

    @property
    def total(self) -> int:
        return self.live + self.gaps

    def in_mode(self, mode: str) -> RankBytes:
        """These bytes with another distributed.activation_checkpointing."""
        return replace(
            self,
            activations=self.activations_by_mode[mode],
            workspace=self.workspace_by_mode[mode],
            host=self.host_by_mode[mode],
        )


def planned_micro_batches(
    spec: JobSpec, layout: ShardLayout, length: int | None = None
) -> MicroBatches:
    """Micro-batches of a full global batch of samples of `length` tokens (None:
    training.max_length), cut as `workers.data` cuts it: a sample that is longer than the budget
    goes alone. Ranks that share samples have the budget each.
    """
    training = spec.training
    ranks = spec.distributed.ranks_per_sample
    length = training.max_length if length is None else max(1, min(length, training.max_length))
    together = 1 if spec.preferences is None else 2  # both samples of a pair are in one micro-batch
    groups = max(1, layout.world // ranks)
    share = together * -(-training.batch * spec.samples_of_item // (together * groups))
    most = min(share, together * (training.per_device_train_batch_size or share))
    given = training.tokens_per_micro_batch
    budget = max(together * length, ranks * (UNKNOWN_BUDGET if given == "auto" else given))
    samples = min(most, budget // length)
    return MicroBatches(
        rounds=-(-share // samples),
        samples=samples,
        length=length,
        tokens=-(-min(most * length, budget) // ranks),
        step_tokens=-(-share * length // ranks),
        ranks=ranks,
    )


def rank_bytes(job: ShardedJob, batches: MicroBatches, machine: Machine) -> RankBytes:
    """The bytes of a rank. All options of the job's spec must be chosen, except
    training.tokens_per_micro_batch.
    """
    shape = job.base.dimensions
    layout = job.layout
    compute = job.compute_bytes
    by_format = dict.fromkeys(sorted({s.format for s in job.frozen}), 0)
    for weight in job.frozen:
        by_format[weight.format] += weight.bytes_on_rank(layout)
    numel = sum(a.numel_on_rank(layout) for a in job.adapters)
    in_8_bits = job.spec.training.optim == "adamw_8bit"
    fused = _fused_parts(job, machine)
    kept = _kept_by_mode(job, batches.tokens, fused)
    by_token = _product_workspace(job, machine) + _copied_by_lots(job, machine)
    by_token += _fp32_results(job, machine)
    extra = _dequantised(job, machine) + by_token * batches.tokens
    of_attention = _attention_workspace(job, batches, machine) + exchange_buffers(job, batches)
    backward = _backward_by_mode(job, batches.tokens, extra, of_attention, fused)
    backward |= _backward_for_long_samples(job, batches, machine, fused, backward["full"])
    workspace = {mode: max(0, backward[mode] - kept[mode]) for mode in kept}
    mode = job.spec.distributed.checkpointing
    teacher = teaching_job(job)
    taught_by = 0 if teacher is None else sum(w.bytes_on_rank(layout) for w in teacher.frozen)
    gathered = [own for own in (job, teacher) if own is not None and layout.shard > 1]
    host = dict.fromkeys(kept, 0)
    host["offload"] = offloaded_bytes(batches.tokens * compute * shape.hidden, shape.layers)
    return RankBytes(
        base=by_format,
        adapters=numel * FP32_BYTES,
        gradients=numel * FP32_BYTES,
        optimizer=sum(a.moments_on_rank(layout, in_8_bits=in_8_bits) for a in job.adapters)
        + sum(a.tensors for a in job.adapters) * FP32_BYTES,
        gather=sum(map(_gather, gathered)),
        accumulation=_accumulation(job, batches),
        activations=kept[mode],
        activations_by_mode=kept,
        workspace=workspace[mode],
        workspace_by_mode=workspace,
        host=host[mode],
        host_by_mode=host,
        rows=batches.tokens * (batches.ranks * ROW_BYTES + 2 * compute * shape.q // shape.heads),
        logits=_logits(job, batches),
        offloaded=job.spec.distributed.offload,
        heap_factor=machine.heap_factor,
        teacher=taught_by + teaching_adapter_bytes(job),
        tower=_tower(job),
    )


def _tower(job: ShardedJob) -> int:
    images = job.base.images
    trained = any(adapter.on_every_rank for adapter in job.adapters)
    return images.tower_bytes if trained and images is not None else 0


def _logits(job: ShardedJob, batches: MicroBatches) -> int:
    """Bytes when the loss is taken: in chunks, or of the logits of all targets."""
    shape = job.base.dimensions
    loss = job.spec.loss
    taught = isinstance(loss, DistillationOptions)
    by = job.base.teacher or job.base
    if not (job.base.loss_in_chunks and by.loss_in_chunks):
        return (1 + taught) * whole_logits_bytes(shape.vocabulary, batches.tokens)
    targets = max(1, batches.tokens - batches.samples)
    head = trained_head(job.base, job.adapters)
    teacher = _of_teacher(job, by, loss, targets) if taught else 0
    return (
        teacher
        + head_bytes(shape.vocabulary, shape.hidden, targets, job.compute_bytes, head)
        + _cast(job, head)
    )


def _of_teacher(job: ShardedJob, by: Description, loss: DistillationOptions, targets: int) -> int:
    """Bytes of a teacher that wait for the student: its likeliest words with their logarithms; or
    what its head is given, with the whole head of another base. Both logits are in a chunk of half
    as many rows.
    """
    if loss.top_k is not None:
        return targets * (loss.top_k * 12 + 3 * FP32_BYTES)
    head = 0 if by is job.base else by.dimensions.vocabulary * by.dimensions.hidden
    return (targets * by.dimensions.hidden + head) * job.compute_bytes


def _fused_parts(job: ShardedJob, machine: Machine) -> FusedParts:
    """What fused kernels compute of a job's layers."""
    has_them = machine.fuses and not machine.shared_memory
    return job.base.dimensions.fused if has_them and job.spec.wants_fused_kernels else FusedParts()


def _kept_by_mode(job: ShardedJob, tokens: int, fused: FusedParts) -> dict[str, int]:
    """Bytes kept for the backward when the loss is taken, with the last norm's output.

    The first layer's first norm keeps nothing where the embedding has no gradient. Without
    checkpointing that saves as much as the last norm keeps.
    """
    shape = job.base.dimensions
    inputs = job.compute_bytes * shape.hidden
    last_norm = _norm_bytes(job, fused.last_norm)
    per_token = {
        "none": layer_activation_bytes(job, fused) * shape.layers
        + (last_norm if job.trains_embedding else 0),
        "full": inputs * shape.layers + last_norm,
        "selective": (inputs + _product_bytes(job)) * shape.layers + last_norm,
        "tiled": inputs * shape.layers + last_norm,
        "offload": inputs + last_norm,
    }
    return {
        mode: (kept + inputs) * tokens + (_casts(job) if mode == "none" else 0)
        for mode, kept in per_token.items()
    }


def _norm_bytes(job: ShardedJob, fused: bool) -> int:
    """Bytes per token of the input that a norm of the hidden state keeps."""
    return norm_kept_bytes(job.base.dimensions.hidden, job.compute_bytes, fused=fused)


def _backward_by_mode(
    job: ShardedJob, tokens: int, extra: int, of_attention: int, fused: FusedParts
) -> dict[str, int]:
    """Bytes where the backward needs most: in the last norm, in the last layer's feed-forward, in
    the product before that, or in its attention. `extra`, `of_attention`: bytes that the product
    and attention need in addition to their results.
    """
    shape = job.base.dimensions
    compute = job.compute_bytes
    layer = layer_activation_bytes(job, fused)
    inputs = compute * shape.hidden
    common = compute * _common_width(shape)
    # The gradient of what shared experts gave, until their backward.
    scaled = inputs if shape.shared_scaled else 0
    norm = _norm_bytes(job, _fuses_norms(shape, fused))
    of_norm = tokens * norm_backward_bytes(shape.hidden, compute, fused=fused.last_norm)
    product = tokens * max(common, compute * _routed_width(shape)) + extra
    needed = max(
        tokens * (2 if shape.gated else 1) * common, tokens * _backward_of_experts(job), product
    )
    attention = (
        tokens * (layer - _inner_bytes(job, fused) + inputs + 2 * compute * (shape.q + shape.kv))
        + of_attention
    )
    feed_forward = tokens * (layer + inputs + scaled) + needed
    of_layer = max(feed_forward, attention if of_attention else 0)
    before = tokens * (shape.layers - 1)
    # Which the first layer's norm does not keep.
    first = 0 if job.trains_embedding else tokens * norm
    # A norm in fp32, or by a kernel, keeps its input itself, and no copy.
    same = tokens * norm if norm == inputs else 0
    recomputed = tokens * inputs * shape.layers - same + _casts(job) // max(1, shape.layers)
    return {
        "none": _casts(job) + before * layer - first + max(of_layer, tokens * layer + of_norm),
        "full": recomputed + max(of_layer, of_norm),
        "selective": recomputed
        + before * _product_bytes(job)
        + max(feed_forward, of_norm),  # by PyTorch's kernel
    }


def _backward_for_long_samples(
    job: ShardedJob, batches: MicroBatches, machine: Machine, fused: FusedParts, full: int
) -> dict[str, int]:
    """Bytes where the backward of "tiled" and "offload" needs most. `full`: that of "full"."""
    shape = job.base.dimensions
    tokens = batches.tokens
    inputs = job.compute_bytes * shape.hidden
    on_device = tokens * inputs * min(DEVICE_INPUTS, shape.layers)
    if not job.base.tiles or tiles_of(tokens) == 1:
        return {"tiled": full, "offload": full - tokens * inputs * shape.layers + on_device}
    norm = _norm_bytes(job, _fuses_norms(shape, fused))
    common = job.compute_bytes * _common_width(shape)
    inner_product = _product_workspace(job, machine) + _copied_by_lots(job, machine)
    inner_product += _fp32_results(job, machine)
    layer = LayerBytes(
        kept=layer_activation_bytes(job, fused),
        inner=_inner_bytes(job, fused),
        hidden=inputs,
        norm=norm,
        q=job.compute_bytes * shape.q,
        kv=job.compute_bytes * shape.kv,
        inner_needed=max((2 if shape.gated else 1) * common, _backward_of_experts(job)),
        inner_product=max(common, job.compute_bytes * _routed_width(shape)) + inner_product,
        outer_product=_product_workspace(job, machine, max(shape.hidden, shape.q)),
    )
    of_layer = backward_by_tiles(
        layer,
        tokens,
        _any_attention_workspace(job, batches, machine) + exchange_buffers(job, batches),
        _dequantised(job, machine),
    )
    of_norm = tokens * norm_backward_bytes(shape.hidden, job.compute_bytes, fused=fused.last_norm)
    # A norm in fp32, or by a kernel, keeps the layer's input itself, and no copy.
    same = tokens * norm if norm == inputs else 0
    beside = max(of_layer - same, of_norm) + _casts(job) // max(1, shape.layers)
    return {"tiled": tokens * inputs * shape.layers + beside, "offload": on_device + beside}


def _any_attention_workspace(job: ShardedJob, batches: MicroBatches, machine: Machine) -> int:
    """Bytes in which the backward of attention works on a GPU, by any kernel; 0: on a processor,
    whose samples are computed one after the other.
    """
    shape = job.base.dimensions
    if machine.shared_memory:
        return 0
    by_flash = flash_workspace_bytes(
        batches.tokens,
        shares_of_heads(job).all_heads,
        shape.q // shape.heads,
        job.compute_bytes,
        grouped=shape.kv < shape.q,
    )
    return max(by_flash, _attention_workspace(job, batches, machine))


def _attention_workspace(job: ShardedJob, batches: MicroBatches, machine: Machine) -> int:
    """Bytes in which cuDNN's backward of attention works. 0: PyTorch's kernel computes it."""
    shape = job.base.dimensions
    tokens = batches.ranks * batches.tokens
    if not job_attends_by_cudnn(job, machine, tokens, batches.length):
        return 0
    longest = min(batches.length, tokens)
    grouped = shape.kv < shape.q
    return cudnn_workspace_bytes(
        tokens, longest, shares_of_heads(job).heads, shape.q // shape.heads, grouped=grouped
    )


def job_attends_by_cudnn(job: ShardedJob, machine: Machine, tokens: int, length: int) -> bool:
    """Whether cuDNN computes the attention of a job's whole rows of so many tokens, with samples of
    `length`, unless checkpointing is selective. Samples longer than a layer's window, of which the
    plan does not know, are left to PyTorch's kernel.
    """
    shape = job.base.dimensions
    spec = job.spec
    packed = spec.training.packing and job.base.padded_because is None
    wanted = spec.precision.compute == "bf16" and packed and spec.distributed.compile is not True
    return (
        machine.by_cudnn
        and wanted
        and attends_by_cudnn(
            tokens,
            length,
            shares_of_heads(job).heads,
            shape.q // shape.heads,
        )
    )


def shares_of_heads(job: ShardedJob) -> HeadShares:
    """How the ranks that share a sample divide the base's heads."""
    shape = job.base.dimensions
    groups = max(1, shape.heads * shape.kv // shape.q)
    return head_shares(shape.heads, groups, job.spec.distributed.ranks_per_sample)


def sent_width(job: ShardedJob) -> int:
    """Numbers per token and layer that ranks which share a sample give away before attention:
    queries, with heads of zeros, and keys and values, repeated where several ranks share them.
    """
    shape = job.base.dimensions
    shares = shares_of_heads(job)
    return shape.q // shape.heads * (shares.all_heads + 2 * shares.all_groups)


def exchanged_width(job: ShardedJob) -> int:
    """The same, and what attention gives, in a forward."""
    shape = job.base.dimensions
    return sent_width(job) + shape.q // shape.heads * shares_of_heads(job).all_heads


def exchange_buffers(job: ShardedJob, batches: MicroBatches) -> int:
    """Bytes of queries, keys and values on their way between ranks: as they were computed, in the
    order in which they are sent, and as they come.
    """
    if batches.ranks == 1:
        return 0
    return 3 * job.compute_bytes * sent_width(job) * batches.tokens


def _casts(job: ShardedJob) -> int:
    """Bytes of the adapters' copies in the compute type; sharded ones are gathered in it."""
    return _cast(job, sum(a.numel for a in job.adapters if not a.whole))


def _cast(job: ShardedJob, numel: int) -> int:
    """Bytes of masters' copies in the compute type."""
    return (
        job.compute_bytes * numel
        if job.layout.shard == 1 and job.compute_bytes != FP32_BYTES
        else 0
    )


def _dequantised(job: ShardedJob, machine: Machine) -> int:
    """Bytes of the largest weight dequantised, or rounded with its adapter; of experts, one matrix,
    or on a GPU as many as it multiplies at a time.
    """
    if job.spec.precision.served_as is not None:
        return max(
            served_bytes(
                weight.numel,
                job.compute_bytes,
                gpu=not machine.shared_memory,
                kept_sums=job.spec.precision.served_as == "nvfp4",
            )
            for weight in job.base.quantizable
        )

    def at_a_time(stored: WeightStorage) -> int:
        if stored.weight.kind != "experts":
            return job.compute_bytes * stored.weight.numel
        return _matrix_bytes(job, stored) * (
            _lot(job, stored) if _grouped(job, machine, stored) else 1
        )

    return max(map(at_a_time, job.quantised), default=0)


def _copied_by_lots(job: ShardedJob, machine: Machine) -> int:
    """Bytes per token of the rows that a grouped product copies where it dequantises experts'
    matrices in lots.
    """
    shape = job.base.dimensions
    experts = [s for s in job.quantised if s.weight.kind == "experts" and _grouped(job, machine, s)]
    sizes = [_matrix_of(job, s) for s in experts if _lot(job, s) < shape.experts]
    return shape.experts_per_token * max(
        (copied_by_lots(*size, job.compute_bytes) for size in sizes), default=0
    )


def _grouped(job: ShardedJob, machine: Machine, stored: WeightStorage) -> bool:
    """Whether a GPU multiplies many matrices of a stack of experts by one kernel."""
    has_kernel = not machine.shared_memory and job.spec.precision.compute == "bf16"
    return has_kernel and grouped_fits(*_matrix_of(job, stored))


def _matrix_of(job: ShardedJob, stored: WeightStorage) -> tuple[int, int]:
    """Rows and columns of one matrix of a stack of experts."""
    return stored.weight.rows // max(1, job.base.dimensions.experts), stored.weight.numel_of_row


def _matrix_bytes(job: ShardedJob, stored: WeightStorage) -> int:
    """Bytes of one matrix of a stack of experts, dequantised."""
    return job.compute_bytes * stored.weight.numel // max(1, job.base.dimensions.experts)


def _lot(job: ShardedJob, stored: WeightStorage) -> int:
    """Number of a stack's matrices that a GPU dequantises at a time."""
    return min(job.base.dimensions.experts, matrices_at_a_time(_matrix_bytes(job, stored)))


def multiplied_in_fp8(job: ShardedJob, machine: Machine) -> list[WeightStorage]:
    """Frozen weights whose products are in FP8.

    A GPU without figures is taken for one that multiplies it.
    """
    precision = job.spec.precision
    knows = machine.fp8_flops is not None or (machine.flops is None and not machine.shared_memory)
    if not knows or precision.fp8_products != "auto" or precision.compute != "bf16":
        return []
    if precision.served_as is not None:
        return []
    in_fp8 = (stored for stored in job.frozen if stored.format == "fp8")
    return [stored for stored in in_fp8 if fp8_fits(stored.weight.rows, stored.weight.numel_of_row)]


def _product_workspace(job: ShardedJob, machine: Machine, widest: int | None = None) -> int:
    """Bytes per token that the backward of a layer's last product needs in addition to its result,
    with dropout and in FP8. `widest`: of products with inputs of at most this width.
    """

    def most(widths: Iterable[int]) -> int:
        return max((own for own in widths if widest is None or own <= widest), default=0)

    dropped = most(a.cols for a in job.adapters) if job.spec.lora.lora_dropout else 0
    rounded = most(s.weight.numel_of_row for s in multiplied_in_fp8(job, machine))
    of_fp8 = fp8_backward_bytes(job.base.dimensions.hidden, rounded) if rounded else 0
    return dropout_bytes(dropped, job.compute_bytes) + of_fp8


def _fp32_results(job: ShardedJob, machine: Machine) -> int:
    """Bytes per token of the copy in fp32 of a product's result, on a processor that computes bf16
    by fp32: of the widest, which is the gradient of the feed-forward's inner width. Experts' are
    left out, each of few tokens.
    """
    slow = machine.slow_in_bf16
    by_fp32 = slow is not None and slow.by_fp32 and job.spec.precision.compute == "bf16"
    return FP32_BYTES * _common_width(job.base.dimensions) if by_fp32 else 0


def _product_bytes(job: ShardedJob) -> int:
    """Bytes per token of the results of matrix products and attention in a layer, which "selective"
    keeps.
    """
    shape = job.base.dimensions
    inner = (2 if shape.gated else 1) * (_common_width(shape) + _routed_width(shape))
    results = shape.hidden * bool(_common_width(shape)) + _routed_hidden(shape)
    attention = 2 * shape.q + 2 * shape.kv + shape.hidden
    products = attention + inner + results + shape.experts + _ranks_of_layer(job)
    return job.compute_bytes * int(products) + FP32_BYTES * shape.heads


def _common_width(shape: Dimensions) -> int:
    """Width of the feed-forward that every token passes: with experts that of shared ones, or 0."""
    return shape.shared_intermediate if shape.experts else shape.intermediate


def _routed_width(shape: Dimensions) -> int:
    """Width of the experts that a token meets, together; without experts 0."""
    return shape.expert_intermediate * shape.experts_per_token if shape.experts else 0


def _routed_hidden(shape: Dimensions) -> int:
    """Numbers that the experts that a token meets give together; without experts 0."""
    return shape.hidden * shape.experts_per_token if shape.experts else 0


def _backward_of_experts(job: ShardedJob) -> int:
    """Bytes per token that the backward of a layer's experts needs besides what they keep, at the
    shares or at the gates.

    At the gates the results are no longer kept, and a product that no adapter needs never was. At
    the shares one place of all tokens is multiplied at a time, in fp32, and the experts' input is
    there.
    """
    shape = job.base.dimensions
    if not shape.experts:
        return 0
    compute = job.compute_bytes
    results = _routed_hidden(shape)
    kept_product = shape.expert_intermediate in _adapted_widths(job)
    at_gates = ((3 if shape.gated else 2) - kept_product) * _routed_width(shape) - results
    at_shares = compute * results + (2 * compute + FP32_BYTES) * shape.hidden
    return max(at_shares, compute * at_gates)


def _adapted_widths(job: ShardedJob) -> set[int]:
    """Widths of the inputs of adapted stacks of experts."""
    return {adapter.cols for adapter in job.adapters if adapter.experts > 1}


def _kept_by_experts(job: ShardedJob) -> int:
    """Bytes per token that a layer's experts and their router keep: the results, which the shares
    multiply; gate, up and, unless it is SiLU, the gate's activation; the router's probabilities;
    and where stacks are adapted, their inputs.
    """
    shape = job.base.dimensions
    compute = job.compute_bytes
    if not shape.experts:
        return 0
    widths = _adapted_widths(job)
    hidden = _routed_hidden(shape) * (2 if shape.hidden in widths else 1)
    gates = 3 - shape.silu_experts if shape.gated else 1
    inner = _routed_width(shape) * (gates + (shape.expert_intermediate in widths))
    return (
        compute * (hidden + inner)
        + CHOICE_BYTES * shape.experts_per_token
        + FP32_BYTES * shape.experts
    )


def _ranks_of_layer(job: ShardedJob) -> float:
    """Mean over the layers of the sum of r over a layer's adapters, those of experts that a token
    meets.
    """
    shape = job.base.dimensions
    ranks = (
        a.r / a.experts * (shape.experts_per_token if a.experts > 1 else 1)
        for a in job.adapters
        if a.layer is not None
    )
    return sum(ranks) / max(1, shape.layers)


def _fuses_norms(shape: Dimensions, fused: FusedParts) -> bool:
    """Whether kernels compute all norms of the hidden state in a layer."""
    return 0 < shape.norms <= fused.norms


def layer_activation_bytes(job: ShardedJob, fused: FusedParts) -> int:
    """Bytes per token that a decoder layer keeps for its backward, without activation
    checkpointing.

    The frozen weights' own inputs are not kept (no weight gradient needs them), but the adapters'
    are. A norm keeps its input in fp32; attention its queries, keys, values, output and one log-sum
    per head; a gated feed-forward gate, up, the gate's activation and the product; experts what
    `_kept_by_experts` counts; every adapter its A(x), those of experts for the experts that a token
    meets, and with DoRA its result before the magnitude. By fused kernels a norm keeps its input as
    it is, and a feed-forward does not keep the gate's activation; experts do.
    """
    shape = job.base.dimensions
    compute = job.compute_bytes
    norms = shape.norms * (_norm_bytes(job, _fuses_norms(shape, fused)) + FP32_BYTES)
    heads = (
        (compute if fused.head_norms else FP32_BYTES) * (shape.q + shape.kv)
        if shape.head_norms
        else 0
    )
    inputs = (1 + bool(_common_width(shape)) + shape.shared_scaled) * compute * shape.hidden
    attention = compute * (2 * shape.q + 2 * shape.kv) + FP32_BYTES * shape.heads
    if job.spec.distributed.ranks_per_sample > 1:  # the output before it is exchanged, and after
        attention += compute * (exchanged_width(job) - shape.q - 2 * shape.kv)
    inner = _inner_bytes(job, fused)
    scaled = sum(a.rows for a in job.adapters if a.magnitude and a.layer is not None) / max(
        1, shape.layers
    )
    return int(
        norms + heads + inputs + attention + inner + compute * (_ranks_of_layer(job) + scaled)
    )


def _inner_bytes(job: ShardedJob, fused: FusedParts) -> int:
    """Bytes per token that a layer's feed-forward and experts keep for their backward."""
    shape = job.base.dimensions
    kept = gate_kept(fused=fused.gate) if shape.gated else 2
    return job.compute_bytes * kept * _common_width(shape) + _kept_by_experts(job)


def _accumulation(job: ShardedJob, batches: MicroBatches) -> int:
    """Bytes of accumulated gradients.

    If sharded, whole gradients until the last micro-batch reduces them; else a buffer that averages
    them over copies.
    """
    needed = batches.rounds > 1 if job.layout.shard > 1 else job.layout.world > 1
    return FP32_BYTES * sum(a.numel for a in job.adapters) if needed else 0


def _gather(job: ShardedJob) -> int:
    """Bytes of gathered weights at the peak over the groups.

    While a group is copied out of the gather's flat buffer both exist, in addition to held weights,
    to those that stay sharded over fewer ranks, and to groups gathered further ahead.
    """
    sizes = [
        (g, g.gathered_bytes_on_rank(job.layout, job.compute_bytes) * job.layout.shard)
        for g in job.groups
    ]
    held = sum(size for group, size in sizes if group.held)
    kept = sum(size // group.kept_over for group, size in sizes if group.kept_over)
    prefetch = job.spec.distributed.prefetch
    ahead = 0 if prefetch is None else max(prefetch.forward, prefetch.backward) - 1
    largest = max((size for group, size in sizes if not group.held), default=0)
    copied = max(((1 if group.held else 2) * size for group, size in sizes), default=0)
    return held + kept + copied + ahead * largest
