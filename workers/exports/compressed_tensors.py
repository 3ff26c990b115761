"""compressed-tensors' layouts, which vLLM and transformers load: FP8 by rows, INT4 by groups, and
NVFP4 and MXFP4 by blocks.

FP8     `X.weight` e4m3 [out, in], `X.weight_scale` bf16 [out, 1]
INT4    `X.weight_packed` int32 [out, in / 8], `X.weight_scale` bf16 [out, in / group],
`X.weight_shape` int64 [2]
        (w4a16, symmetric: value = (code - 8) · scale, code i of an int32 in its bits 4i to 4i + 3)
NVFP4   `X.weight_packed` u8 [out, in / 2], `X.weight_scale` e4m3 [out, in / 16],
`X.weight_global_scale` fp32 [1], which divides
MXFP4   `X.weight_packed` u8 [out, in / 2], `X.weight_scale` u8 [out, in / 32]: exponents of two
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
from workers.quant import mxfp4, nvfp4

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
WHOLE = "_global_scale"
CODES = "_codes"
"""Behind the name of a tensor in a folder that only the export by torchao reads."""
_PER_WORD = 8
_ZERO = 8


def packed(codes: Tensor) -> Tensor:
    """INT4 codes [rows, cols], fp32, as int32 [rows, cols / 8]."""
    words = (codes.to(torch.int32) + _ZERO).unflatten(1, (-1, _PER_WORD)).to(torch.int64)
    shifts = 4 * torch.arange(_PER_WORD)
    return (words << shifts).sum(dim=2).to(torch.uint32).view(torch.int32)


def group_of(to: str, columns: Iterable[int]) -> int:
    """The group that fits layers of these widths; 0: the form has none. Raises SpecError if none
    does.
    """
    widths = set(columns)
    known = {"int4": GROUPS, "nvfp4": (nvfp4.BLOCK,), "mxfp4": (mxfp4.BLOCK,)}.get(to, ())
    for group in known:
        if all(width % group == 0 for width in widths):
            return group
    if not known:
        return 0
    odd = next(width for width in sorted(widths) if width % known[-1])
    raise SpecError(
        f"{to.upper()} stores groups of {', '.join(map(str, known))} columns; the model has a "
        f"layer of {odd}: merge to fp8 or bf16.",
        param="to",
    )


_FORMATS = {
    "fp8": "float-quantized",
    "int4": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


def layout(to: str, ignored: list[str], group: int) -> dict[str, Any]:
    """`quantization_config` of a model whose linear layers, but for `ignored`, are stored so.

    Inputs of FP8 layers are scaled by token where they are in FP8; those of the others stay as
    they are.
    """
    scheme: dict[str, Any] = {"targets": ["Linear"]}
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if to == "fp8":
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        weights |= {**fp8, "strategy": "channel"}
        scheme["input_activations"] = {**fp8, "strategy": "token", "dynamic": True}
    else:
        weights |= {"strategy": "group", "group_size": group}
        if to == "int4":
            weights["type"] = "int"
        elif to == "nvfp4":
            weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        else:
            weights["scale_dtype"] = "torch.uint8"
    scheme["weights"] = weights
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[to],
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
