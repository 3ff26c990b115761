"""Which attention an architecture is built with."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedConfig

from workers.layers import segment_mixers

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT_MIXING = frozenset({"moe", "mlp", "dense", "sparse"})
_MIXING_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Convolutions and recurrences."""


def takes_segments(config: PreTrainedConfig, model: Any) -> bool:
    """Whether the layers of a text decoder that mix tokens can be made to stay within segments, as far as it says.

    `model`: its class.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - _WITHOUT_MIXING
    if kinds <= _ATTENTION_LAYERS and not segment_mixers.are_known(model):
        return bool(getattr(model, "_supports_attention_backend", False))
    chosen = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[model.__module__])  # hybrids do not always declare it
    return chosen and kinds <= _ATTENTION_LAYERS | _MIXING_LAYERS and segment_mixers.are_known(model)


def stock_attention(config: PreTrainedConfig) -> str | None:
    """transformers' own attention. None: the architecture's choice (sdpa where it can), but sdpa ignores soft capping without
    a word.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None
