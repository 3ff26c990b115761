"""The choice of "auto" options for a machine: the fastest of the settings that fit it, by the
plan's own arithmetic. Pure.

Every setting has a pace (seconds per token) that does not depend on the machine's memory, and bytes
that do not depend on its speed. The fitting setting with the best pace is taken, so that more
memory never makes a job slower:

    precision.default         the most exact format with which any setting fits
    context_parallel          1, or if nothing fits then the fewest ranks a sample with which
                              something does
    replicate                 whole on every rank: no gathers, no copies; or shared by the ranks of
                              a host
    activation checkpointing  none, selective (recomputes what is cheap), full (a third more
                              arithmetic); only if nothing fits, in no format, tiled and then offload
    tokens per micro-batch    enough that a GPU computes for longer than its work takes to launch;
                              never below the longest sample, which goes alone
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from ft_service.bases.description import Description
from ft_service.bases.module_rules import staying
from ft_service.plan.context_parallel import why_whole
from ft_service.plan.machines import (
    LINK_EFFICIENCY,
    Machine,
    usable_bytes,
    usable_host_bytes,
)
from ft_service.plan.memory import MicroBatches, RankBytes, planned_micro_batches, rank_bytes
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.speed import (
    WHOLE_LAYERS,
    dequantised_bytes,
    efficiency,
    exchange_bytes,
    flops_per_token,
    forwards_only,
    launch_seconds,
    passes,
    wire_bytes,
)
from ft_service.plan.weight_storage import ShardedJob, ShardLayout
from ft_service.spec import AS_PUBLISHED, FormatChoice, JobSpec
from ft_service.spec.options import WrapBySize

AUTO = "auto"
CHECKPOINTING = "distributed.activation_checkpointing"
BUDGET = "training.tokens_per_micro_batch"
COPIES = "distributed.replicate"
CONTEXT = "distributed.context_parallel"
FORMAT = "precision.default"
LENGTH = "training.max_length"
RATE = "training.learning_rate"
BATCH = "training.batch_size"
EPOCHS = "training.n_epochs"
COMPUTE = "precision.compute"
KEPT = (FORMAT, COMPUTE, LENGTH, RATE, BATCH, EPOCHS)
"""Options that results depend on: chosen once, and never again for the same job."""
COMPILE = "distributed.compile"
FITTED = (FORMAT, COPIES, CONTEXT, CHECKPOINTING, BUDGET)
"""Options that are chosen together, by memory and pace."""

GPU_BUDGETS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
CPU_BUDGETS = (256, 512, 1024, 2048)
"""More tokens leave the caches and gain nothing: a few hundred rows keep a processor's products
busy.
"""
BUSY = {True: 8192, False: 2048}
"""Whether it is a GPU → tokens per micro-batch above which settings of one pace rank alike."""
NOTICEABLE = 1.02
"""Ratio of paces below which two settings count as equally fast."""

_RECOMPUTED = {"none": 1.0, "selective": 1.08, "full": 1.0, "tiled": 1.0, "offload": 1.0}
"""Activation checkpointing → arithmetic as a multiple of `flops_per_token`: norms and activation
functions come on top.
"""
_SHARDED = 1.03
"""Cost of hooks around gathers, and of optimizers on shards."""
_NETWORK_BANDWIDTH = 25e9
"""Bytes/s of a rank between hosts."""
_USUAL = (150e12, 1e12, 32e9)
"""Figures for GPUs whose own are not known: only relations between them count here."""
ROOM = 0.95
"""Share of the usable memory that a setting may take to be chosen: an estimate that is too low ends
the job, one that is too high costs a little speed.
"""


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    spec: JobSpec
    layout: ShardLayout
    batches: MicroBatches
    """Micro-batches of samples of the longest length."""
    rank: RankBytes
    pace: float
    """Seconds per token of one rank."""

    def order(self, gpu: bool) -> tuple[Any, ...]:
        """Sort key, better settings first: by pace, then without gathers, busy, and with less
        memory.
        """
        idle = self.batches.tokens < min(BUSY[gpu], self.batches.step_tokens)
        return math.floor(math.log(self.pace, NOTICEABLE)), self.layout.shard, idle, self.rank.total


def value_of(spec: JobSpec, option: str) -> Any:
    """The value of an option (dotted)."""
    section, name = option.split(".")
    return getattr(getattr(spec, section), name)


def is_open(spec: JobSpec, option: str) -> bool:
    """Whether an option (dotted) is still to be chosen. One rank shares no sample."""
    return value_of(spec, option) == AUTO and not (option == CONTEXT and spec.world_size == 1)


def with_options(spec: JobSpec, options: dict[str, Any]) -> JobSpec:
    """The spec with options (dotted) set, unchecked."""
    for dotted, value in options.items():
        section, field = dotted.split(".")
        spec = spec.model_copy(
            update={section: getattr(spec, section).model_copy(update={field: value})}
        )
    return spec


def assumed(spec: JobSpec) -> JobSpec:
    """The spec that is planned for a machine whose memory is not known."""
    usual = {
        FORMAT: "bf16",
        COPIES: spec.distributed.nnodes,
        CONTEXT: 1,
        CHECKPOINTING: "none",
        COMPILE: False,
    }
    return with_options(
        spec, {option: value for option, value in usual.items() if is_open(spec, option)}
    )


def best_setting(
    base: Description, spec: JobSpec, machine: Machine, lengths: SampleLengths | None
) -> tuple[Setting, bool]:
    """The setting to take, and whether it fits; the smallest one if none fits.

    The machine's memory must be known.

    Raises SpecError for patterns and names that match nothing in the base.
    """
    usable = usable_bytes(machine, spec)
    assert usable is not None, "nothing can be chosen for a machine that is not known"
    smallest: list[Setting] = []
    ways = product(
        _modes(base, spec, machine), ranks_per_sample(base, spec, lengths), _formats(base, spec)
    )
    for modes, ranks, weight_format in ways:
        options = {CONTEXT: ranks, FORMAT: weight_format}
        tried = list(_settings(base, with_options(spec, options), machine, lengths, modes))
        fitting = [own for own in tried if _fits(own, machine, int(ROOM * usable))]
        if fitting:
            return min(fitting, key=lambda setting: setting.order(not machine.shared_memory)), True
        smallest += tried
    least = min(
        smallest,
        key=lambda own: (not host_fits(own.rank, own.spec, machine), own.rank.total),
    )
    return least, _fits(least, machine, usable)


def _fits(setting: Setting, machine: Machine, usable: int) -> bool:
    return setting.rank.total <= usable and host_fits(setting.rank, setting.spec, machine)


def host_fits(rank: RankBytes, spec: JobSpec, machine: Machine) -> bool:
    """Whether a host has the memory for what its ranks keep there, as far as it is known."""
    pinned = usable_host_bytes(machine, spec)
    return pinned is None or rank.host <= pinned


def _modes(base: Description, spec: JobSpec, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Values of activation checkpointing, those that are tried together; later ones only if none
    before fits.
    """
    if not is_open(spec, CHECKPOINTING):
        yield (spec.distributed.activation_checkpointing,)
        return
    yield "none", "selective", "full"
    options = spec.distributed
    refused = (
        options.compile is True
        or isinstance(options.wrap, WrapBySize)
        or spec.precision.served_as is not None
    )
    if refused:
        return
    if base.tiles:
        yield ("tiled",)
    if not machine.shared_memory:
        yield ("offload",)


