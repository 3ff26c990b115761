from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ft_service.bases.description import Weight
from ft_service.errors import SpecError
from ft_service.plan.weight_storage import ShardLayout, WeightStorage, adapters_of
from tests.support.announced import save_gpt_oss, save_qwen3
from tests.support.bases import (
    LLAMA_8B,
    TINY,
    describe,
    llama_shapes,
    plan_of,
    save_base,
    save_fp8_index,
    spec_on,
)
from tests.support.plans import H100, plan_8b


@pytest.mark.parametrize(("weight_format", "bits"), [("bf16", 16), ("fp8", 8.008), ("nf4", 4.13)])
def test_bits_a_parameter_of_an_8b_model(tmp_path: Path, weight_format: str, bits: float) -> None:
    plan = plan_8b(tmp_path, precision={"default": weight_format})
    linears = [module for module in plan.modules if module.kind == "linear"]
    parameters = sum(module.shape[0] * module.shape[1] for module in linears)
    assert parameters == 6_979_321_856
    assert 8 * sum(module.bytes for module in linears) / parameters == pytest.approx(bits, rel=2e-3)


@pytest.mark.parametrize(
    ("asked", "stored", "bits"),
    [("fp8", "fp8_blocks", 8 + 32 / 128), ("bf16", "bf16", 16), ("nf4", "nf4", 4.13)],
)
def test_a_base_in_fp8_by_blocks_keeps_them_in_fp8_and_else_takes_what_the_job_asks_for(
    asked: str, stored: str, bits: float, tmp_path: Path
) -> None:
    spec = spec_on(save_fp8_index(tmp_path, LLAMA_8B), precision={"default": asked})
    linears = [module for module in plan_of(spec, H100).modules if module.kind == "linear"]
    assert {module.format for module in linears} == {stored}
    parameters = sum(module.shape[0] * module.shape[1] for module in linears)
    assert 8 * sum(module.bytes for module in linears) / parameters == pytest.approx(bits, rel=2e-3)


