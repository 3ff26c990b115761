"""Names of an adapter's tensors in its file, where PEFT renames them as it loads them."""

from __future__ import annotations

import pytest

from ft_service.bases.adapter_names import AdapterNames

BASES = {
    "laguna": (
        {"model_type": "laguna"},
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.shared_expert.up_proj",
    ),
    "deepseek ocr": (
        {"model_type": "deepseek_ocr2", "text_config": {"model_type": "deepseek_ocr2_text"}},
        "model.language_model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
    ),
    "mistral large": (
        {"model_type": "mistral_large4", "text_config": {"model_type": "mistral_large4_text"}},
        "model.language_model.layers.1.mlp.experts.base_layer",
        "model.language_model.layers.1.experts.base_layer",
    ),
    "llama": ({"model_type": "llama"}, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize("base", BASES)
def test_a_file_says_itself_how_its_names_are_read(base: str) -> None:
    config, in_model, in_file = BASES[base]
    names = AdapterNames.of_base(config)
    ours, theirs = (f"base_model.model.{module}.lora_A.weight" for module in (in_model, in_file))
    assert names.in_file(ours) == theirs
    assert AdapterNames.of_file({"format": "pt", **names.metadata}).in_model(theirs) == ours
    assert bool(names.metadata) == (in_model != in_file)


def test_a_file_that_says_nothing_has_the_names_of_the_model() -> None:
    for metadata in (None, {}, {"format": "pt"}, {"names_of": "none such"}):
        assert (
            AdapterNames.of_file(metadata).in_model("base_model.model.model.layers.0.x") == "base_model.model.model.layers.0.x"
        )
