"""Bases as others publish them quantised: bitsandbytes by its own modules, FP8 by the published
layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.nn.modules import Params4bit
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from ft_service.bases.safetensors_header import read_header

LAST = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FP8 = torch.float8_e4m3fn
VALUES = "values"
"""Folder in that of a base which transformers cannot read as it is quantised: the same base,
plain.
"""


BY_BLOCKS = r".*_proj(_with_mqa)?"
"""Modules that bases published by blocks hold so."""


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LAST


def rewrite(
    folder: Path,
    quantization: dict[str, Any],
    quantize: Any,
    chosen: Callable[[str], bool] = is_linear,
    inside: str = "",
) -> dict[str, Tensor]:
    """Quantise the linear layers of a plain base in place.

    `quantize(name, weight)`: its tensors, and its value to return; `chosen`: whether a tensor is
    quantised; `inside`: the part of config.json that says so.
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
    folder: Path,
    *,
    nested: bool = True,
    kind: str = "nf4",
    block: int = 64,
    storage: torch.dtype = torch.uint8,
) -> dict[str, Tensor]:
    """By bitsandbytes' own `Params4bit` and its state dict; the values are what bitsandbytes makes
    of them, fp32.
    """

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        container: Any = (
            Params4bit  # its constructor is __new__, which type checkers take for Parameter's
        )
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
        return {
            name: codes,
            name.replace(".weight", ".weight_scale"): scale,
        }, codes.float() * scale.float()

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    return rewrite(folder, settings, quantize)


def fp8_of_torchao(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """FP8 as transformers saves what torchao quantised by rows: codes and scales under names of
    their own, scales in fp32.
    """

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 448).float()
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        module = name.removesuffix(".weight")
        return {
            f"{module}._weight_qdata": codes,
            f"{module}._weight_scale": scale,
        }, codes.float() * scale

    kind = {
        "_type": "Float8WeightOnlyConfig",
        "_version": 2,
        "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}},
    }
    return rewrite(
        folder, {"quant_method": "torchao", "quant_type": {"default": kind}, **settings}, quantize
    )


def fp8_by_tensors(folder: Path) -> dict[str, Tensor]:
    """Static per-tensor scales: scalars, each with a scale of the activations."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.float().abs().max() / 448
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        module = name.removesuffix(".weight")
        made = {
            name: codes,
            f"{module}.weight_scale": scale,
            f"{module}.input_scale": torch.tensor(1.0),
        }
        return made, codes.float() * scale

    return rewrite(folder, {"quant_method": "fp8", "activation_scheme": "static"}, quantize)


def fp8_by_blocks(folder: Path, block: int = 128) -> dict[str, Tensor]:
    """FP8 as DeepSeek, Qwen and MiniMax publish it: `weight_scale_inv` [rows / block, cols /
    block], each rounded up.
    """
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "modules_to_not_convert": _others(folder),
    }
    return rewrite(
        folder, settings, _Blocks(block, "weight_scale_inv", torch.float32), is_block_wise
    )


def fp8_by_blocks_of_compressed_tensors(folder: Path) -> dict[str, Tensor]:
    """The same as llm-compressor writes it: `weight_scale` in bf16."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
        "symmetric": True,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": _others(folder),
    }
    return rewrite(folder, settings, _Blocks(128, "weight_scale", torch.bfloat16), is_block_wise)


