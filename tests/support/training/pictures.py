"""Tiny bases that read pictures, samples that hold some, and the published class's own step on
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, PreTrainedTokenizerFast

from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.image_bases import (
    FAMILIES,
    drawn,
    encoded,
    image_part,
    save_image_base,
    text_part,
)
from tests.support.training.checks import published_model
from tests.support.training.composites import save_composite
from tests.support.training.models import HIDDEN, adapter_value, reference_name
from workers.base.load import plain_name
from workers.data.batches import collate
from workers.images.features import file_of
from workers.images.tower import Tower, asked
from workers.model.build import BuiltModel

CPU = torch.device("cpu")
Inputs = dict[str, np.ndarray]


def _patches(config: Any, size: tuple[int, int], seed: int) -> tuple[int, Inputs]:
    """As Qwen's processors give a picture of `size` patches: rows of patches, and their grid."""
    vision = config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    rows = size[0] * size[1]
    grid = np.array([[1, *size]])
    values = _values(seed, (rows, width))
    return rows // vision.spatial_merge_size**2, {"pixel_values": values, "image_grid_thw": grid}


def _sized(config: Any, size: tuple[int, int], seed: int) -> tuple[int, Inputs]:
    """As Pixtral's processor: pixels of any size, which is told."""
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    pixels = _values(seed, (1, 3, size[0] * side // 2, size[1] * side // 2))
    return size[0] * size[1] // 4, {
        "pixel_values": pixels,
        "image_sizes": np.array([pixels.shape[2:]]),
    }


def _square(config: Any, _size: tuple[int, int], seed: int) -> tuple[int, Inputs]:
    """Pixels of one size."""
    given = config.vision_config.image_size
    side = given if isinstance(given, int) else given[0]
    return TOKENS_OF_SQUARE[config.model_type], {"pixel_values": _values(seed, (1, 3, side, side))}


def _tiled(config: Any, size: tuple[int, int], seed: int) -> tuple[int, Inputs]:
    """As Idefics' processors: tiles of a picture."""
    count, inputs = _square(config, size, seed)
    pixels = inputs["pixel_values"][None]
    mask = np.ones((1, 1, *pixels.shape[3:]), dtype=np.int64)
    return count, {"pixel_values": pixels, "pixel_attention_mask": mask}


def _placed(config: Any, size: tuple[int, int], seed: int) -> tuple[int, Inputs]:
    """As Gemma 4's processor: patches with their places, and some that are padding."""
    vision = config.vision_config
    rows, columns = size
    places = np.full((1, MOST_PATCHES, 2), -1)
    places[0, : rows * columns] = [(x, y) for y in range(rows) for x in range(columns)]
    values = np.random.default_rng(seed).random((1, MOST_PATCHES, 3 * vision.patch_size**2))
    count = rows * columns // vision.pooling_kernel_size**2
    return count, {"pixel_values": values.astype(np.float32), "image_position_ids": places}


def _values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TOKENS_OF_SQUARE = {
    "llava": 16,
    "internvl": 4,
    "gemma3": 16,
    "smolvlm": 4,
    "idefics3": 4,
    "llama4": 4,
}
MOST_PATCHES = 40
"""Patches of a picture, with padding, as `_placed` has them."""

PICTURED: dict[str, Any] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), _patches),
    **dict.fromkeys(("mistral3", "pixtral"), _sized),
    **dict.fromkeys(("llava", "internvl", "gemma3", "llama4"), _square),
    "gemma4": _placed,
    **dict.fromkeys(("smolvlm", "idefics3"), _tiled),
}
"""Family → function that makes what its image processor would."""
_TYPE = {"pixtral": "llava"}
"""Family → its type of transformers, where it has another name."""
TWO_WAY = {
    **dict.fromkeys(("gemma3", "gemma 3"), ("sliding_attention", "full_attention")),
    **dict.fromkeys(("gemma4", "gemma 4"), ("sliding_attention",)),
}
"""Family → kinds of layers in which the tokens of a picture see each other in both directions."""
_WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
"""What pictures' tokens see of each other in the last layer, no later token reads."""
_CONFIG: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen2_vl": {"vision_config": {"hidden_size": HIDDEN}},
        "llava": {"vision_config": {"image_size": 56, "patch_size": 14}},
        "mistral3": {"vision_config": {"image_size": 112}},
        "pixtral": {
            "vision_config": {
                **{"model_type": "pixtral", "image_size": 112, "patch_size": 14},
                **{"hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
                **{"num_hidden_layers": 2, "num_attention_heads": 2},
            },
            **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        },
        "gemma3": {
            "vision_config": {"image_size": 56},
            "mm_tokens_per_image": 16,
            "text_config": _WINDOWS,
        },
        "gemma4": {
            "vision_config": {
                **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24},
                **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
                **{"head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16},
                "standardize": True,
            },
            "text_config": {**_WINDOWS, "use_bidirectional_attention": "vision"},
        },
        "llama4": {
            "vision_config": {
                **{"image_size": 56, "intermediate_size": 64, "projector_input_dim": 20},
                **{"projector_output_dim": 20, "vision_output_dim": 20},
            }
        },
        "internvl": {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}},
        "smolvlm": {"vision_config": {"image_size": 56}, "scale_factor": 2},
        "idefics3": {"vision_config": {"image_size": 56}, "scale_factor": 2},
    }
)


