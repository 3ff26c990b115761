"""`ft export`: a tuned model in the form that another program reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.merge_command import find_adapter, shown_losses
from ft_service.cli.output import Json, print_fields, print_json
from ft_service.errors import FtError, SpecError
from ft_service.rundir.exports import ExportFormat
from ft_service.rundir.verify import verify
from ft_service.supervisor.worker_tasks import run_worker

WORKER = "workers.tasks.export"


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    source: Annotated[str, typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder.")],
    to: Annotated[ExportFormat, typer.Option("--format", help="For whom: see docs/serving.md.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new folder.")],
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="The base; default: where it was trained from.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Of the validation file, to compare losses on; 0: none.")] = 64,
    as_json: Json = False,
) -> None:
    """Write a tuned model as another program reads it. The result is read again and compared before it is there, and says what
    the form costs."""
    if out.exists():
        raise SpecError(f"--out = {out}: exists already. Name another folder.", param="out")
    with find_adapter(source) as folder:
        if faults := verify(folder).faults:
            raise FtError(f"{source} is not what was written ({faults[0]}): see ft verify.")
        report = write_export(folder, out.absolute(), to, base, samples)
    if as_json:
        print_json({"out": str(out.absolute()), "format": to.value, **report})
    else:
        _show(report, to, out)


def write_export(adapter: Path, out: Path, to: ExportFormat, base: Path | None, samples: int) -> dict[str, Any]:
    """Write the new folder `out`, which appears whole or not at all; the report."""
    if to is ExportFormat.PEFT:
        beside = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            shutil.copytree(adapter, beside)
            beside.rename(out)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return {}
    options = ["--base", str(base.absolute())] if base else []
    return run_worker(WORKER, [str(adapter), str(out), "--format", to.value, "--samples", str(samples), *options])


def _show(report: dict[str, Any], to: ExportFormat, out: Path) -> None:
    tensors = f"{report['exact']} of {report['tensors']} tensors hold the very values" if "tensors" in report else None
    error = report.get("relative_error")
    print_fields(
        [
            ("rank", f"{report['r']}" if "r" in report else None),
            *(shown_losses(report) if "validation_loss" in report else []),
            ("read again", f"{tensors}; {error:.2%} off in all" if tensors and error else tensors),
            *(("note", note) for note in report.get("notes", [])),
        ]
    )
    print(f"{to.value} is in {out}")
