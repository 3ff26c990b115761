"""AdamW on plain and sharded adapters, against the one of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ft_service.spec import TrainingOptions
from tests.support.ranks import run_on_ranks
from workers.job.training_state import JobState, Validations


@torch.no_grad()
def test_the_matrices_b_learn_faster_with_lora_plus() -> None:
    """And magnitudes, as in PEFT's create_loraplus_optimizer; against torch's own AdamW with a
    group for each kind.
    """
    names = (
        *(
            "x.lora_A.default.weight",
            "x.lora_B.default.weight",
            "x.lora_magnitude_vector.default.weight",
        ),
        "embed_tokens.weight",
    )
    ours, theirs = ([nn.Parameter(value) for value in values(0)] for _ in range(2))
    job = JobState(
        dict(zip(names, ours, strict=True)), TrainingOptions(weight_decay=0.1, loraplus_lr_ratio=16)
    )
    groups = [
        {"params": [theirs[0], theirs[3]], "lr": 1e-3},
        {"params": [theirs[1], theirs[2]], "lr": 16e-3},
    ]
    stock = torch.optim.AdamW(groups, weight_decay=0.1, fused=True)
    for step in (1, 2):
        for mine, stocks, gradient in zip(ours, theirs, values(step), strict=True):
            mine.grad, stocks.grad = gradient.clone(), gradient.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        stock.step()
        job.update(1e-3, 1.0)
    for mine, stocks in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, stocks, rtol=1e-6)


def job_state(value: float = 1.0) -> tuple[nn.Parameter, JobState]:
    parameter = nn.Parameter(torch.full((4,), value))
    return parameter, JobState({"a": parameter}, TrainingOptions())


SHAPES = ((5, 7), (1, 3), (4,), (8, 2))
"""Of parameters. Five rows on three ranks are two, two and one; one row leaves two ranks with
nothing.
"""


OPTIONS = TrainingOptions(weight_decay=0.1)
OTHER = TrainingOptions(weight_decay=0.1, adam_beta1=0.7, adam_beta2=0.95, adam_epsilon=1e-2)
"""The epsilon is one that counts beside gradients of about 1."""


NORMS = (3.0, 0.0, 1e-3, 0.5)
"""`max_grad_norm` of steps: clips, no clipping, clips nearly everything away, clips."""


def values(step: int) -> list[Tensor]:
    """Random numbers of the parameters' shapes: their start, or the gradients of a step from 1."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def truth(options: TrainingOptions) -> tuple[list[float], list[Tensor]]:
    """The norms and the final parameters, by torch's own clipping and optimizer."""
    parameters = [nn.Parameter(value) for value in values(0)]
    other = {"betas": (0.7, 0.95), "eps": 1e-2} if options is OTHER else {}
    plain = torch.optim.AdamW(parameters, weight_decay=0.1, **other)
    norms = []
    for step, limit in enumerate(NORMS, 1):
        plain.param_groups[0]["lr"] = 0.1 / step
        for parameter, gradient in zip(parameters, values(step), strict=True):
            parameter.grad = gradient
        norms.append(float(nn.utils.clip_grad_norm_(parameters, limit or float("inf"))))
        plain.step()
    return norms, [parameter.detach() for parameter in parameters]


def updates(
    options: TrainingOptions,
    parameters: list[nn.Parameter],
    place: Callable[[Tensor, nn.Parameter], Tensor],
) -> tuple[list[float], JobState]:
    """The same steps by `JobState`. `place`: puts a whole gradient where its parameter is."""
    job = JobState({str(i): parameter for i, parameter in enumerate(parameters)}, options)
    norms = []
    for step, limit in enumerate(NORMS, 1):
        for parameter, gradient in zip(parameters, values(step), strict=True):
            parameter.grad = place(gradient, parameter)
        norms.append(float(job.update(0.1 / step, limit)))
    return norms, job


