"""What "auto" stands for on a machine: the fastest of the settings that fit it, by the plan's own arithmetic. Pure.

Every setting has a pace (seconds a token) that does not depend on the machine's memory, and bytes that do not depend on its
speed. Of those that fit the one with the best pace is taken, so that more memory never makes a job slower:

    precision.default       the most exact format with which any setting fits
    replicate               whole on every rank: no gathers, no copies; or shared by the ranks of a host
    activation checkpointing  none, selective (recomputes what is cheap), full (a third more arithmetic)
    tokens a micro-batch    enough that a GPU computes for longer than its work takes to be launched; never below the longest
                            sample, which goes alone
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ft_service.bases.module_rules import staying
from ft_service.plan.base import BaseShape
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import EFFICIENCY, LINK_EFFICIENCY, Machine, usable_bytes
from ft_service.plan.memory import MicroBatches, RankBytes, planned_micro_batches, rank_bytes
from ft_service.plan.speed import flops_per_token, launch_seconds, wire_bytes
from ft_service.plan.storage import AdapterShape, GatherGroup, Layout, Stored, adapters_of, groups_of, layout_of, stored_weights
from ft_service.spec import JobSpec, WeightFormat

AUTO = "auto"
CHECKPOINTING = "distributed.activation_checkpointing"
BUDGET = "training.tokens_per_micro_batch"
COPIES = "distributed.replicate"
FORMAT = "precision.default"
LENGTH = "training.max_length"
RATE = "training.learning_rate"
BATCH = "training.batch_size"
EPOCHS = "training.n_epochs"
KEPT = (FORMAT, LENGTH, RATE, BATCH, EPOCHS)
"""What results depend on: chosen once, and never again for the same job."""
COMPILE = "distributed.compile"
FITTED = (FORMAT, COPIES, CHECKPOINTING, BUDGET)
"""What is chosen together, by memory and pace."""

PASSES = {"none": 2, "selective": 2, "full": 3}
"""How often a micro-batch dequantises every weight, by activation checkpointing: forward, backward, forward again."""
GPU_BUDGETS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
CPU_BUDGETS = (256, 512, 1024, 2048)
"""Beyond these caches are left behind, and nothing is won: a processor's products are busy with a few hundred rows."""
BUSY = {True: 8192, False: 2048}
"""Tokens above which settings of one pace are all the same, on GPUs and on processors."""
NOTICEABLE = 1.02
"""Settings whose paces differ by less are as fast as each other."""

_RECOMPUTED = {"none": 1.0, "selective": 1.08, "full": 1.0}
"""Arithmetic beside that which `flops_per_token` counts: norms, activation functions."""
_SHARDED = 1.03
"""Hooks around gathers, and optimizers on shards."""
_NETWORK_BANDWIDTH = 25e9
"""Bytes/s of one rank between hosts."""
_USUAL = (150e12, 1e12, 32e9)
"""Figures for GPUs without any: only relations between them count here."""
ROOM = 0.95
"""Share of the usable memory that a setting may take to be chosen: an estimate that is too low ends the job, one that is too
high costs a little speed."""


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    spec: JobSpec
    layout: Layout
    batches: MicroBatches
    """At the longest sample."""
    rank: RankBytes
    pace: float
    """Seconds a token of one rank."""

    def order(self, gpu: bool) -> tuple[Any, ...]:
        """Better settings first: by pace, then without gathers, busy, and with less memory."""
        idle = self.batches.tokens < min(BUSY[gpu], self.batches.step_tokens)
        return math.floor(math.log(self.pace, NOTICEABLE)), self.layout.shard, idle, self.rank.total


def value_of(spec: JobSpec, option: str) -> Any:
    """The value of an option (dotted)."""
    section, name = option.split(".")
    return getattr(getattr(spec, section), name)


def is_open(spec: JobSpec, option: str) -> bool:
    """Whether an option (dotted) is still to be chosen."""
    return value_of(spec, option) == AUTO


def with_options(spec: JobSpec, options: dict[str, Any]) -> JobSpec:
    """The spec with options (dotted) set, unchecked."""
    for dotted, value in options.items():
        section, field = dotted.split(".")
        spec = spec.model_copy(update={section: getattr(spec, section).model_copy(update={field: value})})
    return spec


def assumed(spec: JobSpec) -> JobSpec:
    """The spec as it is planned for a machine whose memory is not known."""
    usual = {FORMAT: "bf16", COPIES: spec.distributed.nnodes, CHECKPOINTING: "none", COMPILE: False}
    return with_options(spec, {option: value for option, value in usual.items() if is_open(spec, option)})


def best_setting(base: BaseShape, spec: JobSpec, machine: Machine, lengths: Lengths | None) -> tuple[Setting, bool]:
    """The setting to take, and whether it fits; the smallest one if none does. The machine's memory is known.

    Raises SpecError for patterns and names that match nothing in the base.
    """
    usable = usable_bytes(machine, spec)
    assert usable is not None, "nothing can be chosen for a machine that is not known"
    tried: list[Setting] = []
    for weight_format in _formats(base, spec):
        tried = list(_settings(base, with_options(spec, {FORMAT: weight_format}), machine, lengths))
        fitting = [setting for setting in tried if setting.rank.total <= ROOM * usable]
        if fitting:
            return min(fitting, key=lambda setting: setting.order(not machine.shared_memory)), True
    smallest = min(tried, key=lambda setting: setting.rank.total)
    return smallest, smallest.rank.total <= usable


