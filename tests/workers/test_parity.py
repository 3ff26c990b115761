"""Sharded and quantised against an unsharded reference of stock parts: loss, every adapter gradient, what the collectives
carried."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ft_service.spec import JobSpec
from tests.ranks import run_on_ranks
from tests.workers.collectives import CountedCollectives
from tests.workers.models import VOCABULARY, adapter_value, reference, save_tiny_llama, spec_for
from workers.data.batches import Tokens, collate, micro_batches
from workers.model.build import build
from workers.model.load import adapters, load, plain_name
from workers.parallel import shard
from workers.quant.rowwise import RowQuantized
from workers.step import forward_backward

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def samples(count: int = 7, longest: int = 24) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        length = longest - 2 * i
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
        targets = torch.rand(length, generator=generator).numpy() < 0.6
        found.append(Tokens(ids, targets))
    return found


def train_once(rank: int, world: int, spec: JobSpec) -> dict[str, Any]:
    """One step's loss, gradients and gathers of the real worker code. World size 1 takes the unsharded path."""
    built = build(spec, CPU)
    dtype = DTYPES[spec.precision.compute]
    mesh = init_device_mesh("cpu", (world,))
    reshard = spec.distributed.reshard_after_forward
    shard(built.peft_model, built.layers, mesh, compute_dtype=dtype, reshard_after_forward=reshard)
    load(built.peft_model, spec.model.path, seed=spec.seed, compute_dtype=dtype, device=CPU)
    set_adapters(built.peft_model)
    data = samples()
    mine = micro_batches(range(len(data)), rank, world, spec.training.per_device_train_batch_size)
    batches = [collate([data[i] for i in part], CPU) for part in mine]
    with CountedCollectives() as collectives:
        sums = forward_backward(built.peft_model, batches, sum(t.target_count for t in data), world)
    grads = {name: full(p.grad) for name, p in adapters(built.peft_model)}
    result = {"loss": sums.mean_loss, "grads": grads, "collectives": collectives.log}
    if world > 1:
        result["layers"] = [bytes_in_gather(layer, world, dtype) for layer in built.layers]
    return result


def set_adapters(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in adapters(model):
            value = adapter_value(name, parameter.shape)
            if isinstance(parameter, DTensor):
                height = -(-parameter.shape[0] // parameter.device_mesh.size())
                local = parameter.to_local()
                start = parameter.device_mesh.get_local_rank() * height
                local.copy_(value[start : start + local.shape[0]])
            else:
                parameter.copy_(value)


def full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def bytes_in_gather(layer: torch.nn.Module, world: int, compute: torch.dtype) -> dict[str, int]:
    """What a layer's parameters put into one gather on this rank, padding rows included: NF4 weights and the rest."""
    found = {"nf4": 0, "nf4_parameters": 0, "rest": 0}
    for parameter in layer.parameters():
        assert isinstance(parameter, DTensor)
        local: Any = parameter.to_local()
        if isinstance(local, RowQuantized):
            found["nf4"] += sum(part.nbytes for part in local.fsdp_pre_all_gather(None)[0])
            found["nf4_parameters"] += parameter.numel()
        else:
            row = math.prod(parameter.shape[1:])
            found["rest"] += -(-parameter.shape[0] // world) * row * compute.itemsize
    return found


def reference_step(model: Path, spec: JobSpec) -> tuple[float, dict[str, torch.Tensor]]:
    peft_model = reference(model, spec)
    batch = collate(samples(), CPU)
    logits = peft_model(input_ids=batch.ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())
    loss.backward()
    grads = {plain_name(n): p.grad for n, p in peft_model.named_parameters() if p.grad is not None}
    return loss.item(), grads


MIXED = {"default": "bf16", "overrides": {r".*self_attn.*": "fp8", r".*mlp\.(up|down)_proj": "nf4"}}
CASES: dict[str, tuple[int, dict[str, Any], str, dict[str, Any]]] = {
    "nf4 on one rank": (1, {"default": "nf4"}, "fp32", {}),
    "nf4 on two": (2, {"default": "nf4"}, "fp32", {}),
    "bf16 on two": (2, {"default": "bf16"}, "fp32", {}),
    "rows that do not divide": (3, {"default": "nf4"}, "fp32", {"vocab_size": VOCABULARY + 2, "intermediate_size": 200}),
    "fewer rows than ranks": (4, {"default": "nf4"}, "fp32", {"num_key_value_heads": 1, "head_dim": 2}),
    "fp8 on two": (2, {"default": "fp8"}, "fp32", {}),
    "all three formats in one layer": (2, MIXED, "fp32", {}),
    "all three, rows that do not divide": (3, MIXED, "fp32", {"intermediate_size": 200}),
    "all three, bf16 compute": (2, MIXED, "bf16", {}),
    "tied embeddings": (2, {"default": "nf4"}, "fp32", {"tie_word_embeddings": True}),
    "bf16 compute": (2, {"default": "nf4"}, "bf16", {}),
    "bf16 compute, one rank": (1, {"default": "nf4"}, "bf16", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_unsharded_reference(case: str, tmp_path: Path) -> None:
    world, storage, compute, changes = CASES[case]
    model = save_tiny_llama(tmp_path / "base", **changes)
    spec = spec_for(
        model,
        ranks=world,
        precision={**storage, "compute": compute},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4},
    )
    loss, grads = reference_step(model, spec)
    for result in run_on_ranks(train_once, world, spec):
        assert result["grads"].keys() == grads.keys()
        if compute == "fp32":
            assert result["loss"] == pytest.approx(loss, rel=1e-6)
            for name, grad in result["grads"].items():
                assert relative_error(grad, grads[name]) < 1e-5, name
        else:
            assert result["loss"] == pytest.approx(loss, rel=1e-2)
            for name, grad in result["grads"].items():
                assert relative_error(grad, grads[name]) < 2e-2, name


@pytest.mark.parametrize("world", [2, 3])
def test_one_gather_per_layer_and_direction_in_storage_format(world: int, tmp_path: Path) -> None:
    """NF4 weights put at most 0.58 bytes a parameter into a gather, padding rows included; the rest is adapters and norms."""
    changes = {"hidden_size": 128, "intermediate_size": 344, "vocab_size": VOCABULARY + 1}  # rows that 3 does not divide
    model = save_tiny_llama(tmp_path / "base", **changes)
    spec = spec_for(
        model, ranks=world, precision={"default": "nf4"}, training={"per_device_train_batch_size": 2}, lora={"r": 4}
    )
    rounds = 2
    for result in run_on_ranks(train_once, world, spec):
        gathers = [(dtype, sent) for kind, dtype, sent in result["collectives"] if kind == "gather"]
        of_layers = [sent for dtype, sent in gathers if dtype == "uint8"]
        assert len(of_layers) == 2 * len(result["layers"]) * rounds, "forward and backward of every layer, in one buffer"
        assert [dtype for dtype, _ in gathers].count("bfloat16") == rounds, "the root, once a micro-batch"
        for layer in result["layers"]:
            assert of_layers.count(layer["nf4"] + layer["rest"]) == len(of_layers)
            assert layer["nf4"] * world <= 0.58 * layer["nf4_parameters"]
        reduces = [dtype for kind, dtype, _ in result["collectives"] if kind == "reduce"]
        assert reduces == ["float32"] * len(result["layers"]), "adapter gradients, once a step and layer"


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).norm() / truth.norm())
