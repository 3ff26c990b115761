"""What a job is made of, recorded by its first attempt and checked by the later ones: base, data, storage formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ft_service.errors import SpecError
from ft_service.provenance import ORIGINS, Base, DataFile, FileDigest, Layer, Origins, base_files, base_of
from ft_service.rundir import RunDir
from ft_service.spec import DataFileRef, JobSpec
from workers.data.batches import Tokens
from workers.model.build import BuiltModel
from workers.model.load import plain_name
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import VERSIONS


def record(run: RunDir, spec: JobSpec, built: BuiltModel, train: Sequence[Tokens], valid: Sequence[Tokens]) -> None:
    """Write origins.json, or compare with it. Called by all ranks together, on the sharded and loaded model.

    Raises SpecError on all ranks if the base is not the one that the first attempt trained on.
    """
    base = identify(spec)
    layers = stored_layers(built, spec.precision.compute)
    before = run.read(ORIGINS, Origins)
    if before is not None and before.base.digest != base.digest:
        changed = sorted(
            n for n in base.files.keys() | before.base.files.keys() if base.files.get(n) != before.base.files.get(n)
        )
        raise SpecError(
            f"The base {spec.model.name} has changed since the job began ({', '.join(changed)}): its checkpoints belong to "
            "the former base. Put that back, or create a new job.",
            param="model",
            code="base_changed",
        )
    data = [_data_file("training", spec.training_data, train)]
    if spec.validation_data is not None:
        data.append(_data_file("validation", spec.validation_data, valid))
    if dist.get_rank() == 0:
        formats = {layer.format for layer in layers}
        quantiser = {name: version for name, version in VERSIONS.items() if name in formats}
        run.write_if_absent(ORIGINS, Origins(base=base, data=data, frozen_linear_layers=layers, quantiser=quantiser))


def identify(spec: JobSpec) -> Base:
    """The base by the contents of its files, which the ranks share out among themselves to read."""
    folder, rank, world = Path(spec.model.path), dist.get_rank(), dist.get_world_size()
    mine = {path.name: FileDigest.of(path) for path in base_files(folder)[rank::world]}
    everyone: list[dict[str, FileDigest]] = [{} for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    return base_of(spec.model.name, folder, {name: found for files in everyone for name, found in files.items()})


def stored_layers(built: BuiltModel, compute: str) -> list[Layer]:
    """Every linear layer of the base with its format, the bytes that takes over all ranks, and its error.

    `compute`: what those multiply in that are dequantised, or not quantised.
    """
    found: list[tuple[str, Any, Any, int]] = []
    base: Any = built.peft_model.get_base_model()
    modules = {plain_name(name): module for name, module in base.named_modules()}
    for name in built.formats:
        module = getattr(modules[name], "base_layer", modules[name])
        weight = module.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        found.append((name, module, weight, local.stored_bytes if isinstance(local, RowQuantized) else local.nbytes))
    assert built.loaded is not None, "its layers have weights"
    changed = built.loaded.changed
    total = torch.tensor([own for *_, own in found], dtype=torch.int64)
    dist.all_reduce(total)
    return [
        Layer(
            module=name,
            format=built.formats[name],
            shape=list(weight.shape),
            bytes=whole,
            multiplied_in="fp8" if getattr(module, "in_fp8", False) else compute,
            relative_error=changed.get(f"{name}.weight", 0.0),
        )
        for (name, module, weight, _), whole in zip(found, total.tolist(), strict=True)
    ]


def _data_file(role: Any, file: DataFileRef, samples: Sequence[Tokens]) -> DataFile:
    return DataFile(
        role=role,
        name=file.name,
        sha256=file.sha256,
        samples=len(samples),
        tokens=sum(len(sample.ids) for sample in samples),
        targets=sum(sample.target_count for sample in samples),
    )
