"""A plan as text: tables for people, one sentence for a job's events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ft_service.money import micros, money_text
from ft_service.plan.job import Module, OptionChange, Plan
from ft_service.plan.machines import CPU
from ft_service.rundir.engine import SeatSize
from ft_service.wording import bytes_text, counted, duration_text

_NUMBER = re.compile(r"\.\d+\.")


def summary(plan: Plan) -> str:
    """One sentence: `Plan: 8.21 GiB per rank on 2 ranks (base 3.10 GiB), fits H200.`"""
    ranks = counted(plan.layout.world, "rank")
    base = bytes_text(sum(plan.rank.base.values()))
    text = f"Plan: at most {bytes_text(plan.rank.total)} per rank on {ranks} (base {base})"
    return f"{text}, {_verdict(plan)}."


def modules_table(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    """Rows: name, count, shape, format, bytes, bytes per rank.

    Modules that differ only in the layer's number share a row.
    """
    alike: dict[tuple[Any, ...], list[Module]] = {}
    for module in modules:
        alike.setdefault((_NUMBER.sub(".*.", module.name), module.shape, module.format), []).append(
            module
        )
    rows = []
    for (name, shape, weight_format), same in alike.items():
        shown = name if len(same) > 1 else same[0].name
        whole = sum(m.bytes for m in same)
        own = sum(m.bytes_per_rank for m in same)
        size = " x ".join(map(str, shape))
        rows.append(
            (shown, str(len(same)), size, weight_format, bytes_text(whole), bytes_text(own))
        )
    return rows


def memory_table(plan: Plan) -> list[tuple[str, str]]:
    rank = plan.rank
    where = " (host memory)" if rank.offloaded else ""
    rows = [(f"base in {name}{where}", count) for name, count in rank.base.items()]
    rows += [
        (f"teacher{where}", rank.teacher),
        ("image tower (fp32)", rank.tower),
        (f"adapters (fp32){where}", rank.adapters),
        (f"gradients{where}", rank.gradients),
        (f"optimizer (AdamW){where}", rank.optimizer),
        ("gathered weights", rank.gather),
        ("gradients between micro-batches", rank.accumulation),
        ("micro-batches", rank.rows),
        ("activations", rank.activations),
        *(
            (f"  with activation_checkpointing: {mode}", count)
            for mode, count in rank.activations_by_mode.items()
            if count != rank.activations and mode != "tiled"  # which keeps what "full" keeps
        ),
        ("logits", rank.logits)
        if rank.logits >= rank.workspace
        else ("backward's workspace", rank.workspace),
        ("the allocator's gaps", rank.gaps),
        ("total", rank.total),
        ("layers' inputs, beside it in pinned host memory", rank.host),
    ]
    return [(name, bytes_text(count)) for name, count in rows if count]


def verdict(plan: Plan) -> str:
    """A sentence that says whether the job fits."""
    usable = "" if plan.memory is None else f" of {bytes_text(plan.memory)} usable"
    likely = f", likely {bytes_text(plan.likely.rank.total)}" if plan.likely else ""
    what = _verdict(plan)
    return (
        f"{what[0].upper()}{what[1:]}: at most {bytes_text(plan.rank.total)}{usable} per "
        f"rank{likely}."
    )


def advice_lines(plan: Plan) -> Iterator[str]:
    """Changes if it does not fit, hints, and warnings."""
    for change in plan.changes:
        yield f"  {change_text(change)}"
    yield from plan.hints
    yield from (f"Warning: {warning}" for warning in plan.warnings)


def time_text(time: Mapping[str, Any]) -> str:
    """A sentence that says how long training takes. `time`: from `training_time`."""
    text = f"{counted(time['steps'], 'step')} over {counted(time['examples'], 'sample')}"
    verb = "takes" if time["steps"] == 1 else "take"
    most = time["seconds_at_most"]
    likely = time["seconds_likely"]
    if most is None:
        return f"{text}."
    if likely is None:
        return f"{text} {verb} at most {about(most)}, if all were training.max_length tokens long."
    worst = duration_text(most)
    end = (
        ""
        if worst == duration_text(likely)
        else f" (at worst {worst}, if all were as long as the longest)"
    )
    return f"{text} {verb} {about(likely)}{end}."


def cost_text(cost: Mapping[str, Any] | None) -> str | None:
    """A sentence that says what training costs. `cost`: from `training_cost`.

    None: its time or its price is not known.
    """
    if cost is None or cost["at_most"] is None:
        return None
    most = money_text(micros(cost["at_most"]), cost["currency"])
    if cost["likely"] is None:
        return f"That costs at most {most}."
    likely = money_text(micros(cost["likely"]), cost["currency"])
    return f"That costs about {likely}{'' if likely == most else f' (at worst {most})'}."


def about(seconds: float) -> str:
    """A duration as text, with "about" before it unless it is less than a second."""
    text = duration_text(seconds)
    return text if seconds < 1 else f"about {text}"


def change_text(change: OptionChange) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in change.options.items())
    return (
        f"with {options}: {bytes_text(change.total)} per rank, "
        f"{'fits' if change.fits else 'does not fit'}"
    )


def _host_text(plan: Plan) -> str:
    """A sentence about the host's memory that layers' inputs need."""
    ranks = plan.ranks_per_host
    text = f"Layers' inputs: {bytes_text(plan.rank.host)} of pinned host memory per rank"
    if ranks > 1:
        text += f", {bytes_text(ranks * plan.rank.host)} on a host of {ranks} ranks"
    if plan.host_memory is None:
        text += "; whether its host has it is not known here"
    elif plan.rank.host > plan.host_memory:
        text += f", more than the {bytes_text(plan.host_memory)} that one can pin"
    else:
        text += f" of {bytes_text(plan.host_memory)} that one can pin"
    if plan.speed is not None:
        copies = duration_text(plan.speed.copy_seconds)
        computed = duration_text(plan.speed.compute_seconds)
        text += f". A step copies them for {copies} out and as long back, beside {computed} of arithmetic"
    return f"{text}."


def work_lines(plan: Plan) -> Iterator[str]:
    """Micro-batches, wire, arithmetic, copies, and the speed that follows."""
    batches = plan.batches
    wire = plan.wire
    times = "1 micro-batch" if batches.rounds == 1 else f"{batches.rounds} micro-batches"
    yield f"A step of a rank: {times} of {batches.tokens:,} tokens at most, samples of up to {batches.length:,}."
    if batches.ranks > 1:
        yield (
            f"{batches.ranks} ranks share each sample (distributed.context_parallel), and exchange "
            f"{bytes_text(wire.exchange)} per rank and step."
        )
    if plan.likely is not None:
        usual = plan.likely.batches
        tokens = min(usual.tokens, usual.step_tokens)
        yield f"With samples of mean length, {usual.length:,} tokens: {usual.rounds} of {tokens:,} tokens."
    if wire.total:
        yield (
            f"On the wire: {bytes_text(wire.total)} received per rank and step "
            f"({wire.gathers} gathers {bytes_text(wire.gather)}, reductions "
            f"{bytes_text(wire.reduce + wire.all_reduce)})."
        )
    yield f"Arithmetic: {plan.flops_per_token / 1e9:.3g} GFLOP a token."
    if plan.rank.host:
        yield _host_text(plan)
    if plan.speed is not None:
        speed = plan.likely.speed if plan.likely and plan.likely.speed else plan.speed
        yield f"Estimate on {plan.machine}: {speed.tokens_per_second:,.0f} tokens/s over all ranks."
    if batches.ranks == 1:
        yield f"{_seat_text(plan.seat)}."


def _seat_text(seat: SeatSize) -> str:
    """A sentence about the job in an engine."""
    room = "" if seat.room is None else f" of {bytes_text(max(0, seat.room))} beside the base"
    text = (
        f"In an engine: {bytes_text(seat.held)} per rank, and {bytes_text(seat.batch)} for its "
        f"micro-batch{room}"
    )
    return (
        text
        if seat.gain is None
        else f"{text}; two such jobs at once are {seat.gain:.2g} times as fast as one by one"
    )


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return f"memory of {plan.machine} not known"
    where = "this host" if plan.machine == CPU else plan.machine
    return f"fits {where}" if plan.fits else f"may not fit {where}"
