"""FLOP per token, bytes on the wire per optimizer step, and the tokens per second that follow from
a machine's figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ft_service.bases.description import Description, Weight
from ft_service.head_shares import head_shares
from ft_service.kernel_limits import SERVED_MOVED_BYTES, tiles_of
from ft_service.plan.long_samples import beside_copies, copy_seconds
from ft_service.plan.machines import EFFICIENCY, EFFICIENCY_BY_CUDNN, LINK_EFFICIENCY, Machine
from ft_service.plan.memory import (
    MicroBatches,
    exchanged_width,
    job_attends_by_cudnn,
    multiplied_in_fp8,
)
from ft_service.plan.weight_storage import AdapterShape, GatherGroup, ShardedJob, trained_head
from ft_service.spec import DistillationOptions, JobSpec, KtoOptions
from ft_service.spec.options import FOR_LONG_SAMPLES

FP8_GAIN = 1.33
"""How many times as fast frozen products are in FP8 as in bf16, with rounding and transposing: an
8B model trained 1.28 times as fast on an H200 (benchmarks/README.md), and these products are 7/8 of
its arithmetic.
"""
LAUNCH_SECONDS = 0.006
"""Time to launch a decoder layer's forward and backward, while the GPU computes: 143 to 319 ms were
measured for 32 layers.
"""
DISPATCH_SECONDS = 0.002
"""The same on a processor, which computes nothing meanwhile."""
_LAUNCHED = {"none": 1.0, "selective": 1.3, "full": 1.35, "tiled": 1.35, "offload": 1.35}
"""Activation checkpointing → launches as a multiple of those without it: what is computed again is
launched again.
"""
FP64_SHARE = 1 / 128
"""FLOP/s in fp64 as a share of those in bf16, on the GPUs that are slowest at it: those of
workstations. Others have a tenth.
"""
FP64_SHARE_OF_PROCESSOR = 1 / 2
PASSES = {"none": 2, "selective": 2, "full": 3, "tiled": 3, "offload": 3}
"""Activation checkpointing → how often a micro-batch dequantises every weight, or rounds it with
its adapter: forward, backward, forward again. By tiles, so often for each tile.
"""
WHOLE_LAYERS = ("full", *FOR_LONG_SAMPLES)
"""Activation checkpointing whose backward computes whole layers again."""


def passes(mode: str, tokens: int) -> int:
    """How often a micro-batch of so many tokens dequantises a weight, at most."""
    return PASSES[mode] * (tiles_of(tokens) if mode in FOR_LONG_SAMPLES else 1)


def forwards_only(spec: JobSpec) -> int:
    """Forwards without gradients that each micro-batch of a step has besides its own: a teacher's
    that the ranks compute, or that of KTO's mismatched answers.
    """
    mismatched = isinstance(spec.loss, KtoOptions) and spec.loss.loss_type == "kto"
    taught = isinstance(spec.loss, DistillationOptions) and spec.served_teacher is None
    return int(mismatched or taught)


@dataclass(frozen=True)
class CollectiveBytes:
    """Bytes that a rank receives from other ranks in an optimizer step."""

    gather: int
    reduce: int
    all_reduce: int
    """Bytes from the reduction between copies of the model."""
    gathers: int
    """Number of all-gathers."""
    reduces: int
    """Number of reductions inside a copy (reduce-scatter)."""
    exchange: int = 0
    """Heads and tokens from the ranks that share its samples."""

    @property
    def overlapped(self) -> int:
        """Bytes that come while the rank computes."""
        return self.gather + self.reduce + self.all_reduce

    @property
    def total(self) -> int:
        return self.overlapped + self.exchange


@dataclass(frozen=True)
class Speed:
    """An estimate of a step."""

    tokens_per_second: float
    """The sum over all ranks."""
    step_seconds: float
    compute_seconds: float
    dequantise_seconds: float
    """Of it, with precision.served_as, rounding base and adapter together."""
    wire_seconds: float
    launch_seconds: float
    """Time until all of a step's work is launched. A GPU with less work than that waits."""
    copy_seconds: float = 0.0
    """Time in which layers' inputs are copied to the host's memory, and the same again in which
    they are copied back.
    """


@dataclass(frozen=True)
class TrainingWork:
    """The work of a whole training, summed over all ranks."""

    flops: float
    seconds: float | None
    """None: the machine's figures are not known."""


def whole_training(tokens: int, flops_per_token: int, speed: Speed | None) -> TrainingWork:
    return TrainingWork(
        float(tokens) * flops_per_token, tokens / speed.tokens_per_second if speed else None
    )


