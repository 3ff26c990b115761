"""GGUF files by llama.cpp's own package: written tensor by tensor, then read again and compared
with what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize
from torch import Tensor

from ft_service.errors import FtError
from workers.exports.gguf_layout import GgufLayout, refusal
from workers.exports.gguf_vocabulary import Vocabulary

Stored = Literal["bf16", "q8_0"]
_BLOCK = 32
"""Columns of Q8_0 that share a scale."""
_FILE_TYPES = {"bf16": LlamaFileType.MOSTLY_BF16, "q8_0": LlamaFileType.MOSTLY_Q8_0}
_QUANTISATION_VERSION = 2


@dataclass(frozen=True)
class Planned:
    """A tensor of a file. `read`: its values, fp32, as llama.cpp has them; called once to write and
    once to compare.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Callable[[], Tensor]


def names_in(layout: GgufLayout) -> Callable[[str], str]:
    """transformers' name of a tensor → GGUF's.

    Raises SpecError for one that the architecture has not.
    """
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == layout.architecture)
    known = get_tensor_name_map(MODEL_ARCH(kind), layout.layers)

    def find(name: str) -> str:
        gguf_name = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise refusal(f"{name} has no place in {layout.architecture} of llama.cpp")
        return gguf_name

    return find


def as_ordered(rows: Tensor, name: str, layout: GgufLayout) -> Tensor:
    """Rows of a tensor (or of an adapter's B) in llama.cpp's order, norms as they multiply."""
    module, _, _ = name.rpartition(".")
    heads = next((count for end, count in layout.heads.items() if module.endswith(end)), None)
    if heads is not None:
        return (
            rows.view(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
            .transpose(1, 2)
            .reshape(rows.shape)
        )
    return rows + 1 if layout.shifted and name.endswith("norm.weight") else rows


def as_stored_there(rows: Tensor, name: str, layout: GgufLayout) -> Tensor:
    """The opposite of `as_ordered`."""
    module, _, _ = name.rpartition(".")
    heads = next((count for end, count in layout.heads.items() if module.endswith(end)), None)
    if heads is not None:
        return (
            rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
            .transpose(1, 2)
            .reshape(rows.shape)
        )
    return rows - 1 if layout.shifted and name.endswith("norm.weight") else rows


def kind_of(shape: tuple[int, ...], stored: Stored) -> GGMLQuantizationType:
    """Vectors stay fp32, as llama.cpp wants them; matrices whose rows are no whole blocks stay
    bf16.
    """
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    whole = stored == "q8_0" and shape[-1] % _BLOCK == 0
    return GGMLQuantizationType.Q8_0 if whole else GGMLQuantizationType.BF16


def write(
    path: Path,
    layout: GgufLayout,
    planned: Iterable[Planned],
    add: Callable[[GGUFWriter], None],
    stored: Stored | None = None,
) -> None:
    """Write a file; one tensor is in memory at a time.

    `add`: the rest of the metadata. `stored`: None for an adapter.
    """
    tensors = list(planned)
    writer = GGUFWriter(path, layout.architecture)
    try:
        if stored is not None:
            writer.add_file_type(_FILE_TYPES[stored])
            writer.add_quantization_version(_QUANTISATION_VERSION)
        add(writer)
        for one in tensors:
            size = _bytes(one)
            writer.add_tensor_info(
                one.name, one.shape, np.dtype(np.float32), size, raw_dtype=one.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in tensors:
            writer.write_tensor_data(_encoded(one))
    finally:
        writer.close()


def add_layout(writer: GGUFWriter, layout: GgufLayout) -> None:
    for name, value in layout.values.items():
        _add(writer, f"{layout.architecture}.{name}", value)


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    for name, value in vocabulary.values.items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _add(writer: GGUFWriter, key: str, value: int | float | bool | str) -> None:
    kinds: Mapping[type, GGUFValueType] = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    writer.add_key_value(key, value, kinds[type(value)])


def _bytes(one: Planned) -> int:
    elements = int(np.prod(one.shape))
    match one.kind:
        case GGMLQuantizationType.F32:
            return 4 * elements
        case GGMLQuantizationType.BF16:
            return 2 * elements
    return elements // _BLOCK * (_BLOCK + 2)


def _encoded(one: Planned) -> np.ndarray[Any, Any]:
    values = one.read()
    if (
        one.kind is GGMLQuantizationType.BF16
    ):  # as torch rounds, which is nothing where the values are bf16 already
        return values.bfloat16().contiguous().view(torch.int16).numpy()
    return quantize(np.ascontiguousarray(values.float().numpy()), one.kind)


@dataclass(frozen=True)
class Compared:
    """A file read again, against what was meant."""

    tensors: int
    exact: int
    """Tensors that hold the very values."""
    relative_error: float
    """‖read - meant‖ / ‖meant‖ over all tensors."""


def compare(
    path: Path, planned: Iterable[Planned], seen: Callable[[str, Tensor], None] | None = None
) -> Compared:
    """Read a file with llama.cpp's package and compare.

    `seen`: is given every tensor as read, fp32.

    Raises FtError if a tensor is missing, of another shape, or further off than its kind explains.
    """
    there = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    tensors = list(planned)
    if there.keys() != {one.name for one in tensors}:
        raise FtError(
            f"{path.name} does not hold the tensors that were written: "
            f"{sorted(there.keys() ^ {t.name for t in tensors})[:3]}."
        )
    exact = 0
    lost = 0.0
    whole = 0.0
    for one in tensors:
        found = there[one.name]
        meant = one.read().float()
        values = torch.from_numpy(
            np.array(dequantize(found.data, found.tensor_type), dtype=np.float32)
        ).reshape(meant.shape)
        off = float((values - meant).double().norm())
        size = float(meant.double().norm())
        if found.tensor_type != one.kind or off > _bound(one.kind) * size:
            raise FtError(f"{path.name}: {one.name}, read again, is not what was written.")
        exact += off == 0.0
        lost = lost + off**2
        whole = whole + size**2
        if seen is not None:
            seen(one.name, values)
    return Compared(len(tensors), exact, (lost / whole) ** 0.5 if whole else 0.0)


def _bound(kind: GGMLQuantizationType) -> float:
    """Largest relative error of a tensor that its storage explains."""
    return {GGMLQuantizationType.F32: 0.0, GGMLQuantizationType.BF16: 2.0**-8}.get(kind, 0.02)
