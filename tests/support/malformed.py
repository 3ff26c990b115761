"""Safetensors files that are none: what writers got wrong, what copies lost, and what attackers
send.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

Entries = dict[str, Any]

LARGE = 10**4000
"""As long as Python lets a number be in JSON, nearly."""


def split(content: bytes) -> tuple[Entries, bytes]:
    """A file's tensors, as its header lists them, and its data."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, content[8 + length :]


def join(header: Entries | bytes, data: bytes, length: int | None = None) -> bytes:
    """`length`: what the first 8 bytes say, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _of_entry(field: str, value: Any) -> Callable[[Entries, bytes], bytes]:
    """One tensor's field has another value, or (None) is missing."""

    def change(header: Entries, data: bytes) -> bytes:
        entry = {**header[sorted(header)[0]], field: value}
        if value is None:
            del entry[field]
        return join({**header, sorted(header)[0]: entry}, data)

    return change


def _of_all(change: Callable[[Entries], Any]) -> Callable[[Entries, bytes], bytes]:
    def changed(header: Entries, data: bytes) -> bytes:
        return join(json.dumps(change(header)).encode(), data)

    return changed


def _of_text(change: Callable[[bytes], bytes]) -> Callable[[Entries, bytes], bytes]:
    return lambda header, data: join(change(json.dumps(header).encode()), data)


def _of_length(length: int) -> Callable[[Entries, bytes], bytes]:
    return lambda header, data: join(header, data, length)


def _swapped(header: Entries) -> Entries:
    """The first two tensors of different size have each other's places."""
    first, *others = sorted(header)
    other = next(name for name in others if header[name]["shape"] != header[first]["shape"])
    places = {name: header[name]["data_offsets"] for name in (first, other)}
    return {
        **header,
        first: {**header[first], "data_offsets": places[other]},
        other: {**header[other], "data_offsets": places[first]},
    }


def _overlapping(header: Entries) -> Entries:
    """Two tensors of one shape lie in one place."""
    first, *others = sorted(header)
    other = next(name for name in others if header[name]["shape"] == header[first]["shape"])
    return {**header, other: header[first]}


def _without_first(header: Entries) -> Entries:
    """A hole where it was, in a header that is fine otherwise."""
    first = min(header, key=lambda name: header[name]["data_offsets"][0])
    return {name: entry for name, entry in header.items() if name != first}


_SIZES: list[Any] = [
    -1,
    [-1],
    [-64, -64],
    [64, -64],
    [64.0, 64.0],
    ["64", "64"],
    [True, True],
    [[64], [64]],
    {},
    "64",
    None,
]
_SIZES += [
    [],
    [0],
    [0, 0],
    [64],
    [63, 64],
    [64, 65],
    [2**63, 2],
    [2**62, 2**62],
    [2**33, 2**33, 0],
    [LARGE],
    [LARGE] * 3,
]
_OFFSETS: list[Any] = [
    [],
    [0],
    [0, 1, 2],
    [-8, 0],
    [-8, 8],
    [8, 0],
    [0, -1],
    [0.0, 8.0],
    ["0", "8"],
    [None, None],
    {},
    0,
    None,
]
_OFFSETS += [
    [0, 2**64],
    [2**63, 2**64],
    [2**64 - 8, 2**64],
    [LARGE, LARGE + 8],
    [0, LARGE],
    [1, 2],
    [True, 9],
    [[0], [8]],
]
_DTYPES: list[Any] = [
    "",
    "bf16",
    "torch.bfloat16",
    "F32",
    "F4",
    "I64",
    "NF4",
    "BF16\0",
    16,
    ["BF16"],
    {"BF16": 1},
    None,
    True,
]
_LENGTHS = [
    0,
    1,
    2,
    7,
    100_000_000,
    100_000_001,
    2**31,
    2**32,
    2**62,
    2**63 - 8,
    2**63,
    2**64 - 8,
    2**64 - 1,
]
_DEEP = 200_000

CHANGES: dict[str, Callable[[Entries, bytes], bytes]] = {
    **{f"shape {str(value)[:40]}": _of_entry("shape", value) for value in _SIZES},
    **{f"offsets {str(value)[:40]}": _of_entry("data_offsets", value) for value in _OFFSETS},
    **{f"dtype {value}": _of_entry("dtype", value) for value in _DTYPES},
    **{f"length {value}": _of_length(value) for value in _LENGTHS},
    **{
        f"metadata {value}": _of_all(lambda header, value=value: {"__metadata__": value, **header})
        for value in (1, "pt", [], {"format": 1}, {"format": None}, {"format": ["pt"]})
    },
    **{
        f"entry {value}": _of_all(lambda header, value=value: {**header, sorted(header)[0]: value})
        for value in (None, 1, "BF16", [], {}, ["BF16", [64], [0, 128]])
    },
    **{
        f"document {value}": lambda _, data, value=value: join(value, data)
        for value in (
            b"[]",
            b"1",
            b"null",
            b'"x"',
            b"{",
            b"{]",
            b"nonsense",
            b"{}",
            b"{} {}",
            b"\xff" * 64,
            b"\0" * 64,
        )
    },
    "deep lists": lambda _, data: join(b"[" * _DEEP, data),
    "deep objects": lambda _, data: join(b'{"a":' * _DEEP, data),
    "deep entry": lambda _, data: join(b'{"a":' + b"[" * _DEEP + b"]" * _DEEP + b"}", data),
    "UTF-16": _of_text(lambda text: text.decode().encode("utf-16")),
    "Latin-1": _of_text(lambda text: text.replace(b"model", b"mod\xe9l", 1)),
    "byte order mark": _of_text(lambda text: b"\xef\xbb\xbf" + text),
    "NUL behind": _of_text(lambda text: text + b"\0"),
    "NaN": _of_text(lambda text: text.replace(b"[64]", b"[NaN]", 1)),
    "Infinity": _of_text(lambda text: text.replace(b"[64]", b"[Infinity]", 1)),
    "too long a number": _of_text(lambda text: text.replace(b"[64]", b"[" + b"9" * 5000 + b"]", 1)),
    "name twice": _of_text(lambda text: text[:-1] + b"," + text[1:]),
    "field twice": _of_text(
        lambda text: text.replace(b'"dtype": "BF16"', b'"dtype": "BF16", "dtype": "BF16"', 1)
    ),
    "NUL in a name": _of_text(lambda text: text.replace(b"model.norm", b"model.\\u0000norm", 1)),
    "half a surrogate": _of_text(lambda text: text.replace(b"model.norm", b"model.\\ud800norm", 1)),
    "places swapped": _of_all(_swapped),
    "one place for two": _of_all(_overlapping),
    "a hole": _of_all(_without_first),
    "bytes behind": lambda header, data: join(header, data + b"\0"),
    "bytes missing": lambda header, data: join(header, data[:-1]),
    "no data": lambda header, data: join(header, b""),
    "no header": lambda header, data: data,
    "empty": lambda header, data: b"",
    "seven bytes": lambda header, data: b"\0" * 7,
    "eight bytes": lambda header, data: b"\0" * 8,
}
"""What is done to a file with a tensor of shape [64], in words → header and data to the malformed
file.
"""