def ranks_per_sample(
    base: Description, spec: JobSpec, lengths: SampleLengths | None
) -> Sequence[int | str]:
    """Numbers of ranks that may share a sample, the fewest first; what is given, if it is not to be
    chosen.
    """
    given = spec.distributed.context_parallel
    if not is_open(spec, CONTEXT):
        return [given]
    if why_whole(base, spec, lengths) is not None:
        return [1]
    per_host = spec.world_size // spec.distributed.nnodes
    return [ranks for ranks in range(1, per_host + 1) if per_host % ranks == 0]


def _formats(base: Description, spec: JobSpec) -> tuple[FormatChoice, ...]:
    """Formats to try, the most exact one first."""
    if spec.precision.default != AUTO:
        return (spec.precision.default,)
    stay = staying(base.held)
    all_stay = all(weight.module in stay for weight in base.quantizable)
    if all_stay or spec.distributed.reshard_size is not None:
        return ("bf16",)
    return ("bf16", "fp8", "nf4") if stay == base.held else ("bf16", AS_PUBLISHED, "fp8", "nf4")


def _settings(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None,
    modes: tuple[str, ...],
) -> Iterator[Setting]:
    for copies in _copies(spec):
        job = ShardedJob.of(base, with_options(spec, {COPIES: copies, CHECKPOINTING: modes[0]}))
        paces = _Paces(job, machine)
        for budget in _budgets(job.spec, machine, job.layout, lengths):
            sized = with_options(job.spec, {BUDGET: budget})
            batches = planned_micro_batches(sized, job.layout, lengths and lengths.longest)
            rank = rank_bytes(job, batches, machine)
            usual = planned_micro_batches(sized, job.layout, lengths and lengths.mean)
            for mode in modes:
                tried = with_options(sized, {CHECKPOINTING: mode})
                yield Setting(
                    tried, job.layout, batches, rank.in_mode(mode), paces.pace(mode, usual)
                )


