"""Refusals of bases by their config: classes that do not generate text from left to right, and
values that make no model.

transformers says which task a config's class is registered for, whether it generates, and whether
it is an encoder with a decoder. Nothing is built here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto import modeling_auto

from ft_service.errors import SpecError
from workers.model.multimodal import NO_DECODER, BaseKind, not_tunable
from workers.model.special_types import NOT_TUNED

MAX_LAYERS = 10_000
"""Layers of a model: each is a module in memory wherever the model is built, and some configs list
them.
"""
MAX_SIZE = 2**31
"""Upper bound of numbers in a config, above any size of a published weight."""
_LAYERS = re.compile(r"(^|_)(n_)?(layers?|blocks|depth)$")
_TASK = re.compile(r"For([A-Z]\w+)$")
READS_ENCODER = (
    "which is no causal language model: its decoder reads what an encoder makes of the input"
)
_ACTIVATIONS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "mlp_hidden_act",
    "mamba_hidden_act",
)
_SHOWN = 80
"""Characters of a value in a message."""


def refuse_numbers(config: Mapping[str, Any]) -> None:
    """Raise SpecError for a config.json, as read, with a number that no model has: building one
    would take all memory.

    So for a `pad_token_id` that is no number.
    """
    for name, value in _numbers(config):
        most = MAX_LAYERS if _LAYERS.search(name.rpartition(".")[2]) else MAX_SIZE
        if isinstance(value, int) and abs(value) >= most and not isinstance(value, bool):
            raise no_model(name, value, f"it must be below {most:,}")
        if name.rpartition(".")[2] == "pad_token_id" and not (value is None or type(value) is int):
            raise no_model(name, value, "it must be a token id, a whole number, or null")


def refuse_untunable(base: BaseKind) -> None:
    """Raise SpecError for a base that is not a causal language model, by what transformers says of
    it and by exceptions.
    """
    config = base.config
    text = base.text
    kind = config.model_type
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise not_causal(kind, READS_ENCODER)
    why = NOT_TUNED.get(kind) or NOT_TUNED.get(text.model_type)
    if why is not None:
        raise not_causal(kind, f"and cannot be tuned here: {why}")
    if base.model_class is None and base.of_several:
        raise not_tunable(kind, NO_DECODER)
    if base.model_class is None:
        raise not_causal(
            kind,
            "which is no causal language model: transformers has no class of it that writes text",
        )
    classes = config.architectures or []
    if classes and not any(map(_writes, classes)):
        raise not_causal(kind, f"published as {classes[0][:_SHOWN]}, whose head writes no text")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise not_causal(
            kind,
            "whose config.json says use_bidirectional_attention: its tokens see those behind them",
        )
    if not getattr(text, "num_attention_heads", None):
        why = "its config.json names no attention heads, which memory and time are planned by"
        raise not_causal(kind, f"and cannot be tuned here: {why}")
    _refuse_values(text)


def no_model(name: str, value: object, wanted: str) -> SpecError:
    """The refusal of a value in config.json."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return SpecError(
        f"The base's config.json says {name} = {shown}, with which no model can be built: "
        f"{wanted}. Compare it with the one "
        "that the base was published with.",
        param="model",
    )


def _numbers(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{key}.")
        elif isinstance(value, list):
            yield from ((f"{before}{key}", one) for one in value)
        else:
            yield f"{before}{key}", value


def _writes(name: str) -> bool:
    """False for the name of a class that, by transformers or by its name's ending, does not
    generate text.
    """
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, PreTrainedModel):
        return (
            known.can_generate()
            or known.base_model_prefix == ""
            or name in modeling_auto.MODEL_MAPPING_NAMES.values()
        )
    task = _TASK.search(name)
    return task is None or task[1] in _tasks()


def _tasks() -> set[str]:
    """Endings of the names of classes that generate text, behind `For`."""
    names = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return {
        found[1]
        for mapping in names
        for name in mapping.values()
        if (found := _TASK.search(str(name)))
    }


def _refuse_values(text: PreTrainedConfig) -> None:
    """Raise SpecError for values that classes are built with, and fail with at the first token."""
    layers = _value(text, "num_hidden_layers")
    if layers is not None and layers < 1:
        raise no_model("num_hidden_layers", layers, "it must be above zero")
    heads = _value(text, "num_attention_heads")
    groups = _value(text, "num_key_value_heads")
    # Keys and values of all heads come from one: the number of groups says nothing.
    latent = _value(text, "kv_lora_rank")
    if (
        not latent
        and isinstance(heads, int)
        and isinstance(groups, int)
        and groups > 0
        and heads % groups
    ):
        raise no_model(
            "num_key_value_heads", groups, f"num_attention_heads, {heads}, must be a multiple of it"
        )


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a value of a config; None: it has none, or its layers differ in it."""
    try:
        return getattr(config, name, None)
    except (
        Exception
    ):  # transformers' AmbiguousGlobalPerLayerAttributeError, which it does not export
        return None


def wrong_value(config: PreTrainedConfig) -> SpecError | None:
    """Return the refusal of the value because of which a config's class could not be built; None if
    it is not known.

    Called once building has failed, since a class may know activations of its own.
    """
    text = config.get_text_config(decoder=True)
    for name in _ACTIVATIONS:
        value = getattr(text, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            return no_model(
                name,
                value,
                "it must be the name of an activation function in transformers, such as silu or "
                "gelu",
            )
    words = getattr(text, "vocab_size", None)
    padding = getattr(text, "pad_token_id", None)
    if isinstance(words, int) and isinstance(padding, int) and not -words <= padding < words:
        return no_model("pad_token_id", padding, f"it must be below vocab_size, {words:,}")
    return None


def not_causal(kind: str, why: str) -> SpecError:
    """The refusal of a base of one model, with a clause that says why."""
    return SpecError(
        f"The base is a {kind} model, {why}. Use a decoder such as Llama, Qwen, Gemma or Mistral; "
        "docs/models.md has a list.",
        param="model",
    )