def _formats(base: BaseShape, spec: JobSpec) -> tuple[WeightFormat, ...]:
    """Formats to try, the most exact one first."""
    if spec.precision.default != AUTO:
        return (spec.precision.default,)
    stay = staying(base.held())
    all_stay = all(weight.module in stay for weight in base.quantizable())
    return ("bf16",) if all_stay or spec.distributed.reshard_size is not None else ("bf16", "fp8", "nf4")


def _settings(base: BaseShape, spec: JobSpec, machine: Machine, lengths: Lengths | None) -> Iterator[Setting]:
    adapters = adapters_of(base, spec)
    modes = ("none", "selective", "full") if is_open(spec, CHECKPOINTING) else (spec.distributed.activation_checkpointing,)
    for copies in _copies(spec):
        shared = with_options(spec, {COPIES: copies, CHECKPOINTING: modes[0]})
        layout = layout_of(shared)
        stored = stored_weights(base, shared, layout)
        groups = groups_of(stored, adapters, shared)
        clock = _Clock(base, shared, machine, layout, stored, adapters, groups)
        for budget in _budgets(shared, machine, layout, lengths):
            sized = with_options(shared, {BUDGET: budget})
            batches = planned_micro_batches(sized, layout, lengths and lengths.longest)
            rank = rank_bytes(base, sized, layout, stored, adapters, groups, batches, machine)
            usual = planned_micro_batches(sized, layout, lengths and lengths.mean)
            for mode in modes:
                tried = with_options(sized, {CHECKPOINTING: mode})
                yield Setting(tried, layout, batches, rank.in_mode(mode), clock.pace(mode, usual))


def _copies(spec: JobSpec) -> list[int]:
    options = spec.distributed
    if options.replicate != AUTO:
        return [options.replicate]
    if spec.world_size == 1:
        return [1]
    several = [options.nnodes, 1] if options.nnodes > 1 else [1]
    return several if options.asks_to_shard else [-1, *several]


def _budgets(spec: JobSpec, machine: Machine, layout: Layout, lengths: Lengths | None) -> list[int]:
    """Tokens a micro-batch to try: no fewer than the longest sample, which needs them anyway, nor more than a step has."""
    if spec.training.tokens_per_micro_batch != AUTO:
        return [spec.training.tokens_per_micro_batch]
    usual = CPU_BUDGETS if machine.shared_memory else GPU_BUDGETS
    whole = planned_micro_batches(with_options(spec, {BUDGET: usual[-1]}), layout, lengths and lengths.longest)
    enough = next((budget for budget in usual if budget >= whole.tokens), usual[-1])
    return sorted({whole.length, *(budget for budget in usual if whole.length <= budget <= enough)})


class _Clock:
    """The paces of one layout. Gathers run beside the arithmetic; what they bring is copied before it."""

    def __init__(
        self,
        base: BaseShape,
        spec: JobSpec,
        machine: Machine,
        layout: Layout,
        stored: list[Stored],
        adapters: list[AdapterShape],
        groups: list[GatherGroup],
    ) -> None:
        self._flops = lru_cache(partial(flops_per_token, base, adapters))
        self._wire = lru_cache(partial(wire_bytes, groups, spec, layout))
        self._quantised = sum(s.bytes_whole + 2 * s.weight.numel for s in stored if s.format != "bf16")
        self._layers, self._on_gpu = base.shape.layers, not machine.shared_memory
        self._sharded = _SHARDED if layout.shard > 1 else 1.0
        self._per_second, self._memory_bandwidth, link = _figures(machine)
        across = layout.shard > spec.world_size // spec.distributed.nnodes
        self._link = min(link, _NETWORK_BANDWIDTH) if across else link

    def pace(self, mode: str, batches: MicroBatches) -> float:
        """Seconds a token of one rank in a step of these micro-batches."""
        rounds = -(-batches.step_tokens // batches.tokens)
        wire = self._wire(rounds)
        flops = self._flops(batches.length, checkpointed=mode == "full") * _RECOMPUTED[mode]
        compute = batches.step_tokens * flops / (self._per_second * EFFICIENCY) * self._sharded
        moved = (rounds * PASSES[mode] * self._quantised + 2 * wire.gather) / self._memory_bandwidth
        launched = launch_seconds(rounds, self._layers, mode, gpu=self._on_gpu)
        wired = wire.total / (self._link * LINK_EFFICIENCY)
        if self._on_gpu:
            return max(compute + moved, wired, launched) / batches.step_tokens
        return max(compute + moved + launched, wired) / batches.step_tokens


def _figures(machine: Machine) -> tuple[float, float, float]:
    """FLOP/s, and bytes/s of memory and of the link to another rank."""
    if machine.flops is None or machine.memory_bandwidth is None or machine.link_bandwidth is None:
        return _USUAL
    return machine.flops, machine.memory_bandwidth, machine.link_bandwidth
