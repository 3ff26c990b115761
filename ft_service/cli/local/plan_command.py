"""`ft plan`: estimate a SPEC's memory and time before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from ft_service.bases.description import Description
from ft_service.cli.local.hub_base import planned_base
from ft_service.cli.local.job_inputs import JobData, describe_job, examine_data
from ft_service.cli.local.plan_ranking import ALL, rank_hardware
from ft_service.cli.local.spec_arguments import (
    Changes,
    ModelName,
    SpecDataOrBase,
    load_spec_arguments,
)
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import (
    Json,
    print_fields,
    print_json,
    print_note,
    print_table,
    print_text,
)
from ft_service.client.responses import shown
from ft_service.control.places.capacity import MOST_NODES, Capacity, refuse_too_many
from ft_service.control.places.price_list import price_list
from ft_service.engines.sharing import share_key
from ft_service.errors import SpecError
from ft_service.host.hardware import default_slots, gpu_count
from ft_service.ids import new_id
from ft_service.launcher.local_launcher import host_id
from ft_service.money import Rate
from ft_service.plan.auto_options import settle_on, within_context
from ft_service.plan.job import MOST_PER_HOST, Plan, plan_job, training_cost, training_time
from ft_service.plan.machines import MACHINES, Machine, find_machine, measured, this_host
from ft_service.plan.plan_text import (
    about,
    advice_lines,
    cost_text,
    memory_table,
    modules_table,
    time_text,
    verdict,
    work_lines,
)
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.seat import engine_seconds, lanes_of, seconds_alone
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.spec_files.spec_file import SpecFile, resolve_spec_file
from ft_service.wording import bytes_text

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MOST_MEMORY = 2**50

HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help=f"{', '.join(MACHINES)} or cpu; all: every GPU, the cheapest or fastest first. "
        "Default: this host.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of one GPU, such as 24GiB, in place of the table's."),
]

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Every module and term of the memory too, and why things were chosen.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    spec: SpecDataOrBase,
    model: ModelName = None,
    changes: Changes = None,
    hardware: HardwareName = None,
    memory: Memory = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Show whether a SPEC fits, what it takes in memory and time, and what would help.

    Of a sweep: all its jobs. Nothing is started. A base that is not here is planned by what the hub
    says of it: all but its weights is fetched, and not kept.
    """
    ranks_all = hardware == ALL
    machine = find_machine(hardware) if hardware and not ranks_all else this_host()
    if memory is not None:
        if ranks_all:
            raise SpecError("--memory: of one GPU. Name it in --hardware.", param="memory")
        machine = replace(machine, memory=parse_size(memory))
    loaded = load_spec_arguments(spec, changes, model, sweep=None, bases=True)
    with planned_base(loaded.request.model, settings_with_models(), print_note) as (settings, told):
        if ranks_all:
            rank_hardware(loaded, settings, as_json=as_json)
            return
        _plan(
            loaded, settings, machine, told, on_host=not hardware, verbose=verbose, as_json=as_json
        )


