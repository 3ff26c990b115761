"""Training steps of the real worker code on N ranks beside the same steps of an unsharded reference of stock parts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ft_service.spec import JobSpec
from tests.workers.models import VOCABULARY, adapter_value, reference
from workers.data.batches import Tokens, collate, micro_batches
from workers.model.build import BuiltModel
from workers.model.load import adapters, plain_name
from workers.parallel import make_mesh
from workers.step import forward_backward
from workers.train import construct

CPU = torch.device("cpu")
RATE = 0.5
"""Of plain gradient descent between the steps: large enough that stale adapters would show in the next loss."""


@dataclass
class Step:
    loss: float
    grads: dict[str, torch.Tensor]
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    """(gather | reduce | allreduce, dtype, bytes that this rank contributes), in order; FSDP2's and those of our own."""


def samples(count: int = 7, longest: int = 24) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        length = longest - 2 * i
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
        targets = torch.rand(length, generator=generator).numpy() < 0.6
        found.append(Tokens(ids, targets))
    return found


def constructed(spec: JobSpec, world: int) -> BuiltModel:
    """The worker's model, sharded and loaded, with adapters that are not zero."""
    built = construct(spec, make_mesh("cpu", world, spec.distributed.replicate), CPU)
    set_adapters(built.peft_model)
    built.peft_model.train()
    return built


def train_steps(rank: int, world: int, spec: JobSpec, steps: int = 2) -> list[Step]:
    """Steps of gradient descent by the real worker code, as this rank sees them."""
    built = constructed(spec, world)
    warnings.simplefilter("error")  # FSDP2 warns of what may go wrong silently
    trained = dict(adapters(built.peft_model))
    return [one_step(rank, world, spec, built, trained) for _ in range(steps)]


def one_step(rank: int, world: int, spec: JobSpec, built: BuiltModel, trained: dict[str, torch.nn.Parameter]) -> Step:
    data = samples()
    mine = micro_batches(range(len(data)), rank, world, spec.training.per_device_train_batch_size)
    batches = [collate([data[i] for i in part], CPU) for part in mine]
    with CountedCollectives() as collectives:
        sums = forward_backward(built.peft_model, batches, sum(t.target_count for t in data), world)
    found = Step(sums.mean_loss, {name: full(p.grad) for name, p in trained.items()}, collectives.log)
    descend(trained)
    return found


@torch.no_grad()
def descend(parameters: dict[str, torch.nn.Parameter]) -> None:
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=RATE)
        parameter.grad = None


@torch.no_grad()
def set_adapters(model: torch.nn.Module) -> None:
    for name, parameter in adapters(model):
        value = adapter_value(name, parameter.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            height = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
            local = parameter.to_local()
            start = mesh.get_local_rank(mesh.ndim - 1) * height
            local.copy_(value[start : start + local.shape[0]])
        else:
            parameter.copy_(value)


def full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


class CountedCollectives(TorchDispatchMode):
    """Records what collectives of tensors carry, forward and backward."""

    KINDS: ClassVar = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "allreduce"}

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self.KINDS.get(func.overloadpacket.__name__) if func.namespace == "c10d" else None
        if kind is not None:
            sent = args[0][0] if kind == "allreduce" else args[1]
            self.log.append((kind, str(sent.dtype).removeprefix("torch."), sent.nbytes))
        return func(*args, **(kwargs or {}))


def reference_steps(model: Path, spec: JobSpec, steps: int = 2) -> list[Step]:
    """The same steps on one process, unsharded, from stock layers on dequantised weights."""
    peft_model = reference(model, spec)
    trained = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    batch = collate(samples(), CPU)
    found = []
    for _ in range(steps):
        logits = peft_model(input_ids=batch.ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())
        loss.backward()
        found.append(Step(loss.item(), {name: full(p.grad) for name, p in trained.items()}))
        descend(trained)
    return found


def assert_parity(ours: list[Step], truth: list[Step], *, loss: float = 1e-6, gradients: float = 1e-5) -> None:
    """Loss and every adapter gradient of every step, within relative bounds."""
    assert len({step.loss for step in truth}) == len(truth), "the steps change something"
    for number, (step, expected) in enumerate(zip(ours, truth, strict=True)):
        assert step.loss == pytest.approx(expected.loss, rel=loss), f"step {number}"
        assert step.grads.keys() == expected.grads.keys()
        for name, grad in step.grads.items():
            assert relative_error(grad, expected.grads[name]) < gradients, f"step {number}: {name}"


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).norm() / truth.norm())
