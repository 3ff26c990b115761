"""Which attention an architecture is built with."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from workers.layers.by_sample import (
    compressed_attention,
    indexed_attention,
    lightning_attention,
    sample_positions,
    segment_mixers,
    whole_attention,
)
from workers.layers.segment_attention import NAME
from workers.model.wrapped import text_decoder

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT_MIXING = frozenset({"moe", "mlp", "dense", "sparse"})
_MIXING_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Convolutions and recurrences."""
_OWN_MASK = "prepare_dynamic_mask"
"""Method of attention that makes a mask of its values (Doge)."""
_CHOOSING_LAYERS = indexed_attention.KINDS | compressed_attention.KINDS


def takes_segments(config: PreTrainedConfig, model: Any) -> bool:
    """Whether the layers of a text decoder that mix tokens can be made to stay within segments, as far as it says.

    `model`: its class.
    """
    if any(hasattr(value, _OWN_MASK) for value in vars(sys.modules[model.__module__]).values()):
        return False
    kinds = set(getattr(config, "layer_types", None) or ()) - _WITHOUT_MIXING
    if kinds & _CHOOSING_LAYERS:
        if not chooses_keys(model):
            return False
        kinds -= _CHOOSING_LAYERS
    if kinds <= _ATTENTION_LAYERS and not mixes_otherwise(model):
        return bool(getattr(model, "_supports_attention_backend", False))
    chosen = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[model.__module__])  # hybrids do not always declare it
    return chosen and kinds <= _ATTENTION_LAYERS | _MIXING_LAYERS and mixes_otherwise(model)


def mixes_otherwise(model: type) -> bool:
    """Whether layers of an architecture mix tokens otherwise than by attention, in ways that are known here."""
    return segment_mixers.are_known(model) or lightning_attention.are_known(model)


def chooses_keys(model: type) -> bool:
    """Whether an architecture has indexers, all of them such as are known here."""
    indexers = indexed_attention.indexers_of(model)
    return bool(indexers) and all(indexed_attention.is_known(own) or compressed_attention.is_known(own) for own in indexers)


def stay_within_segments(model: nn.Module) -> None:
    """Let every layer of a model that looks at several tokens take each sample of the micro-batch in hand by itself. Attention
    does so where it is that of segments (`takes_segments`); other attention runs on one sample after the other.
    """
    decoder = text_decoder(model)
    if decoder.config._attn_implementation != NAME:
        whole_attention.attend_by_sample(decoder)
    segment_mixers.use_segments(model)
    lightning_attention.begin_anew(model)
    indexed_attention.choose_by_sample(model)
    compressed_attention.compress_by_sample(model)
    sample_positions.rotate_by_sample(model)


def stock_attention(config: PreTrainedConfig) -> str | None:
    """transformers' own attention. None: the architecture's choice (sdpa where it can), but sdpa ignores soft capping without
    a word.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def own_attention(decoder: Any) -> str:
    """The same by its name, for a model that has another one."""
    return stock_attention(decoder.config) or ("sdpa" if getattr(decoder, "_supports_sdpa", False) else "eager")
