"""Loading of weights: every rank reads its own rows of every tensor from safetensors and quantises
them.

A row's quantised parts depend on that row alone, so quantising a shard equals sharding the
quantised whole, and a rank never holds more than its part and a few rows. Quantised weights are
stored in a cache, from which the next job on the same base reads them without opening the base's
own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ft_service.bases.adapter_names import is_lora
from ft_service.bases.cache_folder import Cache
from ft_service.errors import SpecError
from workers.base.base_tensors import Safetensors
from workers.base.cached_base import BaseCache
from workers.base.frozen_weights import (
    Deviation,
    FrozenWeight,
    Loaded,
    Place,
    fill,
    initial_adapter,
    is_held_alike,
    keep_original,
    with_shard,
)
from workers.base.parameter_sources import NamedBase, load_buffers
from workers.base.quantized_rows import StoredBase
from workers.base.rank_objects import from_all
from workers.layers.linear import LoraLinear
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import QUANTIZED


def own_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return a rank's rows [start, end) under FSDP2: equal chunks of ceil(rows / world), the last
    ones short or empty.
    """
    height = -(-rows // world)
    return min(rank * height, rows), min((rank + 1) * height, rows)


def rows_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the rows [start, end) of a parameter that this rank holds; all rows if it is not
    sharded.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    mesh = parameter.device_mesh
    return own_rows(
        parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    )


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    seed: int,
    compute_dtype: torch.dtype,
    device: torch.device,
    offload: bool = False,
    cache: Cache | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Loaded:
    """Replace every parameter on meta by this rank's part: the base from `folder`, adapters from
    the seed.

    Works on sharded (DTensor) and on unsharded models. `device`: where the model computes; with
    `offload`, shards (and only shards) are put into the host's memory. `compute_dtype`: dtype of
    plain frozen weights when the model is not sharded; a sharded weight keeps its storage dtype and
    is converted when it is gathered. `tell` is called between weights that are read, which may take
    hours. Called by all ranks together. Raises SpecError for tensors that the base does not have,
    or has in an unknown layout, and for tied ones that differ in its files.
    """
    weights: dict[str, FrozenWeight] = {}
    for name, parameter, places in _owners(model):
        if parameter.requires_grad and is_lora(name):
            start, end = rows_of(parameter)
            first = initial_adapter(plain_name(name), tuple(parameter.shape), seed)
            place = _place(parameter, device, offload)
            # A view would keep the whole.
            _replace(parameter, first[start:end].to(place, copy=True), places)
        else:
            weights[base_tensor_name(name)] = FrozenWeight(parameter, places, rows_of(parameter))
    for weight in weights.values():
        weight.allocate(compute_dtype, _place(weight.parameter, device, offload))
    with Safetensors(folder) as files:
        base = StoredBase.open(files, folder)
        if _has_buffers(model):
            load_buffers(
                model,
                NamedBase(model, base, base_tensor_name),
                base_tensor_name,
                device,
                compute_dtype,
            )
        loaded = _load_base(model, weights, Path(folder), base, cache, tell)
        loaded = loaded if loaded.cached else replace(loaded, bytes_read=files.bytes_read)
    for name, weight in weights.items():
        if isinstance(weight.storage, RowQuantized):
            weight.storage.name = name
        if weight.trained:
            keep_original(weight.places, weight.storage)
            weight.storage = weight.storage.float()
        _replace(weight.parameter, weight.storage, weight.places)
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.magnitude is not None:
            module.begin_magnitude(compute_dtype, slice(*rows_of(module.magnitude)))
    return loaded


def _place(parameter: nn.Parameter, device: torch.device, offload: bool) -> torch.device:
    """Return the device that holds a parameter's part between its uses."""
    return torch.device("cpu") if offload and isinstance(parameter, DTensor) else device


def plain_name(name: str) -> str:
    """Return a parameter's name without prefixes of wrappers, which depend on the job's options."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def base_tensor_name(name: str) -> str:
    """Return a base parameter's name in the base's files: without PEFT's wrapper and layer."""
    return plain_name(name).removeprefix("base_model.model.").replace(".base_layer.", ".")


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters with their plain names, in a fixed order."""
    return (
        (plain_name(name), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _owners(model: nn.Module) -> list[tuple[str, nn.Parameter, list[Place]]]:
    """Return every parameter once, with its first name and all places where it is registered (tied
    weights have several).
    """
    by_id: dict[int, tuple[str, nn.Parameter, list[Place]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            by_id.setdefault(id(parameter), (full, parameter, []))[2].append((module, name))
    return list(by_id.values())


def _has_buffers(model: nn.Module) -> bool:
    return any(
        module._buffers.keys() - module._non_persistent_buffers_set for module in model.modules()
    )


def _load_base(
    model: nn.Module,
    weights: dict[str, FrozenWeight],
    folder: Path,
    base: StoredBase,
    cache: Cache | None,
    tell: Callable[[], None],
) -> Loaded:
    if cache is None or not _is_work(model, weights, base):
        return _from_files(weights, NamedBase(model, base, base_tensor_name), tell)
    store = BaseCache(cache, folder, weights)
    loaded = store.load(tell)
    if loaded is not None:
        return loaded
    loaded = _from_files(weights, NamedBase(model, base, base_tensor_name), tell)
    store.save(loaded)
    return replace(loaded, notes=store.notes)


def _is_work(model: nn.Module, weights: dict[str, FrozenWeight], base: StoredBase) -> bool:
    """Return whether a weight has to be quantised, so that the result is worth caching.

    Plain bases are not opened for this.
    """
    quantized = {
        name: weight.face
        for name, weight in weights.items()
        if isinstance(weight.face, RowQuantized)
    }
    if not base.declared:
        return bool(quantized)
    named = NamedBase(model, base, base_tensor_name)
    return any(not _is_kept(face, named, name) for name, face in quantized.items())


def _is_kept(face: Tensor, base: NamedBase, name: str) -> bool:
    stored = base.stored(name) if name in base else None
    if stored is None or not stored.exact or stored.format is None:
        return False
    return type(face) is QUANTIZED[stored.format]


def _from_files(
    weights: dict[str, FrozenWeight], base: NamedBase, tell: Callable[[], None]
) -> Loaded:
    check_complete({name: tuple(weight.parameter.shape) for name, weight in weights.items()}, base)
    _check_ties(weights, base)
    deviations: dict[str, Deviation] = {}
    layouts: dict[str, str] = {}
    by_choice: set[str] = set()
    for name, weight in weights.items():
        tell()
        deviation = fill(weight.storage, base, name, *weight.rows, weight.face.dtype)
        stored = base.stored(name)
        if deviation is not None:
            deviations[name] = deviation
        if stored is not None:
            layouts[name] = stored.layout
            if stored.exact or not isinstance(weight.storage, RowQuantized):
                by_choice.add(name)
    changed = _over_all_ranks({name: deviation.sums() for name, deviation in deviations.items()})
    return Loaded(
        changed=changed,
        requantized={
            name: layout
            for name, layout in layouts.items()
            if name in changed and name not in by_choice
        },
        converted={
            name: layout
            for name, layout in layouts.items()
            if name in changed and name in by_choice
        },
        kept={name: layout for name, layout in layouts.items() if name not in changed},
        cached=False,
        bytes_read=0,  # set by `load`
    )


def _over_all_ranks(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return relative errors of whole weights from every rank's squared norms.

    Replicas cancel out.
    """
    errors: dict[str, float] = {}
    norms: dict[str, float] = {}
    for part in from_all(sums):
        for name, (error, norm) in part.items():
            errors[name] = errors.get(name, 0.0) + error
            norms[name] = norms.get(name, 0.0) + norm
    return {name: (errors[name] / norms[name]) ** 0.5 if norms[name] else 0.0 for name in errors}


def check_complete(shapes: Mapping[str, tuple[int, ...]], base: NamedBase) -> None:
    """Raises SpecError for a parameter that the base's files lack, or hold in another shape.

    `shapes`: by name.
    """
    missing = [name for name in shapes if name not in base]
    if missing:
        raise SpecError(
            f"The base's safetensors lack {len(missing)} tensors that its architecture needs, the "
            f"first: {missing[0]}. "
            "Its layout is not supported.",
            param="model",
        )
    for name, shape in shapes.items():
        if base.shape(name) != shape:
            raise SpecError(
                f"The base's {name} has shape {base.shape(name)}, its config.json says {shape}.",
                param="model",
            )


def _check_ties(weights: Mapping[str, FrozenWeight], base: NamedBase) -> None:
    """Raises SpecError, on all ranks, for a tied weight of which the base's files hold several
    different ones: transformers does not tie them then. Values decide, of which a description of
    the base knows nothing.
    """
    for name, (first, *others) in base.copies.items():
        for other in others:
            if not all(from_all(is_held_alike(weights[name], base, first, other))):
                raise SpecError(
                    f"The base's config.json ties {other} to {first}, but its files hold two "
                    "different ones: set "
                    "tie_word_embeddings to false in config.json.",
                    param="model",
                )


def _replace(parameter: nn.Parameter, local: Tensor, places: list[Place]) -> None:
    if isinstance(parameter, DTensor):
        local = with_shard(parameter, local)
    loaded = nn.Parameter(local, requires_grad=parameter.requires_grad)
    for module, name in places:
        module._parameters[name] = loaded
