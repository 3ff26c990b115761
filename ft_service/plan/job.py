"""A job's plan: bytes per rank, bytes on the wire, FLOP, whether it fits the machine, and what to
change if it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_service.bases.description import Description
from ft_service.bases.module_rules import (
    ROUTERS,
    converted,
    named_apart,
    refuse_without_position,
    staying,
)
from ft_service.data.statistics import items_of_steps
from ft_service.errors import SpecError
from ft_service.host.processor import slow_bf16_advice
from ft_service.money import Rate, amount, cost_of
from ft_service.plan.auto_options import sentences, settle_on, with_compute
from ft_service.plan.context_parallel import refuse_to_share
from ft_service.plan.fitting_settings import (
    AUTO,
    FORMAT,
    GPU_BUDGETS,
    KEPT,
    assumed,
    host_fits,
    with_options,
)
from ft_service.plan.machines import Machine, ranks_per_host, usable_bytes, usable_host_bytes
from ft_service.plan.memory import MicroBatches, RankBytes, planned_micro_batches, rank_bytes
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.seat import lanes_of, seat_size, sharing_gain
from ft_service.plan.speed import (
    PASSES,
    WHOLE_LAYERS,
    CollectiveBytes,
    Speed,
    exchange_bytes,
    flops_per_token,
    forwards_only,
    sampling_seconds,
    speed_on,
    whole_training,
    wire_bytes,
)
from ft_service.plan.vocabulary_check import refuse_ids_without_row
from ft_service.plan.weight_storage import (
    ShardedJob,
    ShardLayout,
    WeightStorage,
    layout_of,
    stored_weights,
)
from ft_service.rundir.engine import SeatSize
from ft_service.spec import (
    AS_PUBLISHED,
    FORMATS,
    DistillationOptions,
    JobSpec,
    KtoOptions,
    WeightFormat,
    check_distributed,
)
from ft_service.spec.options import DistributedOptions
from ft_service.wording import bytes_text

WITHOUT_WEIGHTS = (
    "The weights of the base are not here, or not all of them: their shapes are "
    "taken from its config.json."
)
PICKLED = (
    "The base cannot be trained on: its folder holds no weights in safetensors, only {name}, "
    "which is pickled and never read. "
    "Their shapes are taken from its config.json."
)
MOST_PER_HOST = 64
"""Ranks that a job may have on a host, whatever the machine."""
_SHORT = 256
"""Tokens below which a plan does not propose to cut samples."""


@dataclass(frozen=True)
class Module:
    """A frozen module and the bytes of its parameters."""

    name: str
    kind: str
    shape: tuple[int, ...]
    format: WeightFormat
    bytes: int
    """Bytes of the whole module."""
    bytes_per_rank: int


@dataclass(frozen=True)
class OptionChange:
    """One or several options to change, and the bytes per rank that result."""

    options: dict[str, Any]
    total: int
    fits: bool


@dataclass(frozen=True)
class Cost:
    """The cost of an optimizer step with samples of one length."""

    batches: MicroBatches
    rank: RankBytes
    wire: CollectiveBytes
    flops_per_token: int
    speed: Speed | None


@dataclass(frozen=True)
class Plan(Cost):
    """The highest cost of a job on a machine: that of samples which are all as long as the longest,
    or training.max_length tokens where the data is not known.
    """

    machine: str
    memory: int | None
    """Bytes that tensors of a rank can have; None: not known."""
    host_memory: int | None
    """Bytes of the host's memory that a rank can pin; None: not known."""
    ranks_per_host: int
    layout: ShardLayout
    modules: tuple[Module, ...]
    frozen_parameters: int
    adapter_parameters: int
    likely: Cost | None
    """The cost at the mean length. None: the data is not known."""
    fits: bool | None
    """None: the machine's memory is not known."""
    seat: SeatSize
    """The job in an engine, on the ranks of its own plan."""
    chosen: tuple[str, ...]
    """A sentence for each "auto" option: its value, and why."""
    changes: tuple[OptionChange, ...]
    """Single changes so that it fits, in the order of preference; if none alone is enough, all of
    them together come last.
    """
    hints: tuple[str, ...]
    """Advice that would make the job faster."""
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON."""
        document = asdict(self)
        for cost, shown in ((self, document), (self.likely, document["likely"])):
            if cost is not None:
                shown["rank"] |= {
                    "stored": cost.rank.stored,
                    "resident": cost.rank.resident,
                    "total": cost.rank.total,
                }
                shown["wire"] |= {"total": cost.wire.total}
        return document

    @property
    def stored_fits(self) -> bool | None:
        """Whether stored and gathered bytes fit, which do not depend on the data.

        None: the machine's memory is not known.
        """
        return None if self.memory is None else self.rank.resident <= self.memory


def plan_job(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None = None,
    most_per_host: int = MOST_PER_HOST,
) -> Plan:
    """A job's plan, with "auto" options chosen for the machine.

    `lengths`: lengths of the training data, if it was read. `most_per_host`: ranks that the job may
    have on a host; no change asks for more.

    Raises SpecError for a base whose tokenizer has ids without a row, for samples longer than the
    positions that a base has learned, and for a pattern or module name that matches nothing.
    """
    folder = Path(spec.model.path)
    refuse_ids_without_row(base, folder)
    _refuse_without_position(base, spec, lengths)
    refuse_to_share(base, spec, lengths)
    draft = _plan(base, spec, machine, lengths)
    if not base.downloaded:
        # With YAML, which commands that only show a plan need not.
        from ft_service.bases.catalogue import (
            pickled_weights,
        )

        pickled = pickled_weights(folder)
        why = WITHOUT_WEIGHTS if pickled is None else PICKLED.format(name=pickled)
        draft = replace(draft, warnings=(*draft.warnings, why))
    if draft.fits:
        return replace(draft, hints=tuple(_hints(base, spec, machine, draft, lengths)))
    if draft.fits is None:
        return draft
    return replace(
        draft,
        changes=tuple(_changes(base, _opened(spec), machine, lengths, most_per_host)),
        warnings=(*draft.warnings, *_unpinnable(draft)),
    )


def _unpinnable(draft: Plan) -> Iterator[str]:
    """What the host lacks, where the job would fit if layers' inputs were in its memory."""
    offloaded = draft.rank.in_mode("offload")
    assert draft.memory is not None
    if (
        draft.host_memory is not None
        and offloaded.total <= draft.memory
        and offloaded.host > draft.host_memory
    ):
        yield (
            "distributed.activation_checkpointing: offload takes "
            f"{bytes_text(offloaded.total)} of the GPU, which fits, and pins "
            f"{bytes_text(offloaded.host)} of the host's memory per rank, of which there are "
            f"{bytes_text(draft.host_memory)}: it needs a host with more memory, or fewer ranks on "
            "one (distributed.nproc_per_node)."
        )


