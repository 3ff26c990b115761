"""Dropout by counting: the masks against arithmetic of another library, the step against stock
parts under the same masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import reference, save_tiny_llama, spec_for
from tests.support.training.parity import (
    CPU,
    Step,
    assert_parity,
    batches_of,
    constructed,
    full,
    samples,
)
from workers.base.load import adapters, plain_name
from workers.data.batches import collate, pack
from workers.layers.dropout import Dropping, dropped_linear, kept_mask, key_of, keys_from
from workers.training.step import Sums, forward_backward

RATE = 0.3


def truth(first: int, positions: int, module: str, channels: int) -> np.ndarray:
    """Which numbers stay, bool [positions, channels], in unsigned arithmetic."""

    def hashed(z: np.ndarray) -> np.ndarray:
        z = z.astype(np.uint32)
        z ^= z >> np.uint32(16)
        z = (z.astype(np.uint64) * 0x7FEB352D).astype(np.uint32)
        z ^= z >> np.uint32(15)
        z = (z.astype(np.uint64) * 0x846CA68B).astype(np.uint32)
        return z ^ (z >> np.uint32(16))

    def keys(key: int, count: int) -> np.ndarray:
        return hashed(
            (np.arange(count, dtype=np.uint64) * 0x9E3779B9 + key % (1 << 32)) % (1 << 32)
        )

    numbers = hashed(
        keys(first, positions)[:, None] ^ keys(key_of("module", module), channels)[None, :]
    )
    return numbers.view(np.int32) >= round(RATE * (1 << 32)) - (1 << 31)


def module_key(name: str) -> torch.Tensor:
    return torch.tensor(key_of("module", name), dtype=torch.int32)


def test_masks_are_those_of_unsigned_arithmetic() -> None:
    for number in range(5):
        first = key_of("sample", 7, 3, number)
        ours = kept_mask(keys_from(first, 40, CPU), module_key("a.b"), 301, RATE)
        assert np.array_equal(ours.numpy(), truth(first, 40, "a.b", 301))


@pytest.mark.parametrize("rate", [0.0, 1e-9, RATE, 0.999])
@pytest.mark.parametrize("numbers_at_once", [1, 1000, 1 << 20])
def test_masks_do_not_depend_on_how_many_are_made_at_once(
    rate: float, numbers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(-(2**31), 2**31 - 1, (3, 17), dtype=torch.int32)
    numbers = tokens.reshape(-1, 1) ^ keys_from(module_key("a"), 301, CPU)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        unsigned = numbers.long() & 0xFFFFFFFF
        numbers = (((unsigned ^ (unsigned >> shift)) * factor) & 0xFFFFFFFF).int()
    monkeypatch.setattr("workers.layers.dropout._NUMBERS_AT_ONCE", numbers_at_once)
    expected = numbers >= round(rate * (1 << 32)) - (1 << 31)
    assert torch.equal(kept_mask(tokens, module_key("a"), 301, rate), expected)
    assert kept_mask(tokens[:0], module_key("a"), 301, rate).shape == (0, 301)


def test_masks_drop_the_right_share_and_have_nothing_to_do_with_each_other() -> None:
    def mask(seed: int = 7, step: int = 3, sample: int = 0, name: str = "a") -> torch.Tensor:
        return kept_mask(
            keys_from(key_of("sample", seed, step, sample), 500, CPU), module_key(name), 400, RATE
        ).double()

    one = mask()
    assert one.mean() == pytest.approx(1 - RATE, abs=0.005), "ten standard deviations"
    assert one.mean(0).std() == pytest.approx((RATE * (1 - RATE) / 500) ** 0.5, rel=0.2), (
        "over tokens"
    )
    assert one.mean(1).std() == pytest.approx((RATE * (1 - RATE) / 400) ** 0.5, rel=0.2), (
        "over channels"
    )
    others = [
        mask(seed=8),
        mask(step=4),
        mask(sample=1),
        mask(name="b"),
        one.roll(1, 0),
        one.roll(1, 1),
    ]
    for other in others:
        assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs() < 0.012


def test_a_token_s_mask_does_not_depend_on_its_neighbours() -> None:
    data = samples(3)
    together = collate(data, CPU, keys=[11, 12, 13]).keys
    alone = collate(data[2:], CPU, keys=[13]).keys
    assert together is not None
    assert alone is not None
    assert torch.equal(together[2, : alone.shape[1]], alone[0])
    packed = pack(data, CPU, keys=[11, 12, 13]).keys
    assert packed is not None
    assert torch.equal(packed[0, -alone.shape[1] :], alone[0])
    for made in (collate([], CPU, keys=[]), pack([], CPU, keys=[])):
        assert made.keys is not None
        assert made.keys.shape == (1, 2)


def test_gradients_are_those_of_the_masked_product() -> None:
    x = torch.randn(2, 5, 16, requires_grad=True)
    a = torch.randn(3, 16, requires_grad=True)
    tokens = collate(samples(2, longest=5), CPU, keys=[1, 2]).keys
    assert tokens is not None
    mask = kept_mask(tokens, module_key("a"), 16, RATE).view(2, 5, 16)
    grad = torch.randn(2, 5, 3)
    expected = F.linear(x * mask / (1 - RATE), a)
    ours = dropped_linear(x, a, tokens, module_key("a"), RATE)
    torch.testing.assert_close(ours, expected)
    for found, right in zip(
        torch.autograd.grad(ours, (x, a), grad),
        torch.autograd.grad(expected, (x, a), grad),
        strict=True,
    ):
        torch.testing.assert_close(found, right)
    torch.library.opcheck(dropped_linear, (x, a, tokens, module_key("a"), RATE))


def test_nothing_is_dropped_in_front_of_a_sample() -> None:
    """Where a layer that looks back puts one row of zeros, there is no token."""
    dropping = Dropping(RATE, "a")
    dropping.use(keys_from(1, 48, CPU).view(2, 24))
    assert dropping.concerns(torch.ones(2, 24, 8))
    assert not dropping.concerns(torch.zeros(2, 1, 8))
    dropping.use(keys_from(1, 2, CPU).view(2, 1))
    assert dropping.concerns(torch.ones(2, 1, 8)), "samples of one token"


def sample_keys(spec: JobSpec, part: list[int]) -> list[int]:
    return [key_of("sample", spec.seed, 0, i) for i in part]


def one_step(rank: int, world: int, spec: JobSpec) -> Step:
    data = samples()
    built = constructed(spec, world)
    batches = batches_of(data, rank, world, spec, sample_keys(spec, list(range(len(data)))))
    targets = sum(t.target_count for t in data)
    sums = Sums.read(forward_backward(built.peft_model, batches, targets, world), targets)
    return Step(sums.mean_loss, {name: full(p.grad) for name, p in adapters(built.peft_model)})


class Masked(nn.Module):
    """In the place of PEFT's dropout: the same masks, by other means."""

    def __init__(self, name: str, firsts: list[int]) -> None:
        super().__init__()
        self._name = name
        self._firsts = firsts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = [truth(first, x.shape[1], self._name, x.shape[2]) for first in self._firsts]
        return x * torch.from_numpy(np.stack(masks)) / (1 - RATE)