@pytest.mark.parametrize(
    ("save", "stacks", "published", "extra"),
    [
        (save_gpt_oss, [(32 * 2 * 2880, 2880), (32 * 2880, 2880)], "mxfp4", (1 / 32, 0)),
        (save_qwen3, [(128 * 2 * 768, 2048), (128 * 2048, 768)], "nvfp4", (1 / 16, 8)),
    ],
    ids=["gpt-oss 20B", "Qwen3 30B"],
)
def test_experts_of_published_sizes_take_on_a_rank_what_their_file_holds_or_what_nf4_does(
    save: Callable[..., Path],
    stacks: list[tuple[int, int]],
    published: str,
    extra: tuple[float, float],
    tmp_path: Path,
) -> None:
    """Two layers of each on eight ranks.

    `stacks`: rows and columns of a layer's; `extra`: bytes of a number and of a row.
    """
    base = save(tmp_path, num_hidden_layers=2)

    def on_a_rank(default: str) -> tuple[set[str], int]:
        modules = plan_of(spec_on(base, 8, precision={"default": default}), H100).modules
        experts = [module for module in modules if module.kind == "experts"]
        return {module.format for module in experts}, sum(
            module.bytes_per_rank for module in experts
        )

    def bytes_of(numbers: float, row: float) -> float:
        return 2 * sum(rows // 8 * (cols * (1 / 2 + numbers) + row) for rows, cols in stacks)

    assert on_a_rank("as_published") == ({published}, bytes_of(*extra))
    assert on_a_rank("nf4") == ({"nf4"}, bytes_of(1 / 64, 4))


def test_such_a_base_may_be_resharded_to_a_number_of_ranks_in_bf16(tmp_path: Path) -> None:
    spec = spec_on(save_fp8_index(tmp_path, LLAMA_8B), 4, distributed={"reshard_after_forward": 2})
    assert {module.format for module in plan_of(spec, H100).modules} == {"bf16"}


def test_what_is_ignored_is_whole_on_every_rank(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    module = {
        m.name: m
        for m in plan_of(
            spec_on(folder, 2, distributed={"ignored": [r".*\.0\..*q_proj.*"]}), H100
        ).modules
    }
    assert (
        module["model.layers.0.self_attn.q_proj"].bytes_per_rank
        == 2 * module["model.layers.1.self_attn.q_proj"].bytes_per_rank
    )
    with pytest.raises(SpecError, match="'nothing' matches no weight of the base") as caught:
        plan_of(spec_on(folder, 2, distributed={"ignored": ["nothing"]}), H100)
    assert caught.value.param == "distributed.ignored"


def test_experts_are_stored_as_one_weight_a_projection(tmp_path: Path) -> None:
    """Given one by one, or stacked: the same plan, and the router is neither quantised nor
    adapted.
    """
    config = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    dense = {name: shape for name, shape in llama_shapes(TINY).items() if ".mlp." not in name}
    single = dict(dense)
    stacked = dict(dense)
    for layer in range(2):
        before = f"model.layers.{layer}"
        single[f"{before}.block_sparse_moe.gate.weight"] = stacked[f"{before}.mlp.gate.weight"] = (
            4,
            64,
        )
        for expert in range(4):
            matrices = {"w1": (192, 64), "w2": (64, 192), "w3": (192, 64)}
            single |= {
                f"{before}.block_sparse_moe.experts.{expert}.{m}.weight": s
                for m, s in matrices.items()
            }
        stacked |= {
            f"{before}.mlp.experts.gate_up_proj": (4, 384, 64),
            f"{before}.mlp.experts.down_proj": (4, 64, 192),
        }
    plans = [
        plan_of(
            spec_on(save_base(tmp_path / name, config, shapes), 2, precision={"default": "nf4"}),
            H100,
        )
        for name, shapes in (("single", single), ("stacked", stacked))
    ]
    assert {m.name: m for m in plans[0].modules} == {m.name: m for m in plans[1].modules}
    found = {module.name: module for module in plans[0].modules}
    assert (
        found["model.layers.0.mlp.experts.gate_up_proj"].shape,
        found["model.layers.1.mlp.gate"].format,
    ) == (
        (1536, 64),
        "bf16",
    )
    assert plans[0].adapter_parameters == 2 * 16 * (2 * 128 + 2 * (64 + 32))
    # q, k, v, o; and two of four experts.
    per_expert = 2 * (4 * 0.5 * 64 * 64 * 1.5 + 3 * 192 * 64 * 2)
    attention_and_adapters = 6 * plans[0].adapter_parameters + 6 * 2 * plans[0].batches.length * 64
    assert (
        plans[0].flops_per_token
        == 4 * (per_expert + TINY["vocab_size"] * 64) + attention_and_adapters
    )


def test_other_towers_and_their_prefix_are_left_out(tmp_path: Path) -> None:
    shapes = {f"language_model.{name}": shape for name, shape in llama_shapes(TINY).items()}
    shapes["vision_tower.encoder.layers.0.proj.weight"] = (64, 64)
    nested = save_base(tmp_path / "nested", {"text_config": TINY, "model_type": "llava"}, shapes)
    plain = save_base(tmp_path / "plain")
    published, stock = (
        spec_on(folder, precision={"overrides": {rf"{stem}\.layers\.0\..*": "nf4"}})
        for folder, stem in ((nested, r"model\.language_model"), (plain, "model"))
    )
    assert plan_of(published, H100).rank == plan_of(stock, H100).rank


@pytest.mark.parametrize(
    ("shape", "sharded", "kept_fp32", "a_row", "on_rank"),
    [
        ((6, 10), True, False, 2 * 10, 2 * 2 * 10),
        ((6, 10), False, False, 4 * 10, 6 * 4 * 10),
        ((6,), True, False, 4, 2 * 4),
        ((6,), False, False, 4, 6 * 4),
        ((6, 10), True, True, 4 * 10, 6 * 4 * 10),
        ((), False, False, 4, 4),
    ],
)
def test_matrices_that_are_sharded_are_stored_in_bf16_and_vectors_in_the_compute_dtype(
    shape: tuple[int, ...], sharded: bool, kept_fp32: bool, a_row: int, on_rank: int
) -> None:
    """Of fp32, on three ranks; what the model keeps in fp32 is whole on each."""
    weight = Weight("m", "weight", shape, "norm", 0, kept_fp32=kept_fp32)  # type: ignore[arg-type]
    stored = WeightStorage.of(weight, "bf16", sharded, 4)
    assert (stored.row_bytes, stored.bytes_on_rank(ShardLayout(1, 3))) == (a_row, on_rank)
    assert stored.bytes_whole == weight.rows * a_row
    assert stored.sharded is (sharded and not kept_fp32)


def test_a_stack_of_experts_has_an_adapter_of_each_expert(tmp_path: Path) -> None:
    """Of Qwen3 30B's sizes: 128 experts of 768, of which gate and up are one stack."""
    base = save_qwen3(tmp_path, num_hidden_layers=2)
    lora = {"r": 4, "target_parameters": ["mlp.experts.gate_up_proj"]}
    own = [
        adapter
        for adapter in adapters_of(describe(base), spec_on(base, lora=lora))
        if adapter.experts > 1
    ]
    assert [(one.rows, one.cols, one.r, one.experts) for one in own] == [
        (2 * 768, 2048, 4 * 128, 128)
    ] * 2
    assert [one.layer for one in own] == [0, 1]
    assert own[0].numel == 4 * 128 * (2 * 768 + 2048)
