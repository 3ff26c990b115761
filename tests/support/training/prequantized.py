"""Bases as others publish them quantised: bitsandbytes by its own modules, FP8 by the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.nn.modules import Params4bit
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

LAST = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FP8 = torch.float8_e4m3fn
VALUES = "values"
"""Folder in that of a base which transformers cannot read as it is quantised: the same base, plain."""


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LAST


def rewrite(
    folder: Path, quantization: dict[str, Any], quantize: Any, chosen: Callable[[str], bool] = is_linear, inside: str = ""
) -> dict[str, Tensor]:
    """Quantise the linear layers of a plain base in place. `quantize(name, weight)`: its tensors, and its value to return;
    `chosen`: whether a tensor is quantised; `inside`: the part of config.json that says so.
    """
    tensors = load_file(folder / "model.safetensors")
    values: dict[str, Tensor] = {}
    for name in [n for n in tensors if chosen(n)]:
        made, values[name] = quantize(name, tensors.pop(name))
        tensors.update(made)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = config[inside] if inside else config
    section["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return values


def bitsandbytes_4bit(
    folder: Path, *, nested: bool = True, kind: str = "nf4", block: int = 64, storage: torch.dtype = torch.uint8
) -> dict[str, Tensor]:
    """By bitsandbytes' own `Params4bit` and its state dict; the values are what bitsandbytes makes of them, fp32."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        container: Any = Params4bit  # its constructor is __new__, which type checkers take for Parameter's
        parameter = container(
            weight.float(),
            requires_grad=False,
            blocksize=block,
            compress_statistics=nested,
            quant_type=kind,
            quant_storage=storage,
        ).to("cpu")
        state: Any = parameter.quant_state
        made = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        value = bnb.dequantize_4bit(parameter.data, state)
        return {name: parameter.data.contiguous(), **made}, value

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return rewrite(folder, {**settings, "bnb_4bit_use_double_quant": nested}, quantize)


def fp8_by_rows(folder: Path) -> dict[str, Tensor]:
    """FP8 as compressed-tensors writes strategy "channel": bf16 scales [rows, 1]."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
        codes = (weight.float() / scale.float()).clamp(-448, 448).to(FP8)
        return {name: codes, name.replace(".weight", ".weight_scale"): scale}, codes.float() * scale.float()

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return rewrite(folder, settings, quantize)


def fp8_of_torchao(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """FP8 as transformers saves what torchao quantised by rows: codes and scales under names of their own, scales in fp32."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 448).float()
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        module = name.removesuffix(".weight")
        return {f"{module}._weight_qdata": codes, f"{module}._weight_scale": scale}, codes.float() * scale

    kind = {
        "_type": "Float8WeightOnlyConfig",
        "_version": 2,
        "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}},
    }
    return rewrite(folder, {"quant_method": "torchao", "quant_type": {"default": kind}, **settings}, quantize)


def fp8_by_tensors(folder: Path) -> dict[str, Tensor]:
    """Static per-tensor scales: scalars, with a scale of the activations beside each."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.float().abs().max() / 448
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        module = name.removesuffix(".weight")
        made = {name: codes, f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(1.0)}
        return made, codes.float() * scale

    return rewrite(folder, {"quant_method": "fp8", "activation_scheme": "static"}, quantize)


def fp8_by_blocks(folder: Path, block: int = 128) -> dict[str, Tensor]:
    """FP8 as DeepSeek and Qwen publish it: `weight_scale_inv` [rows / block, cols / block], each rounded up."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, cols = weight.shape
        scale = torch.empty(-(-rows // block), -(-cols // block))
        codes = torch.empty(rows, cols, dtype=FP8)
        value = torch.empty(rows, cols)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                here = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                scale[i, j] = weight[here].float().abs().max() / 448
                codes[here] = (weight[here].float() / scale[i, j]).to(FP8)
                value[here] = codes[here].float() * scale[i, j]
        return {name: codes, name.replace(".weight", ".weight_scale_inv"): scale}, value

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return rewrite(folder, settings, quantize)


def int4_experts(folder: Path) -> dict[str, Tensor]:
    """As Kimi K2.5 is published: all but the routed experts is plain."""
    return int4_by_groups(folder, lambda name: ".experts." in name, inside="text_config")


def int4_by_groups(folder: Path, chosen: Callable[[str], bool] = is_linear, inside: str = "") -> dict[str, Tensor]:
    """INT4 in groups of 32 as compressed-tensors writes it: the values are what codes and scales in bf16 stand for."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grouped = weight.float().unflatten(1, (-1, 32))
        scale = (grouped.abs().amax(2) / 7).to(torch.bfloat16)
        codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
        made = {
            f"{name}_packed": pack_to_int32(codes.flatten(1).to(torch.int8), 4),
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor(weight.shape, dtype=torch.int32),
        }
        return made, (codes * scale.float()[..., None]).flatten(1)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "actorder": None}}},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"],
        "quantization_status": "compressed",
    }
    return rewrite(folder, settings, quantize, chosen, inside)


def fp8_with_stacks(folder: Path) -> dict[str, Tensor]:
    """Static FP8 as Mistral Small 4 is published: one scale a linear layer and one a matrix of a stack of experts, and those
    of the activations beside them.
    """

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stack = weight.ndim == 3
        scale = weight.float().abs().amax((1, 2), keepdim=True) / 448 if stack else weight.float().abs().max() / 448
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        stem = f"{name}_" if stack else name.removesuffix("weight")
        of_inputs = torch.ones(len(weight)) if stack else torch.tensor(1.0)
        made = {f"{stem}{'' if stack else 'weight_'}scale_inv": scale, f"{stem}activation_scale": of_inputs}
        return {name: codes, **made}, codes.float() * scale

    def chosen(name: str) -> bool:
        parts = name.split(".")
        layer = "layers" in parts and "language_model" in parts
        return layer and (parts[-1] in ("gate_up_proj", "down_proj") or (parts[-1] == "weight" and "_proj" in parts[-2]))

    plain = folder / VALUES
    plain.mkdir()
    config, tensors = (folder / "config.json").read_text(), load_file(folder / "model.safetensors")
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    values = rewrite(folder, settings, quantize, chosen)
    (plain / "config.json").write_text(config)
    save_file({**tensors, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    return values
