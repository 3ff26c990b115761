"""`ft export`: a tuned model in the form that another program reads."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.display import arriving
from ft_service.cli.jobs.adapters import adapter_of_job, find_adapter
from ft_service.cli.jobs.naming import find_job
from ft_service.cli.merge_command import base_here, shown_losses
from ft_service.cli.output import Json, connect, print_fields, print_json, say, tell
from ft_service.client.client import Client
from ft_service.errors import FtError, SpecError
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.verify import verify
from ft_service.serving.pushing import check_address
from ft_service.serving.pushing import push as push_folder
from ft_service.supervisor.worker_tasks import run_worker

WORKER = "workers.tasks.export"
POLL_SECONDS = 1.0
"""Between asking a server whether an export is made."""


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    source: Annotated[str, typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder.")],
    to: Annotated[ExportFormat, typer.Option("--format", help="Output format (docs/serving.md).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new folder.")],
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="The base; default: where it was trained from.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Of the validation file, to compare losses on; 0: none.")] = 64,
    push: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Upload it too: hf://ORG/NAME, or oci://HOST/NAME:TAG.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a tuned model as another program reads it. The result is read again and compared before it is there, and says what
    the form costs."""
    if out.exists():
        raise SpecError(f"--out = {out}: exists already. Name another folder.", param="out")
    if push is not None:
        check_address(push)
    with _where(source, to, remote=base is None) as place:
        if isinstance(place, Path):
            if faults := verify(place).faults:
                raise FtError(f"{source} is not what was written ({faults[0]}): see ft verify.")
            if to is not ExportFormat.PEFT:
                say("Writing it, and reading it again to compare.")
            report = write_export(place, out.absolute(), to, base, samples)
        else:
            report = _fetch(*place, to, out)
    pushed = None if push is None else push_folder(out.absolute(), push, f"{source} as {to.value}")
    if as_json:
        more = {} if pushed is None else {"pushed": pushed}
        print_json({"out": str(out.absolute()), "format": to.value, **report, **more})
    else:
        _show(report, to, out)
        if pushed is not None:
            tell(f"Pushed: {pushed}")


@contextlib.contextmanager
def _where(source: str, to: ExportFormat, *, remote: bool) -> Iterator[Path | tuple[Client, str]]:
    """The folder of the adapter, if it is on this host; else the server that has it, and the job, which makes the export where
    the base is. With `remote` False, and for the adapter as it is, that is fetched instead.
    """
    if not remote or to is ExportFormat.PEFT or Path(source).exists():
        with find_adapter(source) as folder:
            yield folder
        return
    with connect() as client:
        job_id = find_job(client, source)
        here = adapter_of_job(job_id)
        yield here if here is not None else (client, job_id)


def _fetch(client: Client, job_id: str, to: ExportFormat, out: Path) -> dict[str, Any]:
    """Have the server make the export, wait for it, and fetch it into `out`; the report."""
    with arriving() as note:
        found = client.start_export(job_id, to.value)
        while found.status in ("queued", "running"):
            time.sleep(POLL_SECONDS)
            found = client.export(job_id, to.value)
        if found.status == "failed":
            raise SpecError(f"The server could not make it: {found.error}", param="format")
        client.download_export(job_id, to.value, out, note)
        return found.report


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
    found = base or (None if to is ExportFormat.VLLM else base_here(adapter))  # vLLM's form needs no base
    options = ["--base", str(found.absolute())] if found else []
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
    tell(f"{to.value} is in {out}")
