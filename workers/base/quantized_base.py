"""Quantised base in the cache: the parts of every frozen weight as plain tensors, in files by
ranges of rows.

    rows-00000-of-00002.safetensors   tensors `<weight>:<part>`, written by the rank that holds
    these rows index.json                        row ranges and digests of the files, and what
    quantising changed

Any world size can read it: a rank's rows are put together from whichever files hold them. The key
of an entry is a digest of what decides its contents: the base, the storage of every weight, the
quantiser and the kind of device that it ran on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import bitsandbytes
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from ft_service.bases.base_files import open_base_file, read_bytes
from ft_service.bases.cache_folder import INDEX
from ft_service.bases.safetensors_folder import header_of, weight_files
from ft_service.rundir.directory import sha256_of
from ft_service.rundir.file_digest import FileDigest, NamedFile
from workers.base.base_tensors import single_file
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import VERSIONS

SAMPLES = 256
SAMPLE_BYTES = 4096


class CacheFile(NamedFile):
    """One file of an entry. `rows`: weight → its first row and the row after its last."""

    rows: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class QuantizedIndex:
    """`index.json`."""

    files: list[CacheFile]
    changed: dict[str, float] = field(default_factory=dict)
    """Weight → relative error of what is stored, for those that storing changed."""
    requantized: dict[str, str] = field(default_factory=dict)
    """Weight → layout that the base held it quantised in, for those that had to be quantised
    again.
    """
    converted: dict[str, str] = field(default_factory=dict)
    """The same for those that the job stores otherwise though a format holds them as they are, or
    that it stores plain.
    """
    kept: dict[str, str] = field(default_factory=dict)
    """The same for those whose parts are the base's own."""

    def missing(self, wanted: Mapping[str, tuple[int, int]]) -> list[str]:
        """Weights of which some wanted rows are in no file."""
        return [
            name
            for name, span in wanted.items()
            if sum(_overlap(f.rows.get(name), span) for f in self.files) < _height(span)
        ]


OF_WEIGHTS = ("changed", "requantized", "converted", "kept")
"""What an index tells of weights, and `Loaded` too."""


def write_entry_index(folder: Path, index: QuantizedIndex) -> None:
    files = [file.model_dump() for file in index.files]
    (folder / INDEX).write_text(
        json.dumps({"files": files, **{name: getattr(index, name) for name in OF_WEIGHTS}}),
        encoding="utf-8",
    )


def read_entry_index(folder: Path) -> QuantizedIndex:
    """An entry's index. Raises OSError, ValueError, KeyError or TypeError if it is absent or
    malformed.
    """
    body = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    try:
        files = [CacheFile.model_validate(file) for file in body["files"]]
    except ValidationError as error:
        raise ValueError(
            f"{error.error_count()} values of its files are not as they should be"
        ) from None
    return QuantizedIndex(files, *(dict(body[name]) for name in OF_WEIGHTS))


def entry_key(base: str, storage: Mapping[str, str], device: torch.device) -> str:
    """The key of an entry. `base`: from `base_digest`; `storage`: weight → its format and shape."""
    decides = {
        "base": base,
        "storage": dict(sorted(storage.items())),
        "quantiser": [VERSIONS, bitsandbytes.__version__, device.type],
    }
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def base_digest(folder: str | Path) -> str:
    """Identifies a base without reading all of it: hashing 16 GB takes longer than loading them.

    It covers config.json, and of each weight file name, size, time of modification, header (names,
    shapes, dtypes, offsets) and 256 samples of 4 KiB across its data. Changed weights change it, by
    their time or by their samples; so does a copy that does not keep times, which costs quantising
    once more. Only an edit of a few rows that also restores the file's time goes unseen.
    """
    folder = Path(folder)
    digest = hashlib.sha256(read_bytes(folder / "config.json"))
    for path in weight_files(folder):
        header = header_of(path).end
        status = path.stat()
        digest.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
        with open_base_file(path) as file:
            digest.update(file.read(header)[8:])
            step = max(SAMPLE_BYTES, (status.st_size - header) // SAMPLES)
            for offset in range(header, status.st_size, step):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.hexdigest()


def storage_key(face: Tensor, shape: Sequence[int], *, tied: bool = False) -> str:
    """A weight's storage as part of a key.

    `face`: any part of the weight; `shape`: of the whole weight; `tied`: whether it has several
    places in the model.
    """
    # "exact": entries that say "plain" of what is kept in fp32 were written when a job of one rank
    # rounded it to bf16. "tied": those that say "plain" of a tied weight were written when files
    # with two different ones were taken.
    plain = "exact" if face.dtype == torch.float32 else "tied" if tied else "plain"
    kind = type(face).__name__ if isinstance(face, RowQuantized) else plain
    return f"{kind} {str(face.dtype).removeprefix('torch.')} {list(shape)}"


def parts_of(weight: Tensor, face: torch.dtype) -> dict[str, Tensor]:
    """The plain tensors that hold a weight's rows.

    `face`: has the dtype in which a plain weight is cached.
    """
    if isinstance(weight, RowQuantized):
        return dict(zip(weight.PARTS, weight.parts, strict=True))
    return {"values": weight.detach().to(face)}


def write_rows(
    folder: Path,
    name: str,
    weights: Mapping[str, tuple[Tensor, torch.dtype]],
    rows: Mapping[str, tuple[int, int]],
) -> CacheFile:
    """Write this rank's rows of every weight (tensor, dtype of its face).

    Raises OSError if it cannot.
    """
    tensors = {
        f"{weight}:{part}": tensor.cpu().contiguous()
        for weight, (held, face) in weights.items()
        for part, tensor in parts_of(held, face).items()
    }
    path = folder / name
    try:
        save_file(tensors, path)
    except Exception as error:  # safetensors has its own kind for a full disk
        raise OSError(str(error)) from error
    return CacheFile(name=name, rows=dict(rows), **FileDigest.of(path).model_dump())


def faults(folder: Path, files: Iterable[CacheFile]) -> list[str]:
    """What is wrong with files of an entry; empty: nothing."""
    problems = []
    for file in files:
        path = folder / file.name
        try:
            if fault := file.fault(path.stat().st_size, partial(sha256_of, path)):
                problems.append(f"{file.name} {fault}")
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror}")
    return problems


def read_rows(
    folder: Path,
    files: Sequence[CacheFile],
    targets: Mapping[str, tuple[Tensor, tuple[int, int]]],
    tell: Callable[[], None],
) -> int:
    """Fill every weight's storage with its rows [start, end); the bytes read.

    The rows must be in the files. `tell` is called between weights.
    """
    read = 0
    for file in files:
        mine = {n: target for n, target in targets.items() if _overlap(file.rows.get(n), target[1])}
        if not mine:
            continue
        with single_file(folder / file.name) as source:
            for name, (storage, (start, end)) in mine.items():
                tell()
                first, last = file.rows[name]
                low = max(start, first)
                high = min(end, last)
                for part, target in _targets(storage):
                    target[low - start : high - start].copy_(
                        source.rows(f"{name}:{part}", low - first, high - first)
                    )
            read += source.bytes_read
    return read


def _targets(storage: Tensor) -> Iterable[tuple[str, Tensor]]:
    if isinstance(storage, RowQuantized):
        return zip(storage.PARTS, storage.parts, strict=True)
    return [("values", storage)]


def _overlap(held: tuple[int, int] | None, wanted: tuple[int, int]) -> int:
    return 0 if held is None else max(0, min(held[1], wanted[1]) - max(held[0], wanted[0]))


def _height(span: tuple[int, int]) -> int:
    return span[1] - span[0]
