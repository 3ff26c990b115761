"""Verification of an adapter or a run directory against its manifest, for `ft verify`.

Accepts an adapter's folder, a run directory, a merged model, or the tar that `GET …/adapter`
returns; needs no torch and no server.
"""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import re2
from pydantic import ValidationError

from ft_service.bases.adapter_names import AdapterNames
from ft_service.bases.safetensors_folder import read_tensors
from ft_service.bases.safetensors_header import read_header
from ft_service.errors import SpecError
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints
from ft_service.rundir.directory import RunDir, UnreadableDocumentError, sha256_of
from ft_service.rundir.documents import Result
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import (
    EXPORT_MANIFEST,
    MANIFEST,
    ORIGINS,
    Manifest,
    Origins,
    base_without_path,
    digest_of,
    without_paths,
)
from ft_service.rundir.untrusted_tar import unpack
from ft_service.spec import JobSpec, match_pattern

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
_CONFIG_TYPES: dict[str, type] = {
    "r": int,
    "rank_pattern": dict,
    "target_parameters": list,
    "modules_to_save": list,
}
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")


@dataclass
class VerifyReport:
    """Checks that were made, and the faults that they found."""

    path: str
    kind: str
    """"adapter", "run directory", "archive", "exported adapter" or "model"."""
    manifest: Manifest | None = None
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, what: str, faults: list[str]) -> None:
        self.checked.append(what)
        self.faults += faults


def verify(path: Path) -> VerifyReport:
    """Verify the file or folder at `path`. Raises SpecError if it is of another kind."""
    if path.is_file() and tarfile.is_tarfile(path):
        return _verify_archive(path)
    if (path / "adapter").is_dir():
        return _verify_run(path)
    if (
        (path / CONFIG).is_file()
        and (path / EXPORT_MANIFEST).is_file()
        and not (path / MANIFEST).is_file()
    ):
        return _verify_export(path)
    if (path / MANIFEST).is_file() or (path / CONFIG).is_file():
        report = VerifyReport(str(path), "adapter")
        check_adapter(path, report)
        return report
    if (path / MODEL_CONFIG).is_file():
        return _verify_model(path)
    raise SpecError(
        f"{path}: expected an adapter's folder (with {MANIFEST}), a run directory (with "
        "adapter/), a tar of one, or a merged "
        f"model (with {MODEL_CONFIG})."
    )


def _verify_model(path: Path) -> VerifyReport:
    """Verify a model that `ft merge` wrote.

    It has no manifest, so only the completeness of its files can be checked.
    """
    report = VerifyReport(str(path), "model")
    faults: list[str] = []
    try:
        read_tensors(path)
    except SpecError as error:
        faults.append(error.message)
    report.add("weight files", faults)
    return report


def _verify_export(path: Path) -> VerifyReport:
    """Verify an adapter that `ft export` wrote in another form.

    It has no manifest of its own: only that it is complete can be checked.
    """
    report = VerifyReport(str(path), "exported adapter")
    try:
        read_header(path / WEIGHTS)
        report.add("weight files", [])
    except FileNotFoundError:
        report.add("weight files", [f"{WEIGHTS} is missing"])
    except ValueError as error:
        report.add("weight files", [str(error)])
    return report


def _verify_archive(path: Path) -> VerifyReport:
    report = VerifyReport(str(path), "archive")
    with tempfile.TemporaryDirectory(prefix="ft-verify-") as scratch:
        folder = Path(scratch) / "files"
        unpack(path, folder)
        adapter = next(iter([*sorted(folder.rglob(CONFIG)), *sorted(folder.rglob(MANIFEST))]), None)
        if adapter is None:
            raise SpecError(f"{path}: the archive contains no adapter.")
        check_adapter(adapter.parent, report)
    return report


def check_adapter(folder: Path, report: VerifyReport) -> None:
    """Check an adapter's folder: manifest, files, shapes."""
    manifest, faults = read_manifest(folder / MANIFEST)
    report.manifest = manifest
    report.add("manifest", faults)
    if manifest is not None:
        report.add("files", file_faults(folder, manifest.files))
    report.add("shapes", shape_faults(folder, manifest))


def read_manifest(path: Path) -> tuple[Manifest | None, list[str]]:
    """Return a manifest (None: it is missing or incomplete) and its faults."""
    try:
        content = RunDir(path.parent).get(path.name) if path.parent.is_dir() else None
        if content is None:
            return None, [f"{path.name} is missing"]
        body = json.loads(content)
        manifest = Manifest.model_validate(body)
    except UnreadableDocumentError as error:
        return None, [error.message.rstrip(".")]
    except ValidationError as error:
        places = sorted(
            {".".join(map(str, fault["loc"])) for fault in error.errors(include_url=False)}
        )
        return None, [f"{path.name} is incomplete or of another version: {', '.join(places)}"]
    except (ValueError, RecursionError) as error:
        return None, [f"{path.name} is not JSON: {error}"]
    faults = (
        []
        if digest_of(body) == manifest.digest
        else [f"{path.name} was edited: its digest does not match its contents"]
    )
    return manifest, faults


def file_faults(folder: Path, files: Mapping[str, FileDigest]) -> list[str]:
    """Return faults of files that are missing, changed, or not in the manifest."""
    faults = []
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if fault := expected.fault(size, partial(sha256_of, path)):
            faults.append(f"{name} {fault}")
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return faults + [
        f"{name} is not in the manifest" for name in sorted(present - files.keys() - {MANIFEST})
    ]


