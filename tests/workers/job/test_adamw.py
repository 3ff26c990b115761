"""AdamW on plain and sharded adapters, against the one of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ft_service.kernel_limits import moments_bytes
from ft_service.spec import TrainingOptions
from tests.support.ranks import run_on_ranks
from workers.job.training_state import JobState, Validations
from workers.quant import dynamic8


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


def matrices(step: int) -> list[Tensor]:
    """Gradients: of 300 columns, of 8, and of a vector."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((5, 300), (7, 8), (6,))]


def in_8_bits(rank: int, world: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Parameters and moments after five steps, the second without an end."""
    mesh = init_device_mesh("cpu", (world,))
    shard = [Shard(0)]
    parameters = {
        str(i): nn.Parameter(distribute_tensor(value, mesh, shard))
        for i, value in enumerate(matrices(0))
    }
    job = JobState(parameters, TrainingOptions(weight_decay=0.1, optim="adamw_8bit"))
    for step in range(1, 6):
        gradients = matrices(step)
        if step == 2:
            gradients[0][3, 7] = torch.inf
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, shard)
        before = {name: whole(tensor).clone() for name, tensor in job.tensors().items()}
        job.update(1e-2, 0.0)  # a norm is added up in an order that depends on the ranks
        changed = [
            not torch.equal(before[name], whole(tensor)) for name, tensor in job.tensors().items()
        ]
        assert any(changed) is (step != 2)
    return (
        [whole(parameter.detach()) for parameter in parameters.values()],
        {name: whole(tensor) for name, tensor in job.tensors().items()},
    )


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_moments_in_8_bits_are_the_same_on_any_number_of_ranks() -> None:
    ((_, of_one),) = run_on_ranks(in_8_bits, 1)
    assert of_one["exp_avg_codes/0"].dtype == torch.uint8
    assert of_one["exp_avg_sq_scales/0"].shape == (5, 3)
    assert of_one["exp_avg_scales/1"].shape == (7, 1)
    assert of_one["exp_avg/2"].dtype == torch.float32
    held = sum(own.nbytes for name, own in of_one.items() if name.startswith("exp_avg"))
    sizes = [(5, 300), (7, 8), (6, 1)]
    assert held == sum(moments_bytes(*size, in_8_bits=True) for size in sizes)
    for world in (2, 3):
        for _, found in run_on_ranks(in_8_bits, world):
            assert found.keys() == of_one.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in of_one.items())


def test_in_8_bits_it_stays_as_near_to_fp32_as_bitsandbytes_does() -> None:
    """bitsandbytes has blocks of 256, over all numbers; clipping is off."""
    from bitsandbytes.optim.adamw import AdamW8bit

    start = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    ours, exact, theirs = (nn.Parameter(start.clone()) for _ in range(3))
    jobs = [
        JobState({"a": ours}, TrainingOptions(weight_decay=0.1, optim="adamw_8bit")),
        JobState({"a": exact}, TrainingOptions(weight_decay=0.1)),
    ]
    stock = AdamW8bit([theirs], lr=1e-2, weight_decay=0.1, min_8bit_size=1)
    for step in range(1, 21):
        gradient = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)) * 0.01
        for parameter in (ours, exact, theirs):
            parameter.grad = gradient.clone()
        for job in jobs:
            job.update(1e-2, 0.0)
        stock.step()
    moved = (exact.detach() - start).norm()
    apart, of_theirs = (
        (found.detach() - exact.detach()).norm() / moved for found in (ours, theirs)
    )
    assert 0 < float(apart) < 0.03
    assert apart < 1.1 * of_theirs


@pytest.mark.parametrize("signed", [True, False])
def test_codes_in_8_bits_are_the_nearest_of_bitsandbytes_values(signed: bool) -> None:
    from bitsandbytes import functional

    theirs = functional.create_dynamic_map(signed=signed)
    assert torch.equal(dynamic8.table(signed, torch.device("cpu")), theirs)
    values = torch.randn(16, 384, generator=torch.Generator().manual_seed(0)) * 1e-3
    values = values if signed else values.square()
    codes, scales = dynamic8.encode(values, signed=signed)
    quantised, state = functional.quantize_blockwise(values, code=theirs, blocksize=128)
    assert torch.equal(state.absmax.view_as(scales), scales)
    decoded = functional.dequantize_blockwise(quantised, state).view_as(values)
    quantised = quantised.view_as(codes)
    assert torch.equal(dynamic8.decode(quantised, scales, signed=signed), decoded)
    ours = dynamic8.decode(codes, scales, signed=signed)
    # It divides by approximation: at a border it takes the other neighbour.
    assert ((ours - values).abs() <= (decoded - values).abs() * (1 + 1e-5) + 1e-12).all()
    assert float((codes != quantised).float().mean()) < 0.05
    zeros, none = dynamic8.encode(torch.zeros(2, 130), signed=signed)
    assert (zeros == dynamic8.zero_code(signed)).all()
    assert (dynamic8.decode(zeros, none, signed=signed) == 0).all()
