"""What a published config.json leaves out is what transformers' config class has as default, for service and worker alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from ft_service.bases.config_defaults import FILE, KEYS
from ft_service.bases.contents import read_contents
from ft_service.bases.wrapped import NOT_TEXT, text_config
from ft_service.plan.base import base_shape
from ft_service.plan.storage import adapters_of
from tests.support.training.causal_types import show_vectors
from tests.support.training.checks import published_as, small_timm
from tests.support.training.models import spec_for
from workers.base.load import adapters
from workers.model.build import build
from workers.model.config_defaults import collect

CPU = torch.device("cpu")
_SIZES = {"num_hidden_layers": 2, "vocab_size": 272}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
PUBLISHED: dict[str, dict[str, Any]] = {
    # Gemma 3 4B: heads, groups and their size are the class's.
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 48,
            "intermediate_size": 112,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **_SIZES,
        },
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 270,
    },
    # LLaVA 1.5: neither sizes nor heads of the Llama inside.
    "llava": {
        "text_config": {
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "hidden_size": 64,
            "rms_norm_eps": 1e-5,
            **_SIZES,
        },
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "patch_size": 14, "projection_dim": 16},
        "image_token_index": 270,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    },
    # Idefics 2: groups of heads too.
    "idefics2": {
        "text_config": {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5, **_SIZES},
        "vision_config": {**_TOWER, "model_type": "idefics2_vision", "patch_size": 14},
        "perceiver_config": {"model_type": "idefics2_perceiver", "resampler_depth": 1, "resampler_n_heads": 2}
        | {"resampler_head_dim": 8, "num_key_value_heads": 1, "resampler_n_latents": 4},
        "image_token_id": 270,
        "tie_word_embeddings": False,
    },
    # Qwen2.5-VL: the text part's values at the top, and names of a time when its tower was beside the decoder.
    "qwen2_5_vl": {
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
        "vision_config": {"depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 24}
        | {"fullatt_block_indexes": [0], "model_type": "qwen2_5_vl"},
        "image_token_id": 270,
        "video_token_id": 271,
        "tie_word_embeddings": False,
        **_SIZES,
    },
}
"""Model type → its config.json with the keys that published ones of it have, the large numbers made small."""


def save_as_published(kind: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **PUBLISHED[kind]}))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with small_timm():
        model = published_as(config)._from_config(config, dtype=torch.bfloat16)
    show_vectors(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": [type(model).__name__], **PUBLISHED[kind]})
    )
    return folder


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_base_whose_config_leaves_out_defaults_is_planned_as_it_is_trained(tmp_path: Path, kind: str) -> None:
    folder = save_as_published(kind, tmp_path / "base")
    text = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    spec = spec_for(folder, precision={"default": "nf4"}, lora={"r": 3, "target_modules": "all-linear"})
    shape, built = base_shape(read_contents(folder)), build(spec, CPU)
    trained = [p for _, p in adapters(built.peft_model)]
    frozen = [p for p in built.peft_model.parameters() if not p.requires_grad]
    assert sum(a.numel for a in adapters_of(shape, spec)) == sum(p.numel() for p in trained)
    assert sum(w.numel for w in shape.weights) == sum(p.numel() for p in frozen)
    assert (shape.model_type, shape.shape.heads, shape.shape.vocabulary) == (text.model_type, text.num_attention_heads, 272)
    assert shape.untested is None


def test_the_file_is_what_the_classes_say() -> None:
    written = json.loads(FILE.read_bytes())
    if written["transformers"] != transformers.__version__:
        pytest.skip(f"written with transformers {written['transformers']}; make it anew when that changes")
    assert written["types"] == json.loads(json.dumps(collect())), "python -m workers.model.config_defaults writes it anew"


def test_of_a_config_that_says_nothing_all_that_is_read_is_the_class_s() -> None:
    """Of every type: whatever the file holds, it is the value that a config of that type has."""
    compared = 0
    for kind in json.loads(FILE.read_bytes())["types"].keys() - NOT_TEXT.keys():
        try:
            text: Any = AutoConfig.for_model(kind).get_text_config(decoder=True)
            if text.model_type != kind:  # given an empty one, as here, it is the text type's defaults and not the whole's
                given = {"text_config": {"model_type": text.model_type}}
                text = AutoConfig.for_model(kind, **given).get_text_config(decoder=True)
        except Exception:  # made of others that must be given, or unknown to this version
            continue
        ours = text_config({"model_type": kind, "text_config": {}} if text.model_type != kind else {"model_type": kind})
        if ours["model_type"] != text.model_type or ours.get("is_encoder_decoder"):
            continue
        told = text.to_dict()
        for key in KEYS & ours.keys() & told.keys() - {"tie_word_embeddings"}:
            if ours[key] is not None:
                compared += 1
                assert ours[key] == told[key], (kind, key)
    assert compared > 2_000
