"""The description of a base says what training finds, and ends in words for whatever cannot be
tuned.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.bases.description import (
    FusedParts,
    description_key,
    read_described,
    write_described,
)
from ft_service.bases.safetensors_header import read_header
from ft_service.errors import SpecError
from ft_service.installation import SAMPLE_DESCRIPTIONS, SAMPLE_MODELS
from ft_service.plan.weight_storage import layout_of, stored_weights
from tests.support.bases import TINY, llama_shapes, save_base, save_headers, spec_on
from tests.support.ranks import run_on_ranks
from tests.support.training.causal_types import save_type
from tests.support.training.models import save_tiny, save_tiny_llama
from tests.support.training.prequantized import (
    fp8_by_rows,
    int4_by_groups,
    mxfp4,
    nvfp4,
    nvfp4_of_modelopt,
)
from tests.support.training.published import save_published
from workers.describe import _document, _max_positions, describe, main

ORIGINAL = "original_max_position_embeddings"


def described_on_rank(rank: int, world: int, folder: Path, printed: Path) -> None:
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY), 1)
    main(str(folder))


def test_the_process_prints_one_document(tmp_path: Path) -> None:
    """One that has imported everything: tests/e2e/test_describing.py starts the true one."""
    save_tiny("llama", tmp_path / "base")
    run_on_ranks(described_on_rank, 1, tmp_path / "base", tmp_path / "printed")
    document = read_described((tmp_path / "printed").read_bytes())
    base = document.description()
    names = {weight.files for weight in base.weights}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert base.layout in ("bf16", "fp32")
    assert len(document.key) == 64


def test_the_description_that_comes_with_the_sample_base_is_current() -> None:
    """Otherwise: python -m workers.describe examples/models/tiny-llama >
    examples/descriptions/tiny-llama.json, without `products`, which are those of this processor.
    """
    folder = SAMPLE_MODELS / "tiny-llama"
    shipped = read_described((SAMPLE_DESCRIPTIONS / "tiny-llama.json").read_bytes())
    assert shipped.key == description_key(folder, shipped.versions)
    assert write_described(replace(shipped, base=describe(str(folder)))) == write_described(shipped)


def test_a_folder_that_is_no_base_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-that-is-known"}))
    refused = _document(str(tmp_path)).refused
    assert refused is not None
    assert "nothing-that-is-known" in refused.message


def test_experts_are_stacks_with_the_names_of_their_files(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    base = describe(str(tmp_path))
    stacks = {weight.module: weight for weight in base.experts}
    first = stacks["model.layers.0.mlp.experts.gate_up_proj"]
    assert first.shape == (5 * 2 * 40, 48)
    assert "experts.*" in first.files
    assert base.dimensions.experts == 5
    assert base.dimensions.experts_per_token == 2


def test_what_the_model_keeps_in_fp32_is_planned_so(tmp_path: Path) -> None:
    save_type("ernie4_5_moe", tmp_path)
    base = describe(str(tmp_path))
    router = {weight.name: weight for weight in base.weights if weight.kept_fp32}[
        "model.layers.1.mlp.gate.weight"
    ]
    spec = spec_on(tmp_path, ranks=2)
    planned = {
        stored.weight: stored.row_bytes for stored in stored_weights(base, spec, layout_of(spec))
    }
    assert planned[router] == 4 * router.numel_of_row
    other = next(weight for weight in base.linears if not weight.kept_fp32)
    assert planned[other] == 2 * other.numel_of_row


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", FusedParts(norms=2, last_norm=True, gate=True)),
        ("qwen3", FusedParts(norms=2, head_norms=True, last_norm=True, gate=True)),
        ("gemma3_text", FusedParts(norms=4, head_norms=True, last_norm=True)),
        ("mixtral", FusedParts(norms=2, last_norm=True)),
        ("deepseek_v3", FusedParts(norms=2, last_norm=True, gate=True)),
        ("phi3", FusedParts(norms=2, last_norm=True)),
        ("gpt_neox", FusedParts()),
    ],
)
def test_what_fused_kernels_compute_is_described(
    family: str, parts: FusedParts, tmp_path: Path
) -> None:
    """gemma3's feed-forward has another activation, mixtral's has experts and no shared one, phi3's
    gate and up are one layer, and gpt_neox has layer norms.
    """
    dimensions = describe(str(save_tiny(family, tmp_path))).dimensions
    assert dimensions.fused == parts
    assert dimensions.norms >= parts.norms


@pytest.mark.parametrize(
    ("family", "width", "scaled", "by_silu"),
    [
        ("qwen3", 0, False, False),
        ("qwen3_moe", 0, False, True),
        ("mixtral", 0, False, True),
        ("gpt_oss", 0, False, False),
        ("deepseek_v3", 40, False, True),
        ("nemotron_h", 56, False, False),
        ("gemma4_text", 112, False, False),
        ("granitemoehybrid", 40, False, True),
        ("qwen3_next", 40, True, True),
    ],
)
def test_what_every_token_passes_beside_experts_is_described(
    family: str, width: int, scaled: bool, by_silu: bool, tmp_path: Path
) -> None:
    """Shared experts, or next to gemma4's experts a dense feed-forward; granite's are no part of
    the mixture's module. And whether experts are gated by SiLU: gemma's are by GELU, gpt-oss' by
    numbers that are cut at a limit, and nemotron's not at all.
    """
    dimensions = describe(str(save_tiny(family, tmp_path))).dimensions
    found = (dimensions.shared_intermediate, dimensions.shared_scaled, dimensions.silu_experts)
    assert found == (width, scaled, by_silu)


UNKNOWN = ("kimi_k2", "kimi_k3", "minimax_m3", "mimo", "nemotron-nas", "internlm2", "chatglm")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_type_that_transformers_does_not_know_is_refused(tmp_path: Path, kind: str) -> None:
    folder = save_base(
        tmp_path / "base", model_type=kind, auto_map={"AutoModelForCausalLM": "modeling.Model"}
    )
    with pytest.raises(
        SpecError, match=f"The base is a {kind} model, a type that transformers .* does not know"
    ):
        describe(str(folder))


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (
            {"encoder.weight": (4, 4)},
            TINY,
            "lack 21 tensors that its architecture needs, the first: model.embed_tokens.weight",
        ),
        ({**llama_shapes(TINY), "model.norm.weight": (32,)}, TINY, r"model\.norm\.weight"),
        (llama_shapes(TINY), {**TINY, "hidden_size": None}, "makes no model|hidden_size"),
        (
            llama_shapes(TINY),
            {"model_type": "clip", "text_config": TINY, "architectures": ["CLIPModel"]},
            "clip model, made of",
        ),
    ],
)
def test_a_base_that_is_not_understood_is_refused(
    tmp_path: Path, shapes: Any, config: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        describe(str(save_base(tmp_path / "base", config, shapes)))
    assert caught.value.param == "model"


OF_MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4_AWQ", "group_size": 16, "exclude_modules": ["lm_head"]},
}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-e3m2"}, "MXFP6-E3M2"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "INT-QUANTIZED"),
        ({"quant_method": "gptq", "bits": 4}, "gptq, whose codes are packed across rows"),
        ({"bits": 4}, "a method that its config.json does not name"),
    ],
)
def test_a_format_is_refused_by_its_name(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    folder = save_base(tmp_path / "base", quantization_config=given)
    with pytest.raises(
        SpecError, match=rf"The base is published quantised by {named}\. Bases can be plain"
    ):
        describe(str(folder))


def test_what_only_modelopt_s_own_file_announces_is_read(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    assert describe(str(folder)).layout == "bf16"
    (folder / "hf_quant_config.json").write_text(json.dumps(OF_MODELOPT))
    with pytest.raises(SpecError, match=r"The base is published quantised by NVFP4_AWQ\."):
        describe(str(folder))


def test_codes_of_an_unnamed_format_are_refused_as_such(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    shapes = llama_shapes(TINY)
    save_headers(
        folder / "model.safetensors",
        {name: shape for name, shape in shapes.items() if "o_proj" not in name},
    )
    codes = {
        name: (*shape[:-1], shape[-1] // 2) for name, shape in shapes.items() if "o_proj" in name
    }
    save_headers(folder / "codes.safetensors", codes, "U8")
    index = {name: "codes.safetensors" if name in codes else "model.safetensors" for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        SpecError,
        match=r"o_proj\.weight is quantised .*: its U8 numbers are codes of a format that "
        r"config\.json",
    ):
        describe(str(folder))


def test_a_head_of_its_own_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in llama_shapes(TINY).items() if name != "lm_head.weight"}
    folder = save_base(tmp_path / "base", TINY, shapes)
    with pytest.raises(
        SpecError, match=r"lack 1 tensors that its architecture needs, the first: lm_head\.weight"
    ):
        describe(str(folder))
    assert describe(str(save_base(folder, TINY, shapes, tie_word_embeddings=True))).outer.tied


def test_a_base_that_is_not_downloaded_is_described_by_its_config(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    whole = describe(str(folder))
    (folder / "model.safetensors").unlink()
    announced = describe(str(folder))
    assert (whole.downloaded, announced.downloaded) == (True, False)
    assert [(w.name, w.shape, w.kind) for w in announced.weights] == [
        (w.name, w.shape, w.kind) for w in whole.weights
    ]
    assert announced.dimensions == whole.dimensions


@pytest.mark.parametrize(
    "publish", [nvfp4, mxfp4, nvfp4_of_modelopt, fp8_by_rows, int4_by_groups, None]
)
def test_the_index_announces_the_formats_that_the_files_hold(publish: Any, tmp_path: Path) -> None:
    if publish is None:
        save_published("gpt-oss", tmp_path)
    else:
        publish(save_tiny_llama(tmp_path))
    held = describe(str(tmp_path)).held
    file = tmp_path / "model.safetensors"
    index = dict.fromkeys(read_header(file).tensors, "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    file.unlink()
    if publish is int4_by_groups:
        with pytest.raises(SpecError, match="of a quantised base the plan needs its files"):
            describe(str(tmp_path))
    else:
        assert held
        assert describe(str(tmp_path)).held == held


@pytest.mark.parametrize(
    ("positions", "rope", "expected"),
    [
        (40_960, {"rope_type": "default"}, 40_960),
        (40_960, {"rope_type": "yarn", "factor": 4.0, **{ORIGINAL: 32_768}}, 131_072),
        (131_072, {"rope_type": "llama3", "factor": 8.0, **{ORIGINAL: 8192}}, 131_072),
        (131_072, {"rope_type": "llama3", "factor": 32.0, **{ORIGINAL: 8192}}, 131_072),
        (4096, {"rope_type": "longrope", "factor": 32.0, **{ORIGINAL: 4096}}, 131_072),
        (131_072, {"rope_type": "longrope", **{ORIGINAL: 4096}}, 131_072),
        (16_384, {"rope_type": "linear", "factor": 4.0}, 16_384),
        (8192, {"rope_type": "dynamic", "factor": 2.0, **{ORIGINAL: 8192}}, 8192),
        (
            131_072,
            {"full_attention": {"rope_type": "yarn", "factor": 8.0, **{ORIGINAL: 32_768}}},
            262_144,
        ),
        (None, {"factor": 4.0, **{ORIGINAL: 8192}}, None),
        (2048, None, 2048),
    ],
)
def test_the_context_is_that_to_which_positions_are_scaled(
    positions: int | None, rope: dict[str, Any] | None, expected: int | None
) -> None:
    config = SimpleNamespace(max_position_embeddings=positions, rope_parameters=rope)
    assert _max_positions(config) == expected
