"""Provenance of an adapter: records from the start of training, and the manifest that accompanies
every adapter.

origins.json             Origins, by rank 0 of the first attempt: what the job is made of
adapter/manifest.json    Manifest; the run directory's manifest.json is a copy

A manifest is published with its adapter, so it contains no path of the host that trained; spec.json
and origins.json do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ft_service.bases.base_files import is_base_file
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Forgetting
from ft_service.rundir.events import Metrics
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec, WeightFormat

MANIFEST = "manifest.json"
EXPORT_MANIFEST = "adapter_manifest.json"
"""Name, in an export or a merged model, of the manifest of the adapter from which it was made."""
ORIGINS = "origins.json"
BASE_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "tokenizer*",
    "chat_template*",
    "*.model",
    "vocab*",
)
"""Files of a base's folder that decide what is trained: weights, architecture, tokenizer."""


_PATH = re.compile(r"(?<![\w./:])/(?:[^\s/:,;'\"()]+/)+([^\s/:,;'\"()]*)")
"""Pattern of an absolute path in a sentence; the group is its last part."""


class _ManifestDocument(BaseModel):
    model_config = ConfigDict(frozen=True)


class BaseOrigin(_ManifestDocument):
    name: str
    path: str
    """Path of its folder, in origins.json; empty in a manifest."""
    files: dict[str, FileDigest]
    digest: str
    """SHA-256 over names and SHA-256 of the files; it does not depend on the folder's path."""


class DataFile(_ManifestDocument):
    role: Literal["training", "validation"]
    name: str
    sha256: str
    samples: int
    """Lines used for training or validation; lines without a target within max_length are left
    out.
    """
    tokens: int
    targets: int
    token_digest: str
    """SHA-256 over the tokens and targets of the whole file."""
    images: int = 0
    """Different images of the file, none of which earlier versions counted."""


class FrozenModule(_ManifestDocument):
    """Module of the base with weights of its own."""

    module: str
    format: WeightFormat
    shape: list[int]
    """Shape of the weight: [out, in] of a linear layer."""
    bytes: int
    """Stored bytes of weight and bias over the ranks of the first attempt, including copies and
    padding.
    """
    multiplied_in: str | None = None
    """Type of its matrix products in the first attempt (bf16, fp32 or fp8); None: it is not a
    matrix.
    """
    relative_error: float
    """‖stored - read‖ / ‖read‖ of the weight; 0.0: stored as in the base's files."""


class Parent(_ManifestDocument):
    """Tuned model that a job continued."""

    name: str
    job: str
    step: int
    checkpoint: str | None
    """Checkpoint of that job; None: its outcome."""
    digest: str
    """Digest of its manifest, which contains its own provenance."""


class Origins(_ManifestDocument):
    """Inputs of a job; written once, by the first attempt that has read all of them."""

    base: BaseOrigin
    data: list[DataFile]
    frozen_modules: list[FrozenModule]
    quantiser: dict[str, int]
    """Storage format → version of its arithmetic: equal versions store equal values for equal
    weights.
    """
    parent: Parent | None = None
    """Tuned model that it continued; None: the job began with a new adapter."""


class AttemptSummary(_ManifestDocument):
    """Entry of the world-size history, with the reason for its end."""

    attempt: int
    world_size: int
    resumed_from: str | None
    """Checkpoint that it resumed from; None: it began with the first step."""
    ended: str
    """Reason of exit.json; `published` for the attempt that wrote the manifest, `lost` if it left
    no record.
    """
    message: str = ""


class Manifest(_ManifestDocument):
    """Provenance of an adapter, with the digests of its files."""

    version: Literal[3] = 3
    job: str
    tuned_name: str
    attempt: int
    step: int
    checkpoint: str | None
    """Checkpoint that the adapter was taken from; None: the finished job's."""
    seed: int
    spec: JobSpec
    base: BaseOrigin
    data: list[DataFile]
    frozen_modules: list[FrozenModule]
    quantiser: dict[str, int]
    parent: Parent | None
    """Tuned model that training continued; None: it began with a new adapter."""
    versions: dict[str, str]
    history: list[AttemptSummary]
    metrics: Metrics | None
    """Metrics of `step`; None: none were reported."""
    forgetting: Forgetting | None = None
    """What the tuned model has lost of what its base knew; None: not measured, as of a
    checkpoint.
    """
    files: dict[str, FileDigest]
    """Digests of every other file of the adapter's folder."""
    digest: str
    """SHA-256 over all of the above, which detects edits.

    It does not prove the author: an editor can compute it again.
    """


