"""The frozen weights of a rank while they are loaded, and what loading them did."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ft_service.bases.adapter_names import MAGNITUDE
from workers.base.parameter_sources import NamedBase
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import QUANTIZED

Level = Literal["info", "warn"]
Place = tuple[nn.Module, str]
"""A module and the name under which it registers a parameter."""


@dataclass
class FrozenWeight:
    """A parameter on meta with the base's values, and what takes its place on this rank."""

    parameter: nn.Parameter
    places: list[Place]
    rows: tuple[int, int]
    """This rank's rows [start, end)."""
    storage: Tensor = field(default_factory=lambda: torch.empty(0))
    """Where they go, once allocated."""

    @property
    def trained(self) -> bool:
        """Whether it is not frozen, but an fp32 master that starts as what a frozen one would
        hold.
        """
        return self.parameter.requires_grad

    @property
    def face(self) -> Tensor:
        """This rank's part on meta. The dtype of a plain one is that in which it is cached."""
        local = (
            self.parameter.to_local()
            if isinstance(self.parameter, DTensor)
            else self.parameter.data
        )
        return local.bfloat16() if self.trained else local

    def allocate(self, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Make the storage. `compute_dtype`: the dtype of plain weights that are not sharded, and
        of the faces of quantised ones, as of what is gathered; and of vectors: architectures round
        what they give their last norm to its dtype, gathered or not. What the model keeps in fp32
        stays so.
        """
        face = self.face
        shape = (self.rows[1] - self.rows[0], *self.parameter.shape[1:])
        kept = face.dtype == torch.float32 or (
            isinstance(self.parameter, DTensor) and len(shape) > 1
        )
        dtype = face.dtype if kept else compute_dtype
        if isinstance(face, RowQuantized):
            self.storage = type(face).empty(shape, dtype, device)
        else:
            self.storage = torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Loaded:
    """What loading did. All but the bytes are the same on every rank."""

    changed: Mapping[str, float]
    """Base parameter → ‖stored - read‖ / ‖read‖ of the whole of it, for those that storing
    changed.
    """
    requantized: Mapping[str, str]
    """Base parameter → the layout that the base held it quantised in, for those that had to be
    quantised again.
    """
    converted: Mapping[str, str]
    """The same for those that the job stores otherwise though a format holds them as they are, or
    that it stores plain.
    """
    kept: Mapping[str, str]
    """The same for those that are stored as the base held them."""
    cached: bool
    """Whether the cache served it."""
    bytes_read: int
    """Bytes that this rank read, from the base or from the cache."""
    notes: Sequence[tuple[Level, str]] = ()
    """(level, text): what happened in the cache."""

    def messages(self) -> Iterator[tuple[Level, str]]:
        """Events for the job's user: (level, text)."""
        yield from self.notes
        for layout in sorted(set(self.kept.values())):
            count = list(self.kept.values()).count(layout)
            yield "info", f"{count} weights of the base came as {layout} and are kept exactly."
        for layout in sorted(set(self.converted.values())):
            count, mean, worst = self._change(self.converted, layout)
            yield (
                "info",
                f"{count} weights of the base came as {layout} and are stored as the job says, "
                "from exactly the values that "
                f"they stand for. Rounding changed them by {mean:.2%} of their norm on average, "
                f"by {worst:.2%} at most.",
            )
        for layout in sorted(set(self.requantized.values())):
            count, mean, worst = self._change(self.requantized, layout)
            yield (
                "warn",
                f"{count} weights of the base came as {layout}, which no format here can hold as "
                "it is, and were quantised "
                f"again. That changed them by {mean:.2%} of their norm on average, by {worst:.2%} "
                "at most.",
            )

    def _change(self, weights: Mapping[str, str], layout: str) -> tuple[int, float, float]:
        """How many weights have a layout, and their mean and largest change."""
        errors = [
            self.changed[name] for name, its_layout in weights.items() if its_layout == layout
        ]
        return len(errors), sum(errors) / len(errors), max(errors)


CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Elements quantised at a time: the kernels take about 40 bytes each meanwhile, whatever the size
of the tensor.
"""


_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's function; other C libraries have none."""


@dataclass
class Deviation:
    """Squared norms over some rows of a weight: of its values, and of what storing them changed."""

    changed: Tensor | float = 0.0
    values: Tensor | float = 0.0

    def add(self, stored: Tensor, values: Tensor) -> None:
        values = values.float()
        self.changed = self.changed + (stored.float() - values).square_().sum(dtype=torch.float64)
        self.values = self.values + values.square().sum(dtype=torch.float64)

    def sums(self) -> tuple[float, float]:
        return float(self.changed), float(self.values)


def fill(
    storage: Tensor, base: NamedBase, name: str, start: int, end: int, dtype: torch.dtype
) -> Deviation | None:
    """Put rows [start, end) of `name` into `storage` [end - start, ..], on its device.

    Returns None if no value changed.

    `dtype`: what weights are rounded to, also before they are quantised, whatever wider dtype
    `storage` may have.
    """
    if not isinstance(storage, RowQuantized):
        return _fill_plain(storage, base, name, start, end, dtype)
    stored = base.stored(name)
    if (
        stored is not None
        and stored.exact
        and stored.format is not None
        and type(storage) is QUANTIZED[stored.format]
    ):
        for low, high in _chunks(start, end, storage):
            _put(storage.parts, low - start, stored.parts(low, high))
        return None
    deviation = Deviation()
    for low, high in _chunks(start, end, storage):
        values = base.rows(name, low, high).to(storage.device)
        # A plain base is rounded to the dtype first, as weights that are not quantised are.
        quantized = type(storage).quantize(values if stored is not None else values.to(dtype))
        _put(storage.parts, low - start, quantized.parts)
        deviation.add(quantized.dequantize(torch.float32), values)
        if storage.device.type == "cpu":
            _trim_heap()
    return deviation


def is_held_alike(weight: FrozenWeight, base: NamedBase, one: str, other: str) -> bool:
    """Return whether the base's files hold, under these two of its names, the same values for this
    rank's rows of a weight, once both are rounded to what it is stored in.
    """
    dtype = weight.face.dtype
    return base.shape(one) == base.shape(other) and all(
        torch.equal(base.rows(one, low, high).to(dtype), base.rows(other, low, high).to(dtype))
        for low, high in _chunks(*weight.rows, weight.storage)
    )


def _fill_plain(
    storage: Tensor, base: NamedBase, name: str, start: int, end: int, dtype: torch.dtype
) -> Deviation | None:
    deviation: Deviation | None = None
    for low, high in _chunks(start, end, storage):
        values = base.rows(name, low, high)
        rounded = values.to(dtype)
        storage[low - start : high - start].copy_(rounded)
        if torch.promote_types(values.dtype, dtype) != dtype:
            deviation = deviation or Deviation()
            deviation.add(rounded, values)
    return deviation


def _trim_heap() -> None:
    """Return freed host memory to the system: glibc keeps aligned blocks that it does not reuse,
    many times what is in use.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _chunks(start: int, end: int, storage: Tensor) -> Iterator[tuple[int, int]]:
    height = max(1, CHUNK_ELEMENTS[storage.device.type] // max(1, storage.shape[1:].numel()))
    return ((low, min(low + height, end)) for low in range(start, end, height))


def _put(parts: tuple[Tensor, ...], at: int, rows: tuple[Tensor, ...]) -> None:
    for part, some in zip(parts, rows, strict=True):
        part[at : at + some.shape[0]].copy_(some)


def with_shard(tensor: DTensor, shard: Tensor) -> DTensor:
    """A DTensor with another local shard, on whatever device: `DTensor.from_local` would move it to
    the mesh's.
    """
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": shard}
    return DTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


_ORIGINAL = "_ft_original"


def keep_original(places: Sequence[Place], values: Tensor) -> None:
    """Keep on the host this rank's rows of what the base has in place of a parameter that is
    trained whole.
    """
    for module, name in places:
        vars(module).setdefault(_ORIGINAL, {})[name] = values.cpu()


def original_of(module: nn.Module, name: str) -> Tensor:
    """The rows that `keep_original` keeps."""
    return vars(module)[_ORIGINAL][name]


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The first value of an adapter matrix [rows, cols], fp32: A from Kaiming uniform as PEFT does,
    B zero.
    DoRA's magnitude [rows] is zero until its weight is loaded.

    `name`: the plain name. The whole matrix is drawn from (seed, name), so that it depends neither
    on the world size nor on what was drawn before.
    """
    if ".lora_B." in name or f".{MAGNITUDE}." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    full = torch.empty(shape)
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
    return full