def stock_step(model: Path, spec: JobSpec) -> Step:
    peft_model: Any = reference(model, spec)
    firsts = sample_keys(spec, list(range(len(samples()))))
    for name, module in peft_model.get_base_model().named_modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = Masked(name, firsts)
    batch = collate(samples(), CPU)
    logits = peft_model(input_ids=batch.ids).logits.flatten(0, 1)
    loss = F.cross_entropy(logits[batch.places], batch.targets)
    loss.backward()
    return Step(
        loss.item(),
        {plain_name(n): full(p.grad) for n, p in peft_model.named_parameters() if p.requires_grad},
    )


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "three ranks, one with empty micro-batches": (3, {}),
    "activations computed again": (2, {"activation_checkpointing": "full"}),
    "products kept": (2, {"activation_checkpointing": "selective"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_stock_parts_under_the_same_masks(case: str, model: Path) -> None:
    world, distributed = CASES[case]
    spec = spec_for(
        model,
        ranks=world,
        precision={"default": "nf4", "compute": "fp32"},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4, "lora_dropout": RATE},
        distributed=distributed,
    )
    expected = stock_step(model, spec)
    without = stock_step(model, spec.model_copy(update={"seed": spec.seed + 1}))
    assert abs(expected.loss - without.loss) > 1e-4 * expected.loss, "other masks are another step"
    for step in run_on_ranks(one_step, world, spec):
        assert_parity([step], [expected])
