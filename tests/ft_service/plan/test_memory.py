from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import Description, FusedParts
from ft_service.bases.module_rules import OuterModules
from ft_service.host.processor import Products
from ft_service.plan.machines import GIB, MACHINES, Machine, find_machine
from ft_service.plan.memory import (
    MicroBatches,
    RankBytes,
    job_attends_by_cudnn,
    multiplied_in_fp8,
    planned_micro_batches,
    rank_bytes,
)
from ft_service.plan.weight_storage import ShardedJob, ShardLayout
from ft_service.spec.teachers import TeacherRef
from tests.support.bases import LLAMA_8B, describe, llama_shapes, plan_of, save_base, spec_on
from tests.support.plans import made_base, made_job, plan_8b, sections

A100 = MACHINES["A100"]
"""One whose attention PyTorch's kernel computes."""


@pytest.mark.parametrize(("width", "counted"), [(128, True), (256, False), (120, False)])
def test_heads_that_cudnn_does_not_take_need_no_room_for_scores(
    width: int, counted: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "training": {"batch_size": 4, "per_device_train_batch_size": 4, "max_length": 2048}
    }
    spec = spec_on(
        save_base(tmp_path / "base", head_dim=width, max_position_embeddings=2048), **options
    )
    h100, a100 = (plan_of(spec, machine).rank.workspace for machine in (MACHINES["H100"], A100))
    assert (h100 > a100) is counted


@pytest.mark.parametrize(
    ("machine", "options", "fused"),
    [
        (MACHINES["A100"], {}, True),
        (MACHINES["MI300X"], {}, False),
        (MACHINES["T4"], {}, False),
        (replace(MACHINES["A100"], shared_memory=True), {}, False),
        (Machine("unknown GPU", 80 * GIB), {}, False),
        (MACHINES["A100"], {"precision": {"compute": "fp32"}}, False),
        (MACHINES["A100"], {"precision": {"fused_kernels": "off"}}, False),
        (MACHINES["A100"], {"distributed": {"compile": True}}, False),
    ],
)
def test_fused_kernels_are_planned_where_they_are_known_to_compute(
    machine: Machine, options: dict[str, Any], fused: bool, tmp_path: Path
) -> None:
    of_options = plan_8b(tmp_path, machine=machine, **options).rank.activations
    off = {**options, "precision": {**options.get("precision", {}), "fused_kernels": "off"}}
    assert (of_options < plan_8b(tmp_path, machine=machine, **off).rank.activations) is fused


def test_the_plan_of_an_8b_model_is_what_an_h200_took(tmp_path: Path) -> None:
    """To 3 %: the most bytes of tensors that PyTorch counted there (make gpu-report), by tokens of
    the largest micro-batch.
    """
    for tokens, taken in ((516, 8.462), (7571, 37.937), (8059, 39.909), (8171, 40.420)):
        training = {"batch_size": 1, "max_length": tokens}
        plan = plan_8b(
            tmp_path,
            machine=MACHINES["H200"],
            precision={"default": "nf4"},
            training=training,
            lora={"r": 16},
        )
        assert plan.rank.total / GIB == pytest.approx(taken, rel=0.03)


def test_offloaded_weights_take_no_room_on_the_gpu(tmp_path: Path) -> None:
    here, away = (
        plan_8b(tmp_path, 2, distributed={"offload": offload}).rank for offload in (False, True)
    )
    assert away.stored == here.stored
    assert here.total - away.total == here.stored