class _Blocks:
    """Quantises by blocks, whose scales are as far apart as those of trained weights: by up to four
    times.
    """

    def __init__(self, block: int, scale_name: str, scale_dtype: torch.dtype) -> None:
        self._block = block
        self._name = scale_name
        self._dtype = scale_dtype
        self._random = torch.Generator().manual_seed(11)

    def __call__(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = self._block
        grid = [-(-side // size) for side in weight.shape]
        weight = (
            weight.float()
            * self._spread(2 * torch.rand(grid, generator=self._random) - 1, weight).exp2()
        )
        padded = torch.nn.functional.pad(
            weight, (0, grid[1] * size - weight.shape[1], 0, grid[0] * size - weight.shape[0])
        )
        largest = (
            padded.unflatten(1, (grid[1], size)).unflatten(0, (grid[0], size)).abs().amax((1, 3))
        )
        scale = (largest / 448).to(self._dtype)
        each = self._spread(scale.float(), weight)
        codes = (weight / each).clamp(-448, 448).to(FP8)
        return {name: codes, name.removesuffix("weight") + self._name: scale}, codes.float() * each

    def _spread(self, scale: Tensor, weight: Tensor) -> Tensor:
        each = scale.repeat_interleave(self._block, 0).repeat_interleave(self._block, 1)
        return each[: weight.shape[0], : weight.shape[1]]


def is_block_wise(name: str) -> bool:
    """Whether bases published by blocks hold a tensor so: the projections of the decoder's
    layers.
    """
    module, _, parameter = name.rpartition(".")
    return (
        parameter == "weight" and ".layers." in name and re.fullmatch(BY_BLOCKS, module) is not None
    )


def _others(folder: Path) -> list[str]:
    """The modules of a base that stay in bf16, by name.

    Raises ValueError for a base that is smaller than a few blocks.
    """
    shapes = {
        name: entry.shape
        for name, entry in read_header(folder / "model.safetensors").tensors.items()
    }
    if not any(is_block_wise(name) and min(shape) > 128 for name, shape in shapes.items()):
        raise ValueError(
            "no matrix has several blocks in both directions, as every published one has"
        )
    return sorted({name.rpartition(".")[0] for name in shapes if not is_block_wise(name)})


def with_values(
    publish: Callable[[Path], dict[str, Tensor]],
) -> Callable[[Path], dict[str, Tensor]]:
    """`publish`, and the same base with plain weights in `VALUES`."""

    def published(folder: Path) -> dict[str, Tensor]:
        plain = folder / VALUES
        plain.mkdir()
        config = (folder / "config.json").read_text()
        tensors = load_file(folder / "model.safetensors")
        values = publish(folder)
        (plain / "config.json").write_text(config)
        save_file({**tensors, **values}, plain / "model.safetensors", metadata={"format": "pt"})
        return values

    return published


def renamed(
    publish: Callable[[Path], dict[str, Tensor]],
    names: Mapping[str, str],
    section: dict[str, Any],
    form: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> Callable[[Path], dict[str, Tensor]]:
    """`publish` with other names and words.

    `names`: last part of a tensor's name → what is in its place; `section`: the
    quantization_config; `form`: what is made of a tensor with such a name, by its new last part.
    """

    def published(folder: Path) -> dict[str, Tensor]:
        values = publish(folder)
        held: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stem, _, last = name.rpartition(".")
            own = names.get(last)
            held[name if own is None else f"{stem}.{own}"] = (
                tensor if own is None else form(own, tensor).contiguous()
            )
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        return values

    return published


_BY_128: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8_of_deepseek_v4(folder: Path) -> dict[str, Tensor]:
    """FP8 by blocks, with the scales in `X.scale`."""
    return renamed(fp8_by_blocks, {"weight_scale_inv": "scale"}, _BY_128)(folder)


def fp4_of_deepseek_v4(folder: Path) -> dict[str, Tensor]:
    """Codes of four bits, two in a byte with a sign, and exponents in `X.scale`."""

    def form(name: str, tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8).view(
            torch.float8_e8m0fnu if name == "scale" else torch.int8
        )

    names = {"weight_packed": "weight", "weight_scale": "scale"}
    return renamed(mxfp4, names, {**_BY_128, "expert_dtype": "fp4"}, form)(folder)


def fp8_of_mistral(folder: Path) -> dict[str, Tensor]:
    """FP8 by tensors, with the scales in `X.qscale_weight` and those of activations beside them."""
    names = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}
    return renamed(fp8_by_tensors, names, {"quant_method": "fp8", "activation_scheme": "static"})(
        folder
    )


def fp8_of_modelopt(folder: Path) -> dict[str, Tensor]:
    """FP8 by blocks whose scales are [rows, 1, cols, 1]; config.json names the algorithm alone."""
    section = {"quant_algo": "FP8_PB_WO", "producer": {"name": "modelopt"}}
    names = {"weight_scale_inv": "weight_scale"}
    return renamed(fp8_by_blocks, names, section, lambda name, scale: scale[:, None, :, None])(
        folder
    )


def int4_experts(folder: Path) -> dict[str, Tensor]:
    """As Kimi K2.5 is published: all but the routed experts is plain."""
    return int4_by_groups(folder, lambda name: ".experts." in name, inside="text_config")


def int4_by_groups(
    folder: Path, chosen: Callable[[str], bool] = is_linear, inside: str = ""
) -> dict[str, Tensor]:
    """INT4 in groups of 32 as compressed-tensors writes it: the values are what codes and scales in
    bf16 stand for.
    """

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

    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "actorder": None}}
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
        "quantization_status": "compressed",
    }
    return rewrite(folder, settings, quantize, chosen, inside)