def _plan(
    loaded: SpecFile,
    settings: Settings,
    machine: Machine,
    not_here: str | None,
    *,
    on_host: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show a plan. `not_here`: a sentence on a base whose weights are not here; `on_host`: whether
    it is for this host.
    """
    found = resolve_spec_file(
        loaded, settings, job_id=new_id("ftjob-"), seed=0, to_train=False, gpus=_gpus(machine)
    )
    if on_host:  # another host than this one may have any number of ranks
        refuse_too_many(found, _nodes_like_this_host(settings))
    prices = price_list(settings)
    rate = prices.rate(host_id()) if on_host else prices.rate_of_hardware(machine.name)
    base = describe_job(found, settings, print_note)
    machine = measured(machine, base.products)
    resolved = within_context(base, found)
    most = settings.slots or default_slots() if on_host else MOST_PER_HOST
    alone = plan_job(base, resolved, machine, None, most)
    if not loaded.has_data:
        _show_alone(alone, found.model.name, not_here, verbose=verbose, as_json=as_json)
        return
    # An unusable base was reported before the data is read.
    data = examine_data(resolved, settings, print_note, base, need_counts=False)
    if loaded.sweep is not None:
        _plan_sweep(loaded, resolved, settings, machine, data, rate, as_json)
        if not_here is not None and not as_json:
            print_text(not_here)
        return
    its_plan = plan_job(base, resolved, machine, data.lengths(resolved), most)
    examples = data.examples
    duration = training_time(its_plan, resolved, examples)
    cost = training_cost(duration, resolved.world_size, rate)
    largest = _largest(base, resolved, machine, data.lengths(resolved), examples)
    if as_json:
        more: dict[str, Any] = {} if not_here is None else {"not_here": not_here}
        if largest is not None:
            more["largest"] = largest[0].as_dict() | {"ranks": largest[1], "time": largest[2]}
        planned = {"time": duration, "cost": cost, "data": _counts(data)}
        print_json(its_plan.as_dict() | planned | more)
        return
    _show(its_plan, duration, cost)
    if largest is not None:
        print_text(
            f"All this is for the fewest ranks, {resolved.world_size}. On the most, {largest[1]}:"
        )
        _show(largest[0], largest[2], training_cost(largest[2], largest[1], rate))
    if not resolved.checkpoint.save_steps:
        print_text(_checkpoints_text(resolved, examples, duration["steps"]))
    _show_data(data, resolved)
    if not_here is not None:
        print_text(not_here)
    _show_choices(its_plan, verbose)


def _show_alone(
    plan: Plan, name: str, not_here: str | None, *, verbose: bool, as_json: bool
) -> None:
    """Show the plan of a job on a base whose data are not known."""
    if as_json:
        more = {} if not_here is None else {"not_here": not_here}
        print_json(plan.as_dict() | {"time": None, "data": None} | more)
        return
    print_text(verdict(plan))
    for line in advice_lines(plan):
        print_text(line)
    print_text(not_here or f"With data it also says how long that takes: ft plan DATA -m {name}")
    _show_choices(plan, verbose)


def _show_choices(plan: Plan, verbose: bool) -> None:
    if verbose:
        _show_details(plan)
    elif plan.chosen:
        print_text(
            f"Chosen: {', '.join(sentence.partition(' (')[0] for sentence in plan.chosen)}. "
            "Why: ft plan --verbose"
        )


def _checkpoints_text(spec: JobSpec, examples: int, steps: int) -> str:
    """Return a sentence on the checkpoints of a job that does not say when they are written."""
    interval = spec.checkpoint.interval(math.ceil(examples / spec.training.batch), steps)
    if interval >= steps:
        return (
            "A checkpoint is written at the last step; checkpoint.save_steps: N writes one "
            "every N steps."
        )
    return f"A checkpoint is written every {interval:,} steps; checkpoint.save_steps changes that."


def _nodes_like_this_host(settings: Settings) -> Capacity:
    """Return the capacity of hosts like this one, of which `ft run` may use several."""
    ranks = settings.slots or default_slots()
    return Capacity(
        "this host",
        ranks * MOST_NODES,
        ranks,
        gpu_count(),
        None,
        several_nodes=True,
        nodes=MOST_NODES,
    )


def _plan_sweep(
    spec: SpecFile,
    first: JobSpec,
    settings: Settings,
    machine: Machine,
    data: JobData,
    rate: Rate | None,
    as_json: bool,
) -> None:
    """Show what all jobs of a sweep take. `first`: the first job; all have the same base."""
    sweep = spec.sweep
    assert sweep is not None
    base = describe_job(first, settings, print_note)
    examples = data.examples
    planned: list[tuple[Plan, dict[str, Any]]] = []
    settled: list[JobSpec] = []
    for job in sweep.jobs:
        its_spec = replace(spec, request=job.request)
        own = resolve_spec_file(
            its_spec,
            settings,
            job_id=first.job_id,
            seed=0,
            to_train=False,
            like=first,
            gpus=_gpus(machine),
        )
        own = within_context(base, own)
        its_plan = plan_job(base, own, machine, data.lengths(own))
        planned.append((its_plan, training_time(its_plan, own, examples)))
        settled.append(settle_on(base, own, machine, data.lengths(own)))
    total = {
        "examples": examples,
        "steps": sum(time["steps"] for _, time in planned),
        **{
            name: _sum(time[name] for _, time in planned)
            for name in ("seconds_at_most", "seconds_likely")
        },
    }
    # All jobs have the same ranks.
    cost = training_cost(total, first.world_size, rate)
    shared = _seconds_in_engine(settled, planned, settings.seats)
    if as_json:
        jobs = [
            {
                "values": job.values,
                "fits": its_plan.fits,
                "bytes_per_rank": its_plan.rank.total,
                "time": time,
            }
            for job, (its_plan, time) in zip(sweep.jobs, planned, strict=True)
        ]
        time = total | {"seconds_in_engine": shared}
        print_json({"jobs": jobs, "time": time, "cost": cost, "data": _counts(data)})
        return
    largest = max(planned, key=lambda one: one[0].rank.total)[0]
    its_verdict = verdict(largest)
    print_text(
        f"{len(planned)} jobs, of which the largest {its_verdict[0].lower()}{its_verdict[1:]}"
    )
    print_text(f"One after the other, their {time_text(total)}")
    if (said := cost_text(cost)) is not None:
        print_text(said)
    if shared is not None:
        alone = about(
            sum(
                seconds_alone(time["seconds_likely"] or time["seconds_at_most"])
                for _, time in planned
            )
        )
        print_text(
            f"With the starts of their ranks {alone}; in one engine, all at once on one base, "
            f"{about(shared)}."
        )
    if sweep.settings["eta"] is not None:
        print_text("Jobs without hope are stopped early, which saves a part of that.")
    for line in advice_lines(largest):
        print_text(line)
    _show_data(data, first)
    print_text()
    rows = [
        [
            *map(shown, job.values.values()),
            f"{time['steps']:,}",
            bytes_text(its_plan.rank.total),
            _fit(its_plan),
        ]
        for job, (its_plan, time) in zip(sweep.jobs, planned, strict=True)
    ]
    print_table((*sweep.settings["options"], "STEPS", "PER RANK", "FITS"), rows)


def _seconds_in_engine(
    specs: Sequence[JobSpec], planned: Sequence[tuple[Plan, dict[str, Any]]], most_jobs: int
) -> float | None:
    """Return the likely seconds of jobs that share one engine; None: they do not all share one, or
    the speed is not known.
    """
    keys = {
        share_key(spec, its_plan.seat) for spec, (its_plan, _) in zip(specs, planned, strict=True)
    }
    usual = [
        (its_plan.likely or its_plan, time["seconds_likely"] or time["seconds_at_most"])
        for its_plan, time in planned
    ]
    if most_jobs == 0 or len(keys) > 1 or None in keys:
        return None
    trainings = [(cost.speed, seconds) for cost, seconds in usual if cost.speed is not None]
    seats = [its_plan.seat for its_plan, _ in planned[:most_jobs]]
    lanes = lanes_of(seats, max(cost.batches.tokens for cost, _ in usual), specs[0])
    return engine_seconds(trainings, lanes) if len(trainings) == len(usual) else None


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return the sum; None: one of them is unknown."""
    known = list(seconds)
    return None if None in known else math.fsum(one for one in known if one is not None)


def _fit(plan: Plan) -> str:
    return "not known" if plan.fits is None else "yes" if plan.fits else "no"


def _gpus(machine: Machine) -> int:
    """Return the number of GPUs of a host of such machines: this host's, or 1 if it has none."""
    return 0 if machine.shared_memory else max(1, gpu_count())


def _counts(data: JobData) -> dict[str, Any]:
    return {
        param: report.counts and asdict(report.counts) for param, report in data.reports.items()
    }


def _largest(
    base: Description, spec: JobSpec, machine: Machine, lengths: SampleLengths | None, examples: int
) -> tuple[Plan, int, dict[str, Any]] | None:
    """Return the plan on the largest number of ranks that the job may have, that number and the
    time; None: the job has a fixed number. Raises SpecError.
    """
    options = spec.distributed
    if options.max_nnodes is None and options.max_nproc_per_node is None:
        return None
    most = spec.shapes(
        options.max_nnodes or options.nnodes, options.max_nproc_per_node or 64, _gpus(machine)
    )[0]
    there = spec.on(*most)
    plan = plan_job(base, there, machine, lengths)
    return plan, there.world_size, training_time(plan, there, examples)


def parse_size(text: str) -> int:
    """Parse `24GiB`, `80GB` or a number of bytes. Raises SpecError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SpecError(
            f"--memory = {text[:80]!r}: expected a size such as 24GiB or 80GB.", param="memory"
        )
    size = float(match[1]) * unit
    if size > _MOST_MEMORY:  # a number of hundreds of digits is infinite
        raise SpecError(f"--memory = {text[:80]!r}: at most 1024TiB.", param="memory")
    return int(size)


def _show(plan: Plan, duration: dict[str, Any], cost: dict[str, Any] | None) -> None:
    print_text(verdict(plan))
    print_text(time_text(duration))
    if (said := cost_text(cost)) is not None:
        print_text(said)
    for line in advice_lines(plan):
        print_text(line)


def _show_details(plan: Plan) -> None:
    print_text()
    for line in (*plan.chosen, *work_lines(plan)):
        print_text(line)
    print_text()
    print_table(
        ("FROZEN MODULE", "COUNT", "SHAPE", "FORMAT", "BYTES", "PER RANK"),
        modules_table(plan.modules),
    )
    print_text()
    print_fields(memory_table(plan))


def _show_data(data: JobData, spec: JobSpec) -> None:
    for level, message in data.messages(spec):
        print_text(message if level == "info" else f"Warning: {message}")
    if data.counts is None:
        print_text(
            "Tokens are not counted here: transformers is not installed, or the base has no "
            "tokenizer."
        )
