"""What the plan says against what the worker stores and sends: bytes per rank exactly, and
traffic.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_service.errors import SpecError
from ft_service.plan.job import Plan
from ft_service.plan.machines import MACHINES
from ft_service.spec import JobSpec
from tests.support.bases import plan_of
from tests.support.ranks import Cases, often_and_slow
from tests.support.training.models import (
    FAMILIES,
    OTHER_FAMILIES,
    VOCABULARY,
    save_tiny,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, batches_of, constructed, counted_collectives
from tests.support.training.prequantized import (
    bitsandbytes_4bit,
    fp8_by_blocks,
    fp8_by_rows,
    int4_by_groups,
    mxfp4,
    nvfp4,
    nvfp4_of_modelopt,
)
from tests.support.training.published import save_published
from workers.base.load import adapters
from workers.data.batches import Tokens
from workers.job.origins import stored_modules
from workers.job.training_state import JobState
from workers.model.build import build
from workers.quant.rowwise import RowQuantized
from workers.ranks.sharding import Gradients
from workers.training.step import forward_backward

LENGTH = 24


def measure(rank: int, world: int, spec: JobSpec) -> dict[str, Any]:
    """Bytes that the tensors of one rank take during a step of the real worker code, and what its
    collectives carried.
    """
    built = constructed(spec, world)
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    data = full_samples(spec.training.batch)
    batches = batches_of(data, rank, world, spec)
    kept = spec.distributed.keep_unsharded
    with counted_collectives() as collectives:
        forward_backward(
            built.peft_model,
            batches,
            sum(t.target_count for t in data),
            world,
            gradients=Gradients(built.peft_model, world, keep_unsharded=kept),
        )
    frozen = {n: p for n, p in built.peft_model.named_parameters() if not p.requires_grad}
    states = [
        job.optimizer.steps,
        *job.optimizer.exp_avg.values(),
        *job.optimizer.exp_avg_sq.values(),
    ]
    return {
        "quantised": held(p for p in frozen.values() if quantised(p)),
        "plain": held(p for p in frozen.values() if not quantised(p)),
        "adapters": held(job.parameters.values()),
        "gradients": held(p.grad for p in job.parameters.values()),
        "optimizer": held(states),
        "modules": {
            m.module: (m.format, m.bytes) for m in stored_modules(built, spec.precision.compute)
        },
        "collectives": collectives,
    }


def full_samples(count: int, length: int = LENGTH) -> list[Tokens]:
    """Samples of full length whose every token is a target: what the plan reckons with."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, VOCABULARY, (count, length), generator=generator).int().numpy()
    return [Tokens(ids, ids >= 0) for ids in drawn]


def quantised(parameter: Tensor) -> bool:
    return isinstance(local(parameter), RowQuantized)


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "data", tensor)


