"""A job's "auto" options replaced by values for a machine, each with a sentence that says why.

The same spec, base, machine and lengths give the same options, so that all ranks and a resume on
the same machine agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ft_service.bases.description import Description
from ft_service.bases.module_rules import staying
from ft_service.errors import SpecError
from ft_service.host.processor import slowness
from ft_service.plan.fitting_settings import (
    AUTO,
    BATCH,
    BUDGET,
    BUSY,
    CHECKPOINTING,
    COMPILE,
    COMPUTE,
    CONTEXT,
    COPIES,
    EPOCHS,
    FITTED,
    FORMAT,
    KEPT,
    LENGTH,
    RATE,
    Setting,
    best_setting,
    is_open,
    value_of,
    with_options,
)
from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import AS_PUBLISHED, JobSpec
from ft_service.spec.auto_hyperparameters import rate_for
from ft_service.spec.options import FOR_LONG_SAMPLES, WrapBySize
from ft_service.wording import bytes_text, duration_text

COMPILED_SHARE = 0.15
"""Share of the training time that compiled layers save: 16 to 27 % were measured."""
COMPILE_SECONDS = 60
WORTH_SECONDS = 2 * COMPILE_SECONDS / COMPILED_SHARE
"""Training time above which layers are compiled: it saves twice the time to compile, since the time
is an estimate.
"""


@dataclass(frozen=True)
class Ranks:
    """The ranks that train: `world` ranks on `nodes` hosts."""

    world: int
    nodes: int


@dataclass(frozen=True)
class Settled:
    """A spec without "auto", as far as the machine is known."""

    spec: JobSpec
    news: tuple[str, ...] = ()
    """A sentence for every option whose value changed: `distributed.compile: false (only GPUs
    …).`
    """


def settle(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None = None,
    ranks: Ranks | None = None,
) -> Settled:
    """Choose a spec's "auto" options.

    Of these only precision.compute is chosen where the machine's memory is not known.

    Options that were chosen before are chosen again if more is known now: the ranks that really
    train (`ranks`; None: those of the spec), or the counted lengths of the samples. Formats stay,
    since results depend on them. Raises SpecError as a plan does, and for precision.default "auto"
    on a machine whose memory is not known.
    """
    settled = with_format_open(with_compute(spec, machine), machine)
    if not is_settled(settled, lengths, ranks):
        settled = settle_on(base, _reopened(settled, lengths, ranks), machine, lengths)
    changed = [
        option for option in settled.chosen if value_of(settled, option) != value_of(spec, option)
    ]
    return Settled(settled, tuple(_sentence(settled, option) for option in changed))


def is_settled(
    spec: JobSpec, lengths: SampleLengths | None = None, ranks: Ranks | None = None
) -> bool:
    """Whether `settle` would not change the spec, whatever the base."""
    opened = _reopened(spec, lengths, ranks)
    return _is_given(opened, LENGTH) and not any(
        is_open(opened, option) for option in (*FITTED, COMPILE, RATE)
    )


def settle_on(
    base: Description, spec: JobSpec, machine: Machine, lengths: SampleLengths | None = None
) -> JobSpec:
    """The spec with its "auto" options chosen."""
    spec = with_compute(with_rate(base, within_context(base, spec)), machine)
    spec = with_format_open(spec, machine)
    given = [option for option in (*FITTED, COMPILE) if is_open(spec, option)]
    if not given:
        return spec
    if usable_bytes(machine, spec) is None:
        _refuse_unknown(spec, machine)
        return spec
    setting, fits = best_setting(base, spec, machine, lengths)
    compiled, why = _compile(spec, setting, machine, lengths)
    final = with_options(setting.spec, {COMPILE: compiled}) if COMPILE in given else setting.spec
    reasons = {**dict(_reasons(base, setting, machine, fits)), COMPILE: why}
    return final.model_copy(
        update={"chosen": {**spec.chosen, **{option: reasons[option] for option in given}}}
    )


def within_context(base: Description, spec: JobSpec) -> JobSpec:
    """The spec with training.max_length limited to the base's positions, unless it was given."""
    longest = base.dimensions.max_positions
    if _is_given(spec, LENGTH) or longest is None or spec.training.max_length <= longest:
        return spec
    why = (
        f"limited by the base's context of {longest:,}; the default is {spec.training.max_length:,}"
    )
    return with_options(spec, {LENGTH: longest}).model_copy(
        update={"chosen": {**spec.chosen, LENGTH: why}}
    )