def base_of(name: str, folder: Path, files: Mapping[str, FileDigest]) -> BaseOrigin:
    listing = "".join(f"{file} {files[file].sha256}\n" for file in sorted(files))
    return BaseOrigin(
        name=name,
        path=str(folder),
        files=dict(sorted(files.items())),
        digest=hashlib.sha256(listing.encode()).hexdigest(),
    )


def parent_of(name: str, manifest: Manifest) -> Parent:
    return Parent(
        name=name,
        job=manifest.job,
        step=manifest.step,
        checkpoint=manifest.checkpoint,
        digest=manifest.digest,
    )


def base_files(folder: Path) -> list[Path]:
    """Return the files of a base that its identity covers, by name."""
    return sorted(
        {path for pattern in BASE_FILES for path in folder.glob(pattern) if is_base_file(path)}
    )


def history(run: RunDir, attempt: int) -> list[AttemptSummary]:
    """Return the summaries of all attempts up to `attempt`, which is the one that publishes."""
    summaries = []
    for number in range(1, attempt + 1):
        files = Attempt(run, number)
        start = files.readable_start()
        if start is None:
            continue
        ended = files.read_exit() if number < attempt else None
        reason = ended.reason.value if ended else "published" if number == attempt else "lost"
        message = _PATH.sub(r"…/\1", ended.message) if ended else ""
        summaries.append(
            AttemptSummary(
                attempt=number,
                world_size=start.world_size,
                resumed_from=start.checkpoint,
                ended=reason,
                message=message,
            )
        )
    return summaries


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """Where in a job an adapter was taken from; fields as those of Manifest."""

    attempt: int
    step: int
    checkpoint: str | None = None
    metrics: Metrics | None = None
    forgetting: Forgetting | None = None
    versions: Mapping[str, str]


def manifest_of(run: RunDir, source: AdapterSource) -> Manifest:
    """Return the manifest of an adapter, without the adapter's files and without a digest."""
    spec = run.read("spec.json", JobSpec)
    origins = run.read(ORIGINS, Origins)
    assert spec is not None, f"{run.root} holds no spec.json"
    assert origins is not None, f"{run.root} holds no {ORIGINS}"
    return Manifest(
        job=spec.job_id,
        tuned_name=spec.tuned_name,
        attempt=source.attempt,
        step=source.step,
        checkpoint=source.checkpoint,
        seed=spec.seed,
        spec=without_paths(spec),
        base=base_without_path(origins.base),
        data=origins.data,
        frozen_modules=origins.frozen_modules,
        quantiser=origins.quantiser,
        parent=origins.parent,
        versions=dict(source.versions),
        history=history(run, source.attempt),
        metrics=source.metrics,
        forgetting=source.forgetting,
        files={},
        digest="",
    )


def without_paths(spec: JobSpec) -> JobSpec:
    """Return the spec without paths of the host, for publication."""
    places = {
        name: getattr(spec, name)
        for name in ("model", "training_data", "validation_data", "parent")
    }
    return spec.model_copy(
        update={name: ref and ref.model_copy(update={"path": ""}) for name, ref in places.items()}
    )


def base_without_path(base: BaseOrigin) -> BaseOrigin:
    return base.model_copy(update={"path": ""})


def spec_beside(adapter: Path, manifest: Manifest) -> JobSpec:
    """Return the spec of the job that made an adapter, with paths if the adapter's folder is in its
    run directory.
    """
    for folder in (adapter.parent, adapter.parent.parent):
        spec = RunDir(folder).read("spec.json", JobSpec)
        if spec is not None and spec.job_id == manifest.job:
            return spec
    return manifest.spec


def write_manifest(draft: Manifest, folder: Path) -> Manifest:
    """Add the files of the adapter in `folder` to a manifest, and write it there.

    All other files must be complete.
    """
    files = {
        path.name: FileDigest.of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST
    }
    body = draft.model_copy(update={"files": files}).model_dump(mode="json")
    manifest = Manifest.model_validate(body | {"digest": digest_of(body)})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest as read from JSON, without its own `digest`."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(
        json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
