"""A job's seat in an engine: its bytes on each rank, and whether it gains by sharing the base with others.

An engine (workers/engine/) holds the base once. A rank then has

    room = usable memory - base shard - gathered groups - the dequantised weights of one layer

for its seats. Each keeps fp32 masters, gradients and moments as the job does alone and, where the base is sharded, also its
whole adapters in the compute dtype and the fp32 sums of their gradients, since these stand outside of the base's groups. A
round takes micro-batches of several seats, none of which shares an activation with another; logits, and what a layer makes of
its input for a moment, are there for one of them at a time.
"""

from __future__ import annotations

from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.memory import RankBytes
from ft_service.plan.speed import Speed
from ft_service.plan.weight_storage import FP32_BYTES, ShardedJob
from ft_service.rundir.engine import SeatSize

START_SECONDS = 20.0
"""Time of a job before its first step and after its last, on two cores with a base of 119 million parameters in the cache
(benchmarks/engine.py)."""


def seat_size(
    job: ShardedJob, machine: Machine, rank: RankBytes, tokens: int, speed: Speed | None, seconds: float | None
) -> SeatSize:
    """The seat of a job. `rank`: its bytes when it trains alone, with micro-batches of at most `tokens` tokens. `speed`,
    `seconds`: of its steps, and of its whole training; None: not known."""
    numel = sum(adapter.numel for adapter in job.adapters)
    sharded = job.layout.shard > 1
    outside = (job.compute_bytes + FP32_BYTES) * numel if sharded else rank.accumulation
    mode = "none" if job.spec.distributed.checkpointing == "none" else "full"  # lanes compute whole layers again
    alone = rank.in_mode(mode)
    passing = max(alone.logits, alone.workspace)
    usable = usable_bytes(machine, job.spec)
    base = sum(rank.base.values()) + rank.gather + _dequantised_layer(job)
    return SeatSize(
        held=int(rank.heap_factor * (rank.adapters + rank.gradients + rank.optimizer + outside)),
        batch=int(rank.heap_factor * (alone.activations + alone.rows + passing)),
        batch_tokens=tokens,
        room=None if usable is None else usable - int(rank.heap_factor * base),
        gain=None if speed is None else sharing_gain(speed, seconds),
        passing=int(rank.heap_factor * passing),
    )


def sharing_gain(speed: Speed, seconds: float | None) -> float:
    """Time of two equal jobs one after the other, divided by that of both in an engine. `seconds`: of the training of one;
    None: not known, and the start is left out.

    A step alone takes max(c + d, w, l): arithmetic and dequantising, the wire, and launches. In an engine two of them take
    max(2 c + d, w, 2 l), since their micro-batches share dequantised and gathered weights but no product.
    """
    both = max(2 * speed.compute_seconds + speed.dequantise_seconds, speed.wire_seconds, 2 * speed.launch_seconds)
    if seconds is None:
        return 2 * speed.step_seconds / both
    return 2 * (START_SECONDS + seconds) / (START_SECONDS + seconds * both / speed.step_seconds)


def _dequantised_layer(job: ShardedJob) -> int:
    """Bytes of the largest layer's dequantised weights, which are kept while the micro-batches of a round compute it."""
    sizes = (sum(s.weight.numel for s in group.frozen if s.format != "bf16") for group in job.groups)
    return job.compute_bytes * max(sizes, default=0)
