"""Samples that ranks share: how many ranks are chosen, what they hold and exchange, and where that is
refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.plan.context_parallel import refuse_to_share
from ft_service.plan.image_features import note_on_images
from ft_service.plan.job import Plan, plan_job
from ft_service.plan.machines import MACHINES
from ft_service.plan.memory import planned_micro_batches
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.weight_storage import ShardLayout
from ft_service.spec import JobSpec
from tests.support.bases import LLAMA_8B, describe, plan_of, save_base, settle_for, spec_on

PARAM = "distributed.context_parallel"
LONG = 163_840


def spec(folder: Path, ranks: int, context: int | str = "auto", **options: Any) -> JobSpec:
    distributed = {
        "replicate": "auto",
        "activation_checkpointing": options.pop("mode", "auto"),
        "context_parallel": context,
    }
    training = {"max_length": LONG, "batch_size": 4, **options.pop("training", {})}
    return spec_on(
        save_base(folder / "8b", LLAMA_8B),
        ranks,
        precision={"default": "nf4"},
        distributed=distributed,
        training=training,
        **options,
    )


def planned(*args: Any, lengths: SampleLengths | None = None, **options: Any) -> Plan:
    return plan_of(spec(*args, **options), MACHINES["H100"], lengths)


def test_as_few_ranks_share_a_sample_as_have_room_for_it(tmp_path: Path) -> None:
    plans = [planned(tmp_path, 8), planned(tmp_path, 8, training={"max_length": 600_000})]
    assert [(plan.batches.ranks, plan.fits) for plan in plans] == [(2, True), (4, True)]
    assert any(sentence.startswith(f"{PARAM}: 2 (") for sentence in plans[0].chosen)
    short = SampleLengths(4_000, 4, 1_000)
    assert planned(tmp_path, 8, lengths=short).batches.ranks == 1
    assert planned(tmp_path, 1, mode="full").fits is False
    assert planned(tmp_path, 1).chosen, "inputs in the memory of the host"

    machine = MACHINES["H100"]
    chosen = settle_for(spec(tmp_path, 8), machine).spec
    assert chosen.distributed.context_parallel == 2
    counted = settle_for(chosen, machine, short).spec
    assert counted.distributed.context_parallel == 1, "chosen again once samples are counted"
    alone = settle_for(spec(tmp_path, 1), machine).spec
    assert (alone.distributed.context_parallel, PARAM in alone.chosen) == ("auto", False), (
        "an attempt on more ranks may choose"
    )


def test_ranks_have_even_parts_of_the_micro_batches_of_their_group(tmp_path: Path) -> None:
    options = {"tokens_per_micro_batch": 1000, "batch_size": 10, "max_length": 900}
    batches = planned_micro_batches(spec(tmp_path, 4, 2, training=options), ShardLayout(1, 4), 801)
    assert (batches.samples, batches.rounds) == (2, 3), "5 samples a group, 2000 tokens a row"
    assert (batches.tokens, batches.step_tokens) == (1000, -(-5 * 801 // 2))


def test_what_ranks_keep_and_exchange_is_that_of_their_part(tmp_path: Path) -> None:
    """8B: 32 heads of 128 channels in 8 groups, 32 layers; in bf16, computed again in backward."""
    whole, half, many = (planned(tmp_path, 16, ranks, mode="full") for ranks in (1, 2, 16))
    assert whole.rank.activations == pytest.approx(2 * half.rank.activations, rel=0.02)
    tokens = half.batches.step_tokens
    assert half.wire.exchange == 3 * 32 * 2 * tokens * (2 * 4096 + 2 * 1024) // 2
    tokens = many.batches.step_tokens
    repeated = 2 * 1024  # 16 ranks share 8 groups of keys and values
    assert many.wire.exchange == 3 * 32 * 2 * tokens * (2 * 4096 + 2 * repeated) * 15 // 16
    assert whole.wire.exchange == 0
    assert half.speed is not None
    assert half.speed.step_seconds > half.speed.compute_seconds


def test_heads_that_do_not_come_out_even_are_made_up_by_zeros(tmp_path: Path) -> None:
    """32 heads in 8 groups on 3 ranks: 11 each, the last of zeros, each with keys and values."""
    third = planned(tmp_path, 3, 3, mode="full")
    tokens = third.batches.step_tokens
    width = 128 * (33 + 2 * 33 + 33)
    assert third.wire.exchange == 3 * 32 * 2 * tokens * width * 2 // 3
    alone = planned(tmp_path, 3, 1, mode="full")
    attention = 8 * 32 * third.batches.length * 128
    assert third.flops_per_token - alone.flops_per_token == attention


def test_forwards_without_gradients_exchange_too(tmp_path: Path) -> None:
    """Of KTO's mismatched answers: one more, beside a step's three."""
    kto = {"type": "kto", "kto": {"hyperparameters": {"loss_type": "kto"}}}
    apo = {"type": "kto", "kto": {"hyperparameters": {"loss_type": "apo_zero_unpaired"}}}
    more, usual = (planned(tmp_path, 2, 2, mode="full", method=own) for own in (kto, apo))
    assert more.batches == usual.batches
    assert 3 * more.wire.exchange == 4 * usual.wire.exchange > 0


def test_compiled_layers_and_shared_samples_exclude_each_other(tmp_path: Path) -> None:
    """What would be compiled where every rank has whole samples is not where they share them."""
    in_fp32 = {"precision": {"default": "nf4", "compute": "fp32"}}
    machine = replace(MACHINES["H100"], host_memory=2**30)
    long = SampleLengths(10_000 * LONG, 10_000, LONG)

    def settled(context: int | str, **distributed: Any) -> JobSpec:
        auto = {"replicate": "auto", "activation_checkpointing": "full", "compile": "auto"}
        given = spec_on(
            save_base(tmp_path / "8b", LLAMA_8B),
            4,
            distributed={**auto, "context_parallel": context, **distributed},
            training={"max_length": LONG, "batch_size": 4},
            **in_fp32,
        )
        return settle_for(given, machine, long).spec

    whole, shared = settled(1), settled(4)
    assert (whole.distributed.compile, shared.distributed.compile) == (True, False)
    assert "ranks share samples" in shared.chosen["distributed.compile"]
    assert settled("auto", compile=True).distributed.context_parallel == 1
    with pytest.raises(SpecError, match="cannot be compiled") as refused:
        plan_of(settled(4, compile=True), machine, long)
    assert refused.value.param == PARAM


@pytest.mark.parametrize(
    ("facts", "ranks", "lengths"),
    [
        ({"whole_because": "layers of mamba mix tokens by more than attention"}, 2, None),
        ({}, 2, SampleLengths(10, 1, 10, with_images=True)),
    ],
    ids=["mixes otherwise", "images"],
)
def test_what_cannot_be_shared_is_refused_and_never_chosen(
    facts: dict[str, Any], ranks: int, lengths: SampleLengths | None, tmp_path: Path
) -> None:
    given = spec(tmp_path, ranks, ranks)
    base = replace(describe(given.model.path), **facts)
    with pytest.raises(SpecError) as refused:
        plan_job(base, given, MACHINES["H100"], lengths)
    assert refused.value.param == PARAM
    assert plan_job(base, spec(tmp_path, ranks), MACHINES["H100"], lengths).batches.ranks == 1
    refuse_to_share(base, spec(tmp_path, ranks, 1), lengths)


def test_images_are_refused_by_the_check_of_the_data(tmp_path: Path) -> None:
    given = spec(tmp_path, 2, 2)
    with pytest.raises(SpecError) as refused:
        note_on_images(describe(given.model.path), given, 1, 64)
    assert refused.value.param == PARAM
    assert json.dumps(planned(tmp_path, 2, 2).as_dict())
