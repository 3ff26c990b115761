"""Bases that are published as several models in one: their text part, for the plan before a job and for the worker in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.errors import SpecError

NOT_ALONE = frozenset(
    {
        *("paligemma", "colpali", "kosmos-2", "kosmos-2.5", "pix2struct", "blip", "blip-2", "instructblip"),
        *("instructblipvideo", "mllama", "florence2", "t5gemma2", "qwen2_5_omni", "qwen3_omni_moe", "janus", "emu3"),
        *("phi4_multimodal", "chameleon", "idefics", "git", "evolla", "pi0", "kyutai_speech_to_text", "shieldgemma2"),
        *("fast_vlm", "perception_lm", "diffusion_gemma", "gemma4_assistant", "gemma4_unified_assistant", "nemotron_h_omni"),
    }
)
"""Model types of several models whose text part does not read a text from left to right, or not without the others: a prefix
that is seen both ways, images through layers inside the decoder, several decoders, one that its class does not name, a draft
for another model, towers that need further packages."""

NO_DECODER = "has no text part that reads from left to right on its own"
_GENERATES = ("ForConditionalGeneration", "ForCausalLM")
_OTHER_PARTS = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal|mm_|mtp)", re.I)
_TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
_BARE_TEXT = re.compile(r"^(model\.)?(embed_tokens|tok_embeddings|layers|norm|lm_head|output|lerope)\.")
_HEAD = re.compile(r"^(language_model\.)?(lm_head)\.")
_STEMS = {
    "llama4": ("language_model.model.", "language_model."),
    "idefics2": ("model.text_model.", ""),
    "idefics3": ("model.text_model.", ""),
    "smolvlm": ("model.text_model.", ""),
    "granite_docling": ("model.text_model.", ""),
}
"""What the published class calls its decoder, and what stands before its head, where these are not `model.language_model.` and
nothing."""


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The text decoder's part of a config.json that describes several models. None: it has no such part."""
    section = config.get("text_config")
    return section if isinstance(section, Mapping) else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with the text decoder's values in place of those of the whole. Whether the head is the embedding, the whole
    says.
    """
    whole = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**config, **(text_section(config) or {}), **whole}


def generates(class_name: str) -> bool:
    """Whether a class of transformers, by its name, writes text from left to right."""
    return class_name.endswith(_GENERATES)


def not_tunable(kind: str, why: str) -> SpecError:
    """The refusal of a base of several models."""
    return SpecError(
        f"The base is a {kind} model, made of several, and {why}: it cannot be tuned here. Use a text-only language model.",
        param="model",
    )


@dataclass(frozen=True)
class Parts:
    """Which tensors of a base's files are its text decoder's, and what the published class calls them."""

    several: bool
    marked: bool
    """Whether the files call the text part by name."""
    stem: str
    before_head: str

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str]) -> Parts:
        several = text_section(config) is not None or any(
            isinstance(config.get(part), Mapping) for part in ("vision_config", "audio_config")
        )
        stem, before_head = _STEMS.get(str(config.get("model_type")), ("model.language_model.", ""))
        return cls(several, any(_TEXT_PART.match(name) for name in names), stem, before_head)

    def is_text(self, name: str) -> bool:
        if not self.several:
            return not _OTHER_PARTS.match(name)
        if not self.marked:
            return bool(_BARE_TEXT.match(name))
        return bool(_TEXT_PART.match(name) or _HEAD.match(name))

    def published(self, name: str) -> str:
        """The parameter of the published class that a tensor of the text part is."""
        if not self.several:
            return name.replace("language_model.", "")
        head = _HEAD.match(name)
        if head:
            return f"{self.before_head}{name[head.start(2) :]}"
        marked = _TEXT_PART.match(name)
        return self.stem + (name[marked.end() :] if marked else name.removeprefix("model."))
