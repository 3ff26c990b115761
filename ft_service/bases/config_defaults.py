"""Values that a published config.json leaves out, since the config class of its model type has them as defaults.

config_defaults.json holds them by model type, as far as they are read here. It is written by the code that knows the classes:

    python -m workers.model.config_defaults > ft_service/bases/config_defaults.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ft_service.errors import SpecError

FILE = Path(__file__).with_name("config_defaults.json")
KEYS = frozenset(
    {
        *("vocab_size", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "n_inner", "ffn_dim", "max_position_embeddings", "n_positions", "kv_lora_rank"),
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "top_k_experts"),
        *("moe_k", "moe_intermediate_size", "shared_expert_intermediate_size", "num_kv_shared_layers", "qk_nope_head_dim"),
        *("attention_head_dim", "kv_channels", "tie_word_embeddings", "attention_bias", "mlp_bias", "is_encoder_decoder"),
        "use_bidirectional_attention",
    }
)
"""What is read here of a config.json."""


@dataclass(frozen=True)
class TypeDefaults:
    """What the config class of one model type says by itself."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Key → default; null where the class works it out from others."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other name of a key → the key."""
    text: str | None = None
    """Model type of the text part of a type made of several models, if a file does not name it."""
    text_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of that text part where they are not its own type's."""
    flat: bool = False
    """True if files of that type may have the text part's values at the top."""

    def complete(self, given: Mapping[str, Any], of_whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`given`, values of this type, with the defaults of those that it leaves out; keys that stand under another name
        under their own too. `of_whole`: defaults that a model around this one has for it.
        """
        named = {self.aliases.get(key, key): value for key, value in given.items()}
        return {**self.values, **(of_whole or {}), **{key: value for key, value in named.items() if key in KEYS}, **given}


_UNKNOWN = TypeDefaults()


def defaults_of(model_type: object) -> TypeDefaults:
    """The defaults of a model type; of one that is not known none."""
    return _all().get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN


def refuse_unknown_type(config: Mapping[str, Any]) -> None:
    """Raises SpecError for a model type that the workers' version of transformers does not know, if it can be told here: where
    another version is installed than the one that config_defaults.json was written with, the worker says it.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in _known() or _installed() not in (None, _written_with()):
        return
    own_code = "; the code that comes with its files is never run" if config.get("auto_map") else ""
    raise SpecError(
        f"The base is a {kind[:80]} model, a type that transformers {_written_with()}, with which the workers run, does not "
        f"know{own_code}. A later one may: pip install --upgrade transformers 'ft-service[workers]' takes the latest that "
        "works.",
        param="model",
    )


def _all() -> dict[str, TypeDefaults]:
    return _file()[0]


def _known() -> frozenset[str]:
    return _file()[1]


def _written_with() -> str:
    return _file()[2]


@lru_cache(maxsize=1)
def _file() -> tuple[dict[str, TypeDefaults], frozenset[str], str]:
    said = json.loads(FILE.read_bytes())
    types = {kind: TypeDefaults(**of_type) for kind, of_type in said["types"].items()}
    return types, frozenset(said["known"]), said["transformers"]


@lru_cache(maxsize=1)
def _installed() -> str | None:
    """The version of transformers beside this code, which is not imported; None: there is none."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