@dataclass
class Pictured:
    """A base, samples with pictures, and what the image processor makes of each picture."""

    folder: Path
    token_id: int
    samples: list[Tokens]
    inputs: dict[str, Inputs] = field(default_factory=dict)
    """By the pictures' keys."""

    def save_features(self, folder: Path) -> int:
        """Write those of all pictures; returns for how many decoder layers there are some."""
        tower = Tower.loaded(str(self.folder), self.token_id, CPU)
        early = 0
        for sample in self.samples:
            for use in sample.images:
                ids = sample.ids[use.begin : use.end].tolist()
                features = tower.features(ids, self.inputs[use.picture.key])
                features.save(file_of(folder, use.picture.key))
                early = len(features.early)
        return early

    def inputs_of(self, sample: Tokens) -> dict[str, torch.Tensor]:
        """What the published class takes of a sample's pictures."""
        own = [self.inputs[use.picture.key] for use in sample.images]
        names = own[0] if own else ()
        axis = 1 if own and own[0]["pixel_values"].ndim == 5 else 0
        return {
            name: torch.from_numpy(np.concatenate(alike([each[name] for each in own]), axis=axis))
            for name in names
        }


def alike(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Pixels of several pictures, with zeros behind those of the smaller ones."""
    if arrays[0].ndim != 4:
        return arrays
    height, width = (max(own.shape[axis] for own in arrays) for axis in (2, 3))
    return [
        np.pad(own, ((0, 0), (0, 0), (0, height - own.shape[2]), (0, width - own.shape[3])))
        for own in arrays
    ]


def save_pictured(kind: str, folder: Path) -> Pictured:
    """A random base of a type, in bf16, and four samples: with one picture, without, with two, and
    with one at its very beginning.
    """
    assert save_composite(_TYPE.get(kind, kind), folder, _CONFIG.get(kind, {}))
    config: Any = AutoConfig.from_pretrained(folder)
    token = getattr(config, "image_token_id", None) or config.image_token_index
    words = config.get_text_config(decoder=True).vocab_size
    made = Pictured(folder, token, [])
    generator = np.random.default_rng(1)
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith("token_id") and isinstance(value, int)
    }

    def text(count: int) -> list[int]:
        plain = [i for i in range(3, words) if i not in special | {token}]
        return generator.choice(plain, count).tolist()

    start = getattr(config, "vision_start_token_id", None)
    plans = [[5, (4, 4), 9], [7], [3, (4, 8), 4, (8, 4), 12], [0, (4, 4), 6]]
    for plan in plans:
        ids: list[int] = []
        uses: list[ImageUse] = []
        for part in plan:
            if isinstance(part, int):
                ids += text(part)
                continue
            seed = len(made.inputs)
            count, inputs = PICTURED[kind](config, part, seed)
            key = hashlib.sha256(f"{kind} {seed}".encode()).hexdigest()
            made.inputs[key] = inputs
            ids += [] if start is None else [start]
            uses.append(ImageUse(len(ids), len(ids) + count, Picture(key, b"")))
            ids += [token] * count
        learned = np.zeros(len(ids), dtype=np.bool_)
        learned[-plan[-1] + 2 :] = True
        made.samples.append(Tokens(np.array(ids, dtype=np.int32), learned, images=tuple(uses)))
    return made


def published_step(
    made: Pictured,
    built: BuiltModel,
    dtype: torch.dtype = torch.float32,
    beside: Sequence[str] = (),
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the published class with its towers, one sample at a time, with stock
    LoRA layers where a model of ours has them, and `beside`: on these modules too.
    """
    ours: Any = built.peft_model.peft_config["default"]
    config = LoraConfig(
        r=ours.r,
        lora_alpha=ours.lora_alpha,
        target_modules=[*adapted_by_peft(built), *beside] if beside else ours.target_modules,
        target_parameters=ours.target_parameters,
    )
    base: Any = published_model(made.folder, dtype)
    stock = get_peft_model(base, config).eval()
    stock = stock if dtype == torch.float32 else stock.to(dtype)  # turns of Llama 4 are complex
    trained = {plain_name(n): p for n, p in stock.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(adapter_value(reference_name(name), parameter.shape))
    targets = sum(sample.target_count for sample in made.samples)
    total = 0.0
    for sample in made.samples:
        bare = Tokens(sample.ids, sample.targets)
        own = collate([bare], CPU)
        told = asked(base, own.ids, own.ids == made.token_id)
        pixels = made.inputs_of(sample)
        pixels = {n: own.to(dtype) if own.is_floating_point() else own for n, own in pixels.items()}
        logits = stock(input_ids=own.ids, use_cache=False, **told, **pixels).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1)[own.places], own.targets, reduction="sum"
        )
        (loss / targets).backward()
        total += loss.item() / targets
    return total, {name: p.grad for name, p in trained.items() if p.grad is not None}


