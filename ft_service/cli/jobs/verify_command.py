"""`ft verify`: verify an adapter against its manifest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.jobs.adapter_argument import find_adapter
from ft_service.cli.output import Json, print_fields, print_json, print_text
from ft_service.errors import SpecError
from ft_service.rundir.verify import VerifyReport, verify
from ft_service.wording import counted

DIFFERS = 1


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_command)


def verify_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ID|PATH",
            help="A job (ID, suffix, `last`), or an adapter's folder or tar, a run directory, a "
            "merged model.",
        ),
    ],
    as_json: Json = False,
) -> int:
    """Check an adapter's manifest, checksums and shapes. Exit code 1 if anything differs."""
    path = Path(source)
    if path.exists():
        report = verify(path)
    elif os.sep in source:
        raise SpecError(
            f"There is no file or folder {path}. Fetch a job's adapter: ft download ID --out "
            f"{path}",
            param="path",
        )
    else:
        with find_adapter(source) as folder:
            report = verify(folder)
    if as_json:
        manifest = report.manifest.model_dump(mode="json") if report.manifest else None
        print_json(
            {
                "path": report.path,
                "kind": report.kind,
                "ok": not report.faults,
                "checked": report.checked,
                "faults": report.faults,
                "manifest": manifest,
            }
        )
    else:
        _show(report)
    return DIFFERS if report.faults else 0


def _show(report: VerifyReport) -> None:
    manifest = report.manifest
    if manifest is not None:
        losses = manifest.metrics
        print_fields(
            [
                ("job", manifest.job),
                ("tuned model", manifest.tuned_name),
                (
                    "step",
                    f"{manifest.step}"
                    + (f" ({manifest.checkpoint})" if manifest.checkpoint else ""),
                ),
                ("base", f"{manifest.base.name} ({manifest.base.digest[:16]})"),
                (
                    "data",
                    ", ".join(
                        f"{file.name} ({counted(file.samples, 'sample')})" for file in manifest.data
                    ),
                ),
                ("tokens", ", ".join(file.token_digest[:16] for file in manifest.data) or None),
                (
                    "validation loss",
                    f"{losses.valid_loss:.4f}"
                    if losses and losses.valid_loss is not None
                    else None,
                ),
                (
                    "attempts",
                    ", ".join(
                        f"{counted(a.world_size, 'rank')}, {a.ended}" for a in manifest.history
                    ),
                ),
            ]
        )
    for fault in report.faults:
        print_text(f"differs: {fault}")
    if report.kind in ("model", "exported adapter"):
        verdict = "is not complete" if report.faults else "is complete"
    else:
        verdict = "differs from what was written" if report.faults else "is intact"
    print_text(f"{report.path}: {verdict} (checked: {', '.join(report.checked)})")