def with_rate(base: Description, spec: JobSpec) -> JobSpec:
    """The spec with training.learning_rate chosen for base and adapter, if it is "auto"."""
    if not is_open(spec, RATE):
        return spec
    rate, why = rate_for(base.model_type, base.dimensions.hidden, spec.lora)
    return with_options(spec, {RATE: rate}).model_copy(
        update={"chosen": {**spec.chosen, RATE: why}}
    )


def with_compute(spec: JobSpec, machine: Machine) -> JobSpec:
    """The spec with precision.compute "fp32" for a processor that is slower in bf16, unless it was
    given.
    """
    slow = machine.slow_in_bf16
    if slow is None or _is_given(spec, COMPUTE):
        return spec
    chosen = {**spec.chosen, COMPUTE: slowness(slow)}
    return with_options(spec, {COMPUTE: "fp32"}).model_copy(update={"chosen": chosen})


def with_format_open(spec: JobSpec, machine: Machine) -> JobSpec:
    """The spec with precision.default "auto" unless it was given, on a machine whose memory is
    known.
    """
    if _is_given(spec, FORMAT) or usable_bytes(machine, spec) is None:
        return spec
    return with_options(spec, {FORMAT: AUTO})


def _is_given(spec: JobSpec, option: str) -> bool:
    section, name = option.split(".")
    return name in getattr(spec, section).model_fields_set


def keep_choices(spec: JobSpec, before: JobSpec) -> JobSpec:
    """The spec with the options that results depend on as they were chosen for the same job before,
    if they are still "auto"; precision.default, precision.compute and training.max_length too,
    unless they are given.
    """
    if not _is_given(spec, LENGTH):
        spec = with_options(spec, {LENGTH: before.training.max_length})
    if not _is_given(spec, COMPUTE):
        spec = with_options(spec, {COMPUTE: before.precision.compute})
    kept = {option: before.chosen[option] for option in KEPT if option in before.chosen}
    if not _is_given(spec, FORMAT):
        spec = with_options(spec, {FORMAT: AUTO if FORMAT in kept else before.precision.default})
    for option in (FORMAT, RATE):
        if not is_open(spec, option):
            kept.pop(option, None)
        elif option in kept:
            spec = with_options(spec, {option: value_of(before, option)})
    for option in (BATCH, EPOCHS):  # already chosen, by the number of samples now
        if option not in spec.chosen:
            kept.pop(option, None)
        elif option in kept:
            spec = with_options(spec, {option: value_of(before, option)})
    pinned = {name: getattr(before, name) for name in ("date", "shared_experts")}
    return spec.model_copy(update={"chosen": kept, **pinned})


def sentences(spec: JobSpec) -> dict[str, str]:
    """Option → a sentence, for every chosen option of a spec."""
    return {option: _sentence(spec, option) for option in spec.chosen}


def _sentence(spec: JobSpec, option: str) -> str:
    value = value_of(spec, option)
    return (
        f"{option}: {str(value).lower() if isinstance(value, bool) else value} "
        f"({spec.chosen[option]})."
    )


