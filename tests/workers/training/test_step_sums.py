"""What a step sums up, and in which order it does it: on a model whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training.looked_up import CHANCES, LookedUp, log_of, sample
from workers.data import row_parts
from workers.data.batches import Batch, make_batch
from workers.ranks.context_group import ContextGroup
from workers.training import step
from workers.training.step import (
    cross_entropies,
    evaluate,
    forward_backward,
    last_logits,
    logits_of,
    target_log_probabilities,
    target_logits,
)

CPU = torch.device("cpu")
SAMPLES = [sample([0, 3, 2], 2), sample([2, 2], 1), sample([1, 1, 0], 1)]
OF_TARGETS = [0.4, 0.15, 0.45, 0.5]
"""Chances of 3 behind 0, 2 behind 3, 2 behind 2, and 0 behind 1."""
CORRECT = [True, False, True, True]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_cross_entropies_are_summed_and_their_gradient_is_scaled(
    packed: bool, in_chunks: bool
) -> None:
    model = LookedUp(in_chunks=in_chunks)
    batch = make_batch(SAMPLES, CPU, packed=packed)
    loss, sums = cross_entropies(model, batch, 0.25)
    assert (loss.dtype, sums.dtype, sums.requires_grad) == (torch.float32, torch.float64, False)
    assert sums.tolist() == [pytest.approx(-log_of(*OF_TARGETS)), 3]
    assert loss.item() == pytest.approx(-0.25 * log_of(*OF_TARGETS))
    loss.backward()
    expected = CHANCES.clone()
    for row, target in ((0, 3), (3, 2), (2, 2), (1, 0)):
        expected[row, target] -= 1
    assert model.table.grad is not None
    torch.testing.assert_close(model.table.grad, 0.25 * expected)


@pytest.mark.parametrize("in_chunks", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_targets_have_their_log_probabilities_at_a_temperature(
    in_chunks: bool, temperature: float
) -> None:
    model = LookedUp(in_chunks=in_chunks)
    batch = make_batch(SAMPLES, CPU, packed=True)
    logs, correct = target_log_probabilities(model, batch, temperature)
    flat = (CHANCES ** (1 / temperature))[[0, 3, 2, 1]]
    expected = (flat / flat.sum(dim=1, keepdim=True))[range(4), [3, 2, 2, 0]].log()
    torch.testing.assert_close(logs.detach(), expected)
    assert (logs.dtype, correct.tolist()) == (torch.float32, CORRECT)


def test_of_a_part_all_targets_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    monkeypatch.setattr(row_parts.dist, "all_reduce", lambda values, group: added.append(group))
    batch = make_batch(SAMPLES, CPU, packed=True)
    group: Any = "the group"
    logs, correct = target_log_probabilities(LookedUp(), batch.part_of(ContextGroup(1, 2, group)))
    assert correct.tolist() == [False, False, False, True], "tokens 4 to 7 with their targets"
    assert logs.tolist() == [0, 0, 0, pytest.approx(log_of(0.5))]
    assert (correct.dtype, added) == (torch.bool, ["the group"] * 2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_logits_are_those_before_each_target_or_behind_each_sample(
    packed: bool, in_chunks: bool
) -> None:
    model = LookedUp(in_chunks=in_chunks, dtype=torch.bfloat16)
    batch = make_batch(SAMPLES, CPU, packed=packed)
    found = target_logits(model, batch)
    assert found.dtype == torch.float32
    assert found.tolist() == model.table[[0, 3, 2, 1]].tolist()
    assert last_logits(model, batch, [3, 2, 3]).tolist() == model.table[[2, 2, 0]].tolist()


def test_a_forward_is_told_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for name in ("use_keys", "use_noise"):
        monkeypatch.setattr(step, name, lambda *given, name=name: told.append((name, *given)))
    monkeypatch.setattr(
        step.CURRENT, "use", lambda *given, **more: told.append(("use", given, more))
    )
    monkeypatch.setattr(step.CURRENT, "_whole", None)
    model = LookedUp()
    images: Any = SimpleNamespace(computed=lambda: "features")
    shared: Any = SimpleNamespace(part="part")
    common = {"keys": torch.ones(1), "lengths": torch.zeros(1), "images": images, "shared": shared}
    nothing = torch.zeros(0).long()
    padded = Batch(torch.ones(2, 3).long(), nothing, nothing, rows=(3, 2), **common)
    packed_ones = make_batch(SAMPLES, CPU, packed=True)
    own = packed_ones.packing
    assert own is not None
    numbered = replace(padded, positions=torch.tensor([[4]]))
    for batch in (padded, numbered, packed_ones):
        logits_of(model, batch)
    uses = [own[1:] for own in told if own[0] == "use"]
    of_rows = {"lengths": (3, 2), "device": CPU, "images": "features", "part": "part"}
    assert uses[:2] == [((None,), of_rows)] * 2
    assert uses[2][0][0] is own.starts
    assert (uses[2][0][2], uses[2][1]) == (3, {"images": None, "part": None})
    assert [given.get("position_ids") for given in model.given] == [
        None,
        numbered.positions,
        packed_ones.positions,
    ]
    assert ("position_ids" in model.given[0]) is False
    of_keys = [own for own in told if own[0] == "use_keys"]
    of_noise = [own for own in told if own[0] == "use_noise"]
    assert of_keys[0] == ("use_keys", model, common["keys"])
    assert of_noise[0] == ("use_noise", model, common["keys"], common["lengths"])
    assert (len(of_keys), of_keys[2][2], of_noise[2][2:]) == (3, None, (None, None))


class Noted:
    """Gradients of a step, and what it does in which order."""

    def __init__(self) -> None:
        self.did: list[Any] = []

    def begin(self, last: bool) -> None:
        self.did.append("last" if last else "begin")

    def backward(self, loss: Any) -> None:
        self.did.append(f"backward {loss}")

    def reduce(self) -> None:
        self.did.append("reduce")


@pytest.mark.parametrize(
    ("world", "count", "sums"), [(1, 3, [6.0, 3.0]), (2, 3, [60.0, 30.0]), (2, 1, [10.0, 10.0])]
)
def test_micro_batches_are_made_ahead_and_their_sums_and_gradients_added(
    world: int, count: int, sums: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step.dist, "all_reduce", lambda values: values.mul_(10))
    noted = Noted()
    did = noted.did

    def batches() -> Any:
        for number in range(1, count + 1):
            did.append(f"make {number}")
            yield number

    def loss_of(model: nn.Module, batch: int, scale: float) -> Any:
        did.append(f"loss {batch} at {scale}")
        return f"of {batch}", torch.tensor([float(batch), 1.0], dtype=torch.float64)

    given: Any = noted
    model = nn.Identity()
    found = forward_backward(model, batches(), 8, world, loss_of=loss_of, gradients=given)
    assert found.tolist() == sums
    at = f"at {world / 8}"
    first = ["begin", f"loss 1 {at}", "backward of 1"]
    others = [
        *("make 3", "begin", f"loss 2 {at}", "backward of 2"),
        *("last", f"loss 3 {at}", "backward of 3"),
    ]
    assert did == (
        ["make 1", "make 2", *first, *others, "reduce"]
        if count == 3
        else ["make 1", "last", *first[1:], "reduce"]
    )


def test_the_gradients_of_a_step_are_those_of_the_model() -> None:
    model = LookedUp()
    halves = [make_batch(part, CPU) for part in (SAMPLES[:1], SAMPLES[1:])]
    sums = forward_backward(model, halves, 4, 1)
    assert sums.tolist() == [pytest.approx(-log_of(*OF_TARGETS)), 3]
    assert model.table.grad is not None
    assert model.table.grad[0].tolist() == pytest.approx([0.025, 0.05, 0.075, -0.15])


@pytest.mark.parametrize(("world", "factor"), [(1, 1), (2, 10)])
def test_a_validation_has_no_gradients_and_frees_what_it_gathered(
    world: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[Any] = []
    monkeypatch.setattr(step, "reshard", freed.append)
    monkeypatch.setattr(step.dist, "all_reduce", lambda values: values.mul_(10))
    model = LookedUp()
    batches = [make_batch([own], CPU) for own in SAMPLES]
    found = evaluate(model, batches, world)
    assert found.tolist() == [pytest.approx(-factor * log_of(*OF_TARGETS)), 3 * factor]
    scales: list[Any] = []

    def loss_of(model: nn.Module, batch: Batch, scale: float) -> Any:
        scales.append((scale, torch.is_grad_enabled()))
        return None, torch.ones(1)

    evaluate(model, batches, 1, loss_of)
    assert (scales, freed) == ([(1.0, False)] * 3, [model, model])