def wire_bytes(job: ShardedJob, rounds: int) -> CollectiveBytes:
    """Bytes on the wire in an optimizer step of `rounds` micro-batches.

    In every micro-batch a layer is gathered for its forward and, if it was freed, again for its
    backward; with keep_unsharded once a step. Gradients of adapters are reduced once a step, inside
    a copy of the model and then between copies (in a ring: twice the bytes except a rank's own
    part).
    """
    layout = job.layout
    reduced = [group.reduced_bytes_on_rank(layout) for group in job.groups if group.adapters]
    between = 2 * (layout.replicate - 1) * sum(reduced) // layout.replicate
    if layout.shard == 1:
        return CollectiveBytes(0, 0, between, 0, 0)
    times = 1 if job.spec.distributed.keep_unsharded else rounds
    own = [group.gathered_bytes_on_rank(layout, job.compute_bytes) for group in job.groups]
    more = 0 if job.spec.distributed.keep_unsharded else forwards_only(job.spec)
    received = [
        [forward] * more + [forward, *backward]
        for forward, *backward in (
            _received(group, size, layout.shard)
            for group, size in zip(job.groups, own, strict=True)
        )
    ]
    return CollectiveBytes(
        gather=times * sum(map(sum, received)),
        reduce=(layout.shard - 1) * sum(reduced),
        all_reduce=between,
        gathers=times * sum(map(len, received)),
        reduces=len(reduced),
    )


def exchange_bytes(job: ShardedJob, batches: MicroBatches, mode: str) -> int:
    """Bytes that a rank receives in a step from the ranks that share its samples: in every layer's
    forward, again as gradients in its backward, where that computes the layer again once more, and
    in each forward without gradients.

    `mode`: activation checkpointing.
    """
    if batches.ranks == 1:
        return 0
    times = (2 if mode == "none" else 3) + forwards_only(job.spec)
    layer = job.compute_bytes * exchanged_width(job) * batches.step_tokens
    received = layer * (batches.ranks - 1) // batches.ranks
    return times * job.base.dimensions.layers * received


