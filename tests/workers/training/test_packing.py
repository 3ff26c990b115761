"""Packed rows against padded ones on whole models, and the trial that says which a model can
take.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import chunked_causal_mask_function
from transformers.models.llama import modeling_llama

from ft_service.spec import JobSpec
from tests.support.ranks import Cases, often_and_slow, run_on_ranks
from tests.support.training.models import (
    FAMILIES,
    OF_EXPERTS,
    OTHER_FAMILIES,
    save_tiny,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, assert_parity, constructed, samples, train_steps
from workers.data import batches
from workers.data.batches import collate, pack
from workers.data.micro_batches import attention_share
from workers.layers.segment_attention import NAME
from workers.layers.segments import CURRENT
from workers.model import packed_trial
from workers.model.multimodal import causal_model
from workers.training import packing
from workers.training.packing import settle_attention, settle_limits
from workers.training.step import logits_of

FP32 = {"default": "bf16", "compute": "fp32"}


def built(rank: int, world: int, spec: JobSpec, answer: Callable[[nn.Module], Any]) -> Any:
    return answer(constructed(spec, world).peft_model)


def on_one(spec: JobSpec, answer: Callable[[nn.Module], Any]) -> Any:
    return run_on_ranks(built, 1, spec, answer)[0]


def packed_and_apart(model: nn.Module) -> tuple[str | None, list[Tensor], list[Tensor]]:
    reason = settle_attention(model, CPU, torch.float32)
    batches.filled_row = lambda tokens: tokens + 3  # in a process of its own
    data = samples(5)
    with torch.no_grad():
        row = logits_of(model, pack(data, CPU))[0]
        *together, _ = row.split([*(len(sample.ids) for sample in data), 3])
        apart = [logits_of(model, collate([sample], CPU))[0] for sample in data]
    return reason, together, apart


def packed_and_apart_on_rank(
    rank: int, world: int, spec: JobSpec
) -> tuple[str | None, list[Tensor], list[Tensor]]:
    try:
        return built(rank, world, spec, packed_and_apart)
    finally:
        CURRENT.use(None)


@pytest.fixture(scope="module")
def families(
    tmp_path_factory: pytest.TempPathFactory,
) -> Cases[tuple[str | None, list[Tensor], list[Tensor]]]:
    def spec_of(family: str) -> JobSpec:
        lora = {"r": 2, "target_modules": OF_EXPERTS.get(family, "all-linear")}
        return spec_for(
            save_tiny(family, tmp_path_factory.mktemp(family)), precision=FP32, lora=lora
        )

    return Cases(
        packed_and_apart_on_rank, {family: spec_of(family) for family in FAMILIES}, OTHER_FAMILIES
    )


@pytest.mark.parametrize("family", often_and_slow(FAMILIES, OTHER_FAMILIES))
def test_packed_samples_are_computed_as_they_are_apart(
    family: str, families: Cases[tuple[str | None, list[Tensor], list[Tensor]]]
) -> None:
    """Token by token, in every family: with windows, soft caps and experts, and in a row that is
    filled up; and the trial says so.
    """
    _, [(reason, together, apart)] = families.of(family)
    assert reason is None
    for ours, alone in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "world", [*(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2)), 3]
)
def test_steps_of_packed_samples_are_those_of_padded_ones(world: int, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "base", sliding_window=7)
    spec = spec_for(
        model, ranks=world, precision={"default": "nf4", "compute": "fp32"}, lora={"r": 4}
    )
    either = {
        f"{packing}": spec_with(spec, packing=packing, tokens_per_micro_batch=40)
        for packing in (True, False)
    }
    trained = Cases(train_steps, either)
    assert_parity(trained.of("True")[1][0], trained.of("False")[1][0])


def spec_with(spec: JobSpec, **training: Any) -> JobSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


def leaks(model: nn.Module) -> tuple[str | None, str | None, bool]:
    """A layer that adds something of the token before: what a short convolution does."""
    layer: Any = causal_model(model).model.layers[1]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x) + 0.1 * torch.cat([x[:, :1], x[:, :-1]], dim=1)
    return refused(model)


def leaks_less_than_rounding(model: nn.Module) -> tuple[str | None, str | None, bool]:
    """The same where rounding is as large: only that other tokens change the answer gives it
    away.
    """
    packed_trial.SAME[torch.float32] = float("inf")  # in a process of its own
    return leaks(model)


def ignores_positions(model: nn.Module) -> tuple[str | None, str | None, bool]:
    """Positions of its own, counted through the row."""
    rotary: Any = causal_model(model).model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(
        x, torch.arange(x.shape[1])[None].expand(len(x), -1) ** 2
    )
    return refused(model)


def attends_in_chunks(model: nn.Module) -> tuple[str | None, str | None, bool]:
    """A mask that its layers do not name."""
    llama: Any = modeling_llama
    made = llama.create_causal_mask
    chunks = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))

    def in_chunks(**options: Any) -> Any:
        return made(**options, and_mask_function=chunks)

    llama.create_causal_mask = in_chunks
    try:
        return refused(model)
    finally:
        llama.create_causal_mask = made


def refused(model: nn.Module) -> tuple[str | None, str | None, bool]:
    reason = settle_attention(model, CPU, torch.float32)
    return reason, causal_model(model).config._attn_implementation, CURRENT.faults is None


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (leaks, "not computed as they are apart"),
        (leaks_less_than_rounding, "carry something from one packed sample into the next"),
        (ignores_positions, "not computed as they are apart"),
        (
            attends_in_chunks,
            "the mask of LlamaAttention has chunks of 4, and its layer has no window",
        ),
    ],
)
def test_a_model_that_cannot_take_packed_rows_is_found_out(
    broken: Any, says: str, tmp_path: Path
) -> None:
    reason, attention, clean = on_one(
        spec_for(save_tiny_llama(tmp_path / "base"), precision=FP32), broken
    )
    assert reason is not None
    assert re.search(says, reason), reason
    assert attention == "sdpa", "its own attention, with its own masks"
    assert clean


def limits_and_warnings(model: nn.Module) -> tuple[bool, list[str]]:
    causal_model(model).config._attn_implementation = "sdpa"
    told: list[str] = []
    spec = spec_for(Path("none"), precision=FP32, training={"tokens_per_micro_batch": 77})
    return settle_limits(model, spec, CPU, told.append).packed, told


def test_samples_are_padded_with_a_warning_where_attention_cannot_be_chosen(tmp_path: Path) -> None:
    packed, told = on_one(
        spec_for(save_tiny_llama(tmp_path / "base"), precision=FP32), limits_and_warnings
    )
    assert not packed
    assert len(told) == 1
    assert "training.packing: samples are padded" in told[0]


def own_limits(model: nn.Module) -> Any:
    told: list[str] = []
    options = {"tokens_per_micro_batch": 77, "per_device_train_batch_size": 3, "packing": False}
    limits = settle_limits(
        model, spec_for(Path("none"), precision=FP32, training=options), CPU, told.append
    )
    return (
        limits.tokens,
        limits.samples,
        limits.packed,
        causal_model(model).config._attn_implementation,
        told,
    )


def test_padding_that_was_asked_for_is_no_warning(tmp_path: Path) -> None:
    assert on_one(spec_for(save_tiny_llama(tmp_path / "base"), precision=FP32), own_limits) == (
        77,
        3,
        False,
        NAME,
        [],
    )


@pytest.mark.parametrize(
    ("asked", "reason", "packed", "warnings"),
    [(True, None, True, 0), (True, "it looks back", False, 1), (False, "it looks back", False, 0)],
)
def test_limits_of_micro_batches_are_those_of_the_spec(
    asked: bool, reason: str | None, packed: bool, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(hidden_size=64)
    monkeypatch.setattr(packing, "causal_model", lambda model: model)
    monkeypatch.setattr(packing, "text_decoder", lambda model: SimpleNamespace(config=config))
    warned: list[str] = []
    for tokens, expected in (("auto", packing.TOKENS), (96, 96)):
        training = SimpleNamespace(
            packing=asked, tokens_per_micro_batch=tokens, per_device_train_batch_size=3
        )
        spec: Any = SimpleNamespace(training=training)
        found = packing.limits_of(nn.Identity(), spec, reason, warned.append)
        assert (found.tokens, found.samples, found.packed) == (expected, 3, packed)
        assert found.per_token == attention_share(64) > 0
    assert len(warned) == 2 * warnings


@pytest.mark.parametrize("ranks", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_what_any_rank_finds_of_packed_rows_counts(
    ranks: bool, elsewhere: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(flag: Tensor, op: Any) -> None:
        assert op == packing.dist.ReduceOp.MAX
        flag.clamp_(min=int(elsewhere))

    monkeypatch.setattr(packing.dist, "is_initialized", lambda: ranks)
    monkeypatch.setattr(packing.dist, "all_reduce", reduce)
    monkeypatch.setattr(packed_trial, "settle_attention", lambda *given: given)
    model = nn.Identity()
    found: Any = settle_attention(model, CPU, torch.bfloat16)
    *given, agreed = found
    assert given == [model, CPU, torch.bfloat16]
    assert agreed(here) is (here or (ranks and elsewhere))
