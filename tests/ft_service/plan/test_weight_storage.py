from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import Weight
from ft_service.bases.module_rules import OuterModules
from ft_service.errors import SpecError
from ft_service.plan.weight_storage import (
    AdapterShape,
    GatherGroup,
    ShardLayout,
    WeightStorage,
    adapters_of,
    trained_head,
)
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
from tests.support.plans import H100, made_base, made_job, plan_8b


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


@pytest.mark.parametrize(
    ("adapter", "numel", "on_rank", "moments", "in_8_bits", "tensors"),
    [
        (
            AdapterShape("m", 0, 100, 300, 8),
            8 * 400,
            3 * 300 + 34 * 8,
            8 * (3 * 300 + 34 * 8),
            2 * 3 * (300 + 4 * 3) + 2 * 34 * (8 + 4),
            2,
        ),
        (
            AdapterShape("m", 0, 100, 300, 7, magnitude=True),
            7 * 400 + 100,
            3 * 300 + 34 * (7 + 1),
            8 * (3 * 300 + 34 * 7 + 34),
            2 * 3 * (300 + 4 * 3) + 8 * 34 * 7 + 8 * 34,
            3,
        ),
        (
            AdapterShape("m", None, 100, 300, 0),
            100 * 300,
            34 * 300,
            8 * 34 * 300,
            2 * 34 * (300 + 4 * 3),
            1,
        ),
        (
            AdapterShape("m", None, 100, 300, 8, on_every_rank=True),
            8 * 400,
            8 * 400,
            8 * 8 * 400,
            2 * 8 * (300 + 4 * 3) + 2 * 100 * (8 + 4),
            2,
        ),
    ],
)
def test_what_an_adapter_takes_on_one_of_three_ranks(
    adapter: AdapterShape, numel: int, on_rank: int, moments: int, in_8_bits: int, tensors: int
) -> None:
    layout = ShardLayout(2, 3)
    assert (adapter.numel, adapter.tensors, layout.world) == (numel, tensors, 6)
    assert adapter.numel_on_rank(layout) == on_rank
    assert adapter.moments_on_rank(layout, in_8_bits=False) == moments
    assert adapter.moments_on_rank(layout, in_8_bits=True) == in_8_bits
    frozen = (
        WeightStorage.of(Weight("w", "weight", (10, 64), "linear", 0), "nf4", True, 4),
        WeightStorage.of(Weight("n", "weight", (10,), "norm", 0), "bf16", False, 4),
    )
    group = GatherGroup("g", frozen, (adapter,), held=False)
    assert group.gathered_bytes_on_rank(layout, 4) == 4 * (64 // 2 + 64 // 64 + 4) + 4 * on_rank
    assert group.reduced_bytes_on_rank(layout) == 4 * on_rank


WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("distributed", "lora", "groups"),
    [
        (
            {},
            {},
            [("embedding", False, False, None, 1, 0), ("norm and head", True, True, None, 2, 0)],
        ),
        (
            {},
            WHOLE,
            [("embedding", False, False, None, 0, 1), ("norm and head", True, True, None, 1, 1)],
        ),
        (
            {"keep_unsharded": True},
            {},
            [("embedding", True, False, None, 1, 0), ("norm and head", True, True, None, 2, 0)],
        ),
        ({"wrap": "none"}, WHOLE, [("all", True, True, None, 15, 16)]),
        ({"ignored": [".*embed.*"]}, {}, [("norm and head", True, True, None, 2, 0)]),
    ],
)
def test_what_is_gathered_together_outside_of_the_layers(
    distributed: dict[str, Any], lora: dict[str, Any], groups: list[tuple[Any, ...]]
) -> None:
    """Name, whether it is held, and needed in the backward; weights, and what is trained."""
    job = made_job(made_base(layers=2), 4, distributed=distributed, lora=lora)
    found = [
        (g.name, g.held, g.in_backward, g.kept_over, len(g.frozen), len(g.adapters))
        for g in job.groups
        if "layer " not in g.name
    ]
    assert found == groups
    wholes = [(a.kind, a.rows, a.cols) for a in job.adapters if a.whole]
    assert wholes == ([("embedding", 1000, 64), ("head", 1000, 64)] if lora else [])
    assert job.trains_embedding is bool(lora)
    assert trained_head(job.base, job.adapters) == (1000 * 64 if lora else 0)


@pytest.mark.parametrize(
    ("distributed", "held", "kept_over"),
    [
        ({}, False, None),
        ({"reshard_after_forward": 2}, False, 2),
        ({"reshard_after_forward": False}, True, None),
        ({"keep_unsharded": True}, True, None),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_layer_is_a_group_and_a_tied_head_is_with_its_embedding(
    distributed: dict[str, Any], held: bool, kept_over: int | None, tied: bool
) -> None:
    base = made_base(layers=2)
    if tied:
        outer = OuterModules("model.embed_tokens", "lm_head", tied=True)
        base = replace(base, outer=outer, weights=(*base.weights[:2], *base.weights[3:]))
    groups = made_job(base, 4, distributed=distributed).groups
    layers = [g for g in groups if g.name.startswith("layer")]
    assert [(g.name, g.held, g.kept_over) for g in layers] == [
        ("layer 0", held, kept_over),
        ("layer 1", held, kept_over),
    ]
    for number, group in enumerate(layers):
        assert (len(group.frozen), len(group.adapters), group.in_backward) == (7, 7, True)
        assert {s.weight.layer for s in group.frozen} == {number}
        assert {a.layer for a in group.adapters} == {number}
    if tied:
        assert (groups[0].name, groups[0].held, len(groups[0].frozen)) == (
            "embedding and head",
            True,
            2,
        )


def test_a_weight_without_numbers_is_refused() -> None:
    base = made_base()
    empty = replace(base.weights[-1], shape=(0, 64))
    with pytest.raises(SpecError, match=r"has shape \(0, 64\): there is nothing") as refused:
        made_job(replace(base, weights=(*base.weights, empty)))
    assert refused.value.param == "model"
