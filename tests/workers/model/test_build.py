"""What a base or a spec asks for that cannot be done for an architecture is refused by name, before
any weight is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from ft_service.errors import SpecError
from ft_service.host.processor import Products
from tests.support.training.models import COMMON, FAMILIES, save_tiny, spec_for
from workers.base.load import load
from workers.model.build import base_on_meta, build, decoder_layers

CPU = torch.device("cpu")


def refusal(model: Path, **options: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        build(spec_for(model, **options), CPU)
    return caught.value


@pytest.mark.parametrize(
    ("compute", "times", "told"), [("bf16", 4.7, True), ("bf16", 0.5, False), ("fp32", 4.7, False)]
)
def test_a_processor_that_is_slow_in_bf16_is_told_with_what_is_faster(
    compute: str, times: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "workers.model.build.products", lambda: Products("", 1e11, 1e11 / times, by_onednn=True)
    )
    spec = spec_for(save_tiny("llama", tmp_path), precision={"compute": compute})
    notes = build(spec, CPU).arithmetic.notes
    assert (
        any(
            "4.7 times as long" in note and "precision.compute: fp32 is faster here" in note
            for note in notes
        )
        is told
    )


def config_only(folder: Path, model_type: str, **values: Any) -> Path:
    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return folder


def load_all(model: Path, **options: Any) -> None:
    spec = spec_for(model, **options)
    load(build(spec, CPU).peft_model, model, seed=1, compute_dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("pattern", "weight_format", "named"),
    [
        ("lm_head", "nf4", "lm_head"),
        (".*embed_tokens", "fp8", "model.embed_tokens"),
        (".*", "nf4", "model.embed_tokens"),
        (r".*mlp\.gate", "nf4", "model.layers.0.mlp.gate"),
        (".*q_prj", "nf4", "model.layers.0.self_attn.q_proj"),
        (".*q_prj", "bf16", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_an_override_that_cannot_be_honoured(
    pattern: str, weight_format: str, named: str, tmp_path: Path
) -> None:
    model = save_tiny("mixtral", tmp_path / "base")
    error = refusal(
        model,
        precision={"overrides": {pattern: weight_format}},
        lora={"target_modules": ["q_proj"]},
    )
    assert error.param == "precision.overrides"
    assert repr(pattern) in error.message
    assert named in error.message


def test_bf16_may_be_asked_for_where_it_is_the_format_anyway(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path / "base")
    overrides = {
        "lm_head": "bf16",
        r".*mlp\.gate": "bf16",
        r".*experts\.down_proj": "fp8",
        r".*mlp.*gate.*": "fp8",
    }
    built = build(spec_for(model, precision={"default": "nf4", "overrides": overrides}), CPU)
    assert {name.split(".", 3)[3]: form for name, form in built.formats.items()} == {
        **{f"self_attn.{p}_proj": "nf4" for p in "qkvo"},
        "mlp.experts.gate_up_proj": "fp8",
        "mlp.experts.down_proj": "fp8",
    }, "the router stays as it is"


def test_layers_that_transformers_loads_in_fp32_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["mlp.up_proj"]
    )
    built = build(spec_for(save_tiny("llama", tmp_path), precision={"default": "nf4"}), CPU)
    kept = {
        name.rpartition("layers.")[2]
        for name, p in built.peft_model.named_parameters()
        if p.dtype == torch.float32
    }
    assert {name for name in kept if "lora" not in name} == {
        f"{i}.mlp.up_proj.base_layer.weight" for i in range(2)
    }
    assert {name.rpartition(".")[2] for name in built.formats} == {
        *(f"{p}_proj" for p in "qkvo"),
        "gate_proj",
        "down_proj",
    }


@pytest.mark.parametrize(
    "targets",
    [
        ["gate_up_proj"],
        ["experts"],
        ["w1"],
        ["mlp.gate"],
        r".*experts.*",
        r".*(q_proj|down_proj)",
        ["q_proj", "down_proj"],
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_on_experts(family: str, targets: Any, tmp_path: Path) -> None:
    error = refusal(save_tiny(family, tmp_path / "base"), lora={"target_modules": targets})
    assert error.param == "lora.target_modules"
    assert "mixture of experts" in error.message


def test_a_rank_pattern_that_matches_nothing(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "base")
    error = refusal(model, lora={"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2}})
    assert error.param == "lora.rank_pattern"
    assert "'v_proj'" in error.message


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("t5", {}, "t5 model, which is no causal language model"),
        ("paligemma", {}, "paligemma model, whose config.json says use_bidirectional_attention"),
        ("phimoe", {}, "draws experts at random"),
        (
            "jetmoe",
            {**COMMON, "num_local_experts": 2, "num_key_value_heads": 2, "kv_channels": 12},
            "JetMoeParallelExperts",
        ),
        (
            "gemma3_text",
            {**COMMON, "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            "llama",
            {**COMMON, "architectures": ["LlamaForSequenceClassification"]},
            "whose head writes no text",
        ),
    ],
)
def test_an_architecture_that_cannot_be_tuned(
    model_type: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    error = refusal(config_only(tmp_path / "base", model_type, **values))
    assert error.param == "model"
    assert words in error.message


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_act": "none such"},
        {"head_dim": 0},
        {"num_attention_heads": 0},
        {"attention_bias": "yes"},
        {"dtype": "x"},
    ],
)
def test_values_that_make_no_model(values: dict[str, Any], tmp_path: Path) -> None:
    base = config_only(tmp_path / "base", "llama", **COMMON)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | values))
    error = refusal(base)
    assert error.param == "model"
    assert "config.json" in error.message


def test_modules_that_peft_does_not_adapt_are_left_out_unless_they_are_named(
    tmp_path: Path,
) -> None:
    base = config_only(tmp_path / "base", "falcon_h1", **COMMON, **FAMILIES["falcon_h1"])
    error = refusal(base, lora={"target_modules": ["in_proj", "out_proj"]})
    assert error.param == "lora.target_modules"
    assert "out_proj" in error.message
    built = build(spec_for(base, lora={"target_modules": "all-linear"}), CPU)
    adapted = {
        name.split(".")[-4] for name, p in built.peft_model.named_parameters() if p.requires_grad
    }
    assert adapted == {
        *(f"{name}_proj" for name in ("q", "k", "v", "o", "in", "gate", "up", "down"))
    }


def test_an_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    said = refusal(tmp_path).message
    assert f"a no-such-model model, a type that transformers {transformers.__version__}" in said
    assert "pip install --upgrade transformers 'ft-service[workers]'" in said


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path / "base")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SpecError,
        match=r"lack some of the tensors that make model\.layers\.1\.mlp\.experts\.gate_up_proj",
    ):
        load_all(model)


def test_decoder_layers_are_found_without_help_from_the_architecture(tmp_path: Path) -> None:
    model = base_on_meta(str(save_tiny("mistral", tmp_path / "base")))
    expected = decoder_layers(model)
    model._no_split_modules = None  # type: ignore[assignment]
    assert decoder_layers(model) == expected == list(model.model.layers)
