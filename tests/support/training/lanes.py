"""Jobs on one base, and the same jobs alone: their sums and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ft_service.spec import DpoOptions, JobSpec
from tests.support.training.models import adapter_value
from tests.support.training.parity import (
    CPU,
    batches_of,
    constructed,
    counted_collectives,
    full,
    samples,
)
from workers.base.load import adapters
from workers.engine.lanes import Lane
from workers.engine.resident_base import load_resident_base
from workers.engine.seat import Seat
from workers.model.build import build
from workers.quant import frozen_linear
from workers.quant.frozen_linear import Numerics
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.ranks.sharding import make_mesh
from workers.training.preference import make_answers, preference_loss
from workers.training.step import LossOf, cross_entropies, forward_backward

DPO = 2
"""The job that learns from pairs."""
Gradients = dict[str, Tensor]
Work = tuple[list[Any], int, LossOf[Any]]
"""A rank's micro-batches of a job's global batch, the divisor of their loss, and the loss."""


def work_of(number: int, spec: JobSpec, rank: int, world: int) -> Work:
    data = samples(4 + 2 * number, 20 + 2 * number)
    if number == DPO:
        own = [data[i : i + 2] for i in range(2 * rank, len(data), 2 * world)]
        pairs = [
            make_answers(pair, torch.full((2,), -30.0, dtype=torch.float64), CPU) for pair in own
        ]
        count = len(data) // 2
        return (
            pairs,
            count,
            preference_loss(
                DpoOptions(beta=0.1, loss_type="sigmoid"),
                count,
                sum(sample.target_count for sample in data[::2]),
            ),
        )
    keys = [100 * number + i for i in range(len(data))] if spec.lora.lora_dropout else None
    return (
        batches_of(data, rank, world, spec, keys),
        sum(sample.target_count for sample in data),
        cross_entropies,
    )


def trained_alone(
    number: int, spec: JobSpec, rank: int, world: int
) -> tuple[list[float], Gradients]:
    built = constructed(spec, world)
    batches, divisor, loss_of = work_of(number, spec, rank, world)
    sums = forward_backward(built.peft_model, batches, divisor, world, loss_of=loss_of)
    return sums.tolist(), {name: full(p.grad) for name, p in adapters(built.peft_model)}


def whole_adapters(spec: JobSpec, value: float | None = None) -> tuple[Any, dict[str, Tensor]]:
    job = build(spec, CPU).peft_model
    job.train()
    first = {name: adapter_value(name, p.shape) for name, p in adapters(job)}
    return job, first if value is None else {
        name: torch.full_like(tensor, value) for name, tensor in first.items()
    }


class Together:
    """Jobs on one base."""

    def __init__(
        self, specs: Sequence[JobSpec], rank: int, world: int, poisoned: int | None = None
    ) -> None:
        mesh = make_mesh("cpu", world, 1)
        self.rank = rank
        self.world = world
        self.base = load_resident_base(specs[0], mesh, CPU).model
        dtype = COMPUTE_DTYPE[specs[0].precision.compute]
        self.specs = specs
        jobs = [
            whole_adapters(spec, float("nan") if number == poisoned else None)
            for number, spec in enumerate(specs)
        ]
        self.seats = [Seat(job, self.base, mesh, first, dtype) for job, first in jobs]
        self.rounds: list[tuple[int, int, int]] = []
        """Lanes, gathers, and weights that were dequantised."""

    def train(self, order: Sequence[int]) -> list[tuple[list[float], Gradients]]:
        work = {
            number: work_of(number, self.specs[number], self.rank, self.world) for number in order
        }
        sums: dict[int, Tensor] = {}
        for i in range(max(len(batches) for batches, _, _ in work.values())):
            now = [number for number in order if i < len(work[number][0])]
            forwards = []
            for number in now:
                batches, divisor, loss_of = work[number]
                forwards.append(
                    partial(loss_of, self.seats[number].model, batches[i], self.world / divisor)
                )
            lanes = [Lane(self.seats[number].linears) for number in now]
            with counted_collectives() as collectives, counted_dequantising() as dequantised:
                losses = self.base.run(lanes, forwards)
                self.base.backward([loss for loss, _ in losses])
            self.rounds.append(
                (len(now), sum(one[0] == "gather" for one in collectives), dequantised["all"])
            )
            for number, (_, own) in zip(now, losses, strict=True):
                self.seats[number].add_gradients()
                sums[number] = own if number not in sums else sums[number] + own
        for number in order:
            if self.world > 1:
                torch.distributed.all_reduce(sums[number])
            self.seats[number].reduce_gradients(self.world)
        gradients = [
            {name: full(p.grad) for name, p in seat.masters.items() if p.grad is not None}
            for seat in self.seats
        ]
        return [(sums[number].tolist(), gradients[number]) for number in sorted(order)]


@contextmanager
def counted_dequantising() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    def counting(numerics: Numerics) -> Numerics:
        def dequantize(*args: Any) -> Tensor:
            counts["all"] += 1
            return numerics.module.dequantize(*args)

        return replace(numerics, module=SimpleNamespace(dequantize=dequantize))  # pyright: ignore[reportArgumentType]

    with patch.dict(
        frozen_linear._KNOWN,
        {name: counting(numerics) for name, numerics in frozen_linear._KNOWN.items()},
    ):
        yield counts


def assert_same(
    found: tuple[list[float], Gradients], expected: tuple[list[float], Gradients]
) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert any(gradient.any() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
