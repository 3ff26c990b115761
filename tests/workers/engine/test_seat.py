"""A seat's adapters: sharded masters, what lanes compute with, and the gradients of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.lanes import whole_adapters
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import CPU, full
from workers.engine.resident_base import load_resident_base
from workers.engine.seat import Seat
from workers.ranks.sharding import make_mesh


def seated(spec: JobSpec, world: int) -> tuple[Any, dict[str, torch.Tensor], Any]:
    mesh = make_mesh("cpu", world, 1)
    base = load_resident_base(spec, mesh, CPU).model
    job, first = whole_adapters(spec)
    return Seat(job, base, mesh, first, torch.bfloat16), first, base


def gradients_of(seat: Any) -> dict[str, torch.Tensor]:
    return {name: full(master.grad) for name, master in seat.masters.items()}


def on_rank(rank: int, world: int, spec: JobSpec) -> None:
    seat, first, base = seated(spec, world)
    heights = {own.shape[0] % 2 for own in first.values()}
    assert heights == {0, 1}, "some rows are of one rank only"
    for name, whole in seat._whole.items():
        assert whole.dtype == torch.bfloat16
        assert torch.equal(whole, first[name].bfloat16())
        assert isinstance(seat.masters[name], DTensor)
        assert seat.masters[name].shape == first[name].shape
        assert torch.equal(full(seat.masters[name]), first[name])
    with torch.no_grad():
        for master in seat.masters.values():
            master.add_(1.0)
    seat.gather()
    for name, whole in seat._whole.items():
        assert torch.equal(whole, (first[name] + 1).bfloat16())

    silent, *others = seat._whole
    for micro in (1.0, 10.0):
        for name in others:
            rows = torch.arange(first[name].shape[0]).float()
            shape = [-1, *[1] * (first[name].dim() - 1)]
            steps = (micro * (rank + 1) + rows).view(shape).expand(first[name].shape)
            seat._whole[name].grad = steps.bfloat16()
        seat.add_gradients()
        assert all(whole.grad is None for whole in seat._whole.values())
    seat.reduce()
    found = gradients_of(seat)
    assert not found[silent].any()
    for name in others:
        rows = 2 * torch.arange(first[name].shape[0]).float()
        mean = 11.0 * (1 + 2) / 2 + rows
        expected = mean.view([-1, *[1] * (first[name].dim() - 1)]).expand(first[name].shape)
        assert torch.equal(found[name], expected), name
        assert found[name].dtype == torch.float32
    seat.reduce()
    assert not any(gradient.any() for gradient in gradients_of(seat).values()), "of a new step"
    assert set(seat.linears) <= set(base.base.modules())
    assert len(seat.linears) == len(first) // 2


def test_masters_are_sharded_and_gradients_are_means_over_the_ranks(tmp_path: Path) -> None:
    spec = spec_for(
        save_tiny_llama(tmp_path), ranks=2, lora={"r": 3, "target_modules": ["q_proj", "v_proj"]}
    )
    run_on_ranks(on_rank, 2, spec)


def alone(rank: int, world: int, spec: JobSpec) -> None:
    seat, first, _ = seated(spec, 1)
    for name, master in seat.masters.items():
        assert seat._whole[name] is master
        assert torch.equal(master, first[name])
        assert master is not first[name]
        master.grad = torch.full_like(master, 2.0)
    seat.add_gradients()
    seat.reduce()
    assert all((gradient == 2).all() for gradient in gradients_of(seat).values())
    parameters = dict(seat.model.get_base_model().named_parameters())
    assert not any(own.is_meta for own in parameters.values()), "weights are those of the base"


def test_where_nothing_is_sharded_lanes_compute_with_the_masters(tmp_path: Path) -> None:
    run_on_ranks(alone, 1, spec_for(save_tiny_llama(tmp_path), lora={"r": 3}))


def refused(rank: int, world: int, spec: JobSpec) -> str | None:
    with pytest.raises(SpecError) as error:
        seated(spec, 1)
    return error.value.param


def test_a_job_that_trains_more_than_linear_layers_has_no_seat(tmp_path: Path) -> None:
    spec = spec_for(save_tiny_llama(tmp_path), lora={"r": 3, "modules_to_save": ["lm_head"]})
    assert run_on_ranks(refused, 1, spec) == ["lora"]
