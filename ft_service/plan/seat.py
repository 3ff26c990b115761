"""A job's seat in an engine: its bytes on each rank, and the time of jobs that share the base.

An engine (workers/engine/) holds the base once. A rank then has

    room = usable memory - base shard - gathered groups - the dequantised weights of one layer

for its seats. Each keeps fp32 masters, gradients and moments as the job does alone and, where the
base is sharded, also its whole adapters in the compute dtype and the fp32 sums of their gradients,
since these stand outside of the base's groups. A round takes micro-batches of several seats, none
of which shares an activation with another; logits, and what a layer makes of its input for a
moment, are there for one of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.memory import UNKNOWN_BUDGET, RankBytes
from ft_service.plan.speed import Speed
from ft_service.plan.weight_storage import FP32_BYTES, ShardedJob
from ft_service.rundir.engine import SeatSize
from ft_service.spec import JobSpec

START_SECONDS = 10.0
"""Time until ranks hold their base: on two cores one of 119 million parameters in NF4, in the cache
(benchmarks/engine.py).
"""
SEAT_SECONDS = 2.7
"""Time of a job besides its steps, where the base is held: before its first step and after its last
(likewise).
"""


def seat_size(job: ShardedJob, machine: Machine, rank: RankBytes, tokens: int) -> SeatSize:
    """The seat of a job, without its gain.

    `rank`: its bytes when it trains alone, with micro-batches of at most `tokens` tokens.
    """
    numel = sum(adapter.numel for adapter in job.adapters)
    sharded = job.layout.shard > 1
    outside = (job.compute_bytes + FP32_BYTES) * numel if sharded else rank.accumulation
    # Lanes compute whole layers again.
    mode = "none" if job.spec.distributed.checkpointing == "none" else "full"
    alone = rank.in_mode(mode)
    passing = max(alone.logits, alone.workspace)
    usable = usable_bytes(machine, job.spec)
    base = sum(rank.base.values()) + rank.gather + _dequantised_layer(job)
    return SeatSize(
        held=int(rank.heap_factor * (rank.adapters + rank.gradients + rank.optimizer + outside)),
        batch=int(rank.heap_factor * (alone.activations + alone.rows + passing)),
        batch_tokens=tokens,
        room=None if usable is None else usable - int(rank.heap_factor * base),
        gain=None,
        passing=int(rank.heap_factor * passing),
    )


def lanes_of(seats: Sequence[SeatSize], tokens: int, spec: JobSpec) -> int:
    """The most micro-batches that a round of these jobs takes, at least one: their bytes fit beside
    the base, and their tokens the budget of a micro-batch. `tokens`: of a usual micro-batch;
    `spec`: that of the job which the engine was begun for.
    """
    budget = spec.training.tokens_per_micro_batch
    lanes = min(len(seats), (UNKNOWN_BUDGET if budget == "auto" else budget) // tokens)
    room = seats[0].room
    if room is not None:
        sizes = [seat.batch_bytes(tokens) for seat in seats]
        passing = max(passing for _, passing in sizes)
        kept = max(batch - passing for batch, passing in sizes)
        lanes = min(lanes, (room - sum(seat.held for seat in seats) - passing) // max(1, kept))
    return max(1, lanes)


def seconds_alone(training: float) -> float:
    """Seconds of a job with ranks of its own, from its start to its end.

    `training`: seconds of its steps.
    """
    return START_SECONDS + SEAT_SECONDS + training


def engine_seconds(trainings: Sequence[tuple[Speed, float]], lanes: int) -> float:
    """Seconds of jobs that share an engine, the start of its ranks included.

    `trainings`: the speed of each, and the seconds of its steps alone; `lanes`: the most
    micro-batches of a round.
    """
    left = sorted(
        (seconds / speed.step_seconds, number, speed)
        for number, (speed, seconds) in enumerate(trainings)
    )
    total = START_SECONDS + len(left) * SEAT_SECONDS
    done = 0.0
    while left:
        speeds = [speed for _, _, speed in left]
        steps = left[0][0]
        total += (steps - done) * _seconds_of_steps(speeds, lanes)
        done = steps
        left = [one for one in left if one[0] > steps]
    return total


def sharing_gain(speed: Speed, seconds: float | None, lanes: int) -> float:
    """Time of two equal jobs one after the other, divided by that of both in an engine.

    `seconds`: of the steps of one; None: not known, and what is no step is left out. `lanes`: as in
    engine_seconds.
    """
    if seconds is None:
        return 2 * speed.step_seconds / _seconds_of_steps([speed] * 2, lanes)
    return 2 * seconds_alone(seconds) / engine_seconds([(speed, seconds)] * 2, lanes)


def _seconds_of_steps(speeds: Sequence[Speed], lanes: int) -> float:
    """Seconds of a step of each job.

    A step alone takes max(c + d, w, l): arithmetic and dequantising, the wire, and launches. N of
    them in a round take max(sum of c + d, w, sum of l), since their micro-batches share dequantised
    and gathered weights but no product.
    """
    rounds = [speeds[first : first + lanes] for first in range(0, len(speeds), lanes)]
    return sum(
        max(
            sum(speed.compute_seconds for speed in together)
            + max(speed.dequantise_seconds for speed in together),
            max(speed.wire_seconds for speed in together),
            sum(speed.launch_seconds for speed in together),
        )
        for together in rounds
    )


def _dequantised_layer(job: ShardedJob) -> int:
    """Bytes of the largest layer's dequantised weights, which are kept while the micro-batches of a
    round compute it.
    """
    sizes = (
        sum(s.weight.numel for s in group.frozen if s.format != "bf16") for group in job.groups
    )
    return job.compute_bytes * max(sizes, default=0)
