from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.plan.job import plan_job
from ft_service.plan.machines import EFFICIENCY, EFFICIENCY_BY_CUDNN, MACHINES, Machine
from ft_service.plan.memory import MicroBatches
from ft_service.plan.speed import (
    CollectiveBytes,
    Speed,
    TrainingWork,
    exchange_bytes,
    flops_per_token,
    launch_seconds,
    passes,
    sampling_seconds,
    served_seconds,
    speed_on,
    whole_training,
    wire_bytes,
)
from tests.support.bases import LLAMA_8B, describe, save_base, spec_on
from tests.support.plans import H100, made_base, made_job, plan_8b
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


def test_sampling_reads_all_weights_for_every_token(tmp_path: Path) -> None:
    """On one H100, whose memory gives 3.35 TB/s: 16.06 GB of bf16 in 4.8 ms."""
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


# Each term of a sum, on a base whose sizes differ ------------------------------------------------

H, HEADS, Q, KV, INNER, V, L, S = 64, 4, 128, 64, 512, 1000, 3, 50
"""Of `made_base`: hidden, heads, widths of queries and of keys, inner width, words, layers; and
tokens of a sample.
"""
MATRICES = L * (2 * Q * H + 2 * KV * H + 3 * INNER * H)
HEAD = V * H
A = L * 4 * (2 * (Q + H) + 2 * (KV + H) + 3 * (INNER + H))
"""Of adapters with r = 4."""
SCORES = L * S * Q
R4: dict[str, Any] = {"lora": {"r": 4, "lora_alpha": 8}}
BATCHES = MicroBatches(rounds=2, samples=3, length=S, tokens=150, step_tokens=290)
GPU = Machine("gpu", None, flops=1e12, memory_bandwidth=1e9, link_bandwidth=1e10)


