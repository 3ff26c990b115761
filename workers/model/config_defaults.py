"""Defaults of the config classes of transformers, for the service, which does not import it; see bases/config_defaults.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__
from transformers.models.auto import modeling_auto

from ft_service.bases.config_defaults import KEYS

_WRITE_TEXT = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
_PROBE = 4160
"""A hidden size that no class has as default."""


def collect() -> dict[str, dict[str, Any]]:
    """Model type → the fields of TypeDefaults, for every type of a model that writes text and for their text parts."""
    kinds = {kind for name in _WRITE_TEXT for kind in getattr(modeling_auto, name, {})} & set(CONFIG_MAPPING.keys())
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted(kinds):
        for config in _parts(kind):
            found.setdefault(config.model_type, _of_class(config))
    return {kind: found[kind] for kind in sorted(found) if found[kind]}


def _parts(kind: str) -> Iterator[PreTrainedConfig]:
    """A type's config of defaults, that of its text part, and that of a part which itself is made of several."""
    with contextlib.suppress(Exception):  # a few types are made of others that must be given
        config = AutoConfig.for_model(kind)
        yield config
        for part in (getattr(config, "thinker_config", config), config.get_text_config(decoder=True)):
            if part is not config:
                yield part


def _of_class(config: PreTrainedConfig) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(type(config)) if field.name in KEYS}
    told = config.to_dict()
    kept = {key: default for key, default in fields.items() if told.get(key) == default}  # else it is worked out
    said: dict[str, Any] = {
        "values": {
            key: kept.get(key) for key, default in sorted(fields.items()) if default is None or isinstance(default, (int, str))
        },
        "aliases": {alias: key for alias, key in sorted(type(config).attribute_map.items()) if {alias, key} & KEYS},
    }
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type and not config.is_encoder_decoder:
        said |= {"text": text.model_type, "text_values": _own_text_values(config, text), "flat": _is_flat(config)}
    return {key: value for key, value in said.items() if value}


def _own_text_values(config: PreTrainedConfig, text: PreTrainedConfig) -> dict[str, Any]:
    """Values that a class gives its text part where the class of that part has others."""
    with contextlib.suppress(Exception):
        empty: dict[str, Any] = {"text_config": {"model_type": text.model_type}}
        given = type(config)(**empty).get_text_config(decoder=True).to_dict()
        usual = AutoConfig.for_model(text.model_type).to_dict()
        return {key: given[key] for key in sorted(KEYS & given.keys()) if given[key] != usual.get(key)}
    return {}


def _is_flat(config: PreTrainedConfig) -> bool:
    with contextlib.suppress(Exception):
        at_the_top: dict[str, Any] = {"hidden_size": _PROBE}
        text = type(config)(**at_the_top).get_text_config(decoder=True)
        return getattr(text, "hidden_size", None) == _PROBE
    return False


def main() -> None:
    lines = (f"    {json.dumps(kind)}: {json.dumps(said)}" for kind, said in collect().items())
    body = "{\n" + ",\n".join(lines) + "\n  }"
    parts = {"transformers": json.dumps(__version__), "known": json.dumps(sorted(CONFIG_MAPPING.keys())), "types": body}
    print("{\n" + ",\n".join(f'  "{key}": {value}' for key, value in parts.items()) + "\n}")


if __name__ == "__main__":
    main()
