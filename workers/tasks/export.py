"""Writes a tuned model in the form that another program reads: `python -m workers.tasks.export
ADAPTER OUT --format FORMAT`.

Everything is read again before OUT appears, and its `fidelity.json` says how much accuracy the form
costs. Needs neither a GPU nor a process group.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":  # before transformers is imported
    keep_torchao_out()
    begin_imports()
from ft_service.bases.origin import licence_of, portable_name
from ft_service.errors import SpecError
from ft_service.host.helper_process import Program, run_once
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.manifest import EXPORT_MANIFEST, MANIFEST, Manifest, spec_beside
from ft_service.rundir.model_card import CARD
from ft_service.spec import JobSpec
from ft_service.wording import counted
from workers.exports.export_card import export_card
from workers.exports.gguf_file import Stored
from workers.exports.to_gguf import export_adapter, export_model
from workers.output.outcome import new_folder
from workers.tasks import print_result
from workers.tasks.fidelity import measure
from workers.tasks.merge import (
    COPIED,
    FIDELITY,
    base_of_job,
    check_base,
    merge_and_measure,
    refuse_other_form,
    restore_codes,
)
from workers.tasks.pad_ranks import pad_ranks

MERGED = {
    "merged": "bf16",
    **{f"merged-{form}": form for form in ("fp8", "int4", "nvfp4", "mxfp4")},
}
"""Format → how `workers.tasks.merge` stores it."""
GGUF: dict[str, Stored] = {"gguf": "bf16", "gguf-q8_0": "q8_0"}
TORCHAO = {f"torchao-{form}": form for form in ("int8", "fp8", "nvfp4", "8da4w")}
"""Format → how `workers.tasks.round_by_torchao` rounds it."""


def export(adapter: Path, out: Path, to: str, base: Path | None, samples: int) -> dict[str, Any]:
    """Write the new folder `out`; the report.

    `samples`: of the validation file, to compare losses on.

    Raises SpecError for what this form cannot hold, naming it, and for another base than the
    adapter's.
    """
    manifest = Manifest.model_validate_json((adapter / MANIFEST).read_bytes())
    spec = spec_beside(adapter, manifest)
    refuse_other_form(spec.precision, MERGED.get(to, to))
    _refuse_images(manifest, to)
    with new_folder(out) as folder:
        if to in MERGED:
            report = merge_and_measure(adapter, folder / "model", MERGED[to], base, samples)
            _lift(folder / "model")
        elif to == "vllm":
            report = _for_vllm(
                adapter,
                folder,
                base or (Path(spec.model.path) if spec.model.path else None),
                manifest,
            )
        elif to == "gguf-adapter":
            there = base or base_of_job(spec)
            check_base(manifest, there)
            report = export_adapter(
                there, adapter, folder, title=manifest.tuned_name, chat_template=spec.chat_template
            )
        elif to in TORCHAO:
            report = _by_torchao(spec, adapter, folder, TORCHAO[to], base, samples)
        else:
            report = _gguf(spec, adapter, folder, GGUF[to], base, samples)
        report = {**report, "to": to}
        shutil.copy(adapter / MANIFEST, folder / EXPORT_MANIFEST)
        write_card(folder, manifest, to, report, spec, adapter)
        (folder / FIDELITY).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _refuse_images(manifest: Manifest, to: str) -> None:
    """Raise SpecError for a form that would lose what was learned of images."""
    images = sum(data.images for data in manifest.data)
    if to.startswith("gguf") and images:
        raise SpecError(
            f"GGUF: {manifest.tuned_name} was trained on {counted(images, 'image')}, for "
            "which llama.cpp needs the base's towers in a file of their own (mmproj), and this "
            "service writes none. Export 'merged' or 'vllm'.",
            param="format",
            code="not_exportable",
        )


def _lift(inner: Path) -> None:
    """Move what is in a folder to where the folder is."""
    for path in list(inner.iterdir()):
        path.rename(inner.parent / path.name)
    inner.rmdir()


def write_card(
    folder: Path, manifest: Manifest, to: str, report: dict[str, Any], spec: JobSpec, adapter: Path
) -> None:
    """Write the model card; where the base lies elsewhere, its licence is not known."""
    base = Path(spec.model.path)
    name, licence = (
        (portable_name(base, spec.model.name), licence_of(base))
        if spec.model.path
        else (spec.model.name, None)
    )
    card = export_card(manifest, ExportFormat(to), report, adapter.parent, name, licence)
    (folder / CARD).write_text(card, encoding="utf-8")


def _for_vllm(adapter: Path, folder: Path, base: Path | None, manifest: Manifest) -> dict[str, Any]:
    if base is not None and manifest.spec.lora.target_parameters:
        check_base(manifest, base)
    for path in adapter.iterdir():
        if path.is_file() and path.name != MANIFEST:  # which describes the adapter as it was
            shutil.copyfile(path, folder / path.name)
    return {"r": pad_ranks(adapter, folder, base)}


def _gguf(
    spec: JobSpec, adapter: Path, folder: Path, stored: Stored, base: Path | None, samples: int
) -> dict[str, Any]:
    """The merged model as GGUF.

    It is first merged to bf16; the losses are those of the weights as the file holds them.
    """
    merged = folder / ".merged"
    restored = folder / ".restored"
    exact = stored == "bf16"  # what the file holds is then what was merged
    report = merge_and_measure(adapter, merged, "bf16", base, samples if exact else 0)
    exported = export_model(
        merged,
        folder,
        stored,
        title=spec.tuned_name,
        chat_template=spec.chat_template,
        restored=None if exact else restored,
    )
    if not exact:
        report |= {
            "reason": None,
            **measure(spec, base or base_of_job(spec), adapter, restored, samples),
        }
    for pattern in COPIED:
        for path in merged.glob(pattern):
            if path.name.startswith(("LICENSE", "NOTICE", "USE_POLICY")):
                shutil.copy(path, folder)
    for scratch in (merged, restored):
        shutil.rmtree(scratch, ignore_errors=True)
    return {**report, **exported}


def _by_torchao(
    spec: JobSpec, adapter: Path, folder: Path, form: str, base: Path | None, samples: int
) -> dict[str, Any]:
    """The merged model, rounded by torchao in a process that may import it; of a job that was
    trained for this form, with the codes by which it has multiplied.

    The losses are those of the weights as they are read again.
    """
    merged = folder / ".merged"
    restored = folder / ".restored"
    codes = folder / ".codes"
    if spec.precision.served_as is None:
        report = merge_and_measure(adapter, merged, "bf16", base, 0)
        weights = ("--restored", str(restored))
    else:
        report = merge_and_measure(adapter, codes, f"torchao-{form}", base, 0)
        restore_codes(codes, merged)
        restored = merged
        weights = ("--codes", str(codes))
    program = Program(
        command=(
            *(sys.executable, "-P", "-m", "workers.tasks.round_by_torchao"),
            *(str(merged), str(folder), "--form", form, *weights),
        ),
        variables={"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    rounded = run_once(program)
    measured = measure(spec, base or base_of_job(spec), adapter, restored, samples)
    for pattern in COPIED:
        for path in merged.glob(pattern):
            if not (folder / path.name).exists():
                shutil.copy(path, folder)
    for scratch in (merged, restored, codes):
        shutil.rmtree(scratch, ignore_errors=True)
    return {**report, "reason": None, **measured, **rounded}


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the report, or the error. Exit code 0 or 64."""
    parser = argparse.ArgumentParser(prog="python -m workers.tasks.export", description=__doc__)
    parser.add_argument("adapter", type=Path, help="an adapter's folder with its manifest")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--format", choices=("vllm", "gguf-adapter", *MERGED, *GGUF, *TORCHAO), required=True
    )
    parser.add_argument(
        "--base", type=Path, help="the base's folder; default: where the job found it"
    )
    parser.add_argument(
        "--samples", type=int, default=64, help="of the validation file, for the losses; 0: none"
    )
    given = parser.parse_args(arguments)
    return print_result(
        lambda: export(given.adapter, given.out, given.format, given.base, given.samples)
    )


if __name__ == "__main__":
    end_imports()
    sys.exit(main(sys.argv[1:]))
