"""The base as the plan sees it, from names and shapes alone."""

from __future__ import annotations

from ft_service.bases.contents import BaseContents, StoredTensor
from ft_service.bases.module_rules import choose_targets
from ft_service.plan.base import base_shape

CONFIG = {
    "model_type": "gemma3n_text",
    "hidden_size": 8,
    "intermediate_size": [16, 24],
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_kv_shared_layers": 1,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}


def _contents() -> BaseContents:
    inside = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "altup.modality_router", "mlp.up_proj")
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in inside]
    names += [f"model.altup_projections.{stream}.weight" for stream in range(3)]
    tensors = [StoredTensor(name, "BF16", (8, 8), 128) for name in names]
    return BaseContents(CONFIG, (StoredTensor("model.embed_tokens.weight", "BF16", (32, 8), 512), *tensors))


def test_layers_that_take_keys_and_values_of_others_have_none_whatever_the_files_hold() -> None:
    names = [weight.module for weight in base_shape(_contents()).weights]
    assert "model.layers.0.self_attn.k_proj" in names
    assert "model.layers.1.self_attn.q_proj" in names
    assert not {"model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"} & set(names)


def test_what_makes_and_mixes_streams_is_counted_stays_plain_and_gets_no_adapter() -> None:
    base = base_shape(_contents())
    assert [w.module for w in base.weights if "altup_projections" in w.module] == [
        f"model.altup_projections.{stream}" for stream in range(3)
    ]
    assert not any("altup" in weight.module for weight in base.quantizable())
    adapted = choose_targets([w.module for w in base.adaptable()], [], "all-linear", base.family)
    assert "model.layers.1.mlp.up_proj" in adapted
    assert not any("altup" in name for name in adapted)


def test_of_widths_one_a_layer_the_largest_counts() -> None:
    assert base_shape(_contents()).shape.intermediate == 24
