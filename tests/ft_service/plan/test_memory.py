from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.host.processor import Products
from ft_service.plan.machines import GIB, MACHINES, Machine, find_machine
from ft_service.plan.memory import RankBytes, multiplied_in_fp8, planned_micro_batches
from ft_service.plan.weight_storage import ShardedJob, ShardLayout
from tests.support.bases import LLAMA_8B, describe, llama_shapes, plan_of, save_base, spec_on
from tests.support.plans import HOST, plan_8b

A100 = MACHINES["A100"]
"""One whose attention PyTorch's kernel computes."""


def in_modes(
    tmp_path: Path,
    fused_kernels: str,
    modes: tuple[str, ...] = ("none", "full", "selective"),
    machine: Machine = A100,
    length: int = 2048,
) -> list[RankBytes]:
    """A rank's bytes for a micro-batch of 8,192 tokens, by activation checkpointing."""
    options: dict[str, Any] = {
        "training": {
            "batch_size": 8192 // length,
            "per_device_train_batch_size": 8192 // length,
            "max_length": length,
        },
        "precision": {"fused_kernels": fused_kernels},
    }
    return [
        plan_8b(
            tmp_path, machine=machine, distributed={"activation_checkpointing": mode}, **options
        ).rank
        for mode in modes
    ]


def test_checkpointing_keeps_the_layers_inputs(tmp_path: Path) -> None:
    """At least the 3.3 GB for 8,192 tokens of those who count bf16 inputs and one layer alone, and
    at most a quarter more.
    """
    none, full, selective = in_modes(tmp_path, "off")
    assert none.activations_by_mode == full.activations_by_mode
    assert full.activations < selective.activations < none.activations
    norms = 2 * 4 * (4096 + 1)
    inputs = 2 * 2 * 4096
    attention = 2 * (2 * 4096 + 2 * 1024) + 4 * 32
    feed_forward = 4 * 2 * 14_336
    adapters = 7 * 2 * 16
    layer = norms + inputs + attention + feed_forward + adapters
    # of the last norm in bf16, and the adapters in bf16
    output = 8192 * 2 * 4096
    casts = 2 * 41_943_040
    assert none.activations == 32 * 8192 * layer + output + casts
    assert full.activations == 32 * 8192 * 2 * 4096 + 8192 * 4 * 4096 + output
    in_backward = full.activations + full.workspace
    assert (
        in_backward
        == 32 * 8192 * 2 * 4096 + 8192 * (layer + 2 * 4096 + 2 * 2 * 14_336) + casts // 32
    )
    assert 3.3e9 < in_backward < 1.35 * 3.3e9
    assert (
        none.total - full.total == none.activations + max(none.logits, none.workspace) - in_backward
    )


def test_fused_kernels_keep_less_for_the_backward(tmp_path: Path) -> None:
    """A norm its input in bf16, which is the layer's own where that is kept anyway, and a
    feed-forward no activation.
    """
    own = in_modes(tmp_path, "off")
    fused = in_modes(tmp_path, "auto")
    of_layer = 2 * 2 * 4096 + 2 * 14_336
    without = own[0]
    other = fused[0]
    assert without.activations - other.activations == 32 * 8192 * of_layer
    last_norm = 8192 * 2 * 4096
    for without, other in zip(own[1:], fused[1:], strict=True):
        assert without.activations - other.activations == last_norm
        peaks = (rank.activations + rank.workspace for rank in (without, other))
        assert next(peaks) - next(peaks) == 8192 * of_layer + last_norm


@pytest.mark.parametrize(
    ("length", "scores"), [(2048, 2**30), (512, 4 * 8192 * 32 * 1024), (128, 4 * 8192 * 32 * 1024)]
)
def test_cudnn_s_backward_of_attention_needs_room_for_scores(
    length: int, scores: int, tmp_path: Path
) -> None:
    """And for a key's and a value's gradient a head, in fp32, of 32 heads with 128 channels; not
    under a dispatch mode.
    """
    h100, a100 = (
        in_modes(tmp_path, "auto", machine=machine, length=length)
        for machine in (MACHINES["H100"], A100)
    )
    norms = 2 * (2 * 4096 + 4)
    inputs = 2 * 2 * 4096
    attention = 2 * (2 * 4096 + 2 * 1024) + 4 * 32
    kept = norms + inputs + attention + 7 * 2 * 16
    in_backward = 8192 * (kept + 2 * 4096 + 2 * 2 * (4096 + 1024)) + scores + 8192 * 8 * 4096
    own = h100[1].activations + h100[1].workspace
    other = a100[1].activations + a100[1].workspace
    feed_forward = 8192 * (kept + 3 * 2 * 14_336 + 2 * 4096 + 2 * 2 * 14_336)
    assert own - other == in_backward - feed_forward
    assert h100[0].workspace - a100[0].workspace == own - other
    assert h100[2].workspace == a100[2].workspace


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


def test_gathering_further_ahead_takes_a_layer_each(tmp_path: Path) -> None:
    usual, ahead = (plan_8b(tmp_path, 2, distributed={"prefetch": {"forward": n}}) for n in (1, 3))
    layer = sum(m.bytes for m in usual.modules if m.name.startswith("model.layers.0."))
    # The embedding is the largest.
    assert ahead.rank.gather - usual.rank.gather == pytest.approx(2 * 1050e6, rel=0.01)
    assert layer < 1050e6


