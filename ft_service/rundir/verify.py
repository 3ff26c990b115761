"""`ft verify`: whether an adapter, or a whole run directory, still is what was written.

Works on an adapter's folder, a run directory, or the tar that `GET …/adapter` answers; needs no torch and no server.
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
from ft_service.rundir.manifest import MANIFEST, ORIGINS, Manifest, Origins, base_without_path, digest_of, without_paths
from ft_service.rundir.untrusted_tar import unpack
from ft_service.spec import JobSpec, match_pattern

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")


@dataclass
class VerifyReport:
    """What was looked at, and what differs."""

    path: str
    kind: str
    """"adapter", "run directory", "archive" or "model"."""
    manifest: Manifest | None = None
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, what: str, faults: list[str]) -> None:
        self.checked.append(what)
        self.faults += faults


def verify(path: Path) -> VerifyReport:
    """Raises SpecError if there is nothing at `path` that could be verified."""
    if path.is_file() and tarfile.is_tarfile(path):
        return _verify_archive(path)
    if (path / "adapter").is_dir():
        return _verify_run(path)
    if (path / MANIFEST).is_file() or (path / CONFIG).is_file():
        report = VerifyReport(str(path), "adapter")
        check_adapter(path, report)
        return report
    if (path / MODEL_CONFIG).is_file():
        return _verify_model(path)
    raise SpecError(
        f"{path}: expected an adapter's folder (with {MANIFEST}), a run directory (with adapter/), a tar of one, or a merged "
        f"model (with {MODEL_CONFIG})."
    )


def _verify_model(path: Path) -> VerifyReport:
    """A model that `ft merge` wrote has no manifest: that its files are whole is what can be told."""
    report = VerifyReport(str(path), "model")
    faults: list[str] = []
    try:
        read_tensors(path)
    except SpecError as error:
        faults.append(error.message)
    report.add("files of the weights are whole", faults)
    return report


def _verify_archive(path: Path) -> VerifyReport:
    report = VerifyReport(str(path), "archive")
    with tempfile.TemporaryDirectory(prefix="ft-verify-") as scratch:
        folder = Path(scratch) / "files"
        unpack(path, folder)
        found = next(iter(sorted(folder.rglob(CONFIG))), None) or next(iter(sorted(folder.rglob(MANIFEST))), None)
        if found is None:
            raise SpecError(f"{path}: the archive holds no adapter.")
        check_adapter(found.parent, report)
    return report


def check_adapter(folder: Path, report: VerifyReport) -> None:
    """Add what can be said of an adapter's folder: manifest, files, shapes."""
    manifest, faults = read_manifest(folder / MANIFEST)
    report.manifest = manifest
    report.add("manifest", faults)
    if manifest is not None:
        report.add("files", file_faults(folder, manifest.files))
    report.add("shapes", shape_faults(folder, manifest))


def read_manifest(path: Path) -> tuple[Manifest | None, list[str]]:
    """A manifest that is complete (None: it is not, or is not there), and what is wrong with it."""
    try:
        found = RunDir(path.parent).get(path.name) if path.parent.is_dir() else None
        if found is None:
            return None, [f"{path.name} is missing"]
        body = json.loads(found)
        manifest = Manifest.model_validate(body)
    except UnreadableDocumentError as error:
        return None, [error.message.rstrip(".")]
    except ValidationError as error:
        places = sorted({".".join(map(str, fault["loc"])) for fault in error.errors(include_url=False)})
        return None, [f"{path.name} is incomplete or of another version: {', '.join(places)}"]
    except (ValueError, RecursionError) as error:
        return None, [f"{path.name} is not JSON: {error}"]
    faults = [] if digest_of(body) == manifest.digest else [f"{path.name} was edited: its digest is not that of its contents"]
    return manifest, faults


def file_faults(folder: Path, files: Mapping[str, FileDigest]) -> list[str]:
    """Files that are missing, changed, or not in the manifest."""
    faults = []
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if fault := expected.fault(size, partial(sha256_of, path)):
            faults.append(f"{name} {fault}")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return faults + [f"{name} is not in the manifest" for name in sorted(there - files.keys() - {MANIFEST})]


