"""A job's plan: bytes per rank, wire, work, whether it fits the machine, and what to change if not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_service.bases.contents import read_contents
from ft_service.bases.described import contents_or_description
from ft_service.bases.module_rules import KEPT_IN_FP8, ROUTERS, named_apart, staying
from ft_service.plan.base import BaseShape, base_shape
from ft_service.plan.choose import AUTO, FORMAT, GPU_BUDGETS, KEPT, PASSES, assumed, with_options
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.memory import MicroBatches, RankBytes, planned_micro_batches, rank_bytes
from ft_service.plan.settle import sentences, settle_on, within_context
from ft_service.plan.speed import Speed, Wire, flops_per_token, launch_seconds, speed_on, wire_bytes
from ft_service.plan.storage import AdapterShape, Layout, Stored, adapters_of, groups_of, layout_of, stored_weights
from ft_service.plan.vocabulary import refuse_ids_without_row
from ft_service.spec import JobSpec, WeightFormat

WITHOUT_WEIGHTS = "The weights of the base are not here, or not all of them: their shapes are taken from its config.json."
PICKLED = (
    "The base cannot be trained on: its folder holds no weights in safetensors, only {name}, which is pickled and never read. "
    "Their shapes are taken from its config.json."
)
_SHORT = 256
"""Tokens below which cutting samples is not worth proposing."""


@dataclass(frozen=True)
class Module:
    """A frozen module and the bytes of its parameters."""

    name: str
    kind: str
    shape: tuple[int, ...]
    format: WeightFormat
    bytes: int
    """Of the whole module, unsharded."""
    bytes_per_rank: int


@dataclass(frozen=True)
class OptionChange:
    """One or several options to change, and the bytes per rank that result."""

    options: dict[str, Any]
    total: int
    fits: bool


@dataclass(frozen=True)
class Cost:
    """What a step of samples of one length takes."""

    batches: MicroBatches
    rank: RankBytes
    wire: Wire
    flops_per_token: int
    speed: Speed | None


@dataclass(frozen=True)
class Plan(Cost):
    """The cost of a job on a machine, at most: were every sample as long as the longest, which is one of training.max_length
    tokens where the data is not known. `fits`: None where the machine's memory is not known."""

    machine: str
    memory: int | None
    """Bytes that tensors of one rank can have."""
    layout: Layout
    modules: tuple[Module, ...]
    frozen_parameters: int
    adapter_parameters: int
    likely: Cost | None
    """The cost at the mean length. None: the data is not known."""
    fits: bool | None
    chosen: tuple[str, ...]
    """What "auto" was chosen to be, and why, a sentence each."""
    changes: tuple[OptionChange, ...]
    """What to change so that it fits, one by one in the order of preference; if no change alone is enough, all of them."""
    hints: tuple[str, ...]
    """What would be better and is not wrong."""
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON."""
        document = asdict(self)
        for cost, shown in ((self, document), (self.likely, document["likely"])):
            if cost is not None:
                shown["rank"] |= {"stored": cost.rank.stored, "resident": cost.rank.resident, "total": cost.rank.total}
                shown["wire"] |= {"total": cost.wire.total}
        return document

    @property
    def stored_fits(self) -> bool | None:
        """Whether the part that does not depend on the data fits: stored and gathered bytes. If not, no sample however short
        helps.
        """
        return None if self.memory is None else self.rank.resident <= self.memory


def plan_job(spec: JobSpec, machine: Machine, lengths: Lengths | None = None, *, to_train: bool = True) -> Plan:
    """A job's plan, with options that are "auto" chosen for the machine. `lengths`: of the training data, if it was read.
    `to_train` False: of the base config.json and, where there is one, its index are enough.

    Raises SpecError for a base that cannot be read or trained on, and for a pattern or module name that matches nothing.
    """
    folder = Path(spec.model.path)
    contents, here = (read_contents(folder), True) if to_train else contents_or_description(folder)
    base = base_shape(contents)
    refuse_ids_without_row(base, folder)
    draft = _plan(base, spec, machine, lengths)
    if not here:
        from ft_service.bases.catalogue import pickled_weights  # with YAML, which commands that only show a plan need not

        pickled = pickled_weights(folder)
        why = WITHOUT_WEIGHTS if pickled is None else PICKLED.format(name=pickled)
        draft = replace(draft, warnings=(*draft.warnings, why))
    if draft.fits:
        return replace(draft, hints=tuple(_hints(base, spec, machine, draft, lengths)))
    if draft.fits is None:
        return draft
    return replace(draft, changes=tuple(_changes(base, _opened(spec), machine, lengths)))


def bounded(spec: JobSpec) -> JobSpec:
    """The spec with samples no longer than the base was made for, unless it says how long. Raises SpecError as `plan_job`."""
    contents, _ = contents_or_description(Path(spec.model.path))
    return within_context(base_shape(contents), spec)


def training_time(plan: Plan, spec: JobSpec, examples: int) -> dict[str, Any]:
    """Optimizer steps and their duration in seconds: at most, were every sample as long as the longest, and likely, at the mean
    length.
    """
    options = spec.training
    steps = options.max_steps or options.epochs * -(-examples // options.batch)
    most, likely = (
        None if cost is None or cost.speed is None else steps * cost.speed.step_seconds for cost in (plan, plan.likely)
    )
    return {"examples": examples, "steps": steps, "seconds_at_most": most, "seconds_likely": likely}


def _plan(base: BaseShape, spec: JobSpec, machine: Machine, lengths: Lengths | None) -> Plan:
    spec = assumed(settle_on(base, spec, machine, lengths))
    memory = usable_bytes(machine, spec)
    layout = layout_of(spec)
    stored, adapters = stored_weights(base, spec, layout), adapters_of(base, spec)
    groups = groups_of(stored, adapters, spec)
    mode = spec.distributed.activation_checkpointing
    known = spec.precision.compute == "bf16" or machine.shared_memory  # data sheets speak of bf16

    def cost(batches: MicroBatches) -> Cost:
        wire = wire_bytes(groups, spec, layout, batches.rounds)
        flops = flops_per_token(base, adapters, batches.length, checkpointed=mode == "full")
        launched = launch_seconds(batches.rounds, base.shape.layers, mode, gpu=not machine.shared_memory)
        return Cost(
            batches=batches,
            rank=rank_bytes(base, spec, layout, stored, adapters, groups, batches, machine),
            wire=wire,
            flops_per_token=flops,
            speed=speed_on(machine, flops, stored, wire, batches, layout, passes=PASSES[mode], launched=launched)
            if known
            else None,
        )

    most = cost(planned_micro_batches(spec, layout, lengths and lengths.longest))
    mean = lengths.mean if lengths else None
    return Plan(
        machine=machine.name,
        memory=memory,
        layout=layout,
        modules=tuple(_modules(stored, layout)),
        frozen_parameters=sum(part.weight.numel for part in stored),
        adapter_parameters=sum(adapter.numel for adapter in adapters),
        **vars(most),
        likely=cost(planned_micro_batches(spec, layout, mean)) if mean else None,
        fits=None if memory is None else most.rank.total <= memory,
        chosen=tuple(sentences(spec).values()),
        changes=(),
        hints=(),
        warnings=tuple(_warnings(base, spec, layout, adapters)),
    )


def _modules(stored: list[Stored], layout: Layout) -> Iterator[Module]:
    """One entry a module: a bias goes with its weight."""
    of_module: dict[str, list[Stored]] = {}
    for part in stored:
        of_module.setdefault(part.weight.module, []).append(part)
    for name, parts in of_module.items():
        main = max(parts, key=lambda part: len(part.weight.shape))
        yield Module(
            name=name,
            kind=main.weight.kind,
            shape=main.weight.shape,
            format=main.format,
            bytes=sum(part.bytes_whole for part in parts),
            bytes_per_rank=sum(part.bytes_on_rank(layout) for part in parts),
        )


def _opened(spec: JobSpec) -> JobSpec:
    """The spec with what was chosen for it open again, so that it follows a change of what was not."""
    again = [option for option in spec.chosen if option not in KEPT or option == FORMAT]
    return with_options(spec.model_copy(update={"chosen": {}}), dict.fromkeys(again, AUTO))


def _changes(base: BaseShape, spec: JobSpec, machine: Machine, lengths: Lengths | None) -> Iterator[OptionChange]:
    """Single changes in the order of preference; then, if none of them is enough, all together."""
    combined, options = spec, dict[str, Any]()
    enough = False
    for change in _candidates(base, spec):
        tried = _tried(base, with_options(spec, change), machine, change, lengths)
        yield tried
        enough = enough or tried.fits
        combined, options = with_options(combined, change), options | change
    if not enough and len(options) > 1:
        yield _tried(base, combined, machine, options, lengths)


def _hints(base: BaseShape, spec: JobSpec, machine: Machine, draft: Plan, lengths: Lengths | None) -> Iterator[str]:
    """Advice beside the changes: a base that fits whole on every rank needs no gathers at all."""
    if draft.layout.shard == 1 or spec.distributed.replicate == AUTO or "distributed.replicate" in spec.chosen:
        return
    options = {"distributed.replicate": -1, "distributed.offload": False}
    if _tried(base, with_options(spec, options), machine, options, lengths).fits:
        yield "The base fits whole on every rank: distributed.replicate: -1 needs no gathers and is the fastest."


def _tried(base: BaseShape, spec: JobSpec, machine: Machine, options: dict[str, Any], lengths: Lengths | None) -> OptionChange:
    plan = _plan(base, spec, machine, lengths)
    return OptionChange(options, plan.rank.total, bool(plan.fits))


def _candidates(base: BaseShape, spec: JobSpec) -> Iterator[dict[str, Any]]:
    """Changes of options that are not "auto": those have the best value already."""
    training, distributed = spec.training, spec.distributed
    if distributed.activation_checkpointing not in ("full", AUTO):
        yield {"distributed.activation_checkpointing": AUTO}
    if distributed.keep_unsharded:
        yield {"distributed.keep_unsharded": False}
    if training.tokens_per_micro_batch != AUTO and training.tokens_per_micro_batch > GPU_BUDGETS[0]:
        yield {"training.tokens_per_micro_batch": AUTO}
    if training.max_length > _SHORT:
        yield {"training.max_length": training.max_length // 2}
    if distributed.replicate != AUTO and layout_of(spec).replicate > 1:
        yield {"distributed.replicate": AUTO}
    if spec.precision.default == "bf16" and not KEPT_IN_FP8.isdisjoint(base.held().values()):
        yield {"precision.default": "fp8"}  # as exact: the base is published so
    if spec.precision.default != AUTO and any(f not in ("nf4", "nf4_fp32") for f in _formats(base, spec)):
        yield {"precision.default": "nf4", "precision.overrides": {}}
    yield {"distributed.nproc_per_node": 2 * spec.world_size // distributed.nnodes}


def _formats(base: BaseShape, spec: JobSpec) -> list[WeightFormat]:
    """Formats of the weights that the precision map decides on."""
    stored = stored_weights(base, spec, layout_of(spec))
    stay = staying(base.held())
    return [s.format for s in stored if s.weight.kind in ("linear", "experts") and s.weight.module not in stay]


def _warnings(base: BaseShape, spec: JobSpec, layout: Layout, adapters: list[AdapterShape]) -> Iterator[str]:
    small = [a for a in adapters if a.r > min(a.rows, a.cols)]
    if small:
        first = small[0]
        yield (
            f"lora.r = {first.r} is more than the matrix of {first.module} has ({first.rows} x {first.cols}): "
            "a rank above the smaller side adds parameters and no freedom."
        )
    if base.untested is not None:
        yield base.untested
    apart = named_apart([weight.module for weight in base.adaptable()], [weight.module for weight in base.experts()])
    left_out = [name for name in apart if ROUTERS.isdisjoint(name.split("."))]
    if left_out and spec.lora.lora_dropout and spec.lora.target_modules == "all-linear" and not spec.shared_experts:
        yield (
            f"lora.lora_dropout = {spec.lora.lora_dropout:g}: PEFT has no dropout for adapters on shared experts and dense "
            f"layers of a mixture, so all-linear leaves these {len(left_out)} out, the first: {left_out[0]}. Set it to 0 to "
            "adapt them."
        )
    longest = base.shape.max_positions
    given = "max_length" in spec.training.model_fields_set
    if given and longest is not None and spec.training.max_length > longest:
        yield (
            f"training.max_length = {spec.training.max_length}: the base was made for {longest} positions "
            "(max_position_embeddings). Lower it, or expect worse results of longer samples."
        )
    if layout.world > spec.training.batch:
        yield (
            f"training.batch_size = {spec.training.batch_size}: {layout.world} ranks share it, so that "
            f"{layout.world - spec.training.batch} of them have nothing to do. Raise it, or ask for fewer ranks."
        )