def _reopened(spec: JobSpec, lengths: SampleLengths | None, ranks: Ranks | None) -> JobSpec:
    """The spec for these ranks.

    If it was made for others, or without the lengths of the samples, chosen options are "auto"
    again, except those that results depend on.
    """
    ranks = ranks or Ranks(spec.world_size, spec.distributed.nnodes)
    if ranks.world == spec.world_size and (lengths is None or not lengths.samples):
        return spec
    again = {option: AUTO for option in spec.chosen if option not in KEPT}
    kept = {option: why for option, why in spec.chosen.items() if option in KEPT}
    shape = {
        "distributed.nnodes": ranks.nodes,
        "distributed.nproc_per_node": max(1, ranks.world // ranks.nodes),
    }
    return with_options(spec.model_copy(update={"chosen": kept}), again | shape)


def _refuse_unknown(spec: JobSpec, machine: Machine) -> None:
    if is_open(spec, FORMAT):
        raise SpecError(
            f"precision.default = 'auto': the memory of {machine.name} is not known here, and "
            "results depend on the format. "
            "Give bf16, as_published, fp8 or nf4.",
            param=FORMAT,
        )


def _reasons(
    base: Description, setting: Setting, machine: Machine, fits: bool
) -> Iterator[tuple[str, str]]:
    """(option, reason of its value in the setting)."""
    rank = setting.rank
    usable = usable_bytes(machine, setting.spec)
    assert usable is not None
    room = f"peak {bytes_text(rank.total)} of {bytes_text(usable)} per rank"
    if not fits:
        room = (
            f"needs least memory, {bytes_text(rank.total)}, and may still not fit "
            f"{bytes_text(usable)} per rank"
        )
    yield FORMAT, _format_reason(base, setting, room)
    yield COPIES, _copies_reason(setting)
    yield CONTEXT, _context_reason(setting, fits=fits)
    yield CHECKPOINTING, _checkpointing_reason(setting, usable)
    yield BUDGET, f"{room}; {_budget_reason(setting, gpu=not machine.shared_memory)}"


def _format_reason(base: Description, setting: Setting, room: str) -> str:
    held = base.held
    chosen = setting.spec.precision.default
    stay = sorted(set(staying(held).values()))
    if stay:
        return f"the base comes in {' and '.join(stay)}, and stays so"
    if held and chosen in (AS_PUBLISHED, "fp8"):
        return "exact, as the base is published, " + room
    return "exact, " + room if chosen == "bf16" else "the most exact format that fits, " + room


def _copies_reason(setting: Setting) -> str:
    layout = setting.layout
    weights = bytes_text(sum(setting.rank.base.values()))
    if layout.world == 1:
        return "one rank"
    if layout.shard == 1:
        return f"the base fits whole on every rank, {weights}, so that nothing is gathered"
    return f"{layout.shard} ranks share a copy, {weights} of the base each: the fastest that fits"


def _context_reason(setting: Setting, *, fits: bool) -> str:
    length = f"{setting.batches.length:,} tokens"
    if setting.batches.ranks == 1:
        return f"a sample of {length} fits on one rank" if fits else "sharing samples does not help"
    if not fits:
        return f"needs least memory for samples of {length}"
    return f"the fewest ranks that have room for a sample of {length}"


def _checkpointing_reason(setting: Setting, usable: int) -> str:
    tokens = setting.batches.tokens
    rank = setting.rank
    mode = setting.spec.distributed.activation_checkpointing
    without = rank.in_mode("none").total
    if mode == "none":
        return f"activations of {tokens:,} tokens take {bytes_text(rank.activations)}, and fit"
    compared = "more than the" if without > usable else "of the"
    pinned = f"; {bytes_text(rank.host)} of host memory are pinned per rank" if rank.host else ""
    return (
        f"without it {tokens:,} tokens need {bytes_text(without)}, {compared} "
        f"{bytes_text(usable)} that there are{pinned}"
    )


def _budget_reason(setting: Setting, *, gpu: bool) -> str:
    batches = setting.batches
    budget = setting.spec.training.tokens_per_micro_batch
    if batches.step_tokens <= batches.tokens:
        return "one micro-batch holds the whole step"
    if batches.ranks > 1 and budget == -(-batches.length // batches.ranks):
        return "a rank's part of the longest sample"
    if budget == batches.length:
        return "the longest sample"
    return (
        "enough to keep it busy"
        if batches.tokens >= BUSY[gpu]
        else "larger ones do not fit, or gain nothing"
    )


def _compile(
    spec: JobSpec, setting: Setting, machine: Machine, lengths: SampleLengths | None
) -> tuple[bool, str]:
    """Whether to compile, and why."""
    if machine.shared_memory:
        return False, "only GPUs gain from it"
    if setting.spec.distributed.activation_checkpointing in FOR_LONG_SAMPLES:
        return False, "it works on whole decoder layers, and feed-forwards go by tiles"
    if setting.spec.distributed.ranks_per_sample > 1:
        return False, "ranks share samples, and their exchange cannot be compiled"
    if isinstance(spec.distributed.wrap, WrapBySize):
        return False, "it works on whole decoder layers, and distributed.wrap groups by size"
    if spec.precision.fused_kernels != "off" and spec.precision.compute == "bf16":
        return False, "precision.fused_kernels do what compiling would gain"
    if lengths is None:
        return False, "how long training takes is not known"
    seconds = lengths.of_training(spec) * setting.pace / setting.layout.world
    takes = (
        "training takes "
        f"{duration_text(seconds) if seconds < 1 else 'about ' + duration_text(seconds)}"
    )
    if seconds < WORTH_SECONDS:
        return False, f"{takes}, too short to win back the minute that compiling takes"
    return (
        True,
        f"{takes}, and some {COMPILED_SHARE:.0%} less with layers compiled in about a minute",
    )