def adapted_by_peft(built: BuiltModel) -> list[str]:
    """Full names of the modules of a model that have adapters."""
    names = (name for name, own in built.peft_model.named_modules() if isinstance(own, LoraLayer))
    return [name.removeprefix("base_model.model.") for name in names]


# Whole bases
# ------------------------------------------------------------------------------

WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen 2.5 vl": ("qwen2_5_vl", {"vision_config": {"patch_size": 14}}),
    "qwen 3 vl": (
        "qwen3_vl",
        {"vision_config": {"patch_size": 16, "depth": 3, "deepstack_visual_indexes": [0, 1]}},
    ),
    "llava 1.5": ("llava", {**_CONFIG["llava"], "vision_feature_select_strategy": "default"}),
    "gemma 3": ("gemma3", dict(_CONFIG["gemma3"])),
    "mistral small 3.1": ("mistral3", {"vision_config": {"image_size": 140}}),
    "internvl 3": ("internvl", dict(_CONFIG["internvl"])),
    "smolvlm": ("smolvlm", {"vision_config": {"image_size": 64, "patch_size": 16}}),
    "qwen 3.5": ("qwen3_5", {"vision_config": {"patch_size": 16}}),
    "gemma 4": (
        "gemma4",
        {
            "vision_config": {
                **_CONFIG["gemma4"]["vision_config"],
                **{"pooling_kernel_size": 3, "position_embedding_size": 64},
            },
            "text_config": {**_CONFIG["gemma4"]["text_config"], "max_position_embeddings": 512},
        },
    ),
    "pixtral": ("llava", dict(_CONFIG["pixtral"])),
}
"""Family (`image_bases.FAMILIES`) → its type of transformers, and values of its config."""
_NAMED_TOKENS = {
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|image>": "boi_token_id",
    "<image|>": "eoi_token_id",
    "<start_of_image>": "boi_token_index",
    "<end_of_image>": "eoi_token_index",
}


def save_whole_base(family: str, folder: Path) -> Path:
    """A random base of a family with weights, tokenizer, chat template and image processor."""
    save_image_base(folder, family)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    kind, values = WHOLE[family]
    known = AutoConfig.for_model(kind).to_dict()
    tokens = {
        key: tokenizer.convert_tokens_to_ids(token)
        for token, key in _NAMED_TOKENS.items()
        if key in known
    }
    image = tokenizer.convert_tokens_to_ids(FAMILIES[family].image_token)
    tokens |= {key: image for key in ("image_token_id", "image_token_index") if key in known}
    text = {**values.get("text_config", {}), "vocab_size": len(tokenizer) + 3}
    assert save_composite(kind, folder, {**values, **tokens, "text_config": text})
    return folder


def save_pictured_chats(path: Path, count: int, *, pairs: bool = False) -> DataFileRef:
    """Chats as OpenAI's fine-tuning takes them: every fourth without a picture, every third with
    two. `pairs`: with two answers each, of which one is preferred.
    """
    lines: list[dict[str, Any]] = []
    for i in range(count):
        sizes = [] if i % 4 == 3 else [(70, 50), (40, 90)][: 1 + (i % 3 == 0)]
        parts = [image_part(encoded(drawn(*size, seed=i))) for size in sizes]
        content = [text_part(f"what is it? {i}"), *parts, text_part("say")]
        messages = [{"role": "user", "content": content}]
        answer = {"role": "assistant", "content": f"it is {i * 7}" + "!" * (i % 5)}
        other = {"role": "assistant", "content": f"no {i}"}
        lines.append(
            {
                "input": {"messages": messages},
                "preferred_output": [answer],
                "non_preferred_output": [other],
            }
            if pairs
            else {"messages": [*messages, answer]}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