def _copies(spec: JobSpec) -> list[int]:
    options = spec.distributed
    if options.replicate != AUTO:
        return [options.replicate]
    if spec.world_size == 1:
        return [1]
    several = [options.nnodes, 1] if options.nnodes > 1 else [1]
    return several if options.asks_to_shard else [-1, *several]


def _budgets(
    spec: JobSpec, machine: Machine, layout: ShardLayout, lengths: SampleLengths | None
) -> list[int]:
    """Tokens per micro-batch to try: at least the longest sample, which needs them anyway, at most
    those of a step.
    """
    if spec.training.tokens_per_micro_batch != AUTO:
        return [spec.training.tokens_per_micro_batch]
    usual = CPU_BUDGETS if machine.shared_memory else GPU_BUDGETS
    whole = planned_micro_batches(
        with_options(spec, {BUDGET: usual[-1]}), layout, lengths and lengths.longest
    )
    enough = next((budget for budget in usual if budget >= whole.tokens), usual[-1])
    least = -(-whole.length // whole.ranks)
    return sorted({least, *(budget for budget in usual if least <= budget <= enough)})


class _Paces:
    """The paces of one layout.

    Gathers overlap with the arithmetic; what they bring is copied before it.
    """

    def __init__(self, job: ShardedJob, machine: Machine) -> None:
        self._exchanged = partial(exchange_bytes, job)
        self._flops = lru_cache(
            partial(
                flops_per_token,
                job.base,
                job.adapters,
                forwards=forwards_only(job.spec),
                ranks=job.spec.distributed.ranks_per_sample,
            )
        )
        self._wire = lru_cache(partial(wire_bytes, job))
        self._dequantised = dequantised_bytes(job)
        self._layers = job.base.dimensions.layers
        self._on_gpu = not machine.shared_memory
        self._sharded = _SHARDED if job.layout.shard > 1 else 1.0
        self._flops_of_machine, self._memory_bandwidth, link = _figures(machine)
        self._efficiency = partial(efficiency, job, machine)
        across_hosts = job.layout.shard > job.spec.world_size // job.spec.distributed.nnodes
        self._link = min(link, _NETWORK_BANDWIDTH) if across_hosts else link

    def pace(self, mode: str, batches: MicroBatches) -> float:
        """Seconds per token of one rank in a step of these micro-batches."""
        rounds = -(-batches.step_tokens // batches.tokens)
        wire = self._wire(rounds)
        flops = self._flops(batches.length, checkpointed=mode in WHOLE_LAYERS) * _RECOMPUTED[mode]
        reached = self._flops_of_machine * self._efficiency(batches, mode)
        compute = batches.step_tokens * flops / reached * self._sharded
        moved = (
            rounds * passes(mode, batches.tokens) * self._dequantised + 2 * wire.gather
        ) / self._memory_bandwidth
        launched = launch_seconds(rounds, self._layers, mode, gpu=self._on_gpu)
        link = self._link * LINK_EFFICIENCY
        wired = wire.total / link
        exchanged = self._exchanged(batches, mode) / link
        if self._on_gpu:
            step = max(max(compute + moved, wired) + exchanged, launched)
        else:
            step = max(compute + moved + launched, wired) + exchanged
        return step / batches.step_tokens


def _figures(machine: Machine) -> tuple[float, float, float]:
    """FLOP/s, and bytes/s of memory and of the link to another rank."""
    if machine.flops is None or machine.memory_bandwidth is None or machine.link_bandwidth is None:
        return _USUAL
    return machine.flops, machine.memory_bandwidth, machine.link_bandwidth
