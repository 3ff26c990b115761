"""Choice of the attention that an architecture is built with."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from workers.layers import segments
from workers.patches import indexed_attention, sample_positions, segment_mixers

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT_MIXING = frozenset({"moe", "mlp", "dense", "sparse"})
_MIXING_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Convolutions and recurrences."""
_OWN_MASK = "prepare_dynamic_mask"
"""Method of attention that makes a mask of its values (Doge)."""


def takes_segments(config: PreTrainedConfig, model: type) -> bool:
    """Whether the layers of a text decoder that mix tokens can be made to stay within segments, as
    far as it says.

    `model`: its class.
    """
    return why_padded(config, model) is None


def why_padded(config: PreTrainedConfig, model: Any) -> str | None:
    """The reason why samples of a text decoder cannot be packed, as far as its class says.

    None: it names no such reason.

    `model`: its class, or one derived from it.
    """
    model = _published(model)
    names = vars(sys.modules[model.__module__])
    own_attention = f"the attention of {config.model_type} cannot be replaced"
    if any(hasattr(value, _OWN_MASK) for value in names.values()):
        return own_attention
    kinds = set(getattr(config, "layer_types", None) or ()) - _WITHOUT_MIXING
    if kinds & indexed_attention.KINDS and chooses_keys(model):
        kinds -= indexed_attention.KINDS
    unknown = kinds - _ATTENTION_LAYERS
    if mixes_otherwise(model):
        unknown -= _MIXING_LAYERS
        replaceable = "ALL_ATTENTION_FUNCTIONS" in names  # hybrids do not always declare it
    else:
        replaceable = bool(getattr(model, "_supports_attention_backend", False))
    if unknown:
        return (
            f"{config.model_type} has layers that cannot be kept within packed samples "
            f"({', '.join(sorted(unknown))})"
        )
    return None if replaceable else own_attention


def why_whole(config: PreTrainedConfig, model: type) -> str | None:
    """The reason why ranks cannot share a sample of a text decoder, as far as its class says, which
    can be packed.

    None: it names no such reason. `model`: its class, or one derived from it.
    """
    model = _published(model)
    if scans := segment_mixers.of_whole_rows(model):
        return (
            f"layers of {config.model_type} scan whole samples with the state of a state space "
            f"({', '.join(scans)})"
        )
    if indexed_attention.indexers_of(model):
        return f"{config.model_type} chooses keys by an indexer, which looks at whole samples"
    return None


def _published(model: Any) -> Any:
    """The class of transformers: FSDP2 derives classes."""
    return next(own for own in model.__mro__ if not own.__module__.startswith("torch."))


def mixes_otherwise(model: type) -> bool:
    """Whether layers of an architecture mix tokens otherwise than by attention, in ways that are
    known here.
    """
    return segment_mixers.are_known(model)


def chooses_keys(model: type) -> bool:
    """Whether an architecture has indexers, all of them such as are known here."""
    indexers = indexed_attention.indexers_of(model)
    return bool(indexers) and all(indexed_attention.is_known(own) for own in indexers)


def stay_within_segments(model: nn.Module) -> None:
    """Let every layer of a model that looks at several tokens take each sample of the current
    micro-batch separately, as far as such layers are known here.
    """
    segments.tell_chunks(model)
    segment_mixers.use_segments(model)
    indexed_attention.choose_by_sample(model)
    sample_positions.rotate_by_sample(model)


def stock_attention(config: PreTrainedConfig) -> str | None:
    """transformers' own attention.

    None: the architecture's choice (sdpa where it can), but sdpa ignores soft capping without a
    word.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def own_attention(decoder: Any) -> str:
    """The same by its name, for a model that has another one."""
    return stock_attention(decoder.config) or (
        "sdpa" if getattr(decoder, "_supports_sdpa", False) else "eager"
    )
