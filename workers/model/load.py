"""Weights: every rank reads its own rows of every tensor from safetensors and quantises them itself.

A row's quantised parts depend on that row alone, so quantising a shard equals sharding the quantised whole; no rank ever
holds more than its rows of one tensor beyond what it keeps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ft_service.errors import SpecError
from workers.model.names import NamedTensors, by_parameter, load_buffers
from workers.quant.rowwise import RowQuantized


class Safetensors:
    """The tensors of a Hugging Face folder, one file or several, opened lazily and read by rows."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files = _file_of_each_tensor(self._folder)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def rows(self, name: str, start: int, end: int, index: int | None = None) -> Tensor:
        """Rows [start, end) of a tensor, in its own dtype; `index`: of that matrix of a stack [matrices, rows, cols]."""
        source = self._handle(name).get_slice(name)
        if start >= end:
            return torch.empty(0, *source.get_shape()[1 if index is None else 2 :])
        return source[start:end] if index is None else source[index, start:end]

    def whole(self, name: str) -> Tensor:
        return self._handle(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: BF16, F32, …"""
        return self._handle(name).get_slice(name).get_dtype()

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file]


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if not (folder / "model.safetensors").is_file():
        raise SpecError(f"{folder} has neither model.safetensors nor model.safetensors.index.json.", param="model")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def own_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The rows [start, end) that FSDP2 gives a rank: equal chunks of ceil(rows / world), the last ones short or empty."""
    height = -(-rows // world)
    return min(rank * height, rows), min((rank + 1) * height, rows)


def load(model: nn.Module, folder: str | Path, *, seed: int, compute_dtype: torch.dtype, device: torch.device) -> None:
    """Replace every parameter on meta by this rank's part: the base from `folder`, adapters from the seed.

    Works on sharded (DTensor) and on unsharded models. `compute_dtype`: of plain frozen weights when nothing is sharded; a
    sharded one keeps its storage dtype and is converted as it is gathered. Raises SpecError for tensors that the checkpoint
    does not hold.
    """
    owners = _owners(model)
    with Safetensors(folder) as files:
        checkpoint = by_parameter(model, files, checkpoint_name)
        load_buffers(model, checkpoint, checkpoint_name, device)
        _check_complete(owners, checkpoint)
        for name, parameter, places in owners:
            if parameter.requires_grad:
                local = _shard(parameter, initial_adapter(name, tuple(parameter.shape), seed).__getitem__, device)
            else:
                local = _read(parameter, checkpoint, checkpoint_name(name), compute_dtype, device)
            _replace(parameter, local, places)


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The first value of an adapter matrix [rows, cols], fp32: A from Kaiming uniform as PEFT does, B zero.

    Drawn whole from (seed, name), so that it depends neither on the world size nor on what was drawn before.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{plain_name(name)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    full = torch.empty(shape)
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
    return full


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add: the same whatever the job is run with."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def checkpoint_name(name: str) -> str:
    """A base parameter's name in the checkpoint: without PEFT's wrapper and layer."""
    return plain_name(name).removeprefix("base_model.model.").replace(".base_layer.", ".")


Place = tuple[nn.Module, str]


def _owners(model: nn.Module) -> list[tuple[str, nn.Parameter, list[Place]]]:
    """Every parameter once, with its first name and all places where it is registered (tied weights have several)."""
    found: dict[int, tuple[str, nn.Parameter, list[Place]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            found.setdefault(id(parameter), (full, parameter, []))[2].append((module, name))
    return list(found.values())


def _check_complete(owners: list[tuple[str, nn.Parameter, list[Place]]], checkpoint: NamedTensors) -> None:
    frozen = [(checkpoint_name(name), parameter) for name, parameter, _ in owners if not parameter.requires_grad]
    missing = [name for name, _ in frozen if name not in checkpoint]
    if missing:
        raise SpecError(
            f"The base's safetensors lack {len(missing)} tensors that its architecture needs, the first: {missing[0]}. "
            "Its layout is not supported.",
            param="model",
        )
    for name, parameter in frozen:
        if checkpoint.shape(name) != tuple(parameter.shape):
            raise SpecError(
                f"The base's {name} has shape {checkpoint.shape(name)}, its config.json says {tuple(parameter.shape)}.",
                param="model",
            )


def _read(
    parameter: nn.Parameter, checkpoint: NamedTensors, name: str, compute_dtype: torch.dtype, device: torch.device
) -> Tensor:
    face = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
    rows = _shard(parameter, lambda part: checkpoint.rows(name, part.start, part.stop), device)
    if isinstance(face, RowQuantized):
        return type(face).quantize(rows.to(face.dtype))
    return rows.to(parameter.dtype if isinstance(parameter, DTensor) else compute_dtype)


def _shard(parameter: nn.Parameter, rows: Any, device: torch.device) -> Tensor:
    """This rank's rows, from `rows(slice)`."""
    start, end = 0, parameter.shape[0]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        start, end = own_rows(end, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    return rows(slice(start, end)).to(device, copy=True)  # a view would keep the whole tensor, or its file, in memory


def _replace(parameter: nn.Parameter, local: Tensor, places: list[Place]) -> None:
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
            run_check=False,
        )
    loaded = nn.Parameter(local, requires_grad=parameter.requires_grad)
    for module, name in places:
        module._parameters[name] = loaded


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters with their plain names, in a fixed order."""
    return ((plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
