"""Which tensors of a base of several models are its text part's, under which names, and why some bases are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.bases.families.acceptance import refuse_untunable
from ft_service.bases.wrapped import NOT_TEXT, Parts, text_config
from ft_service.errors import SpecError

TEXT = {"model_type": "llama", "num_hidden_layers": 4}
THINKER = {"model_type": "qwen2_5_omni_thinker", "text_config": TEXT}
OMNI = {"model_type": "qwen2_5_omni", "thinker_config": THINKER, "talker_config": {"vocab_size": 9}}
MLLAMA = {"model_type": "mllama", "text_config": {**TEXT, "cross_attention_layers": [1, 3]}, "vision_config": {}}
VOXTRAL = {"model_type": "voxtral", "text_config": TEXT, "audio_config": {}}
NEMOTRON = {"model_type": "nemotron_h_omni", "text_config": TEXT}


@pytest.mark.parametrize(
    ("config", "name", "published"),
    [
        (OMNI, "thinker.model.layers.0.mlp.up_proj.weight", "thinker.model.language_model.layers.0.mlp.up_proj.weight"),
        (OMNI, "thinker.lm_head.weight", "thinker.lm_head.weight"),
        (OMNI, "thinker.visual.blocks.0.mlp.up_proj.weight", None),
        (OMNI, "talker.model.layers.0.mlp.up_proj.weight", None),
        (MLLAMA, "language_model.model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        (MLLAMA, "language_model.model.layers.3.cross_attn.q_proj.weight", None),
        (MLLAMA, "language_model.lm_head.weight", "lm_head.weight"),
        (VOXTRAL, "language_model.model.norm.weight", "model.language_model.norm.weight"),
        (VOXTRAL, "language_model.model.model.norm.weight", "model.language_model.norm.weight"),
        (VOXTRAL, "audio_tower.layer_norm.weight", None),
        (NEMOTRON, "language_model.backbone.norm_f.weight", "language_model.model.norm_f.weight"),
        (NEMOTRON, "language_model.lm_head.weight", "language_model.lm_head.weight"),
        ({"text_config": TEXT, "model_type": "emu3"}, "text_model.model.norm.weight", "model.text_model.norm.weight"),
        ({"text_config": TEXT, "model_type": "emu3"}, "text_model.lm_head.weight", "lm_head.weight"),
        (
            {"vq_config": {}, "model_type": "chameleon"},
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ({"vq_config": {}, "model_type": "chameleon"}, "model.vqmodel.encoder.conv_in.weight", None),
        ({"vision_config": {}, "model_type": "phi4_multimodal"}, "model.embed_tokens_extend.audio_embed.down.weight", None),
        ({"protein_encoder_config": {}, "model_type": "evolla"}, "model.layers.0.adapter.gate_ffw", None),
    ],
)
def test_a_tensor_is_the_texts_under_the_name_of_the_published_class(
    config: dict[str, Any], name: str, published: str | None
) -> None:
    """`published`: None: it is no tensor of the text part."""
    parts = Parts.of(config, [name])
    assert parts.is_text(name) == (published is not None)
    assert published in (None, parts.published(name))


def test_the_model_that_holds_the_head_says_whether_it_is_the_embedding() -> None:
    text = {**TEXT, "tie_word_embeddings": True}
    whole = {"text_config": text, "tie_word_embeddings": False}
    assert not text_config({**whole, "model_type": "llava"})["tie_word_embeddings"]
    assert text_config({**whole, "model_type": "blip-2"})["tie_word_embeddings"]
    thinker = {"model_type": "qwen2_5_omni_thinker", **whole}
    assert not text_config({"thinker_config": thinker, "tie_word_embeddings": True})["tie_word_embeddings"]


@pytest.mark.parametrize("kind", sorted(NOT_TEXT))
def test_every_type_that_is_refused_by_name_says_why(kind: str) -> None:
    with pytest.raises(SpecError) as refused:
        refuse_untunable({"model_type": kind, "text_config": TEXT})
    assert NOT_TEXT[kind] in refused.value.message


def test_what_the_config_says_refuses_a_type_that_no_list_knows() -> None:
    known: dict[str, Any] = {"model_type": "brand_new_vl", "architectures": ["BrandNewForConditionalGeneration"]}
    refuse_untunable({**known, "text_config": TEXT})
    for text, words in (
        ({"model_type": "t5"}, "what an encoder makes of the input"),
        ({**TEXT, "is_encoder_decoder": True}, "what an encoder makes of the input"),
        ({**TEXT, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ):
        with pytest.raises(SpecError, match=words):
            refuse_untunable({**known, "text_config": text})
    with pytest.raises(SpecError, match="reads from left to right"):
        refuse_untunable({**known, "architectures": ["BrandNewForRetrieval"], "text_config": TEXT})
