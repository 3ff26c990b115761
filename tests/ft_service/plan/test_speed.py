from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.kernel_limits import served_bytes
from ft_service.plan.job import plan_job
from ft_service.plan.machines import EFFICIENCY, EFFICIENCY_BY_CUDNN, MACHINES, Machine
from ft_service.plan.speed import flops_per_token, sampling_seconds
from tests.support.bases import LLAMA_8B, describe, llama_shapes, plan_of, save_base, spec_on
from tests.support.plans import H100, plan_8b
from tests.support.rollouts import GRADER


def test_adapters_and_arithmetic_of_an_8b_model(tmp_path: Path) -> None:
    """41.9 million parameters of rank 16, and 31.88 / 46.46 GFLOP a token at 2,048 tokens without /
    with checkpointing.
    """
    plan = plan_8b(tmp_path, lora={"r": 16}, training={"max_length": 2048})
    assert plan.adapter_parameters == 41_943_040
    assert plan.flops_per_token / 1e9 == pytest.approx(31.88, rel=1e-3)
    again = plan_8b(tmp_path, lora={"r": 16}, distributed={"activation_checkpointing": "full"})
    assert again.flops_per_token / 1e9 == pytest.approx(46.46, rel=1e-3)
    assert plan.rank.adapters + plan.rank.gradients + plan.rank.optimizer == pytest.approx(
        16 * 41_943_040, rel=1e-5
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_adapters_of_experts_cost_what_a_token_meets(tmp_path: Path, checkpointing: str) -> None:
    """Of 128 experts a token meets 8; with all, tokens of Qwen3 30B-A3B would be planned to cost
    1.47 times as much.
    """
    config: dict[str, Any] = {
        **LLAMA_8B,
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    config |= {
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "intermediate_size": 768,
        "model_type": "mixtral",
    }
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    for layer in range(2):
        before = f"model.layers.{layer}.mlp"
        shapes |= {
            f"{before}.gate.weight": (128, 2048),
            f"{before}.experts.gate_up_proj": (128, 1536, 2048),
        }
        shapes |= {f"{before}.experts.down_proj": (128, 2048, 768)}
    folder = save_base(tmp_path, config, shapes)
    options: dict[str, Any] = {"distributed": {"activation_checkpointing": checkpointing}}
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    attention, all_of_them = (
        plan_of(spec_on(folder, 1, lora={"r": 32, "target_parameters": names}, **options), H100)
        for names in ([], stacks)
    )
    met = 2 * 8 * 32 * ((1536 + 2048) + (2048 + 768))  # layers, experts, r, rows and columns
    assert all_of_them.adapter_parameters - attention.adapter_parameters == 16 * met
    assert (
        all_of_them.flops_per_token - attention.flops_per_token
        == (6 if checkpointing == "none" else 8) * met
    )


def test_one_micro_batch_gathers_the_layers_twice(tmp_path: Path) -> None:
    """3.15 GB of NF4 reach each of eight ranks per gather of all layers."""
    options: dict[str, Any] = {
        "precision": {"default": "nf4"},
        "training": {"batch_size": 16, "per_device_train_batch_size": 2},
    }
    plan = plan_8b(tmp_path, 8, **options)
    larger: dict[str, Any] = options | {
        "training": {"batch_size": 32, "per_device_train_batch_size": 2}
    }
    twice = plan_8b(tmp_path, 8, **larger)
    assert plan.batches.rounds == 1
    assert 2 * 3.15e9 < plan.wire.gather < 2 * 3.15e9 + 2.2e9  # and embedding, head and adapters
    assert (twice.wire.gather, twice.wire.reduce) == (2 * plan.wire.gather, plan.wire.reduce)
    assert plan_8b(tmp_path, 1, **options).wire.total == 0


def test_one_h100_trains_8b_at_about_the_measured_rate(tmp_path: Path) -> None:
    """17,790 tokens/s on an H200, which computes as fast.

    Published are 12,473 (NeMo AutoModel) to 14,875 (LoRAFusion).
    """
    speed = plan_8b(tmp_path, training={"max_length": 4096, "per_device_train_batch_size": 2}).speed
    assert speed is not None
    assert 15_000 < speed.tokens_per_second < 17_790


def test_products_in_fp8_are_planned_to_be_faster_where_the_gpu_has_them(tmp_path: Path) -> None:
    """An H200 trained an 8B in FP8 1.28 times as fast as in bf16.

    Where it is dequantised, it takes that time in addition.
    """
    bf16, fp8, dequantised = (
        plan_8b(
            tmp_path,
            precision={"default": own, "fp8_products": products},
            training={"max_length": 2048},
        ).speed
        for own, products in (("bf16", "auto"), ("fp8", "auto"), ("fp8", "off"))
    )
    assert bf16 is not None
    assert fp8 is not None
    assert dequantised is not None
    assert fp8.tokens_per_second / bf16.tokens_per_second == pytest.approx(1.28, abs=0.01)
    assert fp8.dequantise_seconds == 0 < dequantised.dequantise_seconds
    assert dequantised.compute_seconds == bf16.compute_seconds


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_rounding_with_the_adapter_costs_a_pass_for_each_forward_and_backward(
    tmp_path: Path, checkpointing: str
) -> None:
    """Of 6.98 billion numbers, of which each moves 98 bytes at 3.35 TB/s, and the sums of 16
    products in fp64.
    """
    plain, served, in_fp8 = (
        plan_8b(
            tmp_path,
            lora={"r": 16},
            precision={"compute": "bf16", **own},
            distributed={"activation_checkpointing": checkpointing},
        )
        for own in ({}, {"served_as": "int4_g128"}, {"default": "fp8", "served_as": "fp8"})
    )
    assert plain.speed is not None
    assert served.speed is not None
    assert in_fp8.speed is not None
    assert H100.memory_bandwidth is not None
    assert H100.flops is not None
    numel = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14_336)
    once = 98 * numel / H100.memory_bandwidth + 128 * 2 * 16 * numel / H100.flops
    passes = {"none": 2, "full": 3}[checkpointing] * served.batches.rounds
    assert plain.speed.dequantise_seconds == 0
    assert served.speed.dequantise_seconds == pytest.approx(passes * once, rel=1e-6)
    assert in_fp8.speed.compute_seconds == served.speed.compute_seconds, "no product is in FP8"
    modes = served.rank.workspace_by_mode, plain.rank.workspace_by_mode
    assert modes[0]["selective"] > modes[1]["selective"], "a weight and a block of it at once"
    assert served_bytes(2**26, 2, gpu=True) == 2 * 2**26 + 36 * 2**22
    assert served_bytes(2**10, 4, gpu=False) == 4 * 2**10 + 36 * 2**10


@pytest.mark.parametrize(
    ("options", "cudnn"),
    [
        ({}, True),
        ({"distributed": {"activation_checkpointing": "full"}}, True),
        ({"distributed": {"activation_checkpointing": "selective"}}, False),
        ({"distributed": {"compile": True}}, False),
        ({"training": {"packing": False}}, False),
        ({"training": {"per_device_train_batch_size": 1}}, False),
        (
            {"training": {"max_length": 100, "tokens_per_micro_batch": 8192, "batch_size": 128}},
            False,
        ),
    ],
)
def test_the_higher_rate_is_that_of_jobs_whose_attention_cudnn_computes(
    options: dict[str, Any], cudnn: bool, tmp_path: Path
) -> None:
    """Rows of 4,096 tokens and more, packed, of layers that are neither compiled nor seen by a
    dispatch mode.
    """
    training = {
        "max_length": 2048,
        "batch_size": 4,
        "per_device_train_batch_size": 4,
        **options.get("training", {}),
    }
    plan = plan_8b(tmp_path, **{**options, "training": training})
    assert plan.speed is not None
    arithmetic = (
        plan.batches.step_tokens * plan.flops_per_token / (989e12 * plan.speed.compute_seconds)
    )
    assert arithmetic == pytest.approx(EFFICIENCY_BY_CUDNN if cudnn else EFFICIENCY)


def test_a_base_whose_samples_are_padded_is_planned_without_cudnn(tmp_path: Path) -> None:
    """Neither its rate nor the room for its scores."""
    spec = spec_on(
        save_base(tmp_path / "8b", LLAMA_8B),
        1,
        training={"max_length": 2048, "per_device_train_batch_size": 4},
    )
    base = describe(spec.model.path)
    packed, padded = (
        plan_job(replace(base, padded_because=why), spec, machine)
        for why, machine in ((None, H100), ("its layers carry something on", H100))
    )
    other = plan_job(base, spec, MACHINES["A100"])
    assert packed.rank.workspace > padded.rank.workspace == other.rank.workspace
    assert packed.speed is not None
    assert padded.speed is not None
    faster = padded.speed.compute_seconds / packed.speed.compute_seconds
    assert faster == pytest.approx(EFFICIENCY_BY_CUDNN / EFFICIENCY)


def test_sampling_reads_all_weights_for_every_token_or_computes(tmp_path: Path) -> None:
    """On one H100, whose memory gives 3.35 TB/s: 16.06 GB of bf16 in 4.8 ms.

    With many answers at once arithmetic is slower.
    """
    method: dict[str, Any] = {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 8}},
    }
    (hint,) = plan_8b(tmp_path, training={"max_length": 2048}, method=method).hints
    assert (
        "a step's 64 answers of at most 512 tokens, 32,768 together, estimated to take one H100 "
        "at least 2.5 s" in hint
    )
    environment = {"type": "openenv", "url": "https://game.example", "max_turns": 3}
    method["reinforcement"]["environment"] = environment | {"max_tokens": 600}
    (of_game,) = plan_8b(tmp_path, training={"max_length": 2048}, method=method).hints
    assert (
        "64 answers, each in up to 3 calls of the model, of at most 600 tokens, 38,400" in of_game
    )
    base = describe(str(tmp_path / "8b"))
    few, many, more = (
        sampling_seconds(H100, base, 16_060_000_000, answers, 512) for answers in (8, 1000, 2000)
    )
    assert few == pytest.approx(512 * 16.06e9 / 3.35e12)
    assert many == pytest.approx(512 * 1000 * 2 * 7.5e9 / (989e12 * EFFICIENCY), rel=0.01)
    assert more == pytest.approx(2 * (many or 0.0))
    assert sampling_seconds(Machine("other", None), base, 1, 1, 1) is None


