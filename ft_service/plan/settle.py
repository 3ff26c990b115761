"""A job's "auto" options replaced by what they stand for on a machine, each with a sentence that says why.

The same spec, base, machine and lengths give the same options, so that all ranks and a resume on the same machine agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ft_service.bases.contents import read_contents
from ft_service.bases.module_rules import staying
from ft_service.errors import SpecError
from ft_service.plan.base import BaseShape, base_shape
from ft_service.plan.choose import (
    AUTO,
    BATCH,
    BUDGET,
    BUSY,
    CHECKPOINTING,
    COMPILE,
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
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.quantities import bytes_text, duration_text
from ft_service.spec import JobSpec
from ft_service.spec.options import WrapBySize
from ft_service.spec.rates import rate_for

COMPILED_SHARE = 0.15
"""Of a training's time that compiling its layers saves: 16 to 27 % were measured."""
COMPILE_SECONDS = 60
WORTH_SECONDS = 2 * COMPILE_SECONDS / COMPILED_SHARE
"""Of training, above which it is compiled: twice what compiling takes, since the time is an estimate."""


@dataclass(frozen=True)
class Settled:
    """A spec without "auto", as far as the machine is known."""

    spec: JobSpec
    news: tuple[str, ...] = ()
    """A sentence for every option whose value is another than it was: `distributed.compile: false (only GPUs …).`"""


def settle(
    spec: JobSpec,
    machine: Machine,
    lengths: Lengths | None = None,
    *,
    world: int | None = None,
    nodes: int | None = None,
) -> Settled:
    """Choose what is "auto" in a spec, for its base on the disk. Where the machine's memory is not known all stays as it is.

    What was chosen before is chosen again by whoever knows better: the number of ranks that really train (`world`, on `nodes`
    hosts; None: as the spec says), or the lengths of the samples, counted. The formats are not, since results depend on them.
    Raises SpecError as a plan does, and for precision.default "auto" on a machine whose memory is not known.
    """
    opened = spec
    if (world is not None and world != spec.world_size) or (lengths is not None and lengths.samples):
        opened = _opened(spec, world or spec.world_size, nodes or spec.distributed.nnodes)
    if _length_given(opened) and not any(is_open(opened, option) for option in (*FITTED, COMPILE, RATE)):
        return Settled(spec)
    settled = settle_on(base_shape(read_contents(Path(spec.model.path))), opened, machine, lengths)
    changed = [option for option in settled.chosen if value_of(settled, option) != value_of(spec, option)]
    return Settled(settled, tuple(_sentence(settled, option) for option in changed))


def settle_on(base: BaseShape, spec: JobSpec, machine: Machine, lengths: Lengths | None = None) -> JobSpec:
    """The spec with what is "auto" chosen, for a base that was read."""
    spec = with_rate(base, within_context(base, spec))
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
    return final.model_copy(update={"chosen": {**spec.chosen, **{option: reasons[option] for option in given}}})


def within_context(base: BaseShape, spec: JobSpec) -> JobSpec:
    """The spec with training.max_length, unless it was given, at most the positions that the base was made for."""
    longest = base.shape.max_positions
    if _length_given(spec) or longest is None or spec.training.max_length <= longest:
        return spec
    why = f"limited by the base's context of {longest:,}; the default is {spec.training.max_length:,}"
    return with_options(spec, {LENGTH: longest}).model_copy(update={"chosen": {**spec.chosen, LENGTH: why}})


def with_rate(base: BaseShape, spec: JobSpec) -> JobSpec:
    """The spec with training.learning_rate, if that is "auto", as it suits base and adapter."""
    if not is_open(spec, RATE):
        return spec
    rate, why = rate_for(base.model_type, base.shape.hidden, spec.lora)
    return with_options(spec, {RATE: rate}).model_copy(update={"chosen": {**spec.chosen, RATE: why}})


def _length_given(spec: JobSpec) -> bool:
    return "max_length" in spec.training.model_fields_set


def keep_choices(spec: JobSpec, before: JobSpec) -> JobSpec:
    """The spec with what results depend on as it was chosen for the same job before, if that is still "auto", and its length of
    samples, unless that is given.
    """
    if not _length_given(spec):
        spec = with_options(spec, {LENGTH: before.training.max_length})
    kept = {option: before.chosen[option] for option in KEPT if option in before.chosen}
    for option in (FORMAT, RATE):
        if not is_open(spec, option):
            kept.pop(option, None)
        elif option in kept:
            spec = with_options(spec, {option: value_of(before, option)})
    for option in (BATCH, EPOCHS):  # chosen by the samples already, of which there may be as many as then
        if option not in spec.chosen:
            kept.pop(option, None)
        elif option in kept:
            spec = with_options(spec, {option: value_of(before, option)})
    pinned = {name: getattr(before, name) for name in ("date", "windows", "shared_experts")}
    return spec.model_copy(update={"chosen": kept, **pinned})


