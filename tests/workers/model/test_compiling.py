"""Compiled decoder layers: what they keep for backward, compiled or not, and what happens when
compiling fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ft_service.data.tokens.sample import Tokens
from ft_service.spec import JobSpec
from tests.support.fused_attention import fused_attention
from tests.support.ranks import run_on_ranks
from tests.support.training.models import VOCABULARY, save_tiny_llama, spec_for
from tests.support.training.parity import (
    CPU,
    Step,
    assert_parity,
    constructed,
    one_step,
    reference_steps,
    samples,
    set_adapters,
)
from workers.base.load import adapters, load
from workers.data.batches import Batch, collate, make_batch, pack
from workers.model.activation_checkpointing import checkpoint_activations
from workers.model.build import BuiltModel, build
from workers.model.compiling import compile_layers
from workers.quant.rowwise import RowQuantized
from workers.training.step import forward_backward, logits_of

Saved = tuple[tuple[int, ...], torch.dtype, int]
"""Shape, dtype and address of a tensor that is kept for backward."""


QUANTISED = {"default": "nf4", "overrides": {r".*self_attn.*": "fp8"}}
"""No linear layer inside the decoder layers is left whose own weight could be taken for a copy of
another.
"""


def job(model: Path, ranks: int, compute: str, **distributed: Any) -> JobSpec:
    return spec_for(
        model,
        ranks=ranks,
        precision={**QUANTISED, "compute": compute},
        lora={"r": 4},
        distributed=distributed,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("base"), intermediate_size=200, num_hidden_layers=1
    )


def kept_for_backward(
    rank: int, world: int, spec: JobSpec
) -> tuple[list[Saved], set[tuple[int, ...]], list[str]]:
    """What a forward saves, the shapes of the quantised weights, and the warnings of the
    construction.
    """
    warnings: list[str] = []
    # The compiler's own backend takes several times as long; what is saved is decided before it
    # begins.
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
        loss = (
            built.peft_model(input_ids=collate(samples()[:3], CPU).ids)
            .logits.float()
            .square()
            .mean()
        )
    loss.backward()
    return saved, shapes, warnings


@pytest.mark.parametrize(
    ("world", "compiled"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_no_dense_copy_of_a_quantised_weight_is_kept_for_backward(
    model: Path, world: int, compiled: bool
) -> None:
    """Loss and gradients are right with such a copy, so parity cannot see it; only memory can."""
    spec = job(model, world, "bf16", compile=compiled)
    for saved, shapes, warnings in run_on_ranks(kept_for_backward, world, spec, timeout=800):
        assert not warnings
        assert shapes == {(64, 64), (32, 64), (200, 64), (64, 200)}
        dense = {shape for shape, dtype, _ in saved if dtype in (torch.bfloat16, torch.float32)}
        assert not dense & (shapes | {shape[::-1] for shape in shapes})
        assert torch.float8_e4m3fn in {dtype for _, dtype, _ in saved}, "but the storage is"


def kept_by_linears(rank: int, world: int, spec: JobSpec, names: str) -> list[str]:
    """What LoRA linears with one input keep for backward beyond it, A(x), the storage of their
    weights, A and B.
    """
    built = constructed(spec, world)
    linears: list[Any] = [built.layers[0].get_submodule(f"self_attn.{name}_proj") for name in names]
    x = torch.randn(3, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    storage = {part.data_ptr() for linear in linears for part in linear.base_layer.weight.parts}
    rank_of_all = 4 * len(names)
    allowed = {
        (rank_of_all, 64),
        (64, 4),
        (32, 4),
        (3, 24, rank_of_all),
        (72, rank_of_all),
    }  # A, B, A(x)
    found: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        small = (
            tensor.dtype == torch.bfloat16
            and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & allowed
        )
        if not small and tensor.data_ptr() not in storage | {x.data_ptr()}:
            found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for linear in linears:
            linear(x)
    return found


@pytest.mark.parametrize("names", ["o", "qkv"])
def test_lora_linears_keep_their_input_and_little_else(names: str, model: Path) -> None:
    assert run_on_ranks(kept_by_linears, 1, job(model, 1, "bf16"), names) == [[]]


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
        assert warning.startswith(
            "distributed.compile: the decoder layers could not be compiled and run uncompiled"
        )
        assert "graph_break" in warning


def loaded(spec: JobSpec) -> BuiltModel:
    """A model that has this process to itself."""
    built = build(spec, CPU)
    load(built.peft_model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=CPU)
    set_adapters(built.peft_model)
    built.peft_model.train()
    return built


LENGTHS = ((20, 30, 9), (21, 40, 9), (22, 500, 12, 8), (255, 31), (300, 5), (20, 33, 9))


@pytest.mark.slow  # tracing takes a quarter of a minute
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # by Dynamo, which hides it where it is no error
@pytest.mark.parametrize(
    ("packed", "lengths", "checkpointing"),
    [(True, (*LENGTHS, (600,)), "selective"), (False, LENGTHS, "none")],
    ids=["packed-selective", "padded"],
)
def test_layers_on_a_gpu_are_compiled_once_whatever_their_number_and_the_lengths_of_samples(
    packed: bool, lengths: Sequence[tuple[int, ...]], checkpointing: str, tmp_path: Path
) -> None:
    """Its kernel takes the longest sample's length, and a layer may look for its place among the
    others: numbers on which the compiler would specialise.
    """
    model = save_tiny_llama(tmp_path, intermediate_size=200, num_hidden_layers=3)
    lora = {"r": 4, "target_modules": ["q_proj"]}
    spec = spec_for(
        model, lora=lora, distributed={"compile": True, "activation_checkpointing": checkpointing}
    )
    generator = torch.Generator().manual_seed(0)

    def batch(own: tuple[int, ...]) -> Batch:
        ids = [
            torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
            for length in own
        ]
        return make_batch(
            [Tokens(sample, np.ones(len(sample), bool)) for sample in ids], CPU, packed=packed
        )

    warnings: list[str] = []
    graphs = []
    torch._dynamo.reset()
    counters.clear()
    with (
        fused_attention(),
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
    ):
        built = loaded(spec)
        checkpoint_activations(
            built.layers, spec.distributed.checkpointing, spec.lora.r, compiled=True
        )
        compile_layers(built.layers, warnings.append)
        for own in lengths:
            forward_backward(built.peft_model, [batch(own)], sum(own) - len(own), 1)
            graphs.append(counters["stats"]["unique_graphs"])
    assert warnings == []
    assert graphs == [2] * len(graphs), (
        "of the layer after the embedding, which needs no gradient, and of all others"
    )


@pytest.mark.parametrize("lengths", [(7, 20, 3), (300, 5), (257,), (1,)])
def test_the_gpus_branch_computes_what_the_processors_does(
    model: Path, lengths: tuple[int, ...]
) -> None:
    spec = job(model, 1, "bf16")
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
        for length in lengths
    ]
    batch = pack([Tokens(own, np.ones(len(own), bool)) for own in ids], CPU)
    built = loaded(spec)
    here = logits_of(built.peft_model, batch).detach()
    with fused_attention():
        there = logits_of(built.peft_model, batch).detach()
    assert torch.allclose(here, there, atol=0.05, rtol=0.02)
