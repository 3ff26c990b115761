"""`ft export`: write a tuned model in the format of another program."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.display import download_progress
from ft_service.cli.jobs.adapter_argument import adapter_of_job, find_adapter
from ft_service.cli.jobs.job_argument import find_job
from ft_service.cli.merge_command import local_base, loss_fields
from ft_service.cli.output import Json, connect, print_fields, print_json, print_note, print_text
from ft_service.client.client import Client
from ft_service.errors import FtError, SpecError
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.verify import verify
from ft_service.serving.pushing import check_address
from ft_service.serving.pushing import push as push_folder
from ft_service.serving.worker_tasks import run_worker

WORKER = "workers.tasks.export"
POLL_SECONDS = 1.0
"""Pause between polls of an export."""


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder."),
    ],
    to: Annotated[ExportFormat, typer.Option("--format", help="Output format (docs/serving.md).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; it must not exist.")],
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the base; default: the one used for training."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Validation samples for a comparison of losses; 0: none.")
    ] = 64,
    push: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Upload it to hf://ORG/NAME, or oci://HOST/NAME:TAG."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a tuned model for vLLM, Ollama, llama.cpp or Transformers.

    The result is read again and compared before it is there, and says what the form costs.
    """
    if out.exists():
        raise SpecError(f"--out = {out}: exists already. Name another folder.", param="out")
    if push is not None:
        check_address(push)
    with _where(source, to, remote=base is None) as place:
        if isinstance(place, Path):
            if faults := verify(place).faults:
                raise FtError(
                    f"{source} has changed since it was written ({faults[0]}). `ft verify` shows "
                    "all faults."
                )
            if to is not ExportFormat.PEFT:
                print_note("Writing it, and reading it again to compare.")
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
            print_text(f"Pushed: {pushed}")


@contextlib.contextmanager
def _where(source: str, to: ExportFormat, *, remote: bool) -> Iterator[Path | tuple[Client, str]]:
    """Yield the folder of the adapter if this host has it; else the server and the job, so that the
    server makes the export where the base is. If `remote` is False, and for the plain adapter, the
    adapter is downloaded instead.
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
    """Let the server make the export, download it to `out`, and return the report."""
    with download_progress() as note:
        export = client.start_export(job_id, to.value)
        while export.status in ("queued", "running"):
            time.sleep(POLL_SECONDS)
            export = client.export(job_id, to.value)
        if export.status == "failed":
            raise SpecError(f"The server could not make it: {export.error}", param="format")
        client.download_export(job_id, to.value, out, note)
        return export.report


def write_export(
    adapter: Path, out: Path, to: ExportFormat, base: Path | None, samples: int
) -> dict[str, Any]:
    """Write the new folder `out`, which appears complete or not at all, and return the report."""
    if to is ExportFormat.PEFT:
        temporary = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(adapter, temporary)
            temporary.rename(out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return {}
    # vLLM's format needs no base.
    base_folder = base or (None if to is ExportFormat.VLLM else local_base(adapter))
    options = ["--base", str(base_folder.absolute())] if base_folder else []
    return run_worker(
        WORKER, [str(adapter), str(out), "--format", to.value, "--samples", str(samples), *options]
    )


def _show(report: dict[str, Any], to: ExportFormat, out: Path) -> None:
    tensors = (
        f"verified: {report['exact']} of {report['tensors']} tensors identical"
        if "tensors" in report
        else None
    )
    error = report.get("relative_error")
    print_fields(
        [
            ("rank", f"{report['r']}" if "r" in report else None),
            *(loss_fields(report) if "validation_loss" in report else []),
            ("read again", f"{tensors}; {error:.2%} off in all" if tensors and error else tensors),
            *(("note", note) for note in report.get("notes", [])),
        ]
    )
    print_text(f"{to.value} is in {out}")