def shape_faults(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return faults of the tensors against adapter_config.json and the base's layers in the
    manifest.
    """
    try:
        config = _read_config(folder / CONFIG)
        header = read_header(folder / WEIGHTS)
        names = AdapterNames.of_file(header.metadata)
        shapes = {names.in_model(name): entry.shape for name, entry in header.tensors.items()}
        ranks = {
            match["module"]: rank_of(match["module"], config)
            for match in map(_LORA.fullmatch, shapes)
            if match
        }
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} is missing"]
    except RecursionError:
        return [f"{CONFIG} is nested too deeply"]
    except (ValueError, re2.error) as error:
        return [str(error) or f"{CONFIG} has an invalid rank_pattern"]
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    faults = []
    for name, shape in shapes.items():
        if (match := _LORA.fullmatch(name)) is not None:
            pairs.setdefault(match["module"], {})[match["which"]] = shape
        elif not _is_expected(name, config):
            faults.append(f"{name} is a tensor that {CONFIG} does not call for")
    layers = {layer.module: layer.shape for layer in manifest.frozen_modules} if manifest else {}
    for module, pair in pairs.items():
        missing = [f"{module} has no lora_{which}" for which in "AB" if which not in pair]
        rank = None if _is_expert_stack(module, config) else ranks[module]
        faults += missing or _pair_faults(module, pair, rank, layers.get(module))
    return faults if pairs else [*faults, f"{WEIGHTS} contains no LoRA matrices"]


def _read_config(path: Path) -> dict[str, Any]:
    """Return what an adapter's configuration holds.

    Raises ValueError if an entry that is read here is of another type than PEFT's.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is no JSON object")
    for name, kind in _CONFIG_TYPES.items():
        if not isinstance(config.get(name), kind | None):
            raise ValueError(f"{path.name}: {name} is of another type than PEFT's")
    if not all(isinstance(rank, int) for rank in (config.get("rank_pattern") or {}).values()):
        raise ValueError(f"{path.name}: rank_pattern has a rank that is no whole number")
    return config


def _pair_faults(
    module: str, pair: Mapping[str, tuple[int, ...]], rank: int | None, layer: list[int] | None
) -> list[str]:
    """Return faults of an adapted module: A [r, in] and B [out, r] around a layer [out, in].

    `rank`: None: a stack of experts, with A [experts · r, in] and B [out, r · experts].
    """
    a = pair["A"]
    b = pair["B"]
    matrices = f"{module}: lora_A {list(a)} and lora_B {list(b)}"
    if rank is None:
        return (
            [] if len(a) == len(b) == 2 and a[0] == b[1] else [f"{matrices} do not fit each other"]
        )
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        return [f"{matrices} do not have the rank {rank} of {CONFIG}"]
    if layer is not None and [b[0], a[1]] != layer:
        return [f"{matrices} do not fit its layer {layer}"]
    return []


def _is_expert_stack(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT adapts a stack of experts in this module."""
    return bool(config.get("target_parameters")) and module.removesuffix(".base_layer").endswith(
        ".experts"
    )


def rank_of(module: str, config: Mapping[str, Any]) -> int:
    """Return a module's rank as PEFT does: of the first pattern in `rank_pattern` that matches the
    end of its name, else `r`.

    Raises re2.error for an invalid pattern.
    """
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if match_pattern(rf"(.*\.)?({pattern})", [module]):
            return int(rank)
    return int(config.get("r") or 0)


def _is_expected(name: str, config: Mapping[str, Any]) -> bool:
    if config.get("use_dora") and name.endswith(".lora_magnitude_vector"):
        return True
    return any(f".{saved}." in name for saved in config.get("modules_to_save") or [])


def _verify_run(path: Path) -> VerifyReport:
    """Verify the adapter of a run directory, and that all its documents describe the same job."""
    report = VerifyReport(str(path), "run directory")
    run = RunDir(path)
    check_adapter(path / "adapter", report)
    outer, faults = read_manifest(path / MANIFEST)
    if outer is not None and outer != report.manifest:
        faults = [*faults, f"{MANIFEST} and adapter/{MANIFEST} differ"]
    report.add("manifest of the run", [f"in the run directory: {fault}" for fault in faults])
    if report.manifest is not None:
        report.add("documents", _document_faults(run, report.manifest))
    damaged = [
        f"checkpoint {name}: {fault}"
        for name in complete_checkpoints(run)
        for fault in checkpoint_faults(run, name)
    ]
    report.add("checkpoints", damaged)
    return report


def _document_faults(run: RunDir, manifest: Manifest) -> list[str]:
    faults = []
    try:
        spec = run.read("spec.json", JobSpec)
        if spec is None or without_paths(spec) != without_paths(manifest.spec):
            faults.append("spec.json differs from the spec in the manifest")
        origins = run.read(ORIGINS, Origins)
        result = run.read("result.json", Result)
    except UnreadableDocumentError as error:
        return [*faults, error.message.rstrip(".")]
    base = base_without_path(manifest.base)
    if origins is None or (base_without_path(origins.base), origins.data) != (base, manifest.data):
        faults.append(f"{ORIGINS} names another base or other data than the manifest")
    # Otherwise the adapter is that of an earlier, better step.
    is_last = result is not None and manifest.checkpoint is None
    if (
        result is None
        or result.attempt != manifest.attempt
        or (is_last and result.steps != manifest.step)
    ):
        faults.append("result.json names another attempt or step than the manifest")
    return faults
