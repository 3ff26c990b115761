"""Values in a config.json that no model can be built with, whatever the weights: what is known of them before any is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ft_service.bases.published_layouts import LARGEST_SIZE
from ft_service.errors import SpecError

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that say how many experts a layer has."""
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k")
"""Keys that say how many of them a token meets."""
ACTIVATIONS = frozenset(
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh"),
        *("hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid"),
        *("silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    }
)
"""Activations that transformers knows by name."""
ROTATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "axial", "mrope", "proportional"), ()),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    **dict.fromkeys(("longrope", "su"), ("short_factor", "long_factor")),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kind of rotary embedding → the numbers that it needs, beside those that the config has elsewhere. `mrope` and `su` are what
older bases call `default` with sections, and `longrope`."""

LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention", "conv", "moe"),
        *("compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "hybrid", "hybrid_sliding"),
        *("reference_sliding_attention", "linear_attention", "sparse", "dense", "mlp"),
        *("mamba", "attention", "deepseek_sparse_attention", "qwen_sparse_attention"),  # older names
    }
)
"""Kinds of layers that transformers knows by name."""
_ITS_OWN_ACTIVATION = frozenset({"gpt_oss", "minimax_m3_vl_text"})
"""Types that do not look at what activation their config names."""
_NO_PADDING = frozenset(
    {"bloom", "ctrl", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "mpt", "nemotron_h"}
)
"""Types whose embedding has no row for padding."""
_LISTS_MORE = frozenset({"step3p5"})
"""Types whose files list layers that predict further tokens, and that their classes take off the list."""

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
MAX_LAYERS = 10_000
"""Layers of a decoder: every one is a module in memory, wherever the model is built or planned."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_MAY_BE_LEFT_OUT = ("num_key_value_heads", "head_dim", "max_position_embeddings", *COUNTS)
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "initializer_range", "rope_theta")
_LISTS = ("short_factor", "long_factor")
_OWN_HEAD_SIZES = ("head_dim", "qk_nope_head_dim", "attention_head_dim", "kv_channels")
_DTYPE = re.compile(r"(torch\.)?(auto|bfloat16|half|double|float(16|32|64|8_e4m3fn|8_e5m2)?)")
_SHOWN = 80
"""Characters of a value in a message."""