def shape_faults(folder: Path, manifest: Manifest | None) -> list[str]:
    """Whether the tensors are the ones that adapter_config.json, and the base's layers in the manifest, call for."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        header = read_header(folder / WEIGHTS)
        names = AdapterNames.of_file(header.metadata)
        shapes = {names.in_model(name): entry.shape for name, entry in header.tensors.items()}
        ranks = {match["module"]: rank_of(match["module"], config) for match in map(_LORA.fullmatch, shapes) if match}
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} is missing"]
    except (ValueError, re2.error) as error:
        return [str(error) or f"{CONFIG} has a rank_pattern that is no pattern"]
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    others = []
    for name, shape in shapes.items():
        match = _LORA.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            pairs.setdefault(match["module"], {})[match["which"]] = shape
    layers = {layer.module: layer.shape for layer in manifest.frozen_modules} if manifest else {}
    faults = [
        fault
        for module, pair in pairs.items()
        for fault in (_stack_faults if _is_stack(module, config) else _pair_faults)(
            module, pair, ranks[module], layers.get(module)
        )
    ]
    faults += [f"{name} is no tensor that {CONFIG} calls for" for name in others if not _is_called_for(name, config)]
    return faults if pairs else [*faults, f"{WEIGHTS} holds no LoRA matrices"]


def _pair_faults(module: str, pair: Mapping[str, tuple[int, ...]], rank: int, layer: list[int] | None) -> list[str]:
    """One adapted module: A [r, in] and B [out, r] around a layer [out, in]."""
    missing = [f"{module} has no lora_{which}" for which in "AB" if which not in pair]
    if missing:
        return missing
    a, b = pair["A"], pair["B"]
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        return [f"{module}: lora_A {list(a)} and lora_B {list(b)} are not of rank {rank}, which {CONFIG} says"]
    if layer is not None and [b[0], a[1]] != layer:
        return [f"{module}: lora_A {list(a)} and lora_B {list(b)} do not fit its layer {layer}"]
    return []


def _is_stack(module: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT has the adapter of a stack of experts there: in the module that holds the stack."""
    return bool(config.get("target_parameters")) and module.removesuffix(".base_layer").endswith(".experts")


def _stack_faults(module: str, pair: Mapping[str, tuple[int, ...]], _: int, __: list[int] | None) -> list[str]:
    """The adapters of a stack: A [experts · r, in] and B [out, r · experts]."""
    missing = [f"{module} has no lora_{which}" for which in "AB" if which not in pair]
    if missing:
        return missing
    a, b = pair["A"], pair["B"]
    fits = len(a) == len(b) == 2 and a[0] == b[1]
    return [] if fits else [f"{module}: lora_A {list(a)} and lora_B {list(b)} do not fit each other"]


def rank_of(module: str, config: Mapping[str, Any]) -> int:
    """A module's rank, as PEFT reads its config: the first pattern that matches the end of its name, else r.

    Raises re2.error for a pattern that is none.
    """
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if match_pattern(rf"(.*\.)?({pattern})", [module]):
            return int(rank)
    return int(config.get("r") or 0)


def _is_called_for(name: str, config: Mapping[str, Any]) -> bool:
    if config.get("use_dora") and name.endswith(".lora_magnitude_vector"):
        return True
    return any(f".{saved}." in name for saved in config.get("modules_to_save") or [])


def _verify_run(path: Path) -> VerifyReport:
    """The adapter inside, and that everything beside it tells of the same job."""
    report, run = VerifyReport(str(path), "run directory"), RunDir(path)
    check_adapter(path / "adapter", report)
    outer, faults = read_manifest(path / MANIFEST)
    if outer is not None and outer != report.manifest:
        faults = [*faults, f"{MANIFEST} and adapter/{MANIFEST} differ"]
    report.add("manifest of the run", [f"in the run directory: {fault}" for fault in faults])
    if report.manifest is not None:
        report.add("documents", _document_faults(run, report.manifest))
    damaged = [f"checkpoint {name}: {fault}" for name in complete_checkpoints(run) for fault in checkpoint_faults(run, name)]
    report.add("checkpoints", damaged)
    return report


def _document_faults(run: RunDir, manifest: Manifest) -> list[str]:
    faults = []
    try:
        spec = run.read("spec.json", JobSpec)
        if spec is None or without_paths(spec) != without_paths(manifest.spec):
            faults.append("spec.json is not the spec that the manifest was written for")
        origins, result = run.read(ORIGINS, Origins), run.read("result.json", Result)
    except UnreadableDocumentError as error:
        return [*faults, error.message.rstrip(".")]
    base = base_without_path(manifest.base)
    if origins is None or (base_without_path(origins.base), origins.data) != (base, manifest.data):
        faults.append(f"{ORIGINS} names another base or other data than the manifest")
    whole = result is not None and manifest.checkpoint is None  # otherwise an earlier step was better than the last
    if result is None or result.attempt != manifest.attempt or (whole and result.steps != manifest.step):
        faults.append("result.json names another attempt or step than the manifest")
    return faults
