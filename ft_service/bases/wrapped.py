"""Bases that are published as several models in one: their text part, for the plan before a job and for the worker in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.bases.config_defaults import defaults_of
from ft_service.errors import SpecError

_RETRIEVES = "gives embeddings to search by, and writes no text"
_DRAFTS = "only drafts for another model, whose hidden states it reads"
NOT_TEXT = {
    **dict.fromkeys(("colpali", "colqwen2", "colmodernvbert"), _RETRIEVES),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant"), _DRAFTS),
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "counts its positions from the number of its padding token on"),
    "blip": "its text part reads an image in every layer",
    "diffusion_gemma": "writes whole blocks at once, by diffusion",
    "idefics": "reads no text without an image",
    "kyutai_speech_to_text": "reads the codes of a sound beside every token",
    "paligemma": "sees its prompts both ways: a token of a prompt sees those behind it",
    "pi0": "gives movements of a robot, and writes no text",
    "shieldgemma2": "says whether an image is allowed, and writes no text",
}
"""Model types of several models whose text part is no decoder of text alone → why not, where no value of the config tells."""

NO_DECODER = "has no text part that reads from left to right on its own"
_GENERATES = re.compile(r"For(ConditionalGeneration|CausalLM|ProteinText2Text)$|^Qwen2_5OmniModel$|_Reasoning_V3$")
"""In names of classes that write text."""
INSIDE = "thinker_config"
"""Of a model of several, itself made of several, that speaks as well: the part that writes."""
_OUTER = "thinker."
PARTS_BESIDE = ("vision_config", "audio_config", "vq_config", "protein_encoder_config")
"""Of a model of several models whose text part has its values beside these, in no section of its own."""
_OTHER_PARTS = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal|mm_|mtp)", re.I)
_WITHIN = re.compile(
    r"(^|\.)(vision_model|vqmodel|image_(embed|encoder)|audio_embed|visual_projection|protein_encoder|adapter)\."
)
"""In names of what reads images, sounds or proteins inside a decoder that has its values beside theirs."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.((model|backbone)\.)*")
"""`model.` twice is what transformers 5.17 saves of models that hear."""
_BARE_TEXT = re.compile(r"^(model\.)?(embed_tokens|tok_embeddings|layers|norm|lm_head|output|lerope)\.")
_HEAD = re.compile(r"^((language_model|text_model)\.)?(lm_head)\.")
_TEXT_MODEL = ("model.text_model.", "")
_OWN_HEAD = ("language_model.model.", "language_model.")
_STEMS = {
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo", "llama4", "nemotron_h_omni"), _OWN_HEAD),
    **dict.fromkeys(("emu3", "granite_docling", "idefics2", "idefics3", "smolvlm"), _TEXT_MODEL),
}
"""What the published class calls its decoder, and what stands before its head, where these are not `model.language_model.` and
nothing."""


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The text decoder's part of a config.json that describes several models, as the file has it. None: it has no such part.

    Some types may have its values at the top, beside the sections of the other parts.
    """
    writer = _writer(config)
    section, known = writer.get("text_config"), defaults_of(writer.get("model_type"))
    if isinstance(section, Mapping):
        return section
    return {**writer, "model_type": known.text} if known.flat else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with the text decoder's values in place of those of the whole, and with the defaults of its class for those
    that it leaves out. Whether the head is the embedding, the model says that holds both.
    """
    writer, text = _writer(config), text_section(config)
    known = defaults_of(writer.get("model_type"))
    if text is None:
        return known.complete({**config, **writer})
    text = {"model_type": known.text or writer.get("model_type"), **text}
    own = _stems(config) == _OWN_HEAD and config.get("model_type") != "llama4"
    of_whole = known.complete(writer).get("tie_word_embeddings")
    whole = {} if own or of_whole is None else {"tie_word_embeddings": of_whole}
    own_values = known.text_values if text["model_type"] == known.text else None
    return {**config, **writer, **defaults_of(text["model_type"]).complete(text, own_values), **whole}


def is_of_several(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes several models."""
    return text_section(config) is not None or any(isinstance(config.get(part), Mapping) for part in PARTS_BESIDE)


def layers_of_images(text: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of the decoder layers that look at an image and nothing else: where there is none, they are not asked."""
    layers = text.get("cross_attention_layers")
    return frozenset(n for n in layers if isinstance(n, int)) if isinstance(layers, (list, tuple)) else frozenset()


def is_within(name: str) -> bool:
    """Whether a module, by its full name and a dot, is none of the text's in a decoder that holds what reads images too."""
    return _WITHIN.search(name) is not None


def generates(class_name: str) -> bool:
    """Whether a class of transformers, by its name, writes text from left to right."""
    return _GENERATES.search(class_name) is not None


def _writer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inside = config.get(INSIDE)
    return inside if isinstance(inside, Mapping) else config


def _stems(config: Mapping[str, Any]) -> tuple[str, str]:
    return _STEMS.get(str(_writer(config).get("model_type")), ("model.language_model.", ""))


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
    mixed: bool
    """Whether the decoder itself holds what is not the text's, all under the names of the published class."""
    marked: bool
    """Whether the files call the text part by name."""
    outer: str
    """What stands before every name of the part that writes."""
    stem: str
    before_head: str
    layers_of_images: frozenset[int]

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str]) -> Parts:
        several, stems = is_of_several(config), _stems(config)
        outer = _OUTER if isinstance(config.get(INSIDE), Mapping) else ""
        marked = any(_TEXT_PART.match(name.removeprefix(outer)) for name in names)
        mixed = several and text_section(config) is None
        return cls(several, mixed, marked, outer, *stems, layers_of_images(text_config(config)))

    def is_text(self, name: str) -> bool:
        if not name.startswith(self.outer) or self._is_of_images(name):
            return False
        name = name.removeprefix(self.outer)
        if not self.several:
            return not _OTHER_PARTS.match(name)
        if self.mixed:
            return not is_within(name)
        if not self.marked:
            return bool(_BARE_TEXT.match(name))
        return bool(_TEXT_PART.match(name) or _HEAD.match(name))

    def published(self, name: str) -> str:
        """The parameter of the published class that a tensor of the text part is."""
        if not self.several:
            return name.replace("language_model.", "")
        if self.mixed:
            return name
        name = name.removeprefix(self.outer)
        head = _HEAD.match(name)
        if head:
            return f"{self.outer}{self.before_head}{name[head.start(3) :]}"
        marked = _TEXT_PART.match(name)
        return self.outer + self.stem + (name[marked.end() :] if marked else name.removeprefix("model."))

    def _is_of_images(self, name: str) -> bool:
        layer = _LAYER.search(name)
        return layer is not None and int(layer[1]) in self.layers_of_images
