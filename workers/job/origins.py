"""The origins of a job, recorded by its first attempt and checked by the later ones: base, data,
storage formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import DataError, SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import (
    ORIGINS,
    BaseOrigin,
    DataFile,
    FrozenModule,
    Manifest,
    Origins,
    base_files,
    base_of,
    parent_of,
)
from ft_service.spec import BaseModelRef, DataFileRef, JobSpec
from workers.base.load import base_tensor_name
from workers.base.rank_objects import by_first, from_all
from workers.model.build import BuiltModel
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import VERSIONS

STATUS = "base-status.json"


def record(
    run: RunDir,
    spec: JobSpec,
    built: BuiltModel,
    train: TokenSet,
    valid: TokenSet,
    adopted: Manifest | None = None,
    resident: IdentifiedBase | None = None,
) -> list[str]:
    """Write origins.json, or compare with it.

    Called by all ranks together, on the sharded and loaded model. Returns a warning for each
    storage format in which weights have become other values since.

    `adopted`: the manifest of the adapter that training starts from; None: a new one, or a
    checkpoint. `resident`: the base that other jobs train on too, as it was when it was loaded;
    None: the one on disk. Raises SpecError on all ranks if the base differs from the one that the
    first attempt, or the adopted adapter, was trained on, DataError if the data are other tokens
    than the first attempt's.
    """
    base = identify(run, spec) if resident is None else _adopt(run, resident)
    if adopted is not None and adopted.base.digest != base.digest:
        raise SpecError(
            f"The base {spec.model.name} is not the one that {adopted.tuned_name} was trained on: "
            "its files differ. "
            "Put those back, or start a new job on the base.",
            param="model",
            code="base_changed",
        )
    modules = stored_modules(built, spec.precision.compute)
    before = run.read(ORIGINS, Origins)
    if before is not None and before.base.digest != base.digest:
        changed = sorted(
            n
            for n in base.files.keys() | before.base.files.keys()
            if base.files.get(n) != before.base.files.get(n)
        )
        raise SpecError(
            f"The base {spec.model.name} has changed since the job began ({', '.join(changed)}): "
            "its checkpoints belong to "
            "the former base. Put that back, or create a new job.",
            param="model",
            code="base_changed",
        )
    data = [] if spec.training_data is None else [_data_file("training", spec.training_data, train)]
    if (validated := spec.validation_data or spec.training_data) is not None and spec.validates:
        data.append(_data_file("validation", validated, valid))
    compare_tokens(before.data if before is not None else [], data, [train, valid][: len(data)])
    formats = {module.format for module in modules}
    quantiser = {name: version for name, version in VERSIONS.items() if name in formats}
    parent = parent_of(spec.parent.name, adopted) if spec.parent and adopted else None
    origins = Origins(
        base=base, data=data, frozen_modules=modules, quantiser=quantiser, parent=parent
    )
    by_first(lambda: run.write_if_absent(ORIGINS, origins))  # before the other ranks read it
    return changed_arithmetic(before, modules)


def changed_arithmetic(before: Origins | None, modules: Sequence[FrozenModule]) -> list[str]:
    """A warning for each format whose arithmetic is another than when the job began.

    What a base holds in a format already is read as it is, whatever the version.
    """
    made = {module.format for module in modules if module.relative_error}
    known = {} if before is None else before.quantiser
    return [
        f"Weights are stored in {name} by version {VERSIONS[name]} of its arithmetic; the job "
        f"began with version {version}, "
        "whose values differ by rounding, and its steps so far were trained on those. Create a "
        "new job where every bit has to "
        "be the same."
        for name, version in known.items()
        if name in made and VERSIONS[name] != version
    ]


class BaseStatus(BaseModel):
    """`base-status.json`: the files of a base as they were when their contents were last read."""

    digest: str
    files: dict[str, tuple[int, int, int, int]]
    """Name → device, inode, bytes, time of modification in nanoseconds."""


@dataclass(frozen=True)
class IdentifiedBase:
    """A base by the contents of its files, and how these were before they were read."""

    base: BaseOrigin
    status: BaseStatus


def identify(run: RunDir, spec: JobSpec) -> BaseOrigin:
    """The base of a job by the contents of its files. Called by all ranks together.

    A later attempt reads them again only if they were touched meanwhile: hashing a large base takes
    as long as loading it.
    """
    status = {path.name: _status(path) for path in base_files(Path(spec.model.path))}
    known = run.read(ORIGINS, Origins)
    before = run.readable(STATUS, BaseStatus)
    untouched = known is not None and before == BaseStatus(digest=known.base.digest, files=status)
    if all(from_all(untouched)):  # each host looks at its own files
        assert known is not None
        return known.base
    return _adopt(run, identify_files(spec.model))


def identify_files(model: BaseModelRef) -> IdentifiedBase:
    """A base by the contents of its files; each rank reads a share of them.

    Called by all ranks together.
    """
    folder = Path(model.path)
    rank = dist.get_rank()
    world = dist.get_world_size()
    files = base_files(folder)
    status = {
        path.name: _status(path) for path in files
    }  # before they are read: a change meanwhile is seen the next time
    mine = {path.name: FileDigest.of(path) for path in files[rank::world]}
    base = base_of(
        model.name, folder, {name: file for own in from_all(mine) for name, file in own.items()}
    )
    return IdentifiedBase(base, BaseStatus(digest=base.digest, files=status))


def _adopt(run: RunDir, found: IdentifiedBase) -> BaseOrigin:
    by_first(lambda: run.write(STATUS, found.status))
    return found.base


def _status(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def stored_modules(built: BuiltModel, compute: str) -> list[FrozenModule]:
    """Every module of the base with weights, with format, bytes over all ranks and error.

    Called by all ranks together.

    `compute`: the dtype in which weights that are dequantised, or not quantised, multiply.
    """
    assert built.loaded is not None, "its modules have weights"
    of_module: dict[str, list[nn.Parameter]] = {}
    in_fp8: set[str] = set()
    for (
        name,
        parameter,
    ) in built.peft_model.named_parameters():  # a head that is the embedding is named once
        if not parameter.requires_grad:
            module = base_tensor_name(name).rpartition(".")[0]
            of_module.setdefault(module, []).append(parameter)
            if getattr(built.peft_model.get_submodule(name.rpartition(".")[0]), "in_fp8", False):
                in_fp8.add(module)
    total = torch.tensor(
        [sum(map(_stored_bytes, parameters)) for parameters in of_module.values()],
        dtype=torch.int64,
    )
    dist.all_reduce(total)
    modules = []
    for (name, parameters), whole in zip(of_module.items(), total.tolist(), strict=True):
        weight = max(parameters, key=lambda parameter: parameter.ndim)
        multiplied_in = "fp8" if name in in_fp8 else compute
        modules.append(
            FrozenModule(
                module=name,
                format=built.formats.get(name, "bf16"),
                shape=list(weight.shape),
                bytes=whole,
                multiplied_in=multiplied_in if weight.ndim > 1 else None,
                relative_error=built.loaded.changed.get(f"{name}.weight", 0.0),
            )
        )
    return modules


def _stored_bytes(parameter: nn.Parameter) -> int:
    local = local_rows(parameter)
    return local.stored_bytes if isinstance(local, RowQuantized) else local.nbytes


def compare_tokens(
    before: Sequence[DataFile], now: Sequence[DataFile], samples: Sequence[TokenSet]
) -> None:
    """Raises DataError if a file has become other tokens than those that the job began with."""
    known = {file.role: file.token_digest for file in before}
    for file, tokens in zip(now, samples, strict=True):
        digest = known.get(file.role)
        if digest is not None and digest != file.token_digest and not tokens.dated:
            raise DataError(
                f"{file.name} has become other tokens since the job began: the base's tokenizer "
                "or chat template, or the "
                "version of transformers or tokenizers, is another one. Put the former back, or "
                "create a new job.",
                code="tokens_changed",
            )


def _data_file(role: Any, file: DataFileRef, samples: TokenSet) -> DataFile:
    return DataFile(
        role=role,
        name=file.name,
        sha256=file.sha256,
        samples=len(samples),
        tokens=int(samples.lengths.sum()),
        targets=int(samples.target_counts.sum()),
        token_digest=samples.digest,
        images=0 if samples.pictures is None else len(samples.pictures),
    )
