"""Writing a model as sharded safetensors, piece by piece: no file, and no tensor, is ever whole in
memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""dtypes by the names that safetensors writes."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of DTYPES."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Unit = tuple[TensorPlan, ...]
"""Tensors that belong together and stay in one file."""


def in_files(units: Sequence[Unit], limit: int) -> dict[str, list[Unit]]:
    """Which file each unit goes to: in the given order, files of at most `limit` bytes (or of one
    larger unit).
    """
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        own = sum(plan.bytes for plan in unit)
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += own
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def write_index(folder: Path, files: dict[str, list[Unit]]) -> None:
    """Write the index of several files; a single file has none."""
    if len(files) == 1:
        return
    plans = {plan: file for file, units in files.items() for unit in units for plan in unit}
    index = {
        "metadata": {"total_size": sum(plan.bytes for plan in plans)},
        "weight_map": {
            plan.name: plans[plan] for plan in sorted(plans, key=lambda plan: plan.name)
        },
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def write_file(
    path: Path,
    plans: Sequence[TensorPlan],
    pieces: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file.

    `pieces`: consecutive rows of the tensors in the order of `plans`, on the CPU, as many as
    planned. `metadata`: more entries of the file's header.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for plan in plans:
        offsets = [start, start + plan.bytes]
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": offsets,
        }
        start += plan.bytes
    text = json.dumps(header).encode()
    # Tensors begin at a multiple of 8, so that readers can map them.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in pieces:
            file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
        written = file.tell() - 8 - len(text)
    assert written == start, f"{path.name}: {written} bytes of tensors instead of {start}"
