"""`ft plan`: what a SPEC will take, before anything runs."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from ft_service.cli.local.data import DataFound, examine_data
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, print_fields, print_json, print_table
from ft_service.cli.spec_arguments import Changes, ModelName, SpecOrData, load_given
from ft_service.errors import SpecError
from ft_service.host.hardware import gpu_count
from ft_service.ids import new_id
from ft_service.local.spec_file import resolve_spec_file
from ft_service.plan.job import Plan, bounded, plan_job, training_time
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import MACHINES, Machine, find_machine, this_host
from ft_service.plan.quantities import duration_text
from ft_service.plan.text import memory_table, modules_table, verdict_lines, work_lines
from ft_service.spec import JobSpec

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

HardwareName = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME", help=f"{', '.join(MACHINES)} or cpu. Default: this host."),
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, such as 24GiB, in place of the table's.")]


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    spec: SpecOrData,
    model: ModelName = None,
    changes: Changes = None,
    hardware: HardwareName = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Show what a SPEC will take on every rank, on the wire and in time, and whether it fits. Nothing is started."""
    machine = find_machine(hardware) if hardware else this_host()
    if memory is not None:
        machine = replace(machine, memory=parse_size(memory))
    settings = settings_with_models()
    resolved = resolve_spec_file(load_given(spec, changes, model), settings, job_id=new_id("ftjob-"), seed=0, to_train=False)
    resolved = bounded(resolved)
    plan_job(resolved, machine, to_train=False)  # a base that cannot be used is told of before the data is read
    data = examine_data(resolved, settings, lambda sentence: print(sentence, file=sys.stderr), need_counts=False)
    its_plan = plan_job(resolved, machine, data.lengths, to_train=False)
    examples = data.statistics.items if data.statistics else data.reports["training_file"].examples
    duration = training_time(its_plan, resolved, examples)
    largest = _largest(resolved, machine, data.lengths, examples)
    if as_json:
        counts = {param: report.counts and asdict(report.counts) for param, report in data.reports.items()}
        more = {} if largest is None else {"largest": largest[0].as_dict() | {"ranks": largest[1], "time": largest[2]}}
        print_json(its_plan.as_dict() | {"time": duration, "data": counts} | more)
    else:
        _show(its_plan, machine, duration)
        _show_data(data, resolved)
        if largest is not None:
            _show_largest(*largest, resolved.world_size)


def _largest(
    spec: JobSpec, machine: Machine, lengths: Lengths | None, examples: int
) -> tuple[Plan, int, dict[str, Any]] | None:
    """The plan on the most ranks that the job may have, their number and the time; None: it has one number of ranks. Raises
    SpecError."""
    options = spec.distributed
    if options.max_nnodes is None and options.max_nproc_per_node is None:
        return None
    most = spec.shapes(options.max_nnodes or options.nnodes, options.max_nproc_per_node or 64, gpu_count())[0]
    there = spec.on(*most)
    plan = plan_job(there, machine, lengths, to_train=False)
    return plan, there.world_size, training_time(plan, there, examples)


def _show_largest(plan: Plan, ranks: int, duration: dict[str, Any], fewest: int) -> None:
    print(f"\nAll this is for the fewest ranks, {fewest}. On the most, {ranks}:")
    for line in verdict_lines(plan):
        print(line)
    _show_time(duration)


def parse_size(text: str) -> int:
    """`24GiB`, `80GB` or a number of bytes. Raises SpecError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SpecError(f"--memory = {text!r}: expected a size such as 24GiB or 80GB.", param="memory")
    return int(float(match[1]) * unit)


def _show(plan: Plan, machine: Machine, duration: dict[str, Any]) -> None:
    print_table(("FROZEN MODULE", "COUNT", "SHAPE", "FORMAT", "BYTES", "PER RANK"), modules_table(plan.modules))
    print()
    print_fields(memory_table(plan))
    print()
    for line in verdict_lines(plan):
        print(line)
    for line in work_lines(plan):
        print(line)
    _show_time(duration)


def _show_data(data: DataFound, spec: JobSpec) -> None:
    for level, message in data.messages(spec):
        print(message if level == "info" else f"Warning: {message}")
    if data.counts is None:
        print("Tokens are not counted here: transformers is not installed, or the base has no tokenizer.")


def _show_time(duration: dict[str, Any]) -> None:
    text = f"{duration['steps']} steps over {duration['examples']} examples"
    most, likely = duration["seconds_at_most"], duration["seconds_likely"]
    if most is None:
        print(f"{text}.")
    elif likely is None:
        print(f"{text}: at most about {duration_text(most)}, were every sample training.max_length tokens long.")
    else:
        print(f"{text}: likely about {duration_text(likely)}; {duration_text(most)}, were every sample as long as the longest.")
