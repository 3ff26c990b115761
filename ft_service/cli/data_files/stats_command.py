"""`ft data stats`: statistics of a data file, and advice on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.data_files.data_arguments import (
    Column,
    DataFile,
    Learn,
    Model,
    Split,
    Template,
    base_folder,
    data_options,
    local_data,
    template_text,
)
from ft_service.cli.local.job_inputs import describe_base, examine_data
from ft_service.cli.local.plan_command import HardwareName
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import (
    Json,
    print_fields,
    print_json,
    print_note,
    print_table,
    print_text,
)
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.statistics import DataStatistics, FileStatistics, Measure, advice, bars, share
from ft_service.ids import new_id
from ft_service.plan.auto_options import within_context
from ft_service.plan.job import plan_job
from ft_service.plan.machines import CPU, Machine, find_machine, measured, this_host
from ft_service.plan.one_rank import one_rank_tokens, ranks_for
from ft_service.plan.plan_text import about
from ft_service.plan.speed import whole_training
from ft_service.spec import BaseModelRef, JobContext, JobSpec, parse_request, resolve
from ft_service.wording import counted

Given = int | None


def stats(
    file: DataFile,
    model: Model,
    validation: Annotated[
        Path | None, typer.Option("--validation", metavar="FILE", help="The validation file.")
    ] = None,
    validation_split: Annotated[
        float | None,
        typer.Option(
            "--validation-split", metavar="SHARE", help="Or a share of FILE, such as 0.1."
        ),
    ] = None,
    chat_template: Template = "",
    train_on: Learn = "all_assistant",
    max_length: Annotated[
        Given,
        typer.Option("--max-length", min=8, help="training.max_length: tokens kept of a sample."),
    ] = None,
    batch_size: Annotated[
        Given, typer.Option("--batch-size", min=1, help="training.batch_size: samples a step.")
    ] = None,
    epochs: Annotated[Given, typer.Option("--epochs", min=1, help="training.n_epochs.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the job, which decides what is set aside.")
    ] = 0,
    hardware: HardwareName = None,
    split: Split = "train",
    column: Column = [],  # noqa: B006 - typer makes a list of its own for each call
    as_json: Json = False,
) -> None:
    """Show what a file holds for a base: lengths, what is learned, doubles, overlap with a
    validation file, steps, time, and what to change.
    """
    machine = find_machine(hardware) if hardware else this_host()
    training = {
        "max_length": max_length,
        "batch_size": batch_size,
        "n_epochs": epochs,
        "train_on": train_on,
    }
    body: dict[str, Any] = {
        "model": model,
        "training_file": str(file),
        "training": {name: value for name, value in training.items() if value is not None},
        "seed": seed,
        "data": data_options(column).model_dump(exclude_none=True),
        **({"validation_file": str(validation)} if validation is not None else {}),
        **({"validation_split": validation_split} if validation_split is not None else {}),
        **({"chat_template": template_text(chat_template)} if chat_template else {}),
    }
    spec = _resolved(body, file, validation, split)
    statistics, shared = _with_plan(spec, machine)
    measure = Measure.of(spec)
    if as_json:
        several = {"one_rank": shared and asdict(shared)}
        warned = {"warnings": list(advice(statistics, measure))}
        print_json({**asdict(statistics), **several, **warned})
    else:
        _show(statistics, measure, machine, shared)


def _resolved(body: dict[str, Any], file: Path, validation: Path | None, split: str) -> JobSpec:
    """Return the spec of a job that trains on the file. Raises SpecError, DataError."""
    data = local_data(file, split)
    held_out = (
        local_data(validation, "validation", "validation") if validation is not None else None
    )
    reader = open_data(data.path, data.files, Columns.of(parse_request(body).data, None))
    reader.look()
    if reader.shape.format is not None and reader.shape.format.is_pairs:
        body = body | {"method": {"type": "dpo"}}
    elif reader.shape.labelled:
        body = body | {"method": {"type": "kto"}}
    request = parse_request(body)
    folder = base_folder(request.model)
    spec = resolve(
        request,
        JobContext(
            job_id=new_id("ftjob-"),
            organization="local",
            model=BaseModelRef(name=Path(folder).name, path=folder),
            training_data=data.ref(),
            validation_data=held_out.ref() if held_out is not None else None,
            seed=0,
            gpus=0,
            date=datetime.now(UTC).date().isoformat(),
        ),
    )
    base = describe_base(Path(folder), spec.model.name, settings_with_models(), print_note)
    return within_context(base, spec)


@dataclass(frozen=True)
class _OneRank:
    """What has no room on one rank."""

    tokens: int
    """Tokens of the longest sample that it has room for."""
    ranks: int | None
    """Ranks of a host that the longest sample of the data takes; None: no number has room, or they
    cannot share it.
    """


def _with_plan(spec: JobSpec, machine: Machine) -> tuple[DataStatistics, _OneRank | None]:
    """The statistics, and what one rank has room for; None: it has for every sample, or the
    machine's memory is not known.
    """
    settings = settings_with_models()
    base = describe_base(Path(spec.model.path), spec.model.name, settings, print_note)
    machine = measured(machine, base.products)
    room = one_rank_tokens(base, spec, machine)
    data = examine_data(spec, settings, print_note, base, one_rank=room)
    statistics = data.statistics
    lengths = data.lengths(spec)
    assert statistics is not None, "tokens are counted"
    assert lengths is not None
    plan = plan_job(base, spec, machine, lengths)
    likely = plan.likely or plan
    work = whole_training(lengths.of_training(spec), likely.flops_per_token, likely.speed)
    files = (statistics.training, statistics.validation)
    longest = max(
        (file.lengths.most for file in files if file and file.beyond_one_rank.count), default=0
    )
    shared = None
    if room is not None and longest:
        shared = _OneRank(room, ranks_for(base, spec, machine, longest))
    return replace(statistics, seconds=work.seconds, flops=work.flops), shared


def _show(
    statistics: DataStatistics, measure: Measure, machine: Machine, shared: _OneRank | None
) -> None:
    files = [
        ("training", statistics.training),
        *([("validation", statistics.validation)] if statistics.validation else []),
    ]
    for what, file in files:
        print_fields([(what, file.name), *_fields(file)])
        print_text()
    print_table(("TOKENS", "SAMPLES", ""), bars(statistics.training.histogram))
    print_text()
    takes = (
        f"{about(statistics.seconds)} on {machine.name}" if statistics.seconds is not None else None
    )
    print_fields(
        [
            ("steps", f"{statistics.steps:,} of {counted(measure.training.batch, 'sample')}"),
            ("trained tokens", f"{statistics.trained_tokens:,}"),
            ("work", f"{statistics.flops:.2g} FLOP" if statistics.flops is not None else None),
            ("takes", takes),
            (
                "packing saves",
                f"{statistics.padding_saved:.0%} of padding" if measure.training.packing else None,
            ),
        ]
    )
    if shared is not None:
        print_text(_shared_text(shared, machine))
    for sentence in advice(statistics, measure):
        print_text(f"Warning: {sentence}")


def _shared_text(shared: _OneRank, machine: Machine) -> str:
    where = "this host" if machine.name == CPU else machine.name
    text = f"One rank of {where} has room for samples of up to {shared.tokens:,} tokens. "
    if shared.ranks is None:
        return (
            f"{text}No number of ranks that is planned has for the longest: lower "
            "training.max_length, or see `ft plan`."
        )
    return (
        f"{text}The longest takes {shared.ranks} that share it: distributed.nproc_per_node: "
        f"{shared.ranks}, or a multiple."
    )


def _fields(file: FileStatistics) -> list[tuple[str, str | None]]:
    lengths = file.lengths
    learned = file.learned
    return [
        ("samples", f"{file.samples:,}"),
        (
            "tokens",
            f"{file.tokens:,}, {file.targets:,} learned ({share(file.targets, file.tokens)})",
        ),
        (
            "lengths",
            f"{lengths.least:,} to {lengths.most:,} tokens, mean {lengths.mean:,.0f}, half up to "
            f"{lengths.median:,}, 99 % "
            f"up to {lengths.p99:,}",
        ),
        (
            "learned",
            f"{learned.least:,} to {learned.most:,} tokens a sample, mean {learned.mean:,.0f}",
        ),
        *((name, lines.text(file.word) if lines.count else None) for name, lines in _traits(file)),
    ]


def _traits(file: FileStatistics) -> list[tuple[str, Any]]:
    named = {
        "cut": file.cut,
        "left out": file.dropped,
        "need several ranks": file.beyond_one_rank,
        "answers alike": file.alike,
        "the same as others": file.duplicates,
    }
    last = {"nearly empty": file.near_empty, "skipped for an image": file.skipped}
    return [*named.items(), *last.items()]
