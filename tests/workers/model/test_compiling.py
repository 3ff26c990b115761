"""Compiled decoder layers: what they keep for backward, compiled or not, and what happens when compiling fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import CPU, Step, assert_parity, constructed, one_step, reference_steps, samples
from workers.base.load import adapters
from workers.data.batches import collate
from workers.quant.rowwise import RowQuantized

Saved = tuple[tuple[int, ...], torch.dtype, int]
"""Shape, dtype and address of a tensor that is kept for backward."""


QUANTISED = {"default": "nf4", "overrides": {r".*self_attn.*": "fp8"}}
"""No linear layer inside the decoder layers is left whose own weight could be taken for a copy of another."""


def job(model: Path, ranks: int, compute: str, **distributed: Any) -> JobSpec:
    return spec_for(model, ranks=ranks, precision={**QUANTISED, "compute": compute}, lora={"r": 4}, distributed=distributed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"), intermediate_size=200, num_hidden_layers=1)


def kept_for_backward(rank: int, world: int, spec: JobSpec) -> tuple[list[Saved], set[tuple[int, ...]], list[str]]:
    """What a forward saves, the shapes of the quantised weights, and the warnings of the construction."""
    warnings: list[str] = []
    # The compiler's own backend takes several times as long; what is saved is decided before it begins.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        built = constructed(spec, world, warnings)
    shapes = {
        tuple(p.shape)
        for p in built.peft_model.parameters()
        if isinstance(p.to_local() if isinstance(p, DTensor) else p.data, RowQuantized)
    }
    saved: list[Saved] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype, tensor.data_ptr()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = built.peft_model(input_ids=collate(samples()[:3], CPU).ids).logits.float().square().mean()
    loss.backward()
    return saved, shapes, warnings


@pytest.mark.parametrize(("world", "compiled"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_no_dense_copy_of_a_quantised_weight_is_kept_for_backward(model: Path, world: int, compiled: bool) -> None:
    """Loss and gradients are right with such a copy, so parity cannot see it; only memory can."""
    spec = job(model, world, "bf16", compile=compiled)
    for saved, shapes, warnings in run_on_ranks(kept_for_backward, world, spec, timeout=800):
        assert not warnings
        assert shapes == {(64, 64), (32, 64), (200, 64), (64, 200)}
        dense = {shape for shape, dtype, _ in saved if dtype in (torch.bfloat16, torch.float32)}
        assert not dense & (shapes | {shape[::-1] for shape in shapes})
        assert torch.float8_e4m3fn in {dtype for _, dtype, _ in saved}, "but the storage is"


def kept_by_one_linear(rank: int, world: int, spec: JobSpec) -> list[str]:
    """What a LoRA linear keeps for backward beyond its input, A(x), the storage of its weight, A and B."""
    built = constructed(spec, world)
    linear: Any = built.layers[0].get_submodule("self_attn.q_proj")
    x = torch.randn(3, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    storage = {part.data_ptr() for part in linear.base_layer.weight.parts}
    allowed = {(4, 64), (64, 4), (3, 24, 4), (72, 4)}  # A, B, A(x)
    found: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        small = tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & allowed
        if not small and tensor.data_ptr() not in storage | {x.data_ptr()}:
            found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x)
    return found


def test_a_lora_linear_keeps_its_input_and_little_else(model: Path) -> None:
    assert run_on_ranks(kept_by_one_linear, 1, job(model, 1, "bf16")) == [[]]


def steps_without_compiler(rank: int, world: int, spec: JobSpec) -> tuple[list[Step], list[str]]:
    """Two steps of a model with a part that the compiler cannot take whole."""
    warnings: list[str] = []
    built = constructed(spec, world, warnings)
    norm: Any = built.layers[0].get_submodule("input_layernorm")
    forward = norm.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break("the test breaks the graph")
        return forward(x)

    norm.forward = broken
    trained = dict(adapters(built.peft_model))
    return [one_step(rank, world, spec, built, trained) for _ in range(2)], warnings


def test_what_cannot_be_compiled_runs_uncompiled_and_says_why(model: Path) -> None:
    spec = job(model, 2, "fp32", compile=True)
    truth = reference_steps(model, spec)
    for steps, warnings in run_on_ranks(steps_without_compiler, 2, spec):
        assert_parity(steps, truth)
        (warning,) = warnings
        assert warning.startswith("distributed.compile: the decoder layers could not be compiled and run uncompiled")
        assert "graph_break" in warning