def _refuse_without_position(
    base: Description, spec: JobSpec, lengths: SampleLengths | None
) -> None:
    """Raise SpecError for counted samples as `refuse_without_position`."""
    longest = min(lengths.longest, spec.training.max_length) if lengths and lengths.longest else 0
    others = {
        w.name: w.rows
        for w in base.weights
        if w.kind == "embedding" and w.module != base.outer.embedding
    }
    refuse_without_position(longest, base.dimensions.max_positions, others)


def training_time(plan: Plan, spec: JobSpec, examples: int) -> dict[str, Any]:
    """Optimizer steps and their seconds: at most, with samples as long as the longest, and likely,
    of mean length. `examples`: units of training.batch_size in an epoch, at least 1; a step has
    fewer than the batch where they do not fill it.
    """
    options = spec.training
    steps = options.max_steps or options.epochs * -(-examples // options.batch)
    whole_steps = items_of_steps(steps, options.batch, examples) / options.batch
    whole_steps += reference_steps(spec, min(steps * options.batch, examples) / options.batch)
    most, likely = (
        None if cost is None or cost.speed is None else whole_steps * cost.speed.step_seconds
        for cost in (plan, plan.likely)
    )
    return {"examples": examples, "steps": steps, "seconds_at_most": most, "seconds_likely": likely}


def training_cost(
    time: Mapping[str, Any] | None, ranks: int, rate: Rate | None
) -> dict[str, Any] | None:
    """What the planned training costs in the rate's currency, its start-up left out: `at_most` and
    `likely`, as of `time`, each None if the time is not known.

    `time`: from `training_time`; None: the data is not known. None: neither is the price.
    """
    if rate is None:
        return None
    seconds = {"at_most": "seconds_at_most", "likely": "seconds_likely"}
    costs = {
        name: None
        if time is None or time[key] is None
        else amount(cost_of(time[key] * ranks, rate.price))
        for name, key in seconds.items()
    }
    return {"currency": rate.currency, "slot_hour": amount(rate.price), **costs}


def reference_steps(spec: JobSpec, steps: float) -> float:
    """Steps that take as long as computing the reference's log-probabilities of what so many read:
    one forward of each answer, and one of its mismatched one, as a share of a step's passes.
    """
    if not spec.has_reference:
        return 0.0
    mismatched = forwards_only(spec)
    passes = PASSES.get(spec.distributed.activation_checkpointing, PASSES["none"]) + mismatched
    return steps * (1 + mismatched) / passes


def _plan(
    base: Description, spec: JobSpec, machine: Machine, lengths: SampleLengths | None
) -> Plan:
    spec = assumed(settle_on(base, spec, machine, lengths))
    memory = usable_bytes(machine, spec)
    job = ShardedJob.of(base, spec)
    most = _cost(job, machine, lengths and lengths.longest)
    mean = lengths.mean if lengths else None
    likely = _cost(job, machine, mean) if mean else None
    usual = likely or most
    seconds = (
        lengths
        and whole_training(lengths.of_training(spec), usual.flops_per_token, usual.speed).seconds
    )
    seat = seat_size(job, machine, most.rank, most.batches.tokens)
    if usual.speed is not None:
        seat = replace(
            seat,
            gain=sharing_gain(
                usual.speed, seconds, lanes_of([seat] * 2, usual.batches.tokens, spec)
            ),
        )
    return Plan(
        machine=machine.name,
        memory=memory,
        host_memory=usable_host_bytes(machine, spec),
        ranks_per_host=ranks_per_host(spec),
        layout=job.layout,
        modules=tuple(_modules(job)),
        frozen_parameters=sum(part.weight.numel for part in job.frozen),
        adapter_parameters=sum(adapter.numel for adapter in job.adapters),
        **vars(most),
        likely=likely,
        seat=seat,
        fits=None
        if memory is None
        else most.rank.total <= memory and host_fits(most.rank, spec, machine),
        chosen=tuple(sentences(spec).values()),
        changes=(),
        hints=(),
        warnings=tuple(_warnings(job)),
    )


def _cost(job: ShardedJob, machine: Machine, length: int | None) -> Cost:
    """The cost with samples of `length` tokens; None: training.max_length."""
    batches = planned_micro_batches(job.spec, job.layout, length)
    mode = job.spec.distributed.checkpointing
    wire = replace(wire_bytes(job, batches.rounds), exchange=exchange_bytes(job, batches, mode))
    checkpointed = mode in WHOLE_LAYERS
    flops = flops_per_token(
        job.base,
        job.adapters,
        batches.length,
        checkpointed=checkpointed,
        forwards=forwards_only(job.spec),
        teacher=job.base.teacher,
        ranks=batches.ranks,
    )
    rank = rank_bytes(job, batches, machine)
    speed = speed_on(machine, job, batches, flops, wire, rank.host)
    return Cost(batches, rank, wire, flops, speed)


def _modules(job: ShardedJob) -> Iterator[Module]:
    """One entry per module: a bias goes with its weight."""
    of_module: dict[str, list[WeightStorage]] = {}
    for part in job.frozen:
        of_module.setdefault(part.weight.module, []).append(part)
    for name, parts in of_module.items():
        main = max(parts, key=lambda part: len(part.weight.shape))
        yield Module(
            name=name,
            kind=main.weight.kind,
            shape=main.weight.shape,
            format=main.format,
            bytes=sum(part.bytes_whole for part in parts),
            bytes_per_rank=sum(part.bytes_on_rank(job.layout) for part in parts),
        )


def _opened(spec: JobSpec) -> JobSpec:
    """The spec with its chosen options "auto" again, so that they follow a change of the others."""
    again = [option for option in spec.chosen if option not in KEPT or option == FORMAT]
    return with_options(spec.model_copy(update={"chosen": {}}), dict.fromkeys(again, AUTO))


def _changes(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None,
    most_per_host: int,
) -> Iterator[OptionChange]:
    """Single changes in the order of preference; then, if no single one is enough, all of them
    together.
    """
    combined = spec
    options = dict[str, Any]()
    enough = False
    for change in _candidates(base, spec, most_per_host):
        tried = _tried(base, with_options(spec, change), machine, change, lengths)
        yield tried
        enough = enough or tried.fits
        combined = with_options(combined, change)
        options = options | change
    if not enough and len(options) > 1:
        yield _tried(base, combined, machine, options, lengths)


def _hints(
    base: Description, spec: JobSpec, machine: Machine, draft: Plan, lengths: SampleLengths | None
) -> Iterator[str]:
    """Advice for a job that fits: a base that fits whole on every rank needs no gathers; what its
    times leave out.
    """
    slow = machine.slow_in_bf16
    if slow is not None and with_compute(spec, machine).precision.compute == "bf16":
        yield slow_bf16_advice(slow)
    if spec.reinforcement is not None:
        answers = spec.training.batch * spec.samples_of_item
        longest = spec.longest_rollout
        graded = "; and so does grading" if spec.sampled_for == "rewards" else ""
        seconds = sampling_seconds(
            machine, base, sum(module.bytes for module in draft.modules), answers, longest
        )
        text = (
            ""
            if seconds is None
            else f", estimated to take one {machine.name} at least {seconds:.2g} s"
        )
        turns = ""
        if spec.environment is not None:
            turns = f", each in up to {spec.environment.max_turns:,} calls of the model,"
            text += ", without reading what the environment says, and the environment's own time"
        yield (
            f"Times are those of training alone. Sampling comes on top: a step's {answers:,} "
            f"answers{turns} of at most {longest:,} "
            f"tokens, {answers * longest:,} together{text}{graded}."
        )
    if spec.has_reference:
        what = "answer" if spec.preferences is None else "pair"
        text = (
            f"Before the steps the reference's log-probabilities of each {what} that they read are "
            f"computed once: a whole training's time has it, {reference_steps(spec, 1):.2g} times "
            f"as long as a first pass over these {what}s; that of a step does not."
        )
        if isinstance(spec.loss, KtoOptions) and spec.loss.loss_type == "kto":
            text += (
                " A mismatched answer for each one is a forward more there and in each step; "
                "method.kto.hyperparameters.loss_type: apo_zero_unpaired does without."
            )
        yield text
    if spec.served_teacher is not None:
        yield "Asking the server about the teacher comes on top too."
    elif isinstance(spec.loss, DistillationOptions):
        yield (
            "Each step has a forward of the teacher, without gradients, of rows as long as the "
            "context and the sample: times and memory count it."
        )
        if draft.rank.teacher:
            yield (
                f"The teacher takes {bytes_text(draft.rank.teacher)} of each rank beside the base."
            )
    if (
        draft.layout.shard == 1
        or spec.distributed.replicate == AUTO
        or "distributed.replicate" in spec.chosen
    ):
        return
    options = {"distributed.replicate": -1, "distributed.offload": False}
    if _tried(base, with_options(spec, options), machine, options, lengths).fits:
        yield "The base fits whole on every rank: distributed.replicate: -1 needs no gathers and is the fastest."


def _tried(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    options: dict[str, Any],
    lengths: SampleLengths | None,
) -> OptionChange:
    plan = _plan(base, spec, machine, lengths)
    return OptionChange(options, plan.rank.total, bool(plan.fits))


def _candidates(base: Description, spec: JobSpec, most_per_host: int) -> Iterator[dict[str, Any]]:
    """Changes of options that are not "auto", since "auto" ones have the best value already.
    None that the options beside it refuse: FSDP2 reshards to a number of ranks only plain
    weights.
    """
    training = spec.training
    distributed = spec.distributed
    if distributed.activation_checkpointing not in ("offload", AUTO):
        yield {"distributed.activation_checkpointing": AUTO}
    if distributed.keep_unsharded:
        yield {"distributed.keep_unsharded": False}
    if training.tokens_per_micro_batch != AUTO and training.tokens_per_micro_batch > GPU_BUDGETS[0]:
        yield {"training.tokens_per_micro_batch": AUTO}
    if training.max_length > _SHORT:
        yield {"training.max_length": training.max_length // 2}
    if distributed.context_parallel != AUTO and spec.world_size > 1:
        yield {"distributed.context_parallel": AUTO}
    if distributed.replicate != AUTO and layout_of(spec).replicate > 1:
        yield {"distributed.replicate": AUTO}
    plain = distributed.reshard_size is not None
    if (
        not plain
        and spec.precision.default not in (AUTO, AS_PUBLISHED)
        and any(
            FORMATS[s.format].code_bits > FORMATS[base.held[s.weight.module]].code_bits
            for s in _converted(base, spec)
        )
    ):
        yield {"precision.default": AS_PUBLISHED, "precision.overrides": {}}
    if (
        not plain
        and spec.precision.default != AUTO
        and any(FORMATS[f].code_bits > 4 for f in _formats(base, spec))
    ):
        yield {"precision.default": "nf4", "precision.overrides": {}}
    ranks = 2 * spec.world_size // distributed.nnodes
    if ranks <= min(most_per_host, distributed.max_nproc_per_node or most_per_host) and _may_have(
        distributed, ranks
    ):
        yield {"distributed.nproc_per_node": ranks}


def _may_have(options: DistributedOptions, ranks: int) -> bool:
    """Whether options allow a number of ranks on a host."""
    try:
        check_distributed(options, options.nnodes * ranks, gpus=ranks)
    except SpecError:
        return False
    return True


def _converted(base: Description, spec: JobSpec) -> list[WeightStorage]:
    """Weights that the job stores in another format than the base is published in."""
    stored = stored_weights(base, spec, layout_of(spec))
    others = converted(
        base.held, {s.weight.module: s.format for s in stored if s.weight.parameter == "weight"}
    )
    return [s for s in stored if s.weight.parameter == "weight" and s.weight.module in others]


def _formats(base: Description, spec: JobSpec) -> list[WeightFormat]:
    """Formats of the weights that the precision map decides on."""
    stored = stored_weights(base, spec, layout_of(spec))
    stay = staying(base.held)
    return [
        s.format
        for s in stored
        if s.weight.kind in ("linear", "experts") and s.weight.module not in stay
    ]


def _conversion(job: ShardedJob) -> Iterator[str]:
    """What it costs to store weights otherwise than the base is published."""
    others = _converted(job.base, job.spec)
    if not others:
        return
    kept = [
        WeightStorage.of(s.weight, s.weight.held or s.format, s.sharded, job.compute_bytes)
        for s in others
    ]
    now, then = (sum(s.bytes_on_rank(job.layout) for s in some) for some in (others, kept))
    names = " and ".join(sorted({s.weight.held or "" for s in others}))
    stored = sorted({s.format for s in others})
    rounded = "" if stored == ["bf16"] else ", and rounds their values a second time"
    yield (
        f"The base is published in {names}. Storing {len(others)} of its weights in "
        f"{' and '.join(stored)} takes "
        f"{bytes_text(now)} a rank instead of {bytes_text(then)}{rounded}. precision.default: "
        f"{AS_PUBLISHED} keeps them as they are."
    )


def _unkept(job: ShardedJob) -> Iterator[str]:
    """What becomes of weights that are published in a layout which no format keeps."""
    plain = [
        s
        for s in job.frozen
        if s.weight.parameter == "weight" and s.weight.module in job.base.unkept
    ]
    plain = [s for s in plain if s.format == "bf16"]
    if plain:
        names = " and ".join(sorted({job.base.unkept[s.weight.module] for s in plain}))
        now = bytes_text(sum(s.bytes_on_rank(job.layout) for s in plain))
        yield (
            f"The base holds {len(plain)} of its weights in {names}, which no format here keeps: "
            "with precision.default: "
            f"{job.spec.precision.default} they are stored in bf16, {now} a rank. "
            "precision.default: nf4 or fp8 takes less, "
            "and rounds their values a second time."
        )


def _rounding(job: ShardedJob) -> Iterator[str]:
    """What precision.served_as costs, and what it does not gain."""
    form = job.spec.precision.served_as
    if form is None:
        return
    weights = len(job.base.quantizable)
    again = job.spec.distributed.checkpointing == "full"
    later = " once more to compute the layer again," if again else ""
    yield (
        f"precision.served_as = {form!r}: the {weights} linear weights are rounded with their "
        f"adapters once in the forward and once in the backward of every micro-batch,{later} each "
        "by one product of B and A and one pass over the weight; the time of a step counts it. "
        "Large micro-batches make it cheap."
    )
    if form in ("nvfp4", "mxfp4"):
        yield (
            f"A model in {form.upper()} whose inputs stay in bf16 takes about a quarter of the "
            "memory, and in most shapes its products are not faster than in bf16."
        )


def _warnings(job: ShardedJob) -> Iterator[str]:
    base = job.base
    spec = job.spec
    layout = job.layout
    first = next((a for a in job.adapters if a.r > min(a.rows, a.cols)), None)
    if first is not None:
        yield (
            f"lora.r = {first.r} is more than the matrix of {first.module} has ({first.rows} x "
            f"{first.cols}): "
            "a rank above the smaller side adds parameters and no freedom."
        )
    yield from base.warnings
    yield from _rounding(job)
    yield from _conversion(job)
    yield from _unkept(job)
    apart = named_apart(
        [weight.module for weight in base.linears], [weight.module for weight in base.experts]
    )
    left_out = [name for name in apart if ROUTERS.isdisjoint(name.split("."))]
    if (
        left_out
        and spec.lora.lora_dropout
        and spec.lora.target_modules == "all-linear"
        and not spec.shared_experts
    ):
        yield (
            f"lora.lora_dropout = {spec.lora.lora_dropout:g}: PEFT has no dropout for adapters on "
            "shared experts and dense "
            f"layers of a mixture, so all-linear leaves these {len(left_out)} out, the first: "
            f"{left_out[0]}. Set it to 0 to "
            "adapt them."
        )
    longest = base.dimensions.max_positions
    given = "max_length" in spec.training.model_fields_set
    if given and longest is not None and spec.training.max_length > longest:
        yield (
            f"training.max_length = {spec.training.max_length}: the base was made for {longest} "
            "positions "
            "(max_position_embeddings). Lower it, or expect worse results of longer samples."
        )
    groups = layout.world // spec.distributed.ranks_per_sample
    if groups > spec.training.batch:
        idle = layout.world - spec.training.batch * spec.distributed.ranks_per_sample
        yield (
            f"training.batch_size = {spec.training.batch_size}: {layout.world} ranks share it, so "
            f"that {idle} of them have nothing to do. Raise it, or ask for fewer ranks."
        )
