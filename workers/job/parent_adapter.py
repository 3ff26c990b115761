"""A job that continues from a tuned model: training starts from that model's adapter; everything
else is the job's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ft_service.bases.adapter_names import AdapterNames, peft_name
from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import MANIFEST, Manifest
from ft_service.spec import AdapterRef
from workers.base.load import rows_of
from workers.job.reread_adapter import WEIGHTS
from workers.quant.local_rows import local_rows


def adopt(parameters: Mapping[str, nn.Parameter], parent: AdapterRef) -> Manifest:
    """Fill a job's adapters, sharded or not, with the parent's values, and return the parent's
    manifest.

    `parameters`: by their plain names.

    Every rank reads its own rows. Raises SpecError if the parent is absent, differs from its
    manifest, or has another shape than the job's adapter.
    """
    manifest = intact_manifest(parent)
    folder = Path(parent.path)
    wanted = {peft_name(name): parameter for name, parameter in parameters.items()}
    with safe_open(folder / WEIGHTS, framework="pt") as file, torch.no_grad():
        names = AdapterNames.of_file(file.metadata())
        wanted = {names.in_file(name): parameter for name, parameter in wanted.items()}
        _check_shapes(parent, wanted, file, names)
        for name, parameter in wanted.items():
            start, end = rows_of(parameter)
            local = local_rows(parameter)
            if start < end:
                local.copy_(file.get_slice(name)[start:end])
    return manifest


def intact_manifest(adapter: AdapterRef, param: str = "model") -> Manifest:
    """The manifest of another job's adapter, whose weights are what it says.

    `param`: the option that names it. Raises SpecError if it is absent or damaged.
    """
    folder = Path(adapter.path)
    manifest = RunDir(folder).read(MANIFEST, Manifest)
    if manifest is None or not (folder / WEIGHTS).is_file():
        raise SpecError(
            f"The adapter of {adapter.name} is gone from {folder}.",
            param=param,
            code="model_not_found",
        )
    if FileDigest.of(folder / WEIGHTS) != manifest.files.get(WEIGHTS):
        message = (
            f"The adapter of {adapter.name} is damaged: {folder / WEIGHTS} is not what its "
            "manifest says."
        )
        raise SpecError(message, param=param, code="adapter_damaged")
    return manifest


def _check_shapes(
    parent: AdapterRef, wanted: dict[str, nn.Parameter], file: Any, names: AdapterNames
) -> None:
    ours = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    theirs = {
        name: tuple(file.get_slice(name).get_shape())
        for name in file.keys()  # noqa: SIM118
        if name not in names.tied
    }
    differing = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    if differing:
        name = differing[0]
        raise SpecError(
            f"The adapter of {parent.name} has another shape than this job's: {name} is "
            f"{theirs.get(name, 'not in it')} there "
            f"and {ours.get(name, 'not in it')} here; {len(differing)} matrices differ.",
            param="model",
        )
