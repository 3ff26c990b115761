"""Where an adapter comes from: what is recorded when training starts, and the manifest that leaves with every adapter.

origins.json             Origins, by rank 0 of the first attempt: what the job is made of
adapter/manifest.json    Manifest; the run directory's manifest.json is a copy

A manifest goes wherever its adapter goes, so it holds no path of the host that trained: spec.json and origins.json do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ft_service.bases.base_files import is_base_file
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.events import Metrics
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec, WeightFormat

MANIFEST = "manifest.json"
ORIGINS = "origins.json"
BASE_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer*", "chat_template*", "*.model", "vocab*")
"""What of a base folder decides what is trained: weights, architecture, tokenizer."""


_PATH = re.compile(r"(?<![\w./:])/(?:[^\s/:,;'\"()]+/)+([^\s/:,;'\"()]*)")
"""An absolute path in a sentence; the group is its last part."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True)


class BaseOrigin(_Document):
    name: str
    path: str
    """Of its folder, in origins.json; empty in a manifest, but for those of earlier versions."""
    files: dict[str, FileDigest]
    digest: str
    """SHA-256 over names and SHA-256 of the files: the same wherever the folder lies."""


class DataFile(_Document):
    role: Literal["training", "validation"]
    name: str
    sha256: str
    samples: int
    """Lines that were trained or validated on; those without a target within max_length are left out."""
    tokens: int
    targets: int
    token_digest: str | None = None
    """SHA-256 over the tokens and targets of the whole file; None: written by a version that did not note it."""


class FrozenModule(_Document):
    """One module of the base that has weights of its own."""

    module: str
    format: WeightFormat
    shape: list[int]
    """Shape of the weight: [out, in] of a linear layer."""
    bytes: int
    """Stored of weight and bias over the ranks of the first attempt, copies and padding included."""
    multiplied_in: str | None = None
    """bf16, fp32 or fp8, in the first attempt; None: it is no matrix."""
    relative_error: float
    """‖stored - read‖ / ‖read‖ of the weight; 0.0: stored as the base's files hold it."""


class Parent(_Document):
    """The tuned model that a job went on from."""

    name: str
    job: str
    step: int
    checkpoint: str | None
    """None: that job's outcome."""
    digest: str
    """Digest of its manifest, which says where it comes from in turn."""


class Origins(_Document):
    """What a job is made of; written once, by the first attempt that has read all of it."""

    base: BaseOrigin
    data: list[DataFile]
    frozen_modules: list[FrozenModule]
    quantiser: dict[str, int]
    """Storage format → version of its arithmetic: equal versions store equal values for equal weights."""
    parent: Parent | None = None
    """None: the job began with a new adapter."""


class AttemptSummary(_Document):
    """One entry of the world-size history, with how it was interrupted."""

    attempt: int
    world_size: int
    resumed_from: str | None
    """Checkpoint; None: from the first step."""
    ended: str
    """Reason of exit.json; `published` for the attempt that wrote the manifest, `lost` if it left no record."""
    message: str = ""


class Manifest(_Document):
    """Everything needed to tell where an adapter comes from, and whether it still is what was written."""

    version: Literal[3] = 3
    job: str
    tuned_name: str
    attempt: int
    step: int
    checkpoint: str | None
    """The checkpoint that the adapter was taken from; None: the finished job's."""
    seed: int
    spec: JobSpec
    base: BaseOrigin
    data: list[DataFile]
    frozen_modules: list[FrozenModule]
    quantiser: dict[str, int]
    parent: Parent | None
    """None: training began with a new adapter."""
    versions: dict[str, str]
    history: list[AttemptSummary]
    metrics: Metrics | None
    """Metrics of `step`; None: nothing was reported of it."""
    files: dict[str, FileDigest]
    """Every other file of the adapter's folder."""
    digest: str
    """SHA-256 over all of the above: an edit shows. It proves no author: who can edit can compute it anew."""


def base_of(name: str, folder: Path, files: Mapping[str, FileDigest]) -> BaseOrigin:
    listing = "".join(f"{file} {files[file].sha256}\n" for file in sorted(files))
    return BaseOrigin(
        name=name, path=str(folder), files=dict(sorted(files.items())), digest=hashlib.sha256(listing.encode()).hexdigest()
    )


def parent_of(name: str, manifest: Manifest) -> Parent:
    return Parent(name=name, job=manifest.job, step=manifest.step, checkpoint=manifest.checkpoint, digest=manifest.digest)


def base_files(folder: Path) -> list[Path]:
    """The files of a base that its identity covers, by name."""
    return sorted({path for pattern in BASE_FILES for path in folder.glob(pattern) if is_base_file(path)})


def history(run: RunDir, attempt: int) -> list[AttemptSummary]:
    """All attempts up to `attempt`, which is the one that publishes."""
    found = []
    for number in range(1, attempt + 1):
        one = Attempt(run, number)
        start = one.readable_start()
        if start is None:
            continue
        ended = one.read_exit() if number < attempt else None
        reason = ended.reason.value if ended else "published" if number == attempt else "lost"
        message = _PATH.sub(r"…/\1", ended.message) if ended else ""
        found.append(
            AttemptSummary(
                attempt=number, world_size=start.world_size, resumed_from=start.checkpoint, ended=reason, message=message
            )
        )
    return found


def manifest_of(
    run: RunDir, *, attempt: int, step: int, checkpoint: str | None, metrics: Metrics | None, versions: Mapping[str, str]
) -> Manifest:
    """The manifest of an adapter, without the adapter's files and without a digest."""
    spec, origins = run.read("spec.json", JobSpec), run.read(ORIGINS, Origins)
    assert spec is not None, f"{run.root} holds no spec.json"
    assert origins is not None, f"{run.root} holds no {ORIGINS}"
    return Manifest(
        job=spec.job_id,
        tuned_name=spec.tuned_name,
        attempt=attempt,
        step=step,
        checkpoint=checkpoint,
        seed=spec.seed,
        spec=without_paths(spec),
        base=base_without_path(origins.base),
        data=origins.data,
        frozen_modules=origins.frozen_modules,
        quantiser=origins.quantiser,
        parent=origins.parent,
        versions=dict(versions),
        history=history(run, attempt),
        metrics=metrics,
        files={},
        digest="",
    )


def without_paths(spec: JobSpec) -> JobSpec:
    """The spec as it is told to others: what lies on the host that trains is known by name and digest only."""
    places = {name: getattr(spec, name) for name in ("model", "training_data", "validation_data", "parent")}
    return spec.model_copy(update={name: ref and ref.model_copy(update={"path": ""}) for name, ref in places.items()})


def base_without_path(base: BaseOrigin) -> BaseOrigin:
    return base.model_copy(update={"path": ""})


def spec_beside(adapter: Path, manifest: Manifest) -> JobSpec:
    """The spec of the job that made an adapter: with paths where the adapter's folder lies in its run directory."""
    for folder in (adapter.parent, adapter.parent.parent):
        spec = RunDir(folder).read("spec.json", JobSpec)
        if spec is not None and spec.job_id == manifest.job:
            return spec
    return manifest.spec


def write_manifest(draft: Manifest, folder: Path) -> Manifest:
    """Complete a manifest by the files of the adapter in `folder`, which is complete but for this, and write it there."""
    files = {path.name: FileDigest.of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    body = draft.model_copy(update={"files": files}).model_dump(mode="json")
    manifest = Manifest.model_validate(body | {"digest": digest_of(body)})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over a manifest as read from JSON, its own `digest` left out."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