def _received(group: GatherGroup, own: int, shard: int) -> list[int]:
    """Bytes that a rank receives from each gather of a micro-batch.

    `own`: bytes that it puts into a gather over all ranks.
    """
    forward = (shard - 1) * own
    if group.held or not group.in_backward:
        return [forward]
    ranks = group.kept_over or shard
    return [forward, (ranks - 1) * (own * shard // ranks)]


def flops_per_token(
    base: Description,
    adapters: Sequence[AdapterShape],
    length: int,
    *,
    checkpointed: bool,
    forwards: int = 0,
    teacher: Description | None = None,
    ranks: int = 1,
) -> int:
    """FLOP of forward and backward of a token, with a frozen base: only adapters have weight
    gradients.

    With N parameters of the layers' matrices and A of the adapters that a token meets (of stacks of
    experts and of adapters on them, those of the chosen experts), H of the head, L layers, q =
    heads × head size, and samples of s tokens with causal attention: 4 (N + H) + 6 A + 6 L s q.
    With full activation checkpointing, whose backward runs the layers' forward again: 6 N + 4 H + 8
    A + 8 L s q. A head that is trained: 2 H more. Each of `forwards` without gradients: 2 (N + H +
    A) + 2 L s q more, with the numbers of `teacher` if another base does it. `ranks`: that share a
    sample; q has the heads of zeros by which they have as many each.
    """
    shape = base.dimensions
    n, h = _matrices(base)
    trained = [adapter for adapter in adapters if not adapter.whole]
    a = sum(
        _met_by_token(base, each.numel, "experts" if each.experts > 1 else "linear")
        for each in trained
    )
    of_head = 2 * trained_head(base, adapters)
    groups = max(1, shape.heads * shape.kv // shape.q)
    heads = head_shares(shape.heads, groups, ranks).all_heads
    attention = shape.layers * length * (shape.q // shape.heads) * heads
    forward = n + h + a + attention
    if teacher is not None:
        own = teacher.dimensions
        forward = sum(_matrices(teacher)) + own.layers * length * own.q
    more = of_head + forwards * 2 * forward
    if checkpointed:
        return 6 * n + 4 * h + 8 * a + 8 * attention + more
    return 4 * (n + h) + 6 * a + 6 * attention + more


def _matrices(base: Description) -> tuple[int, int]:
    """Parameters of the layers' matrices that a token meets, and of the head."""
    shape = base.dimensions
    met = sum(_met_by_token(base, weight.numel, weight.kind) for weight in base.quantizable)
    return met, shape.vocabulary * shape.hidden


def efficiency(job: ShardedJob, machine: Machine, batches: MicroBatches, mode: str) -> float:
    """Share of a machine's `flops` that training in these micro-batches reaches.

    `mode`: activation checkpointing; selective, it does without cuDNN's attention.
    """
    cudnn = mode != "selective" and job_attends_by_cudnn(
        job, machine, batches.samples * batches.length, batches.length
    )
    return EFFICIENCY_BY_CUDNN if cudnn else EFFICIENCY


def launch_seconds(rounds: int, layers: int, mode: str, *, gpu: bool) -> float:
    """Seconds until all of a step's work is launched. `mode`: activation checkpointing."""
    return rounds * layers * _LAUNCHED[mode] * (LAUNCH_SECONDS if gpu else DISPATCH_SECONDS)


def served_seconds(job: ShardedJob, machine: Machine) -> float:
    """Seconds of one pass of rounding all weights with their adapters, the mean over all steps; 0:
    the job rounds none.

    The bytes that it moves, and the products of B and A, which are summed up in fp64.
    """
    form = job.spec.precision.served_as
    if form is None:
        return 0.0
    assert machine.memory_bandwidth is not None
    numel = sum(weight.numel for weight in job.base.quantizable)
    summed = sum(2 * a.rows * a.cols * a.r for a in job.adapters if not a.whole)
    share = FP64_SHARE_OF_PROCESSOR if machine.shared_memory else FP64_SHARE
    flops = share * (machine.flops_in(job.spec.precision.compute) or math.inf)
    seconds = SERVED_MOVED_BYTES[form] * numel / machine.memory_bandwidth + summed / flops
    return (1 - job.spec.precision.served_from_step) * seconds


def dequantised_bytes(job: ShardedJob, left_out: Collection[Weight] = ()) -> int:
    """Bytes that one pass of dequantising all weights but some moves: codes are read, bf16 is
    written.
    """
    return sum(
        s.bytes_whole + 2 * s.weight.numel for s in job.quantised if s.weight not in left_out
    )


def speed_on(
    machine: Machine,
    job: ShardedJob,
    batches: MicroBatches,
    flops: int,
    wire: CollectiveBytes,
    host: int,
) -> Speed | None:
    """The speed on a machine; None: its figures are not known.

    `flops`: FLOP per token; `wire`: bytes of a step; `host`: bytes of a micro-batch that lie in the
    host's memory between forward and backward.

    Gathers, copies and launches overlap with the arithmetic, so that the slowest counts; what ranks
    that share samples exchange does not.
    """
    reached = machine.flops_in(job.spec.precision.compute)
    if reached is None or machine.memory_bandwidth is None or machine.link_bandwidth is None:
        return None
    mode = job.spec.distributed.checkpointing
    in_fp8 = {s.weight for s in multiplied_in_fp8(job, machine) if s.weight.kind == "linear"}
    beside = forwards_only(job.spec)
    products = PASSES[mode] + beside
    flops -= int((1 - 1 / FP8_GAIN) * 2 * products * sum(weight.numel for weight in in_fp8))
    compute = batches.step_tokens * flops / (reached * efficiency(job, machine, batches, mode))
    # what is rounded is dequantised by the way
    one_pass = served_seconds(job, machine) or (
        dequantised_bytes(job, in_fp8) / machine.memory_bandwidth
    )
    dequantise = batches.rounds * (passes(mode, batches.tokens) + beside) * one_pass
    copies = batches.rounds * copy_seconds(machine, host)
    link = machine.link_bandwidth * LINK_EFFICIENCY
    exchanged = wire.exchange / link
    overlapped = wire.overlapped / link
    launched = (1 + beside / PASSES[mode]) * launch_seconds(
        batches.rounds, job.base.dimensions.layers, mode, gpu=not machine.shared_memory
    )
    computed = beside_copies(compute + dequantise, copies)
    step = max(max(computed, overlapped) + exchanged, launched)
    return Speed(
        tokens_per_second=job.layout.world * batches.step_tokens / step,
        step_seconds=step,
        compute_seconds=compute,
        dequantise_seconds=dequantise,
        wire_seconds=overlapped + exchanged,
        launch_seconds=launched,
        copy_seconds=copies,
    )


def sampling_seconds(
    machine: Machine, base: Description, stored: int, answers: int, longest: int
) -> float | None:
    """Seconds in which one device draws `answers` answers of `longest` tokens, all at once; None:
    the machine's figures are not known. `stored`: bytes of the base.

    The tokens of an answer come one after the other. For each, all weights are read once for all
    answers together, and 2 (N + H) FLOP are computed for each answer, with N and H as in
    flops_per_token; the slower of the two counts. Reading the prompts, and the keys and values of
    earlier tokens, is left out.
    """
    if machine.flops is None or machine.memory_bandwidth is None:
        return None
    met = sum(_matrices(base))
    return longest * max(
        stored / machine.memory_bandwidth, 2 * met * answers / (machine.flops * EFFICIENCY)
    )


def _met_by_token(base: Description, numel: int, kind: str) -> int:
    if kind != "experts":
        return numel
    return numel * base.dimensions.experts_per_token // base.dimensions.experts
