"""`ft merge`: a base and an adapter as one model, made by a worker process."""

from __future__ import annotations

import contextlib
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases.catalogue import Catalogue
from ft_service.cli.jobs.adapters import find_adapter
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, print_fields, print_json, say, tell
from ft_service.errors import FtError, SpecError
from ft_service.rundir.manifest import MANIFEST, spec_beside
from ft_service.rundir.verify import CONFIG, read_manifest, verify
from ft_service.supervisor.worker_tasks import run_worker


class MergeFormat(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"


def register(app: typer.Typer) -> None:
    app.command("merge")(merge)


def merge(
    source: Annotated[str, typer.Argument(metavar="ID|PATH", help="A job, a run directory, or an adapter's folder.")],
    to: Annotated[MergeFormat, typer.Option(help="How the merged weights are stored.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new folder.")],
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="The base; default: where it was trained from.")] = None,
    max_file_gib: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file, in GiB.")] = 5.0,
    samples: Annotated[int, typer.Option(min=0, help="Of the validation file, to compare losses on; 0: none.")] = 64,
    as_json: Json = False,
) -> None:
    """Write base + adapter as one model, without a GPU, and what that changes in validation loss."""
    if out.exists():
        raise SpecError(f"{out} exists already. Name another folder with --out.", param="out")
    with find_adapter(source) as folder:
        if faults := verify(folder).faults:
            raise FtError(f"{source} has changed since it was written ({faults[0]}). `ft verify` tells all of it.")
        options = ["--to", to.value, "--max-file-gib", str(max_file_gib), "--samples", str(samples)]
        found = base or base_here(folder)
        options += ["--base", str(found.absolute())] if found else []
        then = f", then compare losses over up to {samples} samples" if samples else ""
        say(f"Merging base and adapter, a file at a time{then}. That takes a minute or more.")
        report = run_worker("workers.tasks.merge", [str(folder), str(out.absolute()), *options])
    if as_json:
        print_json({"out": str(out.absolute()), **report})
    else:
        _show(report, out)


def base_here(adapter: Path) -> Path | None:
    """This machine's folder of the base of an adapter that came from elsewhere. None: the adapter lies in its run directory, or
    its manifest, of an earlier version, says where the base is.

    Raises SpecError where there is no base of that name.
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
        f"The base {manifest.base.name} is not among this machine's models: name its folder with --base.", param="base"
    )


def shown_losses(report: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The fidelity report as fields: the three losses, or why there are none, and what rounding cost."""
    losses = report["validation_loss"] or {}
    names = {
        "adapter_on_base_as_trained": "loss, base as trained",
        "adapter_on_bf16_base": "loss, bf16 base",
        "merged": f"loss, merged to {report['to']}",
    }
    rounding = report["rounding"]
    return [
        *((title, f"{losses[name]:.4f}" if name in losses else None) for name, title in names.items()),
        ("no losses", report.get("reason")),
        (
            "rounding",
            f"{rounding['relative_to_weights']:.2%} of the weights, {rounding['relative_to_update']:.1%} of the update",
        ),
    ]


def _show(report: dict[str, Any], out: Path) -> None:
    print_fields(shown_losses(report))
    tell(f"The merged model is in {out}")
