"""Training steps of the real worker code on N ranks, next to the same steps of an unsharded
reference of stock parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ft_service.data.tokens.sample import Tokens
from ft_service.spec import JobSpec
from tests.support.training.models import VOCABULARY, adapter_value, reference, reference_name
from workers.attempt.prepared_model import construct
from workers.base.load import adapters
from workers.data.batches import Batch, collate, make_batch
from workers.data.micro_batches import MicroBatchLimits, share_out
from workers.model.build import BuiltModel
from workers.ranks.context_group import ContextGroup
from workers.ranks.sharding import Gradients, make_mesh
from workers.training.step import Sums, forward_backward

CPU = torch.device("cpu")
MIXED = {"default": "bf16", "overrides": {r".*self_attn.*": "fp8", r".*mlp\.(up|down)_proj": "nf4"}}
RATE = 0.5
"""Of plain gradient descent between the steps: large enough that stale adapters would show in the
next loss.
"""


Collective = tuple[str, str, int, int]
"""(gather | reduce | allreduce, dtype, bytes that this rank contributes, ranks in the group)"""


@dataclass
class Step:
    loss: float
    grads: dict[str, torch.Tensor]
    collectives: list[Collective] = field(default_factory=list)
    """In order; FSDP2's and our own."""


def samples(count: int = 7, longest: int = 24) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(count):
        length = longest - 2 * i
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
        targets = torch.rand(length, generator=generator).numpy() < 0.6
        samples.append(Tokens(ids, targets))
    return samples


def constructed(spec: JobSpec, world: int, warnings: list[str] | None = None) -> BuiltModel:
    """The worker's model, sharded and loaded, with adapters that are not zero.

    `warnings`: takes those of the construction.
    """
    told: list[str] = [] if warnings is None else warnings
    built = construct(spec, make_mesh("cpu", world, spec.distributed.replicate), CPU, told.append)
    set_adapters(built.peft_model)
    built.peft_model.train()
    return built


