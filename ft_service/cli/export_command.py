"""`ft export`: an adapter in the form that another program reads."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.merge_command import find_adapter
from ft_service.cli.output import Json, print_json, say
from ft_service.errors import FtError, SpecError
from ft_service.rundir.manifest import MANIFEST
from ft_service.rundir.verify import verify
from ft_service.supervisor.worker_tasks import run_worker


class ExportFormat(StrEnum):
    PEFT = "peft"
    VLLM = "vllm"


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    source: Annotated[str, typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder.")],
    to: Annotated[ExportFormat, typer.Option("--format", help="vllm: one rank and one scale, which it reads.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new folder.")],
    as_json: Json = False,
) -> None:
    """Write an adapter as another program reads it. The result is read again and compared before it is there. Merged models: ft
    merge."""
    if out.exists():
        raise SpecError(f"--out = {out}: exists already. Name another folder.", param="out")
    beside = out.absolute().with_name(f".{out.name}.tmp")
    with find_adapter(source) as folder:
        if faults := verify(folder).faults:
            raise FtError(f"{source} is not what was written ({faults[0]}): see ft verify.")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            shutil.copytree(folder, beside)
            if to is not ExportFormat.PEFT:
                say("Writing it, and reading it again to compare.")
            report = {} if to is ExportFormat.PEFT else _one_rank(folder, beside)
            beside.rename(out.absolute())
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    if as_json:
        print_json({"out": str(out.absolute()), "format": to.value, **report})
    else:
        rank = f", of rank {report['r']}," if "r" in report else ""
        print(f"The adapter{rank} is in {out}")


def _one_rank(folder: Path, beside: Path) -> dict[str, object]:
    (beside / MANIFEST).unlink(missing_ok=True)  # it describes the adapter as it was
    return run_worker("workers.tasks.pad_ranks", [str(folder), str(beside)])