def sentences(spec: JobSpec) -> dict[str, str]:
    """What was chosen in a spec: option → a sentence."""
    return {option: _sentence(spec, option) for option in spec.chosen}


def _sentence(spec: JobSpec, option: str) -> str:
    value = value_of(spec, option)
    return f"{option}: {str(value).lower() if isinstance(value, bool) else value} ({spec.chosen[option]})."


def _opened(spec: JobSpec, world: int, nodes: int) -> JobSpec:
    """The spec for a number of ranks, with what was chosen, but for what results depend on, open again."""
    again = {option: AUTO for option in spec.chosen if option not in KEPT}
    kept = {option: why for option, why in spec.chosen.items() if option in KEPT}
    ranks = {"distributed.nnodes": nodes, "distributed.nproc_per_node": max(1, world // nodes)}
    return with_options(spec.model_copy(update={"chosen": kept}), again | ranks)


def _refuse_unknown(spec: JobSpec, machine: Machine) -> None:
    if is_open(spec, FORMAT):
        raise SpecError(
            f"precision.default = 'auto': the memory of {machine.name} is not known here, and results depend on the format. "
            "Give bf16, fp8 or nf4.",
            param=FORMAT,
        )


def _reasons(base: BaseShape, setting: Setting, machine: Machine, fits: bool) -> Iterator[tuple[str, str]]:
    """Option → why it is as it is in the setting."""
    rank, usable = setting.rank, usable_bytes(machine, setting.spec)
    assert usable is not None
    room = f"peak {bytes_text(rank.total)} of {bytes_text(usable)} per rank"
    if not fits:
        room = f"needs least memory, {bytes_text(rank.total)}, and may still not fit {bytes_text(usable)} per rank"
    yield FORMAT, _format_reason(base, setting, room)
    yield COPIES, _copies_reason(setting)
    yield CHECKPOINTING, _checkpointing_reason(setting, usable)
    yield BUDGET, f"{room}; {_budget_reason(setting, gpu=not machine.shared_memory)}"


def _format_reason(base: BaseShape, setting: Setting, room: str) -> str:
    held, chosen = base.held(), setting.spec.precision.default
    stay = sorted(set(staying(held).values()))
    if stay:
        return f"the base comes in {' and '.join(stay)}, and stays so"
    if held and chosen == "fp8":
        return "exact, as the base is published, " + room
    return "exact, " + room if chosen == "bf16" else "the most exact format that fits, " + room


def _copies_reason(setting: Setting) -> str:
    layout, weights = setting.layout, bytes_text(sum(setting.rank.base.values()))
    if layout.world == 1:
        return "one rank"
    if layout.shard == 1:
        return f"the base fits whole on every rank, {weights}, so that nothing is gathered"
    return f"{layout.shard} ranks share a copy, {weights} of the base each: the fastest that fits"


def _checkpointing_reason(setting: Setting, usable: int) -> str:
    tokens, rank = setting.batches.tokens, setting.rank
    mode = setting.spec.distributed.activation_checkpointing
    without = rank.in_mode("none").total
    if mode == "none":
        return f"activations of {tokens:,} tokens take {bytes_text(rank.activations)}, and fit"
    compared = "more than the" if without > usable else "of the"
    return f"without it {tokens:,} tokens need {bytes_text(without)}, {compared} {bytes_text(usable)} that there are"


def _budget_reason(setting: Setting, *, gpu: bool) -> str:
    batches = setting.batches
    budget = setting.spec.training.tokens_per_micro_batch
    if batches.step_tokens <= batches.tokens:
        return "one micro-batch holds the whole step"
    if budget == batches.length:
        return "the longest sample"
    return "enough to keep it busy" if batches.tokens >= BUSY[gpu] else "larger ones do not fit, or gain nothing"


def _compile(spec: JobSpec, setting: Setting, machine: Machine, lengths: Lengths | None) -> tuple[bool, str]:
    """Whether to compile, and why."""
    if machine.shared_memory:
        return False, "only GPUs gain from it"
    if isinstance(spec.distributed.wrap, WrapBySize):
        return False, "it works on whole decoder layers, and distributed.wrap groups by size"
    if lengths is None:
        return False, "how long training takes is not known"
    seconds = lengths.of_training(spec) * setting.pace / setting.layout.world
    takes = f"training takes {duration_text(seconds) if seconds < 1 else 'about ' + duration_text(seconds)}"
    if seconds < WORTH_SECONDS:
        return False, f"{takes}, too short to win back the minute that compiling takes"
    return True, f"{takes}, and some {COMPILED_SHARE:.0%} less with layers compiled in about a minute"
