"""compressed-tensors' layouts, which vLLM and transformers load: FP8 by rows, and INT4 by groups.

FP8     `X.weight` e4m3 [out, in], `X.weight_scale` bf16 [out, 1]
INT4    `X.weight_packed` int32 [out, in / 8], `X.weight_scale` bf16 [out, in / group],
`X.weight_shape` int64 [2]
        (w4a16, symmetric: value = (code - 8) · scale, code i of an int32 in its bits 4i to 4i + 3)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ft_service.errors import SpecError
from workers.base.base_tensors import Safetensors
from workers.base.layouts import PACKED_DTYPE
from workers.base.quantized_rows import from_int4
from workers.quant.fp8 import LARGEST

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


class RestoredFolder:
    """A new folder with the configuration and tokenizer of `like`, and one file for each tensor
    that is put into it.
    """

    def __init__(self, folder: Path, like: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._places: dict[str, str] = {}
        for path in [*like.glob("*.json"), *like.glob("*.jinja"), *like.glob("*.model")]:
            if path.name != _INDEX:
                (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")

    def put(self, tensor: str, values: Tensor) -> None:
        file = f"model-{len(self._places):05d}.safetensors"
        save_file({tensor: values.contiguous()}, self._folder / file, metadata={"format": "pt"})
        self._places[tensor] = file

    def close(self) -> None:
        """Write the index: the folder is a model now."""
        index = {"metadata": {}, "weight_map": self._places}
        (self._folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


GROUPS = (128, 64, 32)
"""Columns that may share a scale in INT4, the first that fits all layers: vLLM's kernels know
these.
"""
PACKED = "_packed"
SCALE = "_scale"
SHAPE = "_shape"
_PER_WORD = 8
_ZERO = 8
_SHRINKS = torch.linspace(1.0, 0.7, 13)
"""Shares of a group's largest magnitude that are tried as its scale: the one with the least squared
error is taken.
"""


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] e4m3 and scales [rows, 1] bf16 of fp32 rows.

    The codes belong to the scale as stored.
    """
    scale = (
        (rows.abs().amax(dim=1, keepdim=True) / LARGEST)
        .clamp(min=torch.finfo(torch.bfloat16).tiny)
        .bfloat16()
    )
    return (rows / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def to_int4(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, cols / 8] int32 and scales [rows, cols / group] bf16 of fp32 rows."""
    grouped = rows.unflatten(1, (-1, group))
    largest = grouped.abs().amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.bfloat16).tiny)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in _SHRINKS:
        scale = (largest * shrink / 7.5).bfloat16()
        codes = (grouped / scale.float()).round().clamp(-_ZERO, _ZERO - 1)
        error = (codes * scale.float() - grouped).square().sum(dim=2, keepdim=True)
        if best is None:
            best = error, codes, scale
        else:
            better = error < best[0]
            best = tuple(
                torch.where(better, new, old)
                for new, old in zip((error, codes, scale), best, strict=True)
            )  # type: ignore[assignment]
    assert best is not None
    return _packed(best[1].flatten(1).to(torch.int32)), best[2].squeeze(2)


def _packed(codes: Tensor) -> Tensor:
    words = (codes + _ZERO).unflatten(1, (-1, _PER_WORD)).to(torch.int64)
    shifts = 4 * torch.arange(_PER_WORD)
    return (words << shifts).sum(dim=2).to(torch.uint32).view(torch.int32)


def group_of(columns: Iterable[int]) -> int:
    """The group that fits layers of these widths. Raises SpecError if none does."""
    widths = set(columns)
    for group in GROUPS:
        if all(width % group == 0 for width in widths):
            return group
    odd = next(width for width in sorted(widths) if width % GROUPS[-1])
    raise SpecError(
        f"INT4 stores groups of {', '.join(map(str, GROUPS))} columns; the model has a layer of "
        f"{odd}: merge to fp8 or bf16.",
        param="to",
    )


def layout(to: str, ignored: list[str], group: int) -> dict[str, Any]:
    """`quantization_config` of a model whose linear layers, but for `ignored`, are stored so.

    Inputs of FP8 layers are scaled by token where they are in FP8; those of INT4 layers stay as
    they are.
    """
    scheme: dict[str, Any] = {"targets": ["Linear"]}
    if to == "fp8":
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        scheme["weights"] = {**fp8, "strategy": "channel", "dynamic": False}
        scheme["input_activations"] = {**fp8, "strategy": "token", "dynamic": True}
    else:
        int4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
        scheme["weights"] = {**int4, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if to == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
    }


def restore(stored: Path, folder: Path) -> None:
    """Write a model that is stored in INT4 to the new folder `folder` as plain weights, those of
    the layers in fp32.
    """
    target = RestoredFolder(folder, stored)
    with Safetensors(stored) as tensors:
        packed = {
            name
            for name in tensors.names()
            if tensors.dtype(name) == PACKED_DTYPE and name + SCALE in tensors
        }
        companions = {name + suffix for name in packed for suffix in (SCALE, SHAPE)}
        for name in sorted(set(tensors.names()) - companions):
            whole = tensors.whole(name)
            target.put(
                name, from_int4(whole, tensors.whole(name + SCALE)) if name in packed else whole
            )
    target.close()