@pytest.mark.parametrize(
    ("training", "length", "batches"),
    [
        ({"batch_size": 16, "max_length": 2048}, None, (1, 4, 8192, 8192)),
        ({"batch_size": 32, "max_length": 2048}, None, (2, 4, 8192, 16_384)),
        ({"batch_size": 16, "max_length": 3000}, None, (2, 2, 8192, 12_000)),
        ({"batch_size": 16, "max_length": 20_000}, None, (4, 1, 20_000, 80_000)),
        ({"batch_size": 16, "max_length": 20_000}, 500, (1, 4, 2000, 2000)),
        (
            {"batch_size": 16, "max_length": 2048, "per_device_train_batch_size": 1},
            None,
            (4, 1, 2048, 8192),
        ),
        ({"batch_size": 2, "max_length": 2048}, None, (1, 1, 2048, 2048)),
    ],
)
def test_a_micro_batch_takes_what_its_budget_allows(
    training: dict[str, Any], length: int | None, batches: tuple[int, ...], tmp_path: Path
) -> None:
    """Of 8,192 tokens on four ranks; the peak is a row filled with shorter samples, or one longer
    sample alone.
    """
    spec = spec_on(
        save_base(tmp_path / "base"), 4, training={**training, "tokens_per_micro_batch": 8192}
    )
    found = planned_micro_batches(spec, ShardLayout(1, 4), length)
    assert (found.rounds, found.samples, found.tokens, found.step_tokens) == batches


def test_what_fp8_and_dropout_compute_with_is_counted(tmp_path: Path) -> None:
    """At 8,192 tokens, where without them two gradients as wide as the feed-forward are the most
    that there is: beside one of these the weight dequantised, and three bytes a number of the
    gradient and one of the input; or a mask and a copy.
    """
    options: Any = {
        "training": {"batch_size": 4, "max_length": 2048, "tokens_per_micro_batch": 8192},
        "distributed": {"activation_checkpointing": "full"},
    }
    precision = {"default": "fp8", "fused_kernels": "off"}
    plain, fp8, dropped = (
        plan_8b(
            tmp_path,
            machine=MACHINES["L40S"],
            precision={**precision, "fp8_products": products},
            lora=lora,
            **options,
        ).rank.workspace
        for products, lora in (("off", {}), ("auto", {}), ("off", {"lora_dropout": 0.1}))
    )
    inner = 2 * 8192 * 14_336
    dense = 2 * 4096 * 14_336
    assert fp8 - plain == dense + 8192 * (3 * 4096 + 14_336) - inner
    assert dropped - plain == dense + 8192 * 3 * 14_336 - inner
    for name, counted in (("A100", plain), ("MI300X", plain), ("L40S", fp8)):
        assert (
            plan_8b(tmp_path, machine=MACHINES[name], precision=precision, **options).rank.workspace
            == counted
        ), name


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


def test_a_processor_that_computes_bf16_by_fp32_has_a_products_result_in_it(tmp_path: Path) -> None:
    """4 bytes for each number of the gradient of the feed-forward's inner width, instead of a
    second gate's gradient in bf16. `tests/workers/test_live_bytes.py` counts it in a step.
    """
    by_fp32, by_loop, fast = (
        Products("", 1e11, flops, by) for flops, by in ((2e10, True), (3e9, False), (4e11, True))
    )
    options: dict[str, Any] = {
        "distributed": {"activation_checkpointing": "full"},
        "training": {"max_length": 512},
    }

    def workspace(products: Products | None, compute: str) -> int:
        machine = replace(HOST, products=products)
        return plan_8b(
            tmp_path, machine=machine, precision={"compute": compute, "default": "bf16"}, **options
        ).rank.workspace

    own = workspace(None, "bf16")
    plain = {"precision": {"default": "bf16"}}
    tokens = plan_8b(tmp_path, machine=HOST, **plain, **options).batches.tokens
    assert workspace(by_fp32, "bf16") - own == tokens * (4 * 14_336 + 2 * 14_336 - 2 * 2 * 14_336)
    assert workspace(by_loop, "bf16") == workspace(fast, "bf16") == own
    assert workspace(by_fp32, "fp32") == workspace(None, "fp32")


def test_a_process_on_a_processor_takes_more_than_its_tensors(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "base"))
    rank = plan_of(spec, replace(find_machine("cpu"), heap_factor=1.25)).rank
    assert (rank.gaps, rank.total) == (rank.live // 4, rank.live + rank.live // 4)
    assert plan_of(spec, find_machine("cpu")).rank.gaps > 0
    assert plan_of(spec, MACHINES["H100"]).rank.gaps == 0, (
        "what a GPU's allocator holds is in what is usable"
    )


def test_selective_checkpointing_keeps_the_results_of_products_and_attention(
    tmp_path: Path,
) -> None:
    """Queries, keys, values, attention's and its projection's, gate, up and down, A(x) of seven
    adapters, and one log-sum a head in fp32.
    """
    kept = in_modes(tmp_path, "off")[0].activations_by_mode
    products = 2 * 4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096 + 7 * 16
    assert kept["selective"] - kept["full"] == 32 * 8192 * (2 * products + 4 * 32)
    assert kept["tiled"] == kept["full"]


def test_ranks_that_share_samples_keep_what_attention_gave_before_and_after_the_exchange(
    tmp_path: Path,
) -> None:
    of_token = []
    for ranks in (1, 2):
        plan = plan_8b(
            tmp_path,
            ranks,
            machine=A100,
            distributed={"context_parallel": ranks, "activation_checkpointing": "none"},
            training={"batch_size": 4, "max_length": 2048},
            precision={"fused_kernels": "off"},
        )
        casts = 2 * 41_943_040 if ranks == 1 else 0  # sharded adapters are gathered in bf16
        of_token.append((plan.rank.activations_by_mode["none"] - casts) / plan.batches.tokens)
    assert of_token[1] - of_token[0] == 32 * 2 * 4096


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