def test_copies_exchange_gradients_and_no_weights(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "8b", LLAMA_8B), 4)
    whole, halves = (
        plan_of(
            spec.model_copy(
                update={"distributed": spec.distributed.model_copy(update={"replicate": copies})}
            ),
            H100,
        )
        for copies in (-1, 2)
    )
    assert (whole.wire.gather, whole.wire.reduce) == (0, 0)
    assert whole.wire.all_reduce == pytest.approx(
        2 * 3 / 4 * 4 * whole.adapter_parameters, rel=1e-6
    )
    assert (halves.layout.replicate, halves.layout.shard) == (2, 2)
    assert halves.wire.all_reduce == pytest.approx(
        2 * 1 / 2 * 4 * whole.adapter_parameters / 2, rel=1e-6
    )


@pytest.mark.parametrize(
    ("checkpointed", "of_attention", "of_layers"), [(False, 6, 4), (True, 8, 6)]
)
def test_the_arithmetic_of_a_token_is_counted_by_forwards_and_backwards(
    checkpointed: bool, of_attention: int, of_layers: int, tmp_path: Path
) -> None:
    """Of a base without adapters, in samples of 100 tokens."""
    base = describe(save_base(tmp_path, LLAMA_8B))
    layers, head, attention = 6_979_321_856, 128_256 * 4096, 32 * 100 * 4096
    step, more = (
        flops_per_token(base, (), 100, checkpointed=checkpointed, forwards=forwards)
        for forwards in (0, 3)
    )
    assert step == of_layers * layers + 4 * head + of_attention * attention
    assert more - step == 3 * 2 * (layers + head + attention)
