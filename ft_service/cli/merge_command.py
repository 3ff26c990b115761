"""`ft merge`: merge a base and an adapter into one model, by a worker process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases.catalogue import Catalogue
from ft_service.cli.jobs.adapter_argument import find_adapter
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, print_fields, print_json, print_note, print_text
from ft_service.errors import FtError, SpecError
from ft_service.rundir.evaluations import BOUND
from ft_service.rundir.manifest import MANIFEST, spec_beside
from ft_service.rundir.verify import CONFIG, read_manifest, verify
from ft_service.serving.worker_tasks import run_worker
from ft_service.spec import SERVED_FORMS


class MergeFormat(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


def register(app: typer.Typer) -> None:
    app.command("merge")(merge)


def merge(
    source: Annotated[
        str,
        typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder."),
    ],
    to: Annotated[MergeFormat, typer.Option(help="Format of the merged weights.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; it must not exist.")],
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the base; default: the one used for training."),
    ] = None,
    max_file_gib: Annotated[
        float, typer.Option(min=0.001, max=10_000, help="Largest safetensors file, in GiB.")
    ] = 5.0,
    samples: Annotated[
        int, typer.Option(min=0, help="Validation samples for a comparison of losses; 0: none.")
    ] = 64,
    as_json: Json = False,
) -> None:
    """Merge an adapter into its base (no GPU needed), and report the change in validation loss."""
    if out.exists():
        raise SpecError(f"{out} exists already. Name another folder with --out.", param="out")
    with find_adapter(source) as folder:
        if faults := verify(folder).faults:
            raise FtError(
                f"{source} has changed since it was written ({faults[0]}). `ft verify` shows all "
                "faults."
            )
        options = ["--to", to.value, "--max-file-gib", str(max_file_gib), "--samples", str(samples)]
        base_folder = base or local_base(folder)
        options += ["--base", str(base_folder.absolute())] if base_folder else []
        then = (
            f", then compare losses over up to {samples} validation samples, if the job had any"
            if samples
            else ""
        )
        print_note(f"Merging file by file{then}. This takes a minute or more.")
        report = run_worker("workers.tasks.merge", [str(folder), str(out.absolute()), *options])
    if as_json:
        print_json({"out": str(out.absolute()), **report})
    else:
        _show(report, out)


def local_base(adapter: Path) -> Path | None:
    """Return this machine's folder of the base of an adapter from elsewhere; None: the adapter is
    in its run directory, which names the base.

    Raises SpecError if there is no base of that name.
    """
    manifest, _ = read_manifest(adapter / MANIFEST)
    if manifest is None or spec_beside(adapter, manifest).model.path:
        return None
    published = json.loads((adapter / CONFIG).read_bytes()).get("base_model_name_or_path")
    bases = Catalogue.from_settings(settings_with_models())
    for name in dict.fromkeys([manifest.base.name, str(published)]):
        with contextlib.suppress(SpecError):
            return bases.find(name).path
    raise SpecError(
        f"The base {manifest.base.name} is not among this machine's models: name its folder with "
        "--base.",
        param="base",
    )


def loss_fields(report: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return the fidelity report as fields: the three losses, or the reason for their absence, and
    the rounding error.
    """
    losses = report["validation_loss"] or {}
    names = {
        "adapter_on_base_as_trained": "loss, base as trained",
        "adapter_on_bf16_base": "loss, bf16 base",
        "merged": "loss, merged" if report["to"] == "merged" else f"loss, merged to {report['to']}",
    }
    rounding = report["rounding"]
    return [
        *(
            (title, f"{losses[name]:.4f}" if name in losses else None)
            for name, title in names.items()
        ),
        ("advice", _advice(report["to"], losses)),
        ("losses", f"not measured: {report['reason']}" if report.get("reason") else None),
        (
            "rounding",
            f"{rounding['relative_to_weights']:.2%} of the weights, "
            f"{rounding['relative_to_update']:.1%} of the update",
        ),
    ]


def _advice(to: str, losses: Mapping[str, float]) -> str | None:
    """What to do about a loss that rounding has raised by more than the bound; None: nothing."""
    forms = [
        name for name, form in SERVED_FORMS.items() if to in (form.merged_to, form.exported_as)
    ]
    if not forms or "merged" not in losses:
        return None
    lost = losses["merged"] - losses["adapter_on_base_as_trained"]
    if lost <= BOUND:
        return None
    return (
        f"rounding costs {lost:.4f} nats, more than {BOUND}: train with precision.served_as: "
        f"{' or '.join(forms)}, which learns with the rounded weights"
    )


def _show(report: dict[str, Any], out: Path) -> None:
    print_fields(loss_fields(report))
    print_text(f"The merged model is in {out}")