@pytest.mark.parametrize(("experts", "at_a_time"), [(128, 128), (256, 170)])
def test_a_gpu_dequantises_many_experts_at_a_time(
    tmp_path: Path, experts: int, at_a_time: int
) -> None:
    """With 128 as wide as Qwen3-30B's, all of a stack; of more, what 1 GiB holds, and then the rows
    of input and result are copied. A processor takes one after the other.
    """
    config = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 1}
    config |= {"num_local_experts": experts, "num_experts_per_tok": 8}
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    before = "model.layers.0.mlp"
    shapes |= {
        f"{before}.gate.weight": (experts, 2048),
        f"{before}.experts.gate_up_proj": (experts, 1536, 2048),
    }
    shapes |= {f"{before}.experts.down_proj": (experts, 2048, 768)}
    base = save_base(tmp_path / "base", {**config, "model_type": "mixtral"}, shapes)
    precision = {"default": "nf4", "fused_kernels": "off"}
    spec = spec_on(base, training={"max_length": 16, "batch_size": 1}, precision=precision)
    matrix = 2 * 1536 * 2048
    assert at_a_time == min(experts, 2**30 // matrix)
    on_gpu, in_turn = (
        plan_of(spec, m).rank.workspace
        for m in (MACHINES["H100"], replace(MACHINES["H100"], shared_memory=True))
    )
    copied = 16 * 8 * 2 * (2048 + 2048) if at_a_time < experts else 0
    assert on_gpu - in_turn == at_a_time * matrix - 2 * 2048 * 2048 + copied, (
        "in turn the queries' matrix is the largest"
    )


def test_a_process_on_a_processor_takes_more_than_its_tensors(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "base"))
    rank = plan_of(spec, replace(find_machine("cpu"), heap_factor=1.25)).rank
    assert (rank.gaps, rank.total) == (rank.live // 4, rank.live + rank.live // 4)
    assert plan_of(spec, find_machine("cpu")).rank.gaps > 0
    assert plan_of(spec, MACHINES["H100"]).rank.gaps == 0, (
        "what a GPU's allocator holds is in what is usable"
    )


PARTS: dict[str, Any] = {
    "base": {"nf4": 1000, "bf16": 200},
    "adapters": 30,
    "gradients": 40,
    "optimizer": 50,
    "gather": 600,
    "accumulation": 7,
    "activations": 80,
    "activations_by_mode": {"none": 90, "full": 10},
    "workspace": 11,
    "workspace_by_mode": {"none": 12, "full": 13},
    "host": 0,
    "host_by_mode": {"none": 0, "full": 14},
    "rows": 15,
    "logits": 16,
    "offloaded": False,
}


def test_a_rank_s_bytes_are_summed_up_by_how_long_they_are_there() -> None:
    rank = RankBytes(**PARTS, teacher=3000, tower=4000, heap_factor=1.5)
    stored = 1000 + 200 + 3000 + 30 + 40 + 50
    assert (rank.stored, rank.resident) == (stored, stored + 4000 + 600)
    assert rank.live == rank.resident + 7 + 80 + 15 + 16
    assert (rank.gaps, rank.total) == (rank.live // 2, rank.live + rank.live // 2)
    away = replace(rank, offloaded=True)
    assert (away.stored, away.resident) == (stored, 4000 + 600)
    assert replace(rank, workspace=20).live == rank.live + 4
    full = rank.in_mode("full")
    assert (full.activations, full.workspace, full.host) == (10, 13, 14)


@pytest.mark.parametrize(
    ("compute", "served_as", "rounded"),
    [("bf16", None, True), ("fp32", None, False), ("bf16", "fp8", False)],
)
def test_only_products_in_bf16_of_what_is_not_served_are_in_fp8(
    compute: str, served_as: str | None, rounded: bool, tmp_path: Path
) -> None:
    base = save_base(tmp_path, LLAMA_8B)
    for products in ("auto", "off"):
        precision = {
            "compute": compute,
            "default": "fp8",
            "served_as": served_as,
            "fp8_products": products,
        }
        job = ShardedJob.of(describe(base), spec_on(base, precision=precision))
        for name in ("L40S", "A100"):
            found = multiplied_in_fp8(job, MACHINES[name])
            assert bool(found) is (rounded and products == "auto" and name == "L40S")


# The terms of each sum, on a base whose sizes differ --------------------------------------------

H, HEADS, Q, KV, INNER, V, L = 64, 4, 128, 64, 512, 1000, 3
"""Of `made_base`: hidden, heads, widths of queries and of keys, inner width, words, layers."""
A = 4 * (2 * (Q + H) + 2 * (KV + H) + 3 * (INNER + H))
"""Numbers of a layer's adapters with r = 4."""
R = 7 * 4
T = 150
ATTENTION = 2 * (2 * Q + 2 * KV) + 4 * HEADS
"""Bytes of a token that attention keeps."""
KEPT = 2 * (4 * H + 4) + 2 * 2 * H + ATTENTION + 2 * 4 * INNER + 2 * R
"""Bytes of a token that a layer keeps, without kernels: of norms, inputs, attention, the
feed-forward, and A(x).
"""
RESULTS = 2 * (2 * Q + 2 * KV + H + 2 * INNER + H + R) + 4 * HEADS
"""Bytes of a token that selective checkpointing keeps of a layer."""
INPUT = 2 * H
CARD = Machine("card", None)
SLOW = Machine("slow", None, shared_memory=True, products=Products("", 1e11, 2e10, True))
FUSED = FusedParts(norms=2, head_norms=True, last_norm=True, gate=True)
KERNELS = Machine("kernels", None, fuses=True)
BATCHES = MicroBatches(rounds=2, samples=3, length=50, tokens=T, step_tokens=290)
R4: dict[str, Any] = {"lora": {"r": 4, "lora_alpha": 8}}


def made_bytes(
    base: Description,
    machine: Machine = CARD,
    batches: MicroBatches = BATCHES,
    ranks: int = 1,
    **options: Any,
) -> RankBytes:
    return rank_bytes(made_job(base, ranks, **{**R4, **options}), batches, machine)


def peaks(rank: RankBytes, *modes: str) -> dict[str, tuple[int, int]]:
    """By activation checkpointing what is kept, and what there is in the backward."""
    kept = rank.activations_by_mode
    return {mode: (kept[mode], kept[mode] + rank.workspace_by_mode[mode]) for mode in modes}


def test_all_bytes_of_a_rank_that_trains_alone() -> None:
    rank = made_bytes(made_base(vocabulary=V))
    linears = 2 * Q * H + 2 * KV * H + 3 * INNER * H
    casts = 2 * L * A
    again = T * L * INPUT + casts // L
    feed_forward = T * (KEPT + INPUT) + T * 2 * 2 * INNER
    kept = {
        "none": T * (L * KEPT + INPUT) + casts,
        "full": T * (L * INPUT + 4 * H + INPUT),
        "selective": T * (L * (INPUT + RESULTS) + 4 * H + INPUT),
        "tiled": T * (L * INPUT + 4 * H + INPUT),
        "offload": T * (INPUT + 4 * H + INPUT),
    }
    backward = {
        "none": casts + T * (L - 1) * KEPT - T * 4 * H + feed_forward,
        "full": again + feed_forward,
        "selective": again + T * (L - 1) * RESULTS + feed_forward,
        "tiled": again + feed_forward,
        "offload": again + feed_forward - T * L * INPUT + T * 2 * INPUT,
    }
    workspace = {mode: backward[mode] - kept[mode] for mode in kept}
    host = {**dict.fromkeys(kept, 0), "offload": (L - 1) * 2**26}
    targets = T - 3
    assert rank == RankBytes(
        base={"bf16": 2 * (2 * V * H + H + L * linears)},
        adapters=4 * L * A,
        gradients=4 * L * A,
        optimizer=8 * L * A + 4 * L * 7 * 2,
        gather=0,
        accumulation=0,
        activations=kept["none"],
        activations_by_mode=kept,
        workspace=workspace["none"],
        workspace_by_mode=workspace,
        host=0,
        host_by_mode=host,
        rows=T * (2 * (3 * 8 + 2 * 4) + 2 * 2 * 32),
        logits=8 * V * targets + 2 * 2 * H * targets,
        offloaded=False,
    )


UNGATED = KEPT - 2 * 2 * INNER


@pytest.mark.parametrize(
    ("dimensions", "machine", "options", "layer", "norm", "needed"),
    [
        ({"head_norms": True}, CARD, {}, KEPT + 4 * (Q + KV), 4 * H, 4 * INNER),
        (
            *({"head_norms": True, "fused": FUSED}, KERNELS, {}),
            *(KEPT + 2 * (Q + KV) - 2 * 2 * H - 2 * INNER, 2 * H, 4 * INNER),
        ),
        ({"fused": FusedParts(norms=1)}, KERNELS, {}, KEPT, 4 * H, 4 * INNER),
        ({"gated": False}, CARD, {}, UNGATED, 4 * H, 2 * INNER),
        ({"gated": False}, CARD, sections(r=4, lora_dropout=0.1), UNGATED, 4 * H, 5 * INNER),
        ({"gated": False}, SLOW, sections(compute="bf16"), UNGATED, 4 * H, 6 * INNER),
        (
            *({}, CARD, sections(r=4, use_dora=True)),
            *(KEPT + 2 * (Q + 2 * KV + H + 2 * INNER + H), 4 * H, 4 * INNER),
        ),
    ],
    ids=["plain", "fused", "a norm without", "no gate", "dropout", "slow in bf16", "DoRA"],
)
def test_what_a_dense_layer_keeps_and_its_feed_forward_needs(
    dimensions: Any, machine: Machine, options: Any, layer: int, norm: int, needed: int
) -> None:
    """`layer`, `norm`, `needed`: bytes of a token."""
    base = made_base(dimensions=dimensions)
    last = norm if dimensions.get("fused", FUSED).last_norm and machine.fuses else 4 * H
    dora = "use_dora" in str(options)
    casts = 2 * L * (A + dora * (Q + 2 * KV + H + 2 * INNER + H))
    same = T * norm if norm == INPUT else 0
    assert peaks(made_bytes(base, machine, **options), "none", "full") == {
        "none": (
            T * (L * layer + INPUT) + casts,
            casts + T * (L * layer - norm + max(INPUT + needed, 24 * H)),
        ),
        "full": (
            T * (L * INPUT + last + INPUT),
            T * L * INPUT - same + casts // L + T * (layer + INPUT + needed),
        ),
    }


@pytest.mark.parametrize(
    ("fused", "machine", "norm", "backward"),
    [(FusedParts(), CARD, 4 * H, 24 * H), (FUSED, KERNELS, 2 * H, 2 * H + 2 * 2 * H)],
)
def test_the_backward_of_a_wide_last_norm_needs_most(
    fused: FusedParts, machine: Machine, norm: int, backward: int
) -> None:
    """Of narrow heads and feed-forwards."""
    sizes = {"heads": 1, "groups": 1, "width": 2, "inner": 2, "dimensions": {"fused": fused}}
    gate = 3 if fused.gate else 4
    layer = 2 * (norm + 4) + 2 * 2 * H + 2 * (2 * 2 + 2 * 2) + 4 + 2 * gate * 2 + 2 * R
    results = 2 * (2 * 2 + 2 * 2 + H + 2 * 2 + H + R) + 4
    casts = 2 * L * 4 * 7 * (2 + H)
    again = T * L * INPUT - (T * norm if norm == INPUT else 0) + casts // L
    peak = max(layer + INPUT + 2 * 2 * 2, backward)
    assert {
        mode: b
        for mode, (_, b) in peaks(
            made_bytes(made_base(**sizes), machine), "none", "full", "selective"
        ).items()
    } == {
        "none": casts + T * (L - 1) * layer - T * norm + T * (layer + backward),
        "full": again + T * peak,
        "selective": again + T * (L - 1) * results + T * peak,
    }


@pytest.mark.parametrize(
    ("precision", "machine", "beside"),
    [
        ({"default": "nf4"}, CARD, 2 * INNER * H),
        ({"default": "fp8"}, CARD, 2 * INNER * H + T * (3 * H + INNER)),
        ({"default": "fp8", "fp8_products": "off"}, CARD, 2 * INNER * H),
        ({"default": "fp8"}, Machine("without", None, flops=1.0), 2 * INNER * H),
        (
            {"default": "fp8"},
            Machine("with", None, 1.0, fp8_flops=1.0),
            2 * INNER * H + T * (3 * H + INNER),
        ),
        ({"default": "fp8"}, SLOW, 2 * INNER * H + T * 4 * INNER),
        ({"served_as": "fp8"}, CARD, 2 * INNER * H + 36 * INNER * H),
        ({"served_as": "nvfp4"}, CARD, (2 + 4) * INNER * H + 36 * INNER * H),
    ],
)
def test_what_a_product_s_backward_needs_beside_its_result(
    precision: dict[str, Any], machine: Machine, beside: int
) -> None:
    """The weight dequantised, gradient and input in FP8, the result in fp32, or a block rounded."""
    base = made_base(dimensions={"gated": False})
    precision = {"compute": "bf16", "default": "bf16", **precision}
    plain, own = (
        made_bytes(base, machine, precision=each)
        for each in ({"compute": "fp32", "default": "bf16"}, precision)
    )
    layer = UNGATED
    casts = 2 * L * A
    assert own.activations + own.workspace == (
        casts + T * (L * layer - 4 * H + INPUT) + T * 2 * INNER + beside
    )
    # in fp32 norms keep the layer's input, nothing is copied, and no product has more
    wide = 2 * layer - 2 * (4 * H + 4) - 4 * HEADS
    full = plain.in_mode("full")
    assert full.activations + full.workspace == T * (L * 4 * H - 4 * H + wide + 4 * H + 4 * INNER)


E_COUNT, MET = 6, 2
STACKS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("inner", "lora", "dimensions", "needed"),
    [
        (16, {}, {}, 2 * MET * H + (2 * 2 + 4) * H),
        (16, {}, {"silu_experts": True}, 2 * MET * H + (2 * 2 + 4) * H),
        (512, {}, {}, 2 * (3 * MET * 512 - MET * H)),
        (512, {}, {"gated": False}, 2 * (2 * MET * 512 - MET * H)),
        (512, STACKS, {}, 2 * (2 * MET * 512 - MET * H)),
        (16, STACKS, {"shared_intermediate": 400}, 2 * 2 * 400),
        (16, STACKS, {"shared_intermediate": 40, "shared_scaled": True}, (2 * MET + 8) * H),
    ],
)
def test_what_experts_keep_and_need_for_each_that_a_token_meets(
    inner: int, lora: dict[str, Any], dimensions: dict[str, Any], needed: int
) -> None:
    """At the shares of what experts give, at the gates of wide ones, or in a shared one."""
    sizes = {"gated": True, "shared_intermediate": 0, "shared_scaled": False, **dimensions}
    gates, shared, scaled = (sizes[k] for k in ("gated", "shared_intermediate", "shared_scaled"))
    base = made_base(experts=E_COUNT, expert_inner=inner, dimensions=dimensions)
    adapted = bool(lora)
    r = 4 * 4 + adapted * 2 * 4 * MET
    casts = (
        2 * L * 4 * (2 * (Q + H) + 2 * (KV + H) + adapted * E_COUNT * (2 * inner + H + H + inner))
    )
    ways = 2 if gates else 1
    kept = 3 - ("silu_experts" in dimensions) if gates else 1
    layer = (
        2 * (4 * H + 4)
        + (1 + bool(shared) + scaled) * 2 * H
        + ATTENTION
        + 2 * (MET * H * (1 + adapted) + MET * inner * (kept + adapted))
        + (4 * 8 + 4 + 4) * MET
        + 4 * E_COUNT
        + 2 * (4 if gates else 2) * shared
        + 2 * r
    )
    results = (
        2 * (2 * Q + 2 * KV + H + ways * (shared + MET * inner) + bool(shared) * H + MET * H)
        + 2 * (E_COUNT + r)
        + 4 * HEADS
    )
    of_layer = INPUT + scaled * INPUT + needed
    found = peaks(made_bytes(base, lora={**R4["lora"], **lora}), "none", "full", "selective")
    again = T * L * INPUT + casts // L
    assert found == {
        "none": (
            T * (L * layer + INPUT) + casts,
            casts + T * (L * layer - 4 * H + max(of_layer, 24 * H)),
        ),
        "full": (T * (L * INPUT + 4 * H + INPUT), again + T * (layer + of_layer)),
        "selective": (
            T * (L * (INPUT + results) + 4 * H + INPUT),
            again + T * (L - 1) * results + T * (layer + of_layer),
        ),
    }


@pytest.mark.parametrize(
    ("tokens", "length", "groups", "of_attention"),
    [
        (4096, 4096, 2, min(2**30, 2 * 2 * 4096 * HEADS * 4096) + 2 * 4 * 4096 * Q),
        (5000, 300, 2, 2 * 2 * 8192 * HEADS * 1024 + 2 * 4 * 8192 * Q),
        (5000, 6000, 4, 2 * 2 * 8192 * HEADS * 8192),
        (4095, 300, 2, 0),
        (4096, 127, 2, 0),
    ],
)
def test_attention_by_cudnn_needs_most_in_a_backward_of_narrow_feed_forwards(
    tokens: int, length: int, groups: int, of_attention: int
) -> None:
    inner, kv = 16, groups * 32
    machine = replace(CARD, by_cudnn=True)
    batches = MicroBatches(1, 1, length, tokens, tokens)
    rank = made_bytes(made_base(inner=inner, groups=groups), machine, batches)
    layer = KEPT - 2 * 4 * (INNER - inner) + 2 * 2 * (kv - KV)
    casts = 2 * L * 4 * (2 * (Q + H) + 2 * (kv + H) + 3 * (inner + H))
    feed_forward = tokens * (layer + INPUT + 2 * 2 * inner)
    attention = tokens * (layer - 2 * 4 * inner + INPUT + 2 * 2 * (Q + kv)) + of_attention
    assert (feed_forward < attention) or not of_attention
    of_layer = attention if of_attention else feed_forward
    again = tokens * L * INPUT + casts // L
    results = RESULTS - 2 * 2 * (INNER - inner) + 2 * 2 * (kv - KV)
    assert {m: both[1] for m, both in peaks(rank, "full", "selective").items()} == {
        "full": again + of_layer,
        "selective": again + tokens * (L - 1) * results + feed_forward,
    }


@pytest.mark.parametrize(
    ("options", "padded", "attends"),
    [
        ({"compute": "bf16"}, None, True),
        ({"compute": "bf16"}, "it mixes", False),
        ({"compute": "bf16", "compile": True}, None, False),
        ({"compute": "bf16", "packing": False}, None, False),
        ({"compute": "fp32"}, None, False),
    ],
)
def test_only_packed_rows_in_bf16_that_nothing_compiles_are_left_to_cudnn(
    options: dict[str, Any], padded: str | None, attends: bool
) -> None:
    job = made_job(made_base(padded_because=padded), **sections(**options))
    assert job_attends_by_cudnn(job, replace(CARD, by_cudnn=True), 5000, 500) is attends
    assert not job_attends_by_cudnn(job, CARD, 5000, 500)


@pytest.mark.parametrize(
    ("inner", "machine", "norms", "ranks"),
    [(512, CARD, 4, 1), (16, CARD, 4, 1), (16, SLOW, 4, 1), (512, KERNELS, 2, 1), (16, CARD, 4, 4)],
)
def test_the_backward_of_long_samples_has_a_tile_of_a_feed_forward_or_attention(
    inner: int, machine: Machine, norms: int, ranks: int
) -> None:
    """Of 10,000 tokens in two tiles; `norms`: bytes of a number that a norm keeps."""
    tokens, norm, gate = 10_000, norms * H, 3 if machine.fuses else 4
    tiled: dict[str, Any] = {"row_wise": tuple(f"model.layers.{n}.mlp" for n in range(L))}
    base = made_base(inner=inner, dimensions={"fused": FUSED}, **tiled)
    batches = MicroBatches(1, 1, tokens, tokens, tokens, ranks)
    options = sections(compute="bf16", default="nf4", context_parallel=ranks)
    rank = made_bytes(base, machine, batches, ranks, **options)
    sent = 32 * (4 + 2 * 4) if ranks == 4 else 0
    outside = 2 * (norm + 4) + 2 * INPUT + ATTENTION + 2 * R
    outside += 2 * (sent - 2 * KV) if ranks == 4 else 0
    product = 2 * inner + (4 * inner if machine is SLOW else 0)
    in_tile = 2 * gate * inner + max(2 * 2 * inner, product) + 2 * INPUT
    largest = 2 * H * max(inner, Q)
    feed_forward = tokens * (outside + 2 * INPUT) + 5000 * in_tile + largest
    flash = 0 if machine.shared_memory else tokens * (4 * Q + 2 * 2 * Q)
    attention = tokens * (outside - norm + 2 * 2 * (Q + KV) + 3 * 2 * sent) + flash
    assert (feed_forward > attention) is (inner == 512)
    casts = (ranks == 1) * 2 * L * 4 * (2 * (Q + H) + 2 * (KV + H) + 3 * (inner + H))
    same = tokens * norm if norm == INPUT else 0
    beside = max(feed_forward, attention) - same + casts // L
    assert {m: both[1] for m, both in peaks(rank, "tiled", "offload").items()} == {
        "tiled": tokens * L * INPUT + beside,
        "offload": tokens * 2 * INPUT + beside,
    }
    assert rank.host_by_mode["offload"] == (L - 1) * 2**26


def test_the_backward_of_ranks_that_share_samples_has_what_they_exchange() -> None:
    """Of four ranks with a head each, two of which share a group's key and value."""
    inner = 2
    batches = MicroBatches(1, 1, 600, T, T, ranks=4)
    rank = made_bytes(made_base(inner=inner), CARD, batches, 4, distributed={"context_parallel": 4})
    sent = 32 * (4 + 2 * 4)
    layer = KEPT - 2 * 4 * (INNER - inner) + 2 * (sent + Q - Q - 2 * KV)
    assert rank.activations == T * (L * layer + INPUT)
    attention = layer - 2 * 4 * inner + INPUT + 2 * 2 * (Q + KV) + 3 * 2 * sent
    assert rank.activations + rank.workspace == T * ((L - 1) * layer - 4 * H + attention)
    assert rank.rows == T * (4 * 2 * (3 * 8 + 2 * 4) + 2 * 2 * 32)


LAYER = 2 * (2 * Q * H + 2 * KV * H + 3 * INNER * H + A)
OUTER = 2 * 1004 * H
"""Bytes of 1,001 rows, padded to what four ranks have."""


@pytest.mark.parametrize(
    ("ranks", "distributed", "gather"),
    [
        (1, {}, 0),
        (4, {"replicate": -1}, 0),
        (4, {}, OUTER + 2 * H + 2 * LAYER),
        (4, {"prefetch": {"forward": 3}}, OUTER + 2 * H + 2 * LAYER + 2 * LAYER),
        (4, {"prefetch": {"backward": 2}}, OUTER + 2 * H + 2 * LAYER + LAYER),
        (4, {"keep_unsharded": True}, OUTER + OUTER + 2 * H + L * LAYER + LAYER),
        (4, {"reshard_after_forward": False}, OUTER + 2 * H + L * LAYER + LAYER),
        (4, {"reshard_after_forward": 2}, OUTER + 2 * H + L * LAYER // 2 + 2 * LAYER),
        (4, {"wrap": "none"}, 2 * (OUTER + OUTER + 2 * H + L * LAYER)),
    ],
)
def test_what_stays_gathered_and_the_largest_group_twice(
    ranks: int, distributed: dict[str, Any], gather: int
) -> None:
    base = made_base(vocabulary=1001)
    assert made_bytes(base, ranks=ranks, distributed=distributed).gather == gather


@pytest.mark.parametrize(
    ("ranks", "replicate", "rounds", "needed"),
    [(1, 1, 2, False), (2, -1, 1, True), (2, 1, 1, False), (2, 1, 2, True)],
)
def test_gradients_wait_between_micro_batches_or_are_averaged_over_copies(
    ranks: int, replicate: int, rounds: int, needed: bool
) -> None:
    batches = replace(BATCHES, rounds=rounds)
    rank = made_bytes(
        made_base(), batches=batches, ranks=ranks, distributed={"replicate": replicate}
    )
    assert rank.accumulation == (4 * L * A if needed else 0)


def taught_job(
    base: Description, teacher: Description | None = None, ranks: int = 1, **loss: Any
) -> ShardedJob:
    """A job that a teacher teaches: the base with a context, or another base."""
    method = {"type": "distillation", "distillation": {"with_context": "x", **loss}}
    job = made_job(base, ranks, method=method, **R4)
    if teacher is None:
        return job
    ref = TeacherRef(kind="base", name="t", path="/teacher")
    assert job.spec.loss is not None
    spec = job.spec.model_copy(update={"loss": job.spec.loss.model_copy(update={"teacher": ref})})
    return replace(job, spec=spec, base=replace(base, teacher=teacher))


N = T - 3
"""Targets."""
CHUNK = 8 * V * N + 2 * 2 * H * N
SMALL_TEACHER = made_base(layers=2, hidden=32, vocabulary=500)
TIED = replace(made_base(), outer=OuterModules("model.embed_tokens", "lm_head", tied=True))


@pytest.mark.parametrize(
    ("job", "batches", "logits"),
    [
        (made_job(made_base()), BATCHES, CHUNK),
        (made_job(made_base()), replace(BATCHES, samples=T), 8 * V + 2 * 2 * H),
        (made_job(made_base(vocabulary=2**21)), BATCHES, 8 * 2**28 + 2 * 2 * H * N),
        (made_job(made_base(loss_in_chunks=False)), BATCHES, 12 * V * T),
        (taught_job(made_base(loss_in_chunks=False)), BATCHES, 2 * 12 * V * T),
        (taught_job(made_base()), BATCHES, CHUNK + 2 * H * N),
        (taught_job(made_base(), top_k=20), BATCHES, CHUNK + N * (20 * 12 + 3 * 4)),
        (taught_job(made_base(), SMALL_TEACHER), BATCHES, CHUNK + 2 * 32 * (N + 500)),
        (
            taught_job(made_base(), replace(SMALL_TEACHER, loss_in_chunks=False)),
            BATCHES,
            2 * 12 * V * T,
        ),
        *(
            (
                made_job(base, ranks, lora={"modules_to_save": [name]}),
                replace(BATCHES, samples=T - n),
                max(8 * V * n, 6 * V * n + 2 * V * H) + 2 * 2 * H * n + (4 + cast) * V * H,
            )
            for ranks, cast, n in ((1, 2, N), (2, 0, 40))
            for name, base in (("lm_head", made_base()), ("embed_tokens", TIED))
        ),
        (made_job(made_base(), lora={"modules_to_save": ["embed_tokens"]}), BATCHES, CHUNK),
    ],
)
def test_bytes_when_the_loss_is_taken(job: ShardedJob, batches: MicroBatches, logits: int) -> None:
    assert rank_bytes(job, batches, CARD).logits == logits


def test_an_embedding_that_is_trained_has_a_gradient_below_the_first_norm() -> None:
    """And its moments and sums are those of a parameter of 64 columns, in 8 bits or in fp32."""
    for optim, moments in (("adamw_8bit", 2 * V * (H + 4)), ("adamw_torch", 8 * V * H)):
        lora = {**R4["lora"], "modules_to_save": ["embed_tokens"]}
        own, trained = (
            made_bytes(made_base(), lora=each, training={"optim": optim})
            for each in (R4["lora"], lora)
        )
        assert trained.activations - own.activations == T * 4 * H
        more = trained.activations + trained.workspace - own.activations - own.workspace
        assert more == T * 4 * H
        assert trained.optimizer - own.optimizer == moments + 4
        assert trained.adapters - own.adapters == 4 * V * H


def test_a_teaching_base_is_stored_and_gathered_beside_the_job_s() -> None:
    base = made_base()
    alone, taught = (
        rank_bytes(taught_job(base, teacher, 2), BATCHES, CARD) for teacher in (None, SMALL_TEACHER)
    )
    layer = 32 * (2 * Q + 2 * KV + 3 * INNER)
    assert taught.teacher == 2 * (2 * 500 * 32 + 32 + 2 * layer) // 2
    assert alone.teacher == 0
    assert taught.gather - alone.gather == 2 * (500 * 32 + 32) + 2 * 2 * layer


PAIRS = {"method": {"type": "dpo"}}


@pytest.mark.parametrize(
    ("ranks", "length", "options", "batches"),
    [
        (2, None, sections(batch_size=7, max_length=100), (1, 4, 100, 400, 400)),
        (
            *(2, None, sections(batch_size=7, max_length=100, tokens_per_micro_batch=256)),
            (2, 2, 100, 256, 400),
        ),
        (1, 0, sections(batch_size=2, max_length=100), (1, 2, 1, 2, 2)),
        (1, 101, sections(batch_size=2, max_length=100), (1, 2, 100, 200, 200)),
        (2, None, PAIRS | sections(batch_size=9, max_length=3000), (5, 2, 3000, 8192, 30_000)),
        (2, None, PAIRS | sections(batch_size=9, max_length=9000), (5, 2, 9000, 18_000, 90_000)),
        (
            *(
                2,
                None,
                PAIRS | sections(batch_size=9, max_length=300, per_device_train_batch_size=1),
            ),
            (5, 2, 300, 600, 3000),
        ),
        (
            *(4, None, sections(batch_size=5, max_length=6001, context_parallel=2)),
            (2, 2, 6001, 8192, 9002, 2),
        ),
        (
            *(4, None, sections(batch_size=3, max_length=101, context_parallel=4)),
            (1, 3, 101, 76, 76, 4),
        ),
    ],
)
def test_a_step_is_cut_into_micro_batches_of_whole_samples_and_pairs(
    ranks: int, length: int | None, options: dict[str, Any], batches: tuple[int, ...]
) -> None:
    """Number, samples, length, most tokens, tokens of a step, and ranks that share them."""
    spec = spec_on(Path("/made"), ranks, **options)
    assert planned_micro_batches(spec, ShardLayout(1, ranks), length) == MicroBatches(*batches)