@pytest.mark.parametrize(
    ("base", "lora", "more", "flops"),
    [
        ({}, {}, {}, (MATRICES + HEAD, A, SCORES, 0)),
        ({}, {}, {"forwards": 2}, (MATRICES + HEAD, A, SCORES, 4 * (MATRICES + HEAD + A + SCORES))),
        (
            {},
            {},
            {"forwards": 1, "teacher": made_base(layers=2, hidden=32, vocabulary=500)},
            (
                MATRICES + HEAD,
                A,
                SCORES,
                2 * (2 * 32 * (2 * Q + 2 * KV + 3 * INNER) + 500 * 32 + 2 * S * Q),
            ),
        ),
        ({}, {"modules_to_save": ["lm_head"]}, {}, (MATRICES + HEAD, A, SCORES, 2 * HEAD)),
        ({}, {"modules_to_save": ["embed_tokens"]}, {}, (MATRICES + HEAD, A, SCORES, 0)),
        # 4 heads in groups of 2 on 3 ranks: 2 a rank, two of zeros
        ({}, {}, {"ranks": 3}, (MATRICES + HEAD, A, SCORES * 6 // 4, 0)),
        (
            {"experts": 6, "expert_inner": 16},
            {"target_parameters": ["mlp.experts.down_proj"]},
            {},
            (
                L * (2 * Q * H + 2 * KV * H + 2 * 3 * 16 * H) + HEAD,
                L * 4 * (2 * (Q + H) + 2 * (KV + H) + 2 * (H + 16)),
                SCORES,
                0,
            ),
        ),
    ],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_arithmetic_of_a_token_has_every_product_that_it_meets(
    base: dict[str, Any],
    lora: dict[str, Any],
    more: dict[str, Any],
    flops: tuple[int, int, int, int],
    checkpointed: bool,
) -> None:
    """`flops`: numbers of matrices and head, of adapters, of scores; FLOP of what comes on top."""
    job = made_job(made_base(**base), lora={**R4["lora"], **lora})
    matrices, adapters, scores, top = flops
    again = 2 * (matrices - HEAD + adapters + scores) if checkpointed else 0
    assert flops_per_token(job.base, job.adapters, S, checkpointed=checkpointed, **more) == (
        4 * matrices + 6 * adapters + 6 * scores + again + top
    )


LAYER = 2 * (2 * Q * H + 2 * KV * H + 3 * INNER * H + A // L)
"""Bytes in which a layer is gathered."""
OUTER = 2 * V * H


@pytest.mark.parametrize(
    ("options", "received", "gathers"),
    [
        # embedding and head once; layers again for the backward
        ({}, 2 * 3 * (2 * OUTER + 2 * H + 2 * L * LAYER), 2 * (2 + 2 * L)),
        ({"keep_unsharded": True}, 3 * (2 * OUTER + 2 * H + L * LAYER), 2 + L),
        ({"reshard_after_forward": False}, 2 * 3 * (2 * OUTER + 2 * H + L * LAYER), 2 * (2 + L)),
        (
            {"reshard_after_forward": 2},
            2 * (3 * (2 * OUTER + 2 * H + L * LAYER) + 2 * L * LAYER),
            2 * (2 + 2 * L),
        ),
        ({"wrap": "none"}, 2 * 3 * (2 * OUTER + 2 * H + L * LAYER), 2),
    ],
)
@pytest.mark.parametrize("forwards", [0, 1])
def test_what_a_rank_receives_by_each_gather(
    options: dict[str, Any], received: int, gathers: int, forwards: int
) -> None:
    """One of four, in two micro-batches, each with `forwards` of a teacher."""
    once = "keep_unsharded" in options
    method = {"type": "distillation", "distillation": {"with_context": "x"}}
    taught: dict[str, Any] = {"method": method} if forwards else {}
    wire = wire_bytes(made_job(made_base(), 4, distributed=options, **taught, **R4), 2)
    alone = {"wrap"} & options.keys()
    more = 0 if once else forwards * 2
    whole = 3 * (2 * OUTER + 2 * H + L * LAYER)
    assert wire == CollectiveBytes(
        gather=(received + more * whole) // 4,
        reduce=3 * 4 * A // 4,
        all_reduce=0,
        gathers=gathers + more * (1 if alone else 2 + L),
        reduces=1 if alone else L,
    )
    assert replace(wire, all_reduce=5, exchange=7).total == wire.gather + wire.reduce + 5 + 7


@pytest.mark.parametrize(
    ("replicate", "reduce", "all_reduce", "reduces"),
    [(-1, 0, 2 * 5 * 4 * A // 6, 0), (3, 4 * A // 2, 2 * 2 * (4 * A // 2) // 3, L)],
)
def test_copies_of_six_ranks_average_their_gradients_in_a_ring(
    replicate: int, reduce: int, all_reduce: int, reduces: int
) -> None:
    wire = wire_bytes(made_job(made_base(), 6, distributed={"replicate": replicate}, **R4), 1)
    assert (wire.reduce, wire.all_reduce, wire.reduces) == (reduce, all_reduce, reduces)


@pytest.mark.parametrize(("mode", "times"), [("none", 2), ("full", 3), ("selective", 3)])
def test_what_ranks_that_share_samples_exchange_in_each_pass(mode: str, times: int) -> None:
    """Queries and results of four heads, and each of two keys and values for two ranks."""
    job = made_job(made_base(), 4, distributed={"context_parallel": 4}, **R4)
    width = 32 * (4 + 4 + 2 * 4)
    shared = replace(BATCHES, ranks=4)
    assert exchange_bytes(job, shared, mode) == times * L * (2 * width * 290 * 3 // 4)
    assert exchange_bytes(job, BATCHES, mode) == 0


@pytest.mark.parametrize(
    ("mode", "gpu", "seconds"),
    [
        ("none", True, 6 * 0.006),
        ("selective", True, 6 * 1.3 * 0.006),
        ("full", True, 6 * 1.35 * 0.006),
        ("tiled", False, 6 * 1.35 * 0.002),
        ("offload", True, 6 * 1.35 * 0.006),
    ],
)
def test_every_layer_of_every_micro_batch_is_launched(mode: str, gpu: bool, seconds: float) -> None:
    assert launch_seconds(2, 3, mode, gpu=gpu) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("mode", "tokens", "times"),
    [
        ("none", 20_000, 2),
        ("selective", 1, 2),
        ("full", 20_000, 3),
        ("tiled", 8192, 3),
        ("tiled", 8193, 6),
        ("offload", 20_000, 9),
    ],
)
def test_a_weight_is_dequantised_in_each_pass_and_for_each_tile(
    mode: str, tokens: int, times: int
) -> None:
    assert passes(mode, tokens) == times


@pytest.mark.parametrize(
    ("options", "machine", "slowest"),
    [
        ({"precision": {"default": "bf16"}}, GPU, "launches"),
        ({"precision": {"default": "nf4"}}, replace(GPU, flops=1e10), "arithmetic"),
        (
            {"precision": {"default": "nf4"}},
            replace(GPU, flops=1e10, shared_memory=True),
            "arithmetic",
        ),
        ({"precision": {"default": "fp8"}}, replace(GPU, fp8_flops=2e12), "launches"),
        ({"precision": {"default": "bf16"}}, replace(GPU, link_bandwidth=1e6), "wire"),
        ({"method": {"type": "kto"}}, replace(GPU, flops=1e9), "arithmetic"),
        ({"precision": {"default": "bf16"}}, replace(GPU, host_bandwidth=1e4), "copies"),
        ({"precision": {"served_as": "fp8"}}, GPU, "arithmetic"),
        ({"precision": {"served_as": "fp8"}}, replace(GPU, shared_memory=True), "arithmetic"),
    ],
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_step_takes_as_long_as_the_slowest_of_what_goes_on_at_once(
    options: dict[str, Any], machine: Machine, slowest: str, mode: str
) -> None:
    """Then what ranks exchange; `host`: of a micro-batch, in the host's memory."""
    options = {"precision": {"compute": "bf16", "default": "bf16"}, **options}
    options["precision"] = {"compute": "bf16", **options["precision"]}
    distributed = {"activation_checkpointing": mode}
    job = made_job(made_base(), 2, distributed=distributed, **options, **R4)
    wire = CollectiveBytes(600_000, 70_000, 8_000, 9, 9, exchange=5_000)
    flops, host, beside = 10_000_000, 3_000, int("kto" in str(options))
    found = speed_on(machine, job, BATCHES, flops, wire, host)
    forward_and_back = {"none": 2, "full": 3}[mode]
    times = forward_and_back + beside
    precision = job.spec.precision
    in_fp8 = precision.default == "fp8" and machine.fp8_flops is not None
    saved = int((1 - 1 / 1.33) * 2 * times * MATRICES) if in_fp8 else 0
    compute = 290 * (flops - saved) / (machine.flops_in("bf16") or 0) / 0.48
    codes = sum(s.bytes_whole for s in job.quantised)
    one_pass = 0 if in_fp8 or precision.default == "bf16" else (codes + 2 * MATRICES) / 1e9
    if precision.served_as is not None:
        in_fp64 = 2 if machine.shared_memory else 128
        one_pass = 98 * MATRICES / 1e9 + in_fp64 * 2 * 4 * MATRICES / 1e12
    dequantise = 2 * times * one_pass
    copies = 2 * host / (0.8 * machine.host_bandwidth)
    link = 0.8 * (machine.link_bandwidth or 0)
    a_layer = 0.002 if machine.shared_memory else 0.006
    launches = (1 + beside / forward_and_back) * 2 * L * {"none": 1, "full": 1.35}[mode] * a_layer
    arithmetic = compute + dequantise
    both = max(arithmetic / 4, copies) + max(3 * arithmetic / 4, copies)
    ends = {
        "launches": launches,
        "wire": 678_000 / link + 5_000 / link,
        "arithmetic": both + 5_000 / link,
        "copies": 2 * copies + 5_000 / link,
    }
    assert max(ends.values()) == ends[slowest]
    expected = Speed(
        tokens_per_second=2 * 290 / ends[slowest],
        step_seconds=ends[slowest],
        compute_seconds=compute,
        dequantise_seconds=dequantise,
        wire_seconds=(678_000 + 5_000) / link,
        launch_seconds=launches,
        copy_seconds=copies,
    )
    assert found is not None
    assert vars(found) == pytest.approx(vars(expected), rel=1e-9)


@pytest.mark.parametrize("unknown", ["flops", "memory_bandwidth", "link_bandwidth"])
def test_without_a_figure_of_the_machine_there_is_no_speed(unknown: str) -> None:
    machine = replace(GPU, **{unknown: None})
    wire = CollectiveBytes(0, 0, 0, 0, 0)
    assert speed_on(machine, made_job(made_base()), BATCHES, 1, wire, host=0) is None
    sampled = sampling_seconds(machine, made_base(), 1, 1, 1)
    assert (sampled is None) is (unknown != "link_bandwidth")


def test_a_job_served_only_at_its_end_rounds_in_these_steps_alone() -> None:
    precision = {"compute": "bf16", "served_as": "fp8"}
    always, late = (
        served_seconds(made_job(made_base(), precision=precision | own), GPU)
        for own in ({}, {"served_from_step": 0.75})
    )
    assert late == pytest.approx(always / 4, rel=1e-9)


def test_a_whole_training_is_its_tokens_at_the_rate_of_a_step() -> None:
    speed = Speed(8.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert whole_training(20, 3, speed) == TrainingWork(60.0, 2.5)
    assert whole_training(20, 3, None) == TrainingWork(60.0, None)


@pytest.mark.parametrize(
    ("stored", "answers", "seconds"),
    [(10**6, 1, 10**6 / 1e9), (10, 7, 2 * (MATRICES + HEAD) * 7 / (1e12 * 0.48))],
)
def test_answers_take_what_is_read_or_computed_for_each_token(
    stored: int, answers: int, seconds: float
) -> None:
    found = sampling_seconds(GPU, made_base(), stored, answers, 512)
    assert found == pytest.approx(512 * seconds, rel=1e-9)
