"""Folders of bases that see images, of each family that is tried, with everything that makes their
tokens: a small tokenizer of bytes with the family's special tokens, the published options of its
processor made small, and its chat template as published.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "image_templates"
_TEXT_TEMPLATES = Path(__file__).parent / "chat_templates_by_family"
_CHATML = ("<|im_start|>", "<|im_end|>")
_HALF = [0.5, 0.5, 0.5]


@dataclass(frozen=True)
class ImageBase:
    """A family of bases that see images."""

    template: str
    config: dict[str, Any]
    """config.json without the id of the image token."""
    preprocessor: dict[str, Any]
    image_token: str
    """The token whose embedding is replaced."""
    specials: tuple[str, ...]
    """Special tokens beside it; the first two are those that begin and end texts."""
    processor: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer → special tokens."""
    id_key: str = "image_token_id"


def _qwen(model_type: str, patch: int, processor: str, template: str) -> ImageBase:
    return ImageBase(
        template=template,
        config={"model_type": model_type},
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2},
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": _HALF,
            "image_std": _HALF,
            "processor_class": processor,
        },
        image_token="<|image_pad|>",
        specials=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    )


_PIXTRAL = {
    "image_processor_type": "PixtralImageProcessorFast",
    "do_convert_rgb": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": {"height": 14, "width": 14},
    "size": {"longest_edge": 140},
    "processor_class": "PixtralProcessor",
}
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_IMG = ("[IMG_BREAK]", "[IMG_END]")
FAMILIES = {
    "qwen 2.5 vl": _qwen("qwen2_5_vl", 14, "Qwen2_5_VLProcessor", "qwen 2.5 vl"),
    "qwen 3 vl": _qwen("qwen3_vl", 16, "Qwen3VLProcessor", "qwen 3 vl"),
    "llava 1.5": ImageBase(
        template="llava 1.5",
        config={"model_type": "llava"},
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": 56},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
        },
        image_token="<image>",
        specials=("<s>", "</s>"),
        id_key="image_token_index",
    ),
    "gemma 3": ImageBase(
        template="gemma 3",
        config={"model_type": "gemma3"},
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": _HALF,
            "image_std": _HALF,
            "image_seq_length": 16,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": 56, "width": 56},
        },
        processor={"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        image_token="<image_soft_token>",
        specials=(
            *("<bos>", "<end_of_turn>", "<start_of_turn>"),
            *("<start_of_image>", "<end_of_image>"),
        ),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        id_key="image_token_index",
    ),
    "mistral small 3.1": ImageBase(
        template="mistral small 3.1",
        config={"model_type": "mistral3"},
        preprocessor=_PIXTRAL,
        processor={
            **{"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
            **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
            "image_end_token": "[IMG_END]",
        },
        image_token="[IMG]",
        specials=(*_MISTRAL, *_IMG),
        id_key="image_token_index",
    ),
    "pixtral": ImageBase(
        template="pixtral",
        config={"model_type": "llava"},
        preprocessor=_PIXTRAL,
        processor={
            **{"processor_class": "PixtralProcessor", "patch_size": 14},
            **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
            "image_end_token": "[IMG_END]",
        },
        image_token="[IMG]",
        specials=(*_MISTRAL, *_IMG),
        id_key="image_token_index",
    ),
    "internvl 3": ImageBase(
        template="internvl 3",
        config={"model_type": "internvl"},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "max_patches": 4,
            "min_patches": 1,
            "processor_class": "InternVLProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": 56, "width": 56},
        },
        processor={"image_seq_length": 4, "processor_class": "InternVLProcessor"},
        image_token="<IMG_CONTEXT>",
        specials=(*_CHATML, "<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "smolvlm": ImageBase(
        template="smolvlm",
        config={"model_type": "smolvlm"},
        preprocessor={
            "image_processor_type": "SmolVLMImageProcessor",
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": _HALF,
            "image_std": _HALF,
            "max_image_size": {"longest_edge": 64},
            "processor_class": "SmolVLMProcessor",
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 128},
        },
        processor={"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
        image_token="<image>",
        specials=(
            *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
        ),
        named={
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": "<image>",
        },
    ),
    "qwen 3.5": _qwen("qwen3_5", 16, "Qwen3VLProcessor", "qwen 3 vl"),
    "gemma 4": ImageBase(
        template="gemma 4 of pictures",
        config={"model_type": "gemma4"},
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": False,
            "do_rescale": True,
            "do_resize": True,
            "max_soft_tokens": 70,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "processor_class": "Gemma4Processor",
        },
        processor={"image_seq_length": 70, "processor_class": "Gemma4Processor"},
        image_token="<|image|>",
        specials=("<bos>", "<turn|>", "<|turn>", "<|image>", "<image|>"),
        named={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
    ),
}


def save_image_base(folder: Path, family: str | ImageBase) -> Path:
    """A base of this family, without weights."""
    base = FAMILIES[family] if isinstance(family, str) else family
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(base)
    own = TEMPLATES / f"{base.template}.jinja"
    source = own if own.exists() else _TEXT_TEMPLATES / own.name
    tokenizer.chat_template = source.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    config = {**base.config, base.id_key: tokenizer.convert_tokens_to_ids(base.image_token)}
    documents = {
        "config.json": config,
        "preprocessor_config.json": base.preprocessor,
        **({"processor_config.json": base.processor} if base.processor else {}),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def _tokenizer(base: ImageBase) -> Any:
    """Bytes, line breaks that stand together as one token, and special tokens."""
    breaks = ["Ċ" * count for count in (2, 3)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *breaks])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    begin, end, *others = base.specials
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=begin, eos_token=end, extra_special_tokens=base.named
    )
    made.add_special_tokens({"additional_special_tokens": [*others, base.image_token]})
    return made


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def drawn(width: int = 70, height: int = 50, seed: int = 0) -> Image.Image:
    """A picture with edges and colours, another one for each seed."""
    image = Image.new("RGB", (width, height), (40 * seed % 256, 90, 200))
    image.paste((250, 240, 20 + seed), (width // 4, height // 3, width // 2, height - 1))
    return image


def image_part(data: bytes, mime: str = "image/png", **more: Any) -> dict[str, Any]:
    """An encoded image as OpenAI's part of a message."""
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