def fp8_with_stacks(folder: Path) -> dict[str, Tensor]:
    """Static FP8 as Mistral Small 4 is published: one scale a linear layer and one a matrix of a
    stack of experts, and those of the activations next to them.
    """

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stack = weight.ndim == 3
        scale = (
            weight.float().abs().amax((1, 2), keepdim=True) / 448
            if stack
            else weight.float().abs().max() / 448
        )
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        stem = f"{name}_" if stack else name.removesuffix("weight")
        of_inputs = torch.ones(len(weight)) if stack else torch.tensor(1.0)
        made = {
            f"{stem}{'' if stack else 'weight_'}scale_inv": scale,
            f"{stem}activation_scale": of_inputs,
        }
        return {name: codes, **made}, codes.float() * scale

    def chosen(name: str) -> bool:
        parts = name.split(".")
        layer = "layers" in parts and "language_model" in parts
        return layer and (
            parts[-1] in ("gate_up_proj", "down_proj")
            or (parts[-1] == "weight" and "_proj" in parts[-2])
        )

    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return rewrite(folder, settings, quantize, chosen)


def nvfp4(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """NVFP4 by compressed-tensors: its own compressor, and the values that it decompresses,
    fp32.
    """
    return _packed(
        folder, "nvfp4-pack-quantized", {"strategy": "tensor_group", "group_size": 16}, settings
    )


def mxfp4(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """MXFP4 by compressed-tensors, likewise."""
    return _packed(
        folder, "mxfp4-pack-quantized", {"strategy": "group", "group_size": 32}, settings
    )


def _packed(
    folder: Path, form: str, groups: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Tensor]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **groups}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor: Any = BaseCompressor.get_value_from_registry(form)

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.float().unflatten(1, (-1, groups["group_size"])).abs().amax(2)
        state = {"weight": weight.float()}
        if groups["group_size"] == 16:
            state["weight_global_scale"] = whole = (6 * 448 / largest.max()).reshape(1)
            state["weight_scale"] = (whole * largest / 6).to(FP8).float()
        else:
            state["weight_scale"] = (largest / 6).log2().ceil().exp2()
        made = compressor.compress(state, scheme)
        stem = name.removesuffix("weight")
        value = _decompressed(made, scheme, compressor)
        return {f"{stem}{key}": part.detach().contiguous() for key, part in made.items()}, value

    quantization = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return rewrite(folder, {**quantization, **settings}, quantize)


def _decompressed(made: dict[str, Tensor], scheme: Any, compressor: Any) -> Tensor:
    """What compressed-tensors decodes, in fp32: it decodes to bf16 unless its unpacking is asked
    for more.
    """
    in_fp32 = partial(unpack_fp4_from_uint8, dtype=torch.float32)
    with patch("compressed_tensors.compressors.nvfp4.base.unpack_fp4_from_uint8", in_fp32):
        return compressor.decompress(made, scheme)["weight"].detach()


def nvfp4_of_modelopt(folder: Path) -> dict[str, Tensor]:
    """NVFP4 as modelopt exports it: codes in `weight`, a factor of the whole in `weight_scale_2`,
    and scales of the inputs.
    """

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grouped = weight.float().unflatten(1, (-1, 16))
        factor = grouped.abs().max() / (6 * 448)
        scales = (grouped.abs().amax(2) / 6 / factor).to(FP8)
        each = (scales.float() * factor)[..., None]
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = ((grouped / each).abs()[..., None] - magnitudes).abs().argmin(-1)
        value = (magnitudes[codes] * grouped.sign() * each).flatten(1)
        signed = (codes + 8 * (grouped < 0)).flatten(1).to(torch.uint8)
        stem = name.removesuffix("weight")
        made = {
            name: signed[:, ::2] | (signed[:, 1::2] << 4),
            f"{stem}weight_scale": scales,
            f"{stem}weight_scale_2": factor,
            f"{stem}input_scale": torch.tensor(0.01),
        }
        return made, value

    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    settings = {
        "config_groups": {
            "group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}
        },
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_method": "modelopt",
    }
    return rewrite(folder, settings, quantize)


def four_bits_of_torchao(folder: Path, kind: str) -> dict[str, Tensor]:
    """NVFP4 or MXFP4 as transformers saves what torchao quantised: by its own functions, scales in
    its kernels' order.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # its import takes seconds
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weight = weight.float()
        if kind == "nvfp4":
            whole = per_tensor_amax_to_scale(weight.abs().max())
            made: Any = NVFP4Tensor.to_nvfp4(
                weight, per_tensor_scale=whole, is_swizzled_scales=True
            )
        else:
            rounding = ScaleCalculationMode.RCEIL
            made = MXTensor.to_mx(
                weight, torch.float4_e2m1fn_x2, 32, rounding, is_swizzled_scales=True
            )
        tensors, _ = flatten_tensor_state_dict({name: made})
        return tensors, made.dequantize(torch.float32)

    config = "NVFP4WeightOnlyConfig" if kind == "nvfp4" else "MXDynamicActivationMXWeightConfig"
    return rewrite(
        folder,
        {"quant_method": "torchao", "quant_type": {"default": {"_type": config, "_data": {}}}},
        quantize,
    )
