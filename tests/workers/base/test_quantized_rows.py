"""Bases that come quantised: any rows of any layout, what is kept exactly, what is not and is said,
what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ft_service.errors import SpecError
from tests.support.ranks import often_and_slow, run_on_ranks
from tests.support.training.loading import (
    CPU,
    Outcome,
    load_each_on_rank,
    load_on_rank,
    outcome_of,
    whole,
)
from tests.support.training.models import save_tiny, save_tiny_llama, spec_for
from tests.support.training.prequantized import (
    bitsandbytes_4bit,
    four_bits_of_torchao,
    fp4_of_deepseek_v4,
    fp8_by_blocks,
    fp8_by_blocks_of_compressed_tensors,
    fp8_by_rows,
    fp8_by_tensors,
    fp8_of_deepseek_v4,
    fp8_of_mistral,
    fp8_of_modelopt,
    fp8_of_torchao,
    int4_by_groups,
    is_linear,
    mxfp4,
    nvfp4,
    nvfp4_of_modelopt,
)
from workers.base.base_tensors import Safetensors
from workers.base.layouts import quantization_of
from workers.base.load import load
from workers.base.quantized_rows import StoredBase
from workers.model.build import build
from workers.quant import nf4

Publish = Callable[[Path], dict[str, Tensor]]
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "head_dim": 18,
}
WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4}
"""Matrices of several blocks of 128 both ways, the last ones cut off; three ranks divide their rows
inside of blocks.
"""

EXACT: dict[str, tuple[Publish, dict[str, Any], str]] = {
    "bitsandbytes, nested": (bitsandbytes_4bit, {}, "NF4FP32Weight"),
    "bitsandbytes, plain": (
        lambda folder: bitsandbytes_4bit(folder, nested=False),
        {},
        "NF4FP32Weight",
    ),
    "bitsandbytes in bf16 containers": (
        lambda f: bitsandbytes_4bit(f, storage=torch.bfloat16),
        {},
        "NF4FP32Weight",
    ),
    "bitsandbytes in larger blocks": (
        lambda folder: bitsandbytes_4bit(folder, block=128),
        {"hidden_size": 128, "intermediate_size": 256},
        "NF4FP32Weight",
    ),
    "FP8 by rows": (fp8_by_rows, ODD, "FP8Weight"),
    "FP8 by tensors": (fp8_by_tensors, ODD, "FP8Weight"),
    "FP8 of torchao": (fp8_of_torchao, ODD, "FP8Weight"),
    "FP8 by blocks": (fp8_by_blocks, WIDE, "FP8BlocksWeight"),
    "FP8 by blocks of compressed-tensors": (
        fp8_by_blocks_of_compressed_tensors,
        WIDE,
        "FP8BlocksWeight",
    ),
    "NVFP4 of compressed-tensors": (nvfp4, WIDE, "NVFP4Weight"),
    "NVFP4 of modelopt": (nvfp4_of_modelopt, WIDE, "NVFP4Weight"),
    "NVFP4 of torchao": (lambda folder: four_bits_of_torchao(folder, "nvfp4"), WIDE, "NVFP4Weight"),
    "MXFP4 of compressed-tensors": (mxfp4, WIDE, "MXFP4Weight"),
    "MXFP4 of torchao": (lambda folder: four_bits_of_torchao(folder, "mxfp4"), WIDE, "MXFP4Weight"),
    "FP8 by blocks of DeepSeek V4": (fp8_of_deepseek_v4, WIDE, "FP8BlocksWeight"),
    "FP8 by blocks of modelopt": (fp8_of_modelopt, WIDE, "FP8BlocksWeight"),
    "FP8 by tensors of Mistral": (fp8_of_mistral, ODD, "FP8Weight"),
    "MXFP4 of DeepSeek V4": (fp4_of_deepseek_v4, WIDE, "MXFP4Weight"),
    "FP8 by larger blocks": (
        lambda folder: fp8_by_blocks(folder, 256),
        {**WIDE, "hidden_size": 272},
        "FP8BlocksWeight",
    ),
}
AGAIN: dict[str, tuple[Publish, dict[str, Any], str, float]] = {
    "FP8 by smaller blocks": (lambda folder: fp8_by_blocks(folder, 64), WIDE, "FP8Weight", 0.03),
    "bitsandbytes, blocks across rows": (bitsandbytes_4bit, ODD, "NF4FP32Weight", 0.12),
    "bitsandbytes, blocks across rows, bf16 containers": (
        lambda folder: bitsandbytes_4bit(folder, nested=False, storage=torch.bfloat16),
        ODD,
        "NF4FP32Weight",
        0.12,
    ),
    "bitsandbytes FP4": (
        lambda folder: bitsandbytes_4bit(folder, kind="fp4"),
        {},
        "NF4FP32Weight",
        0.15,
    ),
}
OTHERWISE: dict[str, tuple[Publish, dict[str, Any], str, Callable[[Tensor], Tensor]]] = {
    "INT4 in groups": (int4_by_groups, {}, "plain", lambda value: value.bfloat16().float()),
    "FP8 by blocks, in bf16": (
        fp8_by_blocks,
        WIDE,
        "plain",
        lambda value: value.bfloat16().float(),
    ),
    "FP8 by smaller blocks, in bf16": (
        lambda folder: fp8_by_blocks(folder, 64),
        WIDE,
        "plain",
        lambda value: value.bfloat16().float(),
    ),
    "FP8 by blocks, in nf4": (
        fp8_by_blocks,
        WIDE,
        "NF4Weight",
        lambda value: nf4.dequantize(nf4.quantize(value), value.shape[1], torch.float32),
    ),
}
PUBLISHED = {name: case[:2] for cases in (EXACT, AGAIN, OTHERWISE) for name, case in cases.items()}
OFTEN = {
    "bitsandbytes, nested",
    "bitsandbytes in larger blocks",
    "FP8 by rows",
    "FP8 by tensors of Mistral",
    "FP8 by blocks",
    "FP8 by larger blocks",
    "NVFP4 of compressed-tensors",
    "MXFP4 of torchao",
    "FP8 by smaller blocks",
    "bitsandbytes, blocks across rows",
    "INT4 in groups",
    "FP8 by blocks, in nf4",
}
"""Loaded on ranks in every run: each format and kind of parts. The others differ in how a file says
the same, which `test_any_rows_have_the_values_that_the_checkpoint_stands_for` has of all.
"""
ASKED = {name: "fp8" for name in PUBLISHED if name.startswith("FP8")} | {
    **{name: "as_published" for name in PUBLISHED if name.startswith(("NVFP4", "MXFP4"))},
    "FP8 by blocks, in bf16": "bf16",
    "FP8 by smaller blocks, in bf16": "bf16",
    "FP8 by blocks, in nf4": "nf4",
}
"""What the job asks for, where it is not bf16."""


@pytest.mark.parametrize("layout", PUBLISHED)
def test_any_rows_have_the_values_that_the_checkpoint_stands_for(
    layout: str, tmp_path: Path
) -> None:
    publish, changes = PUBLISHED[layout]
    values = publish(save_tiny_llama(tmp_path, **changes))
    with Safetensors(tmp_path) as checkpoint:
        base = StoredBase.open(checkpoint, tmp_path)
        for name, value in list(values.items())[:7]:
            assert base.shape(name) == value.shape
            rows = value.shape[0]
            for start, end in [
                (0, rows),
                (0, 0),
                (rows, rows),
                (1, rows - 1),
                (rows // 3, rows // 3 + 1),
                (7, 9),
            ]:
                assert torch.equal(base.rows(name, start, end), value[start:end]), (
                    f"{name} [{start}, {end})"
                )


@dataclass
class Run:
    """One published base, loaded on one rank and on three."""

    folder: Path
    values: dict[str, Tensor]
    alone: Outcome
    three: list[Outcome]


def often_of(layouts: Collection[str]) -> list[Any]:
    return often_and_slow(layouts, [layout for layout in layouts if layout not in OFTEN])


class Runs:
    """What was loaded of each layout: of those that every run has, and of the others, when the
    first of them is asked for.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._found: dict[str, Run] = {}

    def __getitem__(self, layout: str) -> Run:
        if layout not in self._found:
            alike = [name for name in PUBLISHED if (name in OFTEN) == (layout in OFTEN)]
            self._found |= loaded_runs({name: self._folders.mktemp("base") for name in alike})
        return self._found[layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def loaded_runs(folders: dict[str, Path]) -> dict[str, Run]:
    """All of them in two groups of processes, since these are what takes time."""
    values = {
        layout: PUBLISHED[layout][0](save_tiny_llama(folder, **PUBLISHED[layout][1]))
        for layout, folder in folders.items()
    }
    found = {}
    for world in (1, 3):
        specs = [
            spec_for(folder, ranks=world, precision={"default": ASKED.get(layout, "bf16")})
            for layout, folder in folders.items()
        ]
        found[world] = list(zip(*run_on_ranks(load_each_on_rank, world, specs), strict=True))
    return {
        layout: Run(folders[layout], values[layout], found[1][i][0], list(found[3][i]))
        for i, layout in enumerate(folders)
    }


@pytest.mark.parametrize("layout", often_of(EXACT))
def test_layouts_by_rows_are_kept_bit_for_bit(layout: str, runs: Runs) -> None:
    run = runs[layout]
    for outcomes in ([run.alone], run.three):
        for name, value in run.values.items():
            assert outcomes[0].kinds[name] == EXACT[layout][2]
            assert torch.equal(whole(outcomes, name), value), name
        plain = load_file(run.folder / "model.safetensors")
        for name in outcomes[0].kinds.keys() - run.values.keys():
            assert torch.equal(whole(outcomes, name), plain[name].float()), name
        assert not outcomes[0].loaded.changed
        assert len(outcomes[0].loaded.kept) == len(run.values)
        assert [level for level, _ in outcomes[0].messages] == ["info"]


@pytest.mark.parametrize("layout", often_of(AGAIN))
def test_other_layouts_are_quantised_again_and_the_loss_is_said(layout: str, runs: Runs) -> None:
    _, _, kind, bound = AGAIN[layout]
    run = runs[layout]
    for name, value in run.values.items():
        assert run.alone.kinds[name] == kind
        assert torch.equal(whole(run.three, name), run.alone.values[name]), (
            "whatever the world size"
        )
        error = float((run.alone.values[name] - value).norm() / value.norm())
        assert 0 < error < bound
        for outcome in (run.alone, *run.three):
            assert outcome.loaded.changed[name] == pytest.approx(error, rel=1e-4)
    ((level, text),) = run.three[0].messages
    assert level == "warn"
    assert f"{len(run.values)} weights" in text
    assert f"{max(run.alone.loaded.changed.values()):.2%}" in text


@pytest.mark.parametrize("layout", often_of(OTHERWISE))
def test_what_the_job_stores_otherwise_begins_with_the_exact_values(
    layout: str, runs: Runs
) -> None:
    _, _, kind, stored = OTHERWISE[layout]
    run = runs[layout]
    for name, value in run.values.items():
        assert run.alone.kinds[name] == kind
        assert torch.equal(run.alone.values[name], stored(value)), "rounded once"
        assert torch.equal(whole(run.three, name), run.alone.values[name]), (
            "whatever the world size"
        )
    assert run.alone.loaded.converted.keys() == run.values.keys()
    assert not run.alone.loaded.requantized
    ((level, text),) = run.three[0].messages
    assert (level, text.split(" weights")[0]) == ("info", str(len(run.values)))


@pytest.mark.parametrize(
    "layout", often_of([name for name in EXACT if "blocks" in name and "FP8" in name])
)
def test_published_blocks_are_kept_code_by_code_and_scale_by_scale(layout: str, runs: Runs) -> None:
    run = runs[layout]
    published = load_file(run.folder / "model.safetensors")
    size = 256 if "larger" in layout else 128
    several = 0
    for name in run.values:
        names = [
            f"{name.removesuffix('weight')}{last}"
            for last in ("weight_scale", "weight_scale_inv", "scale")
        ]
        scales = next(published[scale] for scale in names if scale in published)
        scales = scales.flatten(1) if scales.ndim == 4 else scales
        codes, kept = (
            torch.cat([outcome.parts[name][part] for outcome in run.three]) for part in (0, 1)
        )
        rows, cols = run.values[name].shape
        of_rows = scales.float()[torch.arange(rows) // size][
            :, torch.arange(-(-cols // 128)) * 128 // size
        ]
        assert torch.equal(codes, published[name].view(torch.uint8))
        assert torch.equal(kept.view(torch.float32), of_rows)
        several += (
            scales.shape[0] > 1 and scales.shape[1] > 1 and len(scales.unique()) == scales.numel()
        )
        height = -(-rows // 3)
        assert rows < size or any(start % size for start in (height, 2 * height)), (
            "a rank's rows begin inside a block"
        )
    assert several >= 4


def test_modules_outside_the_layers_keep_the_format_that_they_come_in(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["lm_head.weight"].float()
    tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = (
        head.to(torch.float8_e4m3fn),
        torch.ones(1),
    )
    save_file(tensors, tmp_path / "model.safetensors")
    declare(tmp_path, {"quant_method": "fp8"})
    outcomes = run_on_ranks(load_on_rank, 2, spec_for(tmp_path, ranks=2))
    assert outcomes[0].kinds["lm_head.weight"] == "FP8Weight"
    assert torch.equal(whole(outcomes, "lm_head.weight"), head.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("default", "kind"), [("fp8", "FP8BlocksWeight"), ("bf16", "plain"), ("nf4", "plain")]
)
def test_a_head_by_blocks_is_kept_in_fp8_and_else_exact_in_bf16(
    default: str, kind: str, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path, **WIDE)
    values = fp8_by_blocks(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    tensors["lm_head.weight"] = tensors[f"{up}.weight"][:256].clone()
    tensors["lm_head.weight_scale_inv"] = tensors[f"{up}.weight_scale_inv"][:2].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(spec_for(tmp_path, precision={"default": default}), CPU).peft_model
    outcome = outcome_of(
        model, load(model, tmp_path, seed=0, compute_dtype=torch.bfloat16, device=CPU)
    )
    head = values[f"{up}.weight"][:256]
    assert outcome.kinds["lm_head.weight"] == kind
    assert torch.equal(
        outcome.values["lm_head.weight"], head if kind != "plain" else head.bfloat16().float()
    )


def declare(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def packed(**changes: Any) -> dict[str, Any]:
    """What compressed-tensors says of packed codes."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, **changes}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq, whose codes are packed across rows"),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"u": {}}},
            },
            "with a transform_config",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
            },
            "as Int4WeightOnlyConfig",
        ),
        ({"quant_method": "torchao"}, "does not say what"),
        (packed(num_bits=8), "'num_bits': 8"),
        (packed(symmetric=False), "'symmetric': False"),
        (packed(actorder="group"), "'actorder': 'group'"),
        ({"quant_method": "torchao", "quant_type": {}}, "does not say what"),
    ],
)
def test_a_method_that_is_not_known_is_refused_by_name(
    quantization: dict[str, Any], named: str, tmp_path: Path
) -> None:
    declare(save_tiny_llama(tmp_path), quantization)
    with pytest.raises(SpecError, match=named) as refused:
        build(spec_for(tmp_path), torch.device("cpu"))
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    ("card", "folder", "release"),
    [
        (
            "---\nlicense: apache-2.0\nbase_model:\n- Qwen/Qwen2.5-7B-Instruct\n---\n",
            "q",
            "Qwen/Qwen2.5-7B-Instruct",
        ),
        ("---\nbase_model: 'meta-llama/Llama-3.1-8B'\n---\n", "q", "meta-llama/Llama-3.1-8B"),
        (None, "Qwen3-8B-AWQ", "Qwen3-8B"),
        (None, "TheModel-GPTQ-Int4", "TheModel"),
    ],
)
def test_codes_across_rows_are_refused_with_the_release_to_take(
    card: str | None, folder: str, release: str, tmp_path: Path
) -> None:
    base = tmp_path / folder
    base.mkdir()
    (base / "config.json").write_text('{"quantization_config": {"quant_method": "awq", "bits": 4}}')
    if card is not None:
        (base / "README.md").write_text(card)
    with pytest.raises(
        SpecError,
        match=rf"quantised by awq.* Take the release in bf16 that it was made from: {release}\.",
    ):
        quantization_of(base)


def test_a_method_without_a_card_and_a_telling_name_names_no_release(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(SpecError, match=r"in groups\.$"):
        quantization_of(tmp_path)


CODES = "model.layers.1.self_attn.q_proj.weight_packed"
MODULE = CODES.removesuffix("weight_packed")
F8 = torch.float8_e4m3fn
HOSTILE: dict[str, tuple[Publish, dict[str, Tensor | None], str]] = {
    "no scales": (nvfp4, {"weight_scale": None}, "U8 numbers are codes"),
    "one scale too few": (nvfp4, {"weight_scale": torch.ones(64, 3).to(F8)}, "codes of four bits"),
    "one row of scales too few": (
        nvfp4,
        {"weight_scale": torch.ones(63, 4).to(F8)},
        "codes of four bits",
    ),
    "scales without shape": (
        nvfp4,
        {"weight_scale": torch.tensor(1.0).to(F8)},
        "codes of four bits",
    ),
    "scales in fp32": (nvfp4, {"weight_scale": torch.ones(64, 4)}, "scales F32"),
    "scales of the other format": (
        mxfp4,
        {"weight_scale": torch.ones(64, 2).to(F8)},
        "codes of four bits",
    ),
    "codes in three dimensions": (
        nvfp4,
        {"weight_packed": torch.zeros(64, 8, 4, dtype=torch.uint8)},
        "codes of four bits",
    ),
    "columns that fill no block": (
        nvfp4,
        {
            "weight_packed": torch.zeros(64, 30, dtype=torch.uint8),
            "weight_scale": torch.ones(64, 3).to(F8),
        },
        "codes of four bits",
    ),
    "no rows and no columns": (
        nvfp4,
        {
            "weight_packed": torch.zeros(0, 0, dtype=torch.uint8),
            "weight_scale": torch.ones(0, 0).to(F8),
        },
        r"has shape \(0, 0\)",
    ),
    "a shape that is not the config's": (
        nvfp4,
        {
            "weight_packed": torch.zeros(64, 16, dtype=torch.uint8),
            "weight_scale": torch.ones(64, 2).to(F8),
        },
        r"has shape \(64, 32\)",
    ),
    "scales that are no numbers": (
        nvfp4,
        {"weight_scale": torch.full((64, 4), float("nan")).to(F8)},
        "are no numbers",
    ),
    "exponents that are no numbers": (
        mxfp4,
        {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)},
        "a scale of 255",
    ),
    "a divisor of zero": (
        nvfp4,
        {"weight_global_scale": torch.zeros(1)},
        "not one positive fp32 number",
    ),
    "an infinite divisor": (
        nvfp4,
        {"weight_global_scale": torch.tensor([torch.inf])},
        "not one positive fp32 number",
    ),
    "a divisor for each row": (
        nvfp4,
        {"weight_global_scale": torch.ones(64)},
        "not one positive fp32 number",
    ),
    "a divisor in bf16": (
        nvfp4,
        {"weight_global_scale": torch.ones(1).bfloat16()},
        "not one positive fp32 number",
    ),
    "a factor and a divisor": (
        nvfp4,
        {"weight_scale_2": torch.ones(())},
        "weight_scale_2 and .*weight_global_scale",
    ),
    "a divisor of powers": (mxfp4, {"weight_global_scale": torch.ones(1)}, "MXFP4 with the scales"),
    "factors of the inputs": (
        nvfp4,
        {"pre_quant_scale": torch.ones(64)},
        "pre_quant_scale has a factor",
    ),
    "zero points": (
        nvfp4,
        {"weight_zero_point": torch.zeros(64, 4)},
        "weight_zero_point has zero points",
    ),
    "an order of the inputs": (
        int4_by_groups,
        {"weight_g_idx": torch.arange(64)},
        "weight_g_idx has an order",
    ),
    "zero points of FP8": (
        fp8_by_rows,
        {"weight_zero_point": torch.zeros(64, 1)},
        "weight_zero_point has zero points",
    ),
}


def load_as_published(folder: Path) -> None:
    model = build(spec_for(folder, precision={"default": "as_published"}), CPU).peft_model
    load(model, folder, seed=0, compute_dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("fault", HOSTILE)
def test_what_would_be_read_as_other_values_is_refused_by_the_tensors_name(
    fault: str, tmp_path: Path
) -> None:
    publish, changed, why = HOSTILE[fault]
    publish(save_tiny_llama(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    for last, tensor in changed.items():
        tensors.pop(MODULE + last, None)
        if tensor is not None:
            tensors[MODULE + last] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecError, match=rf"model\.layers\.1\.self_attn\.q_proj.*{why}") as refused:
        load_as_published(tmp_path)
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"{}_scale": None}, "no weight_scale"),
        (
            {"{}_scale": torch.ones(5, 5)},
            "neither those of rows, nor one, nor those of blocks of 128 x 128",
        ),
        (
            {"{}": torch.zeros(64, 64, dtype=torch.float8_e5m2)},
            r"its FP8 codes are e5m2 \(F8_E5M2\), and only e4m3",
        ),
        (
            {"{}": torch.zeros(64, 64, dtype=torch.int8)},
            "its I8 numbers are codes of a format that config.json does not name",
        ),
    ],
)
def test_a_layout_that_is_not_known_is_refused_by_the_tensors_name(
    changed: dict[str, Tensor | None], why: str, tmp_path: Path
) -> None:
    fp8_by_rows(save_tiny_llama(tmp_path))
    weight = "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    updates = {name.format(weight): tensor for name, tensor in changed.items()}
    save_file(
        {n: t for n, t in {**tensors, **updates}.items() if t is not None},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(SpecError, match=rf"model\.layers\.1\.self_attn\.q_proj\.weight.*{why}"):
        build(spec_for(tmp_path), torch.device("cpu"))


def test_an_override_against_the_stored_format_is_refused_by_name(tmp_path: Path) -> None:
    bitsandbytes_4bit(save_tiny_llama(tmp_path))
    with pytest.raises(
        SpecError, match=r"'\.\*up_proj' asks for fp8 in model\.layers\.0\.mlp\.up_proj.*nf4_fp32"
    ) as refused:
        build(
            spec_for(tmp_path, precision={"overrides": {".*up_proj": "fp8"}}), torch.device("cpu")
        )
    assert refused.value.param == "precision.overrides"


def test_weights_by_blocks_are_given_any_format_that_the_job_names(tmp_path: Path) -> None:
    fp8_by_blocks(save_tiny_llama(tmp_path, **WIDE))
    precision = {
        "default": "nf4",
        "overrides": {".*self_attn.*": "fp8", ".*down_proj": "bf16", ".*up_proj": "fp8_blocks"},
    }
    formats = build(spec_for(tmp_path, precision=precision), torch.device("cpu")).formats
    layer = {
        name.removeprefix("model.layers.1."): stored
        for name, stored in formats.items()
        if "layers.1" in name
    }
    assert layer == {
        **{f"self_attn.{name}_proj": "fp8_blocks" for name in "qkvo"},
        **{"mlp.gate_proj": "nf4", "mlp.up_proj": "fp8_blocks", "mlp.down_proj": "bf16"},
    }


def test_stored_modules_stay_whatever_the_default_is_and_plain_ones_follow_it(
    tmp_path: Path,
) -> None:
    bitsandbytes_4bit(save_tiny_llama(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    plain = "model.layers.0.self_attn.q_proj.weight"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(plain)}
    save_file({**kept, plain: torch.randn(64, 64).bfloat16()}, tmp_path / "model.safetensors")
    precision = {"default": "fp8", "overrides": {".*down_proj": "nf4"}}
    formats = dict(build(spec_for(tmp_path, precision=precision), torch.device("cpu")).formats)
    assert formats.pop(plain.removesuffix(".weight")) == "fp8"
    assert set(formats.values()) == {"nf4_fp32"}
    assert all(is_linear(f"{name}.weight") for name in formats)


@pytest.mark.parametrize(
    ("publish", "hidden", "inner"),
    [
        (fp8_by_rows, 64, 64),
        pytest.param(bitsandbytes_4bit, 64, 64, marks=pytest.mark.slow),
        (fp8_by_blocks, 160, 144),
    ],
)
def test_experts_that_come_one_by_one_are_kept_in_their_stacks(
    publish: Publish, hidden: int, inner: int, tmp_path: Path
) -> None:
    values = publish(
        save_tiny("qwen3_moe", tmp_path, hidden_size=hidden, moe_intermediate_size=inner)
    )
    outcomes = run_on_ranks(
        load_on_rank, 3, spec_for(tmp_path, ranks=3, precision={"default": "fp8"})
    )
    for layer in ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts"):
        experts = range(
            sum(name.startswith(layer) and name.endswith("down_proj.weight") for name in values)
        )
        gate_up = [
            values[f"{layer}.{i}.{half}_proj.weight"] for i in experts for half in ("gate", "up")
        ]
        assert torch.equal(whole(outcomes, f"{layer}.gate_up_proj.weight"), torch.cat(gate_up))
        down = [values[f"{layer}.{i}.down_proj.weight"] for i in experts]
        assert torch.equal(whole(outcomes, f"{layer}.down_proj.weight"), torch.cat(down))
    assert not any(".experts." in name for name in outcomes[0].loaded.changed), (
        "others are narrower than a block"
    )
