"""The workers' code for GPUs on fake CUDA tensors, forward and backward: no operator is given
tensors of two devices, or waits for a number, and products get strides and alignments that the
hardware takes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ft_service.data.tokens.sample import Tokens
from ft_service.kernel_limits import SERVED_MOVED_BYTES
from ft_service.spec import SERVED_FORMS, ServedAs
from tests.support.fake_cuda import Record, backward, build_on, compiling, fake_cuda, recording
from tests.support.training.models import ATTENTION, COMMON, save_tiny, save_tiny_llama, spec_for
from workers.data.batches import make_batch
from workers.model.compiling import compile_layers
from workers.model.multimodal import decoder_layers
from workers.quant.served_forms import AdapterFactors, served_weight
from workers.quant.weights import QUANTIZED
from workers.training.step import cross_entropies

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def step(
    base: Path, *, packed: bool = True, compiled: bool = False, **options: Any
) -> tuple[Record, dict[torch.Tensor, torch.Tensor]]:
    """What one micro-batch launches, and the gradients of the adapters.

    `compiled`: launches of decoder layers alone.
    """
    spec = spec_for(base, **options, distributed={"compile": compiled})
    if compiled:
        # It wants a whole Triton or none: not the stand-in.
        importlib.import_module("torch._inductor.debug")
    with fake_cuda() as device:
        model = build_on(device, spec)
        samples = [
            Tokens(np.ones(length, np.int32), np.ones(length, bool)) for length in (20, 30, 9)
        ]
        batch = make_batch(
            samples, device, [1, 2, 3] if spec.lora.lora_dropout else None, packed=packed
        )
        record = Record()
        with compiling(record) if compiled else recording(record):
            if compiled:
                base_model: Any = model.get_base_model()
                compile_layers(decoder_layers(base_model), pytest.fail)
            loss, _ = cross_entropies(model, batch)
            record.backward = True
            return record, backward(loss)


PADDED = ("bf16",)
"""Formats that are tried with padded rows too, which change nothing of how weights are
multiplied.
"""


@pytest.mark.parametrize(
    ("stored", "packed"),
    [
        pytest.param(
            stored, packed, marks=[pytest.mark.slow] * (not packed and stored not in PADDED)
        )
        for stored in ("bf16", *QUANTIZED)
        for packed in (True, False)
    ],
)
def test_every_storage_format_stays_on_the_gpu(stored: str, packed: bool, tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base", **SIZES)
    record, gradients = step(
        base, packed=packed, precision={"default": stored}, lora={"r": 4, "lora_dropout": 0.1}
    )
    assert len(gradients) == 2 * 7 * 2
    assert all(
        gradient.is_cuda and gradient.dtype == torch.float32 for gradient in gradients.values()
    )
    launched = record.counted()
    assert launched["triton._kept"] == 2 * (7 + 7), (
        "dropout's masks are made in forward and in backward"
    )
    assert launched["triton._normed"] == 5
    assert launched["triton._normed_grad"] == 4, "nothing before the first adapter has a gradient"
    assert launched["triton._rotated"] == 2 * 2
    assert launched["triton._cross_entropy"] == 1
    assert launched["triton._gated"] == launched["triton._gated_grad"] == 2
    assert (launched["aten._scaled_mm"] > 0) == (stored == "fp8")
    assert (
        launched["aten._flash_attention_forward"] == launched["aten._flash_attention_backward"] == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bf16", *QUANTIZED])
def test_compiled_layers_stay_on_the_gpu(stored: str, tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base", **SIZES)
    record, gradients = step(
        base, compiled=True, precision={"default": stored}, lora={"r": 4, "lora_dropout": 0.1}
    )
    assert len(gradients) == 2 * 7 * 2
    assert all(
        gradient.is_cuda and gradient.dtype == torch.float32 for gradient in gradients.values()
    )
    launched = record.counted()
    assert (
        launched["aten._flash_attention_forward"] == launched["aten._flash_attention_backward"] == 2
    )
    assert launched["triton._kept"] == 2 * (7 + 7), (
        "dropout's masks are made in forward and in backward"
    )
    assert launched["triton._normed"] == 0, "the compiler fuses by itself"
    assert (launched["aten._scaled_mm"] > 0) == (stored == "fp8")
    assert not {"aten._local_scalar_dense", "aten.nonzero"} & launched.keys()


def test_without_fused_kernels_the_models_own_operations_stay_on_the_gpu(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base", **SIZES)
    record, gradients = step(base, precision={"default": "nf4", "fused_kernels": "off"})
    assert len(gradients) == 2 * 7 * 2
    assert not [name for name in record.counted() if name.startswith("triton._normed")]


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "compiled"]
)
@pytest.mark.parametrize("stored", ["bf16", "nf4", "fp8"])
def test_experts_are_grouped_products_that_nothing_waits_for(
    stored: str, compiled: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **COMMON
        | {
            "hidden_size": 64,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    record, gradients = step(
        tmp_path / "base", compiled=compiled, precision={"default": stored}, lora={"r": 4}
    )
    assert gradients
    assert all(gradient.is_cuda for gradient in gradients.values())
    launched = record.counted()
    assert launched["aten._grouped_mm"] > 0
    assert not {"aten._local_scalar_dense", "aten.nonzero"} & launched.keys()


def test_sinks_are_added_to_what_the_fused_kernel_gives(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path / "base")
    record, gradients = step(
        tmp_path / "base", precision={"default": "bf16"}, lora={"r": 4, "target_modules": ATTENTION}
    )
    assert all(gradient.is_cuda for gradient in gradients.values())
    launched = record.counted()
    assert (
        launched["aten._flash_attention_forward"] == launched["aten._flash_attention_backward"] == 2
    )
    assert "aten._softmax" not in {
        op.name for op in record.operations if op.where == "layers.scored_attention"
    }


@pytest.mark.parametrize("form", SERVED_FORMS)
def test_rounding_for_a_served_form_moves_the_bytes_that_the_plan_counts(form: ServedAs) -> None:
    rows = 1024
    cols = 4096
    with fake_cuda() as device:
        weight = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
        a = torch.empty(16, cols, dtype=torch.bfloat16, device=device)
        b = torch.empty(rows, 16, dtype=torch.bfloat16, device=device)
        with recording() as record:
            served_weight([weight], "", AdapterFactors(a, b, 2.0), form, torch.bfloat16)
    moved = sum(operation.moved for operation in record.operations)
    assert moved / weight.numel() == pytest.approx(SERVED_MOVED_BYTES[form], rel=0.02)