@contextmanager
def values_of_other_kinds() -> Iterator[None]:
    """Turn what goes wrong in the block, which looks at a base's config.json, because a value is of another kind than configs
    have, into SpecError.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        said = " ".join(str(error).split())[:_SHOWN]
        raise SpecError(
            "The base's config.json or the headers of its weights hold a value of another kind than those of published bases "
            f"({type(error).__name__}: {said}). Compare them with the ones that the base was published with.",
            param="model",
            code="model_unreadable",
        ) from error


def refuse_values(text: Mapping[str, Any], *, tested: bool) -> None:
    """Raises SpecError naming the first value of a decoder's config that makes no model, and what it may be.

    `tested`: whether its type is one that tests know; of others it is not known what they do with some values.
    """
    looks = (_sizes, _kinds, _heads, _layers, _rotations, _experts, *((_padding, _kinds_of_layers) if tested else ()))
    for look in looks:
        for fault in look(text):
            raise fault


def _sizes(text: Mapping[str, Any]) -> Iterator[SpecError]:
    for key in (*_COUNTED, *_LAYERS[1:], *_MAY_BE_LEFT_OUT):
        value = text.get(key)
        if value is None:
            continue
        least = 1 if key in _COUNTED or (key == "head_dim" and not text.get("kv_lora_rank")) else 0
        if not _is_whole(value) or value < least:
            yield _fault(key, value, "it is a whole number" + (" above zero" if least else ""))
        elif value >= (most := MAX_LAYERS if key in _LAYERS else LARGEST_SIZE):
            yield _fault(key, value, f"it is below {most:,}")
    for key in ("sliding_window", "intermediate_size", "pad_token_id"):
        value = text.get(key)
        if value is not None and not _is_whole(value) and not (key == "intermediate_size" and isinstance(value, list)):
            yield _fault(key, value, "it is a whole number")


def _padding(text: Mapping[str, Any]) -> Iterator[SpecError]:
    padding, words = text.get("pad_token_id"), text.get("vocab_size")
    if padding is not None and words is not None and padding >= words and text.get("model_type") not in _NO_PADDING:
        yield _fault("pad_token_id", padding, f"it is one of the {words} tokens of vocab_size, or null")


def _kinds(text: Mapping[str, Any]) -> Iterator[SpecError]:
    expected: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_SWITCHES, lambda value: isinstance(value, bool), "it is true or false"),
        (_NUMBERS, lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "it is a number"),
        (_ACTIVATION_KEYS, lambda value: value in ACTIVATIONS, f"transformers has {', '.join(sorted(ACTIVATIONS))}"),
        (("dtype", "torch_dtype"), _is_dtype, "it is bfloat16, float16 or float32"),
    ]
    for keys, fits, wanted in expected:
        for key in keys:
            if keys is _ACTIVATION_KEYS and text.get("model_type") in _ITS_OWN_ACTIVATION:
                continue
            value = text.get(key)
            if key == "rope_theta" and isinstance(value, list):
                continue  # one for each layer
            if value is not None and not (isinstance(value, (str, bool, int, float)) and fits(value)):
                yield _fault(key, value, wanted)


def _heads(text: Mapping[str, Any]) -> Iterator[SpecError]:
    heads, groups, hidden = (text.get(key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    latent = bool(text.get("kv_lora_rank"))  # keys and values of all heads from one: the number of groups says nothing
    if heads and groups and heads % groups and not latent:
        yield _fault("num_key_value_heads", groups, f"num_attention_heads, {heads}, is a multiple of it")
    if heads and hidden and hidden % heads and not any(text.get(key) for key in _OWN_HEAD_SIZES):
        yield _fault(
            "num_attention_heads", heads, f"hidden_size, {hidden}, is a multiple of it, or head_dim says how wide a head is"
        )


def _layers(text: Mapping[str, Any]) -> Iterator[SpecError]:
    kinds, layers = text.get("layer_types"), text.get("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds)):
        yield _fault("layer_types", kinds, "it is a list of names, one for each layer")
    elif kinds is not None and layers and len(kinds) < layers:
        yield _too_few_or_many(kinds, layers)


def _kinds_of_layers(text: Mapping[str, Any]) -> Iterator[SpecError]:
    kinds, layers = text.get("layer_types") or [], text.get("num_hidden_layers")
    unknown = next((kind for kind in kinds if kind not in LAYERS), None)
    if unknown is not None:
        yield _fault("layer_types", unknown, f"transformers has {', '.join(sorted(LAYERS))}")
    if layers and len(kinds) > layers and text.get("model_type") not in _LISTS_MORE:
        yield _too_few_or_many(kinds, layers)


def _too_few_or_many(kinds: list[str], layers: int) -> SpecError:
    return _fault("layer_types", kinds, f"it names {len(kinds)} layers and num_hidden_layers is {layers}: one for each")


def _rotations(text: Mapping[str, Any]) -> Iterator[SpecError]:
    for key in ("rope_parameters", "rope_scaling"):
        given = text.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            yield _fault(key, given, "it is an object with rope_type and what that needs, or null")
            continue
        parts = {f"{key}.{kind}": part for kind, part in given.items() if isinstance(part, Mapping)}
        for name, part in (parts or {key: given}).items():
            yield from _rotation(name, part)


def _rotation(key: str, given: Mapping[str, Any]) -> Iterator[SpecError]:
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROTATIONS:
        yield _fault(f"{key}.rope_type", kind, f"transformers has {', '.join(sorted(ROTATIONS))}")
        return
    for needed in ROTATIONS[kind]:
        value = given.get(needed)
        if needed in _LISTS and not isinstance(value, list):
            yield _fault(f"{key}.{needed}", value, f"with rope_type {kind!r} it is a list of numbers")
        elif needed not in _LISTS and not isinstance(value, (int, float)):
            yield _fault(f"{key}.{needed}", value, f"with rope_type {kind!r} it is a number")


def _experts(text: Mapping[str, Any]) -> Iterator[SpecError]:
    held, chosen = (next((key for key in keys if _is_whole(text.get(key))), None) for keys in (COUNTS, CHOSEN))
    if held and chosen and 1 < text[held] < text[chosen]:
        yield _fault(chosen, text[chosen], f"a token meets at most the {text[held]} experts that {held} says there are")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and _DTYPE.fullmatch(value) is not None


def _fault(key: str, value: object, wanted: str) -> SpecError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return SpecError(
        f"The base's config.json says {key} = {shown}, with which no model can be built: {wanted}. Compare it with the one "
        "that the base was published with.",
        param="model",
    )
