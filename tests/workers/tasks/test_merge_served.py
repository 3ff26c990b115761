"""Merges of adapters that were trained for one form: to exactly what training has multiplied by."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.host.helper_process import Program, run_once
from ft_service.spec import JobSpec, PrecisionOptions
from tests.support.training.adapters import difference, logits, merged_by_peft, save_adapter
from tests.support.training.models import (
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, MIXED
from workers.exports.compressed_tensors import restore
from workers.layers.linear import LoraLinear, stored_parts
from workers.layers.segments import CURRENT
from workers.layers.served import ServedLinear
from workers.quant.served_forms import AdapterFactors, rounded_rows, values_of
from workers.tasks.fidelity import with_adapter
from workers.tasks.merge import merge, restore_codes

FP4 = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "base")


def served(base: Path, form: str, compute: str = "fp32") -> JobSpec:
    precision = {**MIXED, "compute": compute, "served_as": form}
    return spec_for(base, lora={"r": 4, "lora_alpha": 8}, precision=precision)


def codes_of(layer: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a layer multiplies by."""
    weight: Any = layer.base_layer.weight
    factors = AdapterFactors(
        layer.lora_A["default"].weight.detach(),
        layer.lora_B["default"].weight.detach(),
        layer.scaling["default"],
    )
    rows = list(rounded_rows(*stored_parts(weight), factors, layer.served_as))
    found = [own.codes for own in rows]
    return (
        torch.cat([own.codes for own in found]),
        torch.cat([own.scales for own in found]),
        found[0].whole,
    )


@pytest.mark.parametrize(
    ("form", "to"),
    [("int4_g32", "int4"), ("fp8", "fp8"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")],
)
def test_merging_writes_the_codes_by_which_training_has_multiplied(
    base: Path, tmp_path: Path, form: str, to: str
) -> None:
    """Also of a base that training stores in FP8 and NF4."""
    spec = served(base, form)
    adapter = save_adapter(base, tmp_path / "adapter")
    model = with_adapter(spec, adapter, CPU)
    merge(base, adapter, tmp_path / "out", to=to, precision=spec.precision)
    held = load_file(tmp_path / "out/model.safetensors")
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    assert len(layers) == 14
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wholes: dict[str, set[float]] = {}
    for name, layer in layers.items():
        assert isinstance(layer, ServedLinear)
        codes, scales, whole = codes_of(layer)
        if whole is None:
            assert torch.equal(held[f"{name}.weight_scale"], scales)
        else:  # of which queries, keys and values have the same
            shared = held[f"{name}.weight_global_scale"]
            assert torch.equal(
                held[f"{name}.weight_scale"].float() / shared, scales.float() * whole
            )
            wholes.setdefault(name.rpartition(".")[0], set()).add(float(shared))
        if to == "int4":
            shape = torch.Size(held[f"{name}.weight_shape"].tolist())
            theirs = unpack_from_int32(held[f"{name}.weight_packed"], 4, shape).float()
        elif to == "fp8":
            theirs = held[f"{name}.weight"].float()
        else:
            theirs = held[f"{name}.weight_packed"]
        assert torch.equal(theirs, codes.to(theirs.dtype))
        stock.get_submodule(name).weight.data = values_of(theirs, scales, whole)
    assert all(len(found) == 1 for found in wholes.values())
    CURRENT.use(None)
    ours = logits(model)
    assert difference(logits(stock), ours) < 1e-6
    assert difference(logits(merged_by_peft(base, adapter)), ours) > 0.01
    if to == "int4":
        restore(tmp_path / "out", tmp_path / "plain")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        assert difference(logits(plain), ours) < 1e-6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    if to in FP4:  # whose values are numbers of bf16, in which they are multiplied out
        config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
        scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
        for name in layers:
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in held.items()
                if key.startswith(f"{name}.")
            }
            theirs = FP4[to].decompress(own, scheme)["weight"]
            assert torch.equal(theirs.float(), stock.get_parameter(f"{name}.weight"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        assert difference(logits(loaded), ours) < 0.03
        return
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    bound = 5e-3 if to == "int4" else 0.1  # values rounded to bf16; inputs rounded to FP8
    assert difference(logits(loaded), ours) < bound


@pytest.mark.slow
@pytest.mark.parametrize("form", ["8da4w", "int8"])
def test_torchao_computes_what_training_has_computed(base: Path, tmp_path: Path, form: str) -> None:
    """By its own tensors, in fp32: of 8da4w with inputs in 8 bits."""
    spec = served(base, form)
    adapter = save_adapter(base, tmp_path / "adapter")
    model = with_adapter(spec, adapter, CPU)
    codes, plain, out = (tmp_path / name for name in ("codes", "plain", "out"))
    merge(base, adapter, codes, to=f"torchao-{form}", precision=spec.precision)
    restore_codes(codes, plain)
    command = (sys.executable, "-m", "workers.tasks.round_by_torchao", str(plain), str(out))
    report = run_once(Program(command=(*command, "--form", form, "--codes", str(codes))))
    assert report["exact"] == report["tensors"] == 14
    CURRENT.use(None)
    ours = logits(model)
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    if form == "int8":
        assert difference(logits(stock), ours) < 1e-6
    read = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, module in stock.named_modules():
        theirs: Any = read.get_submodule(name)
        if not name.endswith("proj"):
            continue
        weight = theirs.weight
        assert torch.equal(
            weight.qdata, load_file(codes / "model.safetensors")[f"{name}.weight_codes"]
        )
        if form == "8da4w":  # bf16 holds its scales exactly
            module.weight = torch.nn.Parameter(weight.to(torch.float32), requires_grad=False)
    assert difference(logits(stock), ours) < 1e-6
    assert difference(logits(read), ours) < 0.05, "in bf16"
    assert difference(logits(merged_by_peft(base, adapter)), ours) > 0.003


def test_in_bf16_merging_takes_the_adapter_as_it_was_multiplied_in_bf16(
    base: Path, tmp_path: Path
) -> None:
    spec = served(base, "int4_g32", "bf16")
    adapter = save_adapter(base, tmp_path / "adapter")
    other = spec.precision.model_copy(update={"compute": "fp32"})
    merge(base, adapter, tmp_path / "out", to="int4", precision=spec.precision)
    merge(base, adapter, tmp_path / "other", to="int4", precision=other)
    layer = next(
        module
        for module in with_adapter(spec, adapter, CPU).modules()
        if isinstance(module, ServedLinear)
    )
    for name in ("lora_A", "lora_B"):
        matrix = getattr(layer, name)["default"].weight
        matrix.data = matrix.data.bfloat16()
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    ours, others = (
        unpack_from_int32(
            load_file(tmp_path / folder / "model.safetensors")[name], 4, torch.Size((64, 64))
        ).float()
        for folder in ("out", "other")
    )
    assert torch.equal(ours, codes_of(layer)[0])
    assert not torch.equal(ours, others)


def test_a_plain_job_is_merged_as_ever(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "one", to="int4")
    merge(base, adapter, tmp_path / "other", to="int4", precision=PrecisionOptions())
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
