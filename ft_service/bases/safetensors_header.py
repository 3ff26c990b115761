"""The header of a safetensors file: 8 bytes that hold its length, then JSON of that length.

No tensor is read.

Descriptions, `ft verify` and workers take names, dtypes, shapes and offsets of tensors from here.
Files that the safetensors library refuses are refused, so that an accepted file opens there; and
also duplicate or unprintable names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from ft_service.bases.base_files import Limit, open_regular, parse_document, shown

HEADER = Limit(bytes=32 * 2**20, values=4_000_000)
"""The size of a header of 250,000 tensors, below the format's own limit of 100 MB."""
DTYPE_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
"""Name of a dtype in the format → bits of a value."""
_METADATA = "__metadata__"
_MOST_BITS = 2**63


class HeaderError(ValueError):
    """The file is damaged, or no safetensors file. `why`: the fault, and the tensor that has it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path.name}: {why}")
        self.why = why


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. `dtype`: a key of DTYPE_BITS."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset of its first byte in the file."""
    end: int
    """Offset of the byte after its last."""

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    tensors: Mapping[str, TensorEntry]
    """Name → entry, in the header's order."""
    end: int
    """Bytes before the tensors: the header, and the 8 that hold its length."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


def read_header(path: Path) -> Header:
    """Read a header, and check its entries against each other and the file's length.

    Raises HeaderError, OSError.
    """
    with open_regular(path, lambda why: HeaderError(path, why)) as file:
        return header_in(file, path)


def header_in(file: BinaryIO, path: Path) -> Header:
    """`read_header` of a file that is open at its beginning. `path`: for messages and entries."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(HEADER.bytes, size - 8):
        detail = f": that would be {length} bytes long, of the file's {size}" if length else ""
        raise HeaderError(path, f"it does not begin with a safetensors header{detail}")
    text = file.read(length)
    try:
        given = parse_object(text, HEADER, "its header")
        metadata = _metadata(given.pop(_METADATA, None))
        entries = [_entry(name, entry, path, 8 + length) for name, entry in given.items()]
        _check_places(entries, 8 + length, size)
    except ValueError as error:
        raise HeaderError(path, str(error)) from None
    return Header({entry.name: entry for entry in entries}, 8 + length, metadata)


def parse_object(text: bytes, limit: Limit, what: str = "it") -> dict[str, Any]:
    """Parse a strict JSON object: UTF-8, without duplicate names and NaN.

    Raises ValueError that names `what`.
    """
    try:
        return parse_document(text, limit, what, unique=_unique, constant=_refuse_constant)
    except _NameTwiceError as error:
        raise ValueError(f"{what} names {error} twice") from None


class _NameTwiceError(Exception):
    pass


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _NameTwiceError(shown(twice))
    return members


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _metadata(given: object) -> dict[str, str]:
    if given is not None and not (
        isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
    ):
        raise ValueError(f"its {_METADATA} is no mapping of texts to texts")
    return given or {}


def _entry(name: str, given: object, path: Path, data: int) -> TensorEntry:
    """A tensor's entry. `data`: offset of the file's first tensor.

    Raises ValueError naming the tensor.
    """
    what = f"tensor {shown(name)}"
    if not name.isprintable():
        raise ValueError(f"{what} has control characters, or half of a surrogate pair, in its name")
    if not isinstance(given, dict):
        raise ValueError(f"{what} has no dtype, shape and data_offsets")
    dtype = given.get("dtype")
    shape = given.get("shape")
    offsets = given.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"{what} has the dtype {shown(dtype)}, which safetensors does not know")
    if not _are_sizes(shape):
        raise ValueError(
            f"{what} has the shape {shown(shape)}: a list of sizes that are not negative is needed"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{what} has the data_offsets {shown(offsets)}: needed is [begin, end] with 0 <= "
            "begin <= end"
        )
    begin, end = offsets
    bits = _bits(shape, DTYPE_BITS[dtype])
    if bits is None or bits != 8 * (end - begin):
        need = "more than any file holds" if bits is None else f"{bits / 8:.15g}"
        raise ValueError(
            f"{what} has {shown(end - begin)} bytes (data_offsets {shown(offsets)}), but {dtype} "
            f"of shape {shown(shape)} "
            f"takes {need}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, data + begin, data + end)


def _are_sizes(given: object) -> TypeGuard[list[int]]:
    # A bool is no size.
    return isinstance(given, list) and all(type(size) is int and size >= 0 for size in given)


def _bits(shape: Iterable[int], of_value: int) -> int | None:
    """Size of a tensor in bits.

    None: more than any file has, also if a size is 0, since readers multiply in order.
    """
    total = of_value
    empty = False
    for size in shape:
        empty = empty or size == 0
        total *= size or 1
        if total >= _MOST_BITS:
            return None
    return 0 if empty else total


def _check_places(entries: Iterable[TensorEntry], start: int, size: int) -> None:
    """Refuse tensors that do not fill the file without gaps.

    `start`: offset of the first tensor; `size`: bytes of the file.
    """
    place = start
    before = ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start < place:
            raise ValueError(
                f"tensor {shown(entry.name)} begins at byte {entry.start - start} of the data, "
                f"inside {before}, "
                f"which ends at byte {place - start}"
            )
        if entry.start > place:
            raise ValueError(
                f"bytes {place - start} to {shown(entry.start - start)} of the data, before "
                f"tensor {shown(entry.name)}, "
                "belong to no tensor"
            )
        place = entry.end
        before = f"tensor {shown(entry.name)}"
    if place > size:
        raise ValueError(
            f"it is {size} bytes long and should be {shown(place)}: a copy or download was cut "
            "short"
        )
    if place < size:
        raise ValueError(
            f"it is {size} bytes long and should be {place}: what follows belongs to no tensor"
        )