def held(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each once: padding rows and all."""
    storages: dict[int, int] = {}
    for tensor in map(local, tensors):
        for part in plain_parts(tensor):
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


MIXED = {"default": "bf16", "overrides": {r".*self_attn.*": "fp8", r".*mlp\.(up|down)_proj": "nf4"}}
FOUR_BITS = {"default": "nvfp4", "overrides": {r".*mlp.*": "mxfp4"}}
ODD = {
    "vocab_size": VOCABULARY + 1,
    "intermediate_size": 200,
    "hidden_size": 72,
    "num_attention_heads": 4,
}
FEW_ROWS = {"num_key_value_heads": 1, "head_dim": 2}
"""Of keys and values: fewer than three ranks."""
BLOCKS = {
    "hidden_size": 160,
    "intermediate_size": 289,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
"""Of a base in FP8 by blocks of 128, several of which lie in every matrix both ways."""
BOTH = ["embed_tokens", "lm_head"]
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16 on one rank": (1, {"default": "bf16"}, {}, {}),
    "nf4 on one rank, fp32": (1, {"default": "nf4", "compute": "fp32"}, {}, {}),
    "nf4 on two": (2, {"default": "nf4"}, {}, {}),
    "fp8 on three": (3, {"default": "fp8"}, {}, {}),
    "all three formats, rows that do not divide or are fewer than ranks": (
        3,
        MIXED,
        {**ODD, **FEW_ROWS},
        {},
    ),
    "tied embeddings": (2, MIXED, {"tie_word_embeddings": True}, {}),
    "two copies of two": (4, MIXED, {"intermediate_size": 200}, {"replicate": 2}),
    "two copies unsharded": (2, {"default": "nf4"}, {}, {"replicate": -1}),
    "kept unsharded over the step": (2, {"default": "nf4"}, {}, {"keep_unsharded": True}),
    "kept over two of four": (4, {"default": "bf16"}, {}, {"reshard_after_forward": 2}),
    "in one group": (2, {"default": "fp8"}, {}, {"wrap": "none"}),
    "fp8 by blocks on three, columns that do not divide": (
        3,
        {"default": "fp8_blocks"},
        {"intermediate_size": 200},
        {},
    ),
    "nvfp4 and mxfp4 on three, columns that do not divide": (
        3,
        FOUR_BITS,
        {"intermediate_size": 200},
        {},
    ),
    "some weights whole": (
        3,
        {**MIXED, "compute": "fp32"},
        {},
        {"ignored": [r".*norm\.weight", r".*up_proj.*"]},
    ),
    "magnitudes, and trained whole, on three": (3, MIXED, ODD, {}),
    "trained whole and tied": (2, MIXED, {"tie_word_embeddings": True}, {}),
    "kept gathered until the backward": (
        2,
        {"default": "nf4"},
        {},
        {"reshard_after_forward": False},
    ),
}
SLOW = {
    "bf16 on one rank",
    "nf4 on two",
    "fp8 on three",
    "tied embeddings",
    "nf4 of whole blocks",
    "fp8 by rows",
    "mxfp4 in nf4",
    "fp8 by blocks in bf16",
    "fp8 by blocks of another width",
    "gpt-oss",
    "gpt-oss on three",
    "kept over two of four",
    "two copies of two",
    "fp8 by blocks on three, columns that do not divide",
    "nvfp4",
}
"""Of which others have more: another type on one rank, all formats on three, what is tied trained
whole, blocks across rows, blocks in NF4, experts on three, blocks published on two, both formats of
four bits on three. Two copies of one rank are of the short list, and two of two in
tests/workers/ranks/test_hsdp.py.
"""


def job(base: Path, case: str) -> JobSpec:
    world, precision, changes, distributed = CASES[case]
    spec = spec_for(
        save_tiny_llama(base, **changes),
        ranks=world,
        precision=precision,
        training={
            "batch_size": 2 * world + 1,
            "per_device_train_batch_size": 2,
            "max_length": LENGTH,
        },
        lora={
            "r": 5,
            "use_dora": "magnitudes" in case,
            "modules_to_save": BOTH if "whole" in case else [],
        },
    )
    return spec.model_copy(update={"distributed": spec.distributed.model_copy(update=distributed)})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Cases[dict[str, Any]]:
    """Of all tests of this module, so that ranks of each number are started once."""
    made = {
        **dict.fromkeys(CASES, job),
        **dict.fromkeys(PUBLISHED, published_job),
        **dict.fromkeys(EXPERTS, experts_job),
    }
    return Cases(
        measure,
        {case: make(tmp_path_factory.mktemp("base"), case) for case, make in made.items()},
        SLOW,
    )


@pytest.mark.parametrize("case", often_and_slow(CASES, SLOW & CASES.keys()))
def test_a_rank_has_the_bytes_and_the_traffic_that_were_planned(
    case: str, measured: Cases[dict[str, Any]]
) -> None:
    spec, results = measured.of(case)
    plan = plan_of(spec, MACHINES["H100"])
    for result in results:
        assert (result["quantised"], result["plain"]) == base_bytes(plan)
        assert (result["adapters"], result["gradients"]) == (
            plan.rank.adapters,
            plan.rank.gradients,
        )
        copies = plan.layout.replicate
        shard = plan.layout.shard
        between = sum(
            sent
            for kind, dtype, sent, _ in result["collectives"]
            if (kind, dtype) == ("allreduce", "float32")
        )
        assert 2 * between * (copies - 1) // copies == pytest.approx(plan.wire.all_reduce, rel=0.02)
        received = [
            sent * (ranks - 1) for kind, _, sent, ranks in result["collectives"] if kind == "gather"
        ]
        reduced = [sent for kind, _, sent, _ in result["collectives"] if kind == "reduce"]
        assert (len(received), len(reduced)) == (plan.wire.gathers, plan.wire.reduces)
        assert sum(received) == pytest.approx(plan.wire.gather, rel=0.02)
        assert sum(reduced) * (shard - 1) / shard == pytest.approx(plan.wire.reduce, rel=0.02)
    assert max(result["optimizer"] for result in results) == plan.rank.optimizer
    assert sum(module.bytes_per_rank for module in plan.modules) == sum(plan.rank.base.values())
    recorded = results[0]["modules"]
    assert {module.name: module.format for module in plan.modules} == {
        name: kept for name, (kept, _) in recorded.items()
    }
    quantised_bytes = sum(count for kept, count in recorded.values() if kept != "bf16")
    assert quantised_bytes == sum(result["quantised"] for result in results)


def base_bytes(plan: Plan) -> tuple[int, int]:
    """Of quantised and of plain weights, per rank."""
    plain = plan.rank.base.get("bf16", 0)
    return sum(plan.rank.base.values()) - plain, plain


def plain_parts(parameter: Tensor) -> tuple[Tensor, ...]:
    data = local(parameter)
    return data.parts if isinstance(data, RowQuantized) else (data,)


PUBLISHED: dict[str, tuple[Any, dict[str, Any], str, set[str]]] = {
    "nf4 of whole blocks": (bitsandbytes_4bit, {"intermediate_size": 128}, "nf4", {"nf4_fp32"}),
    "nf4 of blocks across rows": (
        bitsandbytes_4bit,
        {"intermediate_size": 96},
        "nf4",
        {"nf4_fp32"},
    ),
    "fp8 by rows": (fp8_by_rows, {}, "nf4", {"fp8"}),
    "fp8 by blocks": (fp8_by_blocks, BLOCKS, "fp8", {"fp8_blocks"}),
    "nvfp4": (nvfp4, {"intermediate_size": 96}, "as_published", {"nvfp4"}),
    "mxfp4": (mxfp4, {"intermediate_size": 96}, "as_published", {"mxfp4"}),
    "mxfp4 in nf4": (mxfp4, {"intermediate_size": 96}, "nf4", {"nf4"}),
    "fp8 by blocks in nf4": (fp8_by_blocks, BLOCKS, "nf4", {"nf4"}),
    "fp8 by blocks in bf16": (fp8_by_blocks, BLOCKS, "bf16", set()),
    "fp8 by blocks of another width": (partial(fp8_by_blocks, block=64), BLOCKS, "fp8", {"fp8"}),
}
OF_TWO = {"batch_size": 2, "per_device_train_batch_size": 2, "max_length": LENGTH}


def published_job(base: Path, case: str) -> JobSpec:
    publish, changes, asked, _ = PUBLISHED[case]
    publish(save_tiny_llama(base, **changes))
    return spec_for(base, ranks=2, precision={"default": asked}, training=OF_TWO)


@pytest.mark.parametrize("case", often_and_slow(PUBLISHED, SLOW & PUBLISHED.keys()))
def test_a_base_published_quantised_takes_what_was_planned(
    case: str, measured: Cases[dict[str, Any]]
) -> None:
    spec, results = measured.of(case)
    stored = PUBLISHED[case][-1]
    plan = plan_of(spec, MACHINES["H100"])
    formats = dict(build(spec, CPU).formats)
    assert {m.name: m.format for m in plan.modules if m.name in formats} == formats
    assert {m.format for m in plan.modules} - {"bf16"} == set(formats.values()) - {"bf16"} == stored
    check_bytes(plan, results)


def check_bytes(plan: Plan, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert (result["quantised"], result["plain"]) == base_bytes(plan)
        received = sum(
            sent * (ranks - 1) for kind, _, sent, ranks in result["collectives"] if kind == "gather"
        )
        assert received == pytest.approx(plan.wire.gather, rel=0.02)


def nvfp4_experts(base: Path) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "intermediate_size": 160,
    }
    nvfp4_of_modelopt(save_tiny("qwen3_moe", base, **sizes))
    return base


EXPERTS: dict[str, tuple[Any, str, str, int]] = {
    "gpt-oss": (partial(save_published, "gpt-oss"), "mxfp4", "as_published", 1),
    "gpt-oss on three": (partial(save_published, "gpt-oss"), "mxfp4", "as_published", 3),
    "qwen3 on three": (nvfp4_experts, "nvfp4", "as_published", 3),
    "qwen3 in nf4 on two": (nvfp4_experts, "nf4", "nf4", 2),
}


def experts_job(base: Path, case: str) -> JobSpec:
    publish, _, default, world = EXPERTS[case]
    return spec_for(publish(base), ranks=world, precision={"default": default}, training=OF_TWO)


@pytest.mark.parametrize("case", often_and_slow(EXPERTS, SLOW & EXPERTS.keys()))
def test_experts_published_in_four_bits_take_what_was_planned(
    case: str, measured: Cases[dict[str, Any]]
) -> None:
    spec, results = measured.of(case)
    plan = plan_of(spec, MACHINES["H100"])
    assert {module.format for module in plan.modules if module.kind == "experts"} == {
        EXPERTS[case][1]
    }
    check_bytes(plan, results)


def test_a_base_published_quantised_keeps_its_formats(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    fp8_by_rows(base)
    asked = spec_for(base, precision={"overrides": {r".*up_proj": "nf4"}})
    resharded = spec_for(base, ranks=4)
    resharded = resharded.model_copy(
        update={
            "distributed": resharded.distributed.model_copy(update={"reshard_after_forward": 2})
        }
    )
    for spec, param in [
        (asked, "precision.overrides"),
        (resharded, "distributed.reshard_after_forward"),
    ]:
        for look in (lambda: plan_of(spec, MACHINES["H100"]), lambda: build(spec, CPU)):  # noqa: B023  called at once
            with pytest.raises(SpecError) as refused:
                look()
            assert refused.value.param == param


@pytest.mark.parametrize(
    ("publish", "changes", "layout"),
    [
        (int4_by_groups, {}, "INT4 in groups of"),
        (
            partial(fp8_by_blocks, block=64),
            {"hidden_size": 160, "intermediate_size": 288},
            "FP8 by blocks of 64 x 64",
        ),
    ],
)
def test_the_plan_says_what_no_format_keeps_as_published(
    publish: Any, changes: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    base = save_tiny_llama(tmp_path / "base", **changes)
    publish(base)
    for default, told in (("as_published", True), ("nf4", False)):
        plan = plan_of(spec_for(base, precision={"default": default}), MACHINES["H100"])
        said = [warning for warning in plan.warnings if f"in {layout}" in warning]
        assert [
            f"precision.default: {default} they are stored in bf16" in warning for warning in said
        ] == [True] * told


@pytest.mark.parametrize(
    "wanted", [["lm_head"], ["q_proj", "embed_tokens"], ".*lm_head", "model.embed_tokens"]
)
def test_plan_and_worker_say_that_embedding_and_head_are_trained_whole(
    wanted: Any, tmp_path: Path
) -> None:
    spec = spec_for(save_tiny_llama(tmp_path / "base"), lora={"target_modules": wanted})
    said: set[str] = set()
    for look in (lambda: plan_of(spec, MACHINES["H100"]), lambda: build(spec, CPU)):
        with pytest.raises(SpecError) as refused:
            look()
        assert refused.value.param == "lora.target_modules"
        said.add(str(refused.value))
    name = "lm_head" if "lm_head" in str(wanted) else "embed_tokens"
    assert len(said) == 1
    assert f"lora.modules_to_save: [{name}]" in said.pop()


@pytest.mark.parametrize("family", often_and_slow(FAMILIES, OTHER_FAMILIES))
def test_the_headers_of_every_family_say_what_its_model_has(family: str, tmp_path: Path) -> None:
    """The same modules to quantise, parameters to store and adapters to train, without looking at
    the model's code.
    """
    options = {"precision": {"default": "nf4"}, "lora": {"r": 3, "target_modules": "all-linear"}}
    spec = spec_for(save_tiny(family, tmp_path / family), **options)
    plan = plan_of(spec, MACHINES["H100"])
    built = build(spec, CPU)
    assert {m.name for m in plan.modules if m.format == "nf4"} == set(built.formats)
    frozen = {id(p): p.numel() for p in built.peft_model.parameters() if not p.requires_grad}
    assert plan.frozen_parameters == sum(frozen.values())
    assert plan.adapter_parameters == sum(p.numel() for _, p in adapters(built.peft_model))