def train_steps(rank: int, world: int, spec: JobSpec, steps: int = 2) -> list[Step]:
    """Steps of gradient descent by the real worker code, as this rank sees them."""
    built = constructed(spec, world)
    trained = dict(adapters(built.peft_model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FSDP2 warns of what may go wrong silently
        # A head with a bias returns a view, which would matter to somebody who writes into logits
        # in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        return [one_step(rank, world, spec, built, trained) for _ in range(steps)]


def steps_of_sharding(rank: int, world: int, spec: JobSpec) -> list[Step]:
    """A step, and a second one where what is gathered or compiled may outlive the first: stale
    adapters show in its loss.
    """
    return train_steps(rank, world, spec, steps_needed(spec))


def steps_needed(spec: JobSpec) -> int:
    how = spec.distributed
    return (
        2
        if how.keep_unsharded or how.reshard_after_forward is not True or how.compile is True
        else 1
    )


def one_step(
    rank: int, world: int, spec: JobSpec, built: BuiltModel, trained: dict[str, torch.nn.Parameter]
) -> Step:
    data = samples()
    batches = batches_of(data, rank, world, spec)
    with counted_collectives() as collectives:
        targets = sum(t.target_count for t in data)
        kept = spec.distributed.keep_unsharded
        sums = forward_backward(
            built.peft_model,
            batches,
            targets,
            world,
            gradients=Gradients(built.peft_model, world, keep_unsharded=kept),
        )
    done = Step(
        Sums.read(sums, targets).mean_loss,
        {name: full(p.grad) for name, p in trained.items()},
        collectives,
    )
    descend(trained)
    return done


def batches_of(
    data: list[Tokens],
    rank: int,
    world: int,
    spec: JobSpec,
    keys: list[int] | None = None,
    context: ContextGroup | None = None,
) -> list[Batch]:
    """A rank's micro-batches of a global batch, as the worker makes them.

    `keys`: of the samples, for dropout. `context`: the ranks that share rows with this one.
    """
    ranks = 1 if context is None else context.ranks
    options = spec.training
    tokens = 4096 if options.tokens_per_micro_batch == "auto" else options.tokens_per_micro_batch
    limits = MicroBatchLimits(ranks * tokens, options.per_device_train_batch_size, options.packing)
    batches = []
    for micro in share_out([len(sample.ids) for sample in data], world // ranks, limits):
        own = micro[rank // ranks]
        of_samples = None if keys is None else [keys[i] for i in own]
        batch = make_batch([data[i] for i in own], CPU, of_samples, packed=options.packing)
        batches.append(batch if context is None else batch.part_of(context))
    return batches


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


@contextmanager
def counted_collectives() -> Iterator[list[Collective]]:
    """Records what collectives of tensors carry.

    By patching: the compiler refuses to work below a dispatch mode.
    """
    log: list[Collective] = []

    def counting(kind: str, collective: Any, position: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[position] if len(args) > position else kwargs["input"]
            log.append(
                (
                    kind,
                    str(sent.dtype).removeprefix("torch."),
                    sent.nbytes,
                    dist.get_world_size(kwargs.get("group")),
                )
            )
            return collective(*args, **kwargs)

        return call

    gather = "all_gather_single"
    reduce = "reduce_scatter_single"
    if not hasattr(dist, gather):  # before torch 2.13
        gather = "all_gather_into_tensor"
        reduce = "reduce_scatter_tensor"
    with (
        patch.object(dist, gather, counting("gather", getattr(dist, gather), 1)),
        patch.object(dist, reduce, counting("reduce", getattr(dist, reduce), 1)),
        patch.object(dist, "all_reduce", counting("allreduce", dist.all_reduce, 0)),
    ):
        yield log


def reference_steps(
    model: Path, spec: JobSpec, steps: int = 2, dtype: torch.dtype = torch.float32
) -> list[Step]:
    """The same steps on one process, unsharded, from stock layers on dequantised weights.

    `dtype`: of the arithmetic.
    """
    peft_model = reference(model, spec, dtype)
    trained = {reference_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    batch = collate(samples(), CPU)
    done = []
    for _ in range(steps):
        logits = peft_model(input_ids=batch.ids).logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits[batch.places], batch.targets)
        loss.backward()
        done.append(Step(loss.item(), {name: full(p.grad) for name, p in trained.items()}))
        descend(trained)
    return done


class References:
    """Reference steps of jobs, each computed once: how a job is sharded changes nothing of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], list[Step]] = {}

    def of(self, spec: JobSpec, steps: int) -> list[Step]:
        key = (
            spec.model.path,
            spec.precision.model_dump_json(),
            spec.lora.model_dump_json(),
            f"{steps}",
        )
        if key not in self._found:
            self._found[key] = reference_steps(Path(spec.model.path), spec, steps)
        return self._found[key]


def assert_parity(
    ours: list[Step], truth: list[Step], *, loss: float = 1e-6, gradients: float = 1e-5
) -> None:
    """Loss and every adapter gradient of every step, within relative bounds."""
    assert len({step.loss for step in truth}) == len(truth), "the steps change something"
    for number, (step, expected) in enumerate(zip(ours, truth, strict=True)):
        assert step.loss == pytest.approx(expected.loss, rel=loss), f"step {number}"
        assert step.grads.keys() == expected.grads.keys()
        for name, grad in step.grads.items():
            assert relative_error(grad, expected.grads[name]) < gradients, f"step {number}: {name}"


def assert_parity_in_bf16(ours: list[Step], stock: list[Step], truth: list[Step]) -> None:
    """As near to the truth in fp32 as stock parts in bf16 come, whose roundings are as many but not
    the same: within 1 to 2 %.

    `stock`, `truth`: the reference's steps in bf16 and in fp32. Each gradient of the first step,
    and all of them together of every step, for later the last bits of some adapters have rounded to
    other bf16 numbers. The loss within 0.01 %.
    """
    for number, (step, other, expected) in enumerate(zip(ours, stock, truth, strict=True)):
        assert step.loss == pytest.approx(other.loss, rel=1e-4), f"step {number}"
        assert step.grads.keys() == expected.grads.keys()
        assert _error_of_all(step, expected) < min(1.25 * _error_of_all(other, expected), 0.02), (
            f"step {number}"
        )
    errors, others = (
        {name: relative_error(step.grads[name], grad) for name, grad in truth[0].grads.items()}
        for step in (ours[0], stock[0])
    )
    for name, error in errors.items():
        assert error < min(1.25 * max(others.values()), 0.02), name


def _error_of_all(step: Step, truth: Step) -> float:
    gradient, wanted = (
        torch.cat([grads[name].flatten() for name in truth.grads])
        for grads in (step.grads, truth.grads)
    )
    return relative_error(gradient, wanted)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).norm() / truth.norm())