def assert_equals_truth(options: TrainingOptions, norms: list[float], found: list[Tensor]) -> None:
    true_norms, true = truth(options)
    assert norms == pytest.approx(true_norms, rel=1e-6)
    for own, wanted in zip(found, true, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("options", [OPTIONS, OTHER])
def test_update_clips_to_the_norm_and_steps_like_adamw(options: TrainingOptions) -> None:
    parameters = [nn.Parameter(value) for value in values(0)]
    norms, job = updates(options, parameters, lambda gradient, _: gradient)
    assert_equals_truth(options, norms, [parameter.detach() for parameter in parameters])
    assert job.step == len(NORMS)
    assert all(parameter.grad is None for parameter in parameters)


def updates_on_rank(rank: int, world: int, copies: int) -> list[tuple[list[float], list[Tensor]]]:
    """By OPTIONS, and by OTHER."""
    shape, names = (
        ((copies, world // copies), ("replicate", "shard"))
        if copies > 1
        else ((world,), ("shard",))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [*([Replicate()] if copies > 1 else []), Shard(0)]

    def sharded(whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, placements)

    def updated(options: TrainingOptions) -> tuple[list[float], list[Tensor]]:
        """All parameters but the last are sharded, that one is plain: it counts once."""
        *start, last = values(0)
        parameters = [*(nn.Parameter(sharded(value)) for value in start), nn.Parameter(last)]
        norms, job = updates(
            options,
            parameters,
            lambda gradient, p: sharded(gradient) if isinstance(p, DTensor) else gradient,
        )
        assert all(
            isinstance(tensor, DTensor) == (not name.endswith("/3"))
            for name, tensor in job.tensors().items()
        )
        return norms, [
            p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters
        ]

    return [updated(options) for options in (OPTIONS, OTHER)]


@pytest.mark.parametrize(("world", "copies"), [(3, 1), (4, 2)])
def test_shards_are_clipped_and_stepped_as_the_whole(world: int, copies: int) -> None:
    for of_rank in run_on_ranks(updates_on_rank, world, copies):
        for options, (norms, found) in zip((OPTIONS, OTHER), of_rank, strict=True):
            assert_equals_truth(options, norms, found)


def test_a_parameter_without_a_gradient_stays() -> None:
    one = nn.Parameter(torch.ones(4))
    two = nn.Parameter(torch.ones(4))
    job = JobState({"one": one, "two": two}, OPTIONS)
    two.grad = torch.ones(4)
    job.update(learning_rate=0.1, max_grad_norm=1.0)
    assert torch.equal(one, torch.ones(4))
    assert not torch.equal(two, torch.ones(4))
    assert job.optimizer.steps.tolist() == [0.0, 1.0]


def test_zero_max_grad_norm_clips_nothing() -> None:
    parameter, job = job_state()
    parameter.grad = torch.full((4,), 100.0)
    job.update(learning_rate=0.1, max_grad_norm=0.0)
    assert torch.allclose(job.tensors()["exp_avg/a"], torch.full((4,), 10.0))


def test_a_resumed_optimizer_goes_on_where_it_was() -> None:
    parameter, job = job_state()
    for gradient in (1.0, -3.0):
        parameter.grad = torch.full((4,), gradient)
        job.update(learning_rate=0.1, max_grad_norm=1.0)
    other, resumed = job_state()
    with torch.no_grad():
        for name, tensor in resumed.tensors().items():
            tensor.copy_(job.tensors()[name])
    resumed.resume_at(2, 0, Validations(), updates=2)
    for each, its in ((parameter, job), (other, resumed)):
        each.grad = torch.full((4,), 0.5)
        its.update(learning_rate=0.1, max_grad_norm=1.0)
    assert torch.equal(other, parameter)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameter, job = job_state()
    parameter.grad = torch.tensor([1.0, -2.0, 0.0, 3.0])
    job.update(learning_rate=0.1, max_grad_norm=1.0)
    before = {name: tensor.clone() for name, tensor in job.tensors().items()}
    parameter.grad = torch.tensor([1.0, bad, bad, 0.0])
    norm = job.update(learning_rate=0.1, max_grad_norm=1.0)
    assert norm.shape == ()
    assert not norm.isfinite()
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.tensors().items())
    assert job.step == 2
