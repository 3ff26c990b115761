"""config.json as it is published: without what the config classes have as defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

_KEPT = frozenset(
    {
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "quantization_config",
    }
)
_OF_FILE = frozenset({"transformers_version", "_name_or_path"})
_TRIES = 5


def leave_out_defaults(folder: Path) -> None:
    """Take out of a base's config.json every value that transformers reads the same without it."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    try:
        meant = _as_read(folder)
    except Exception:  # it is there to be refused
        return
    slim = _without_defaults(whole)
    for _ in range(_TRIES):
        path.write_text(json.dumps(slim, indent=2))
        try:
            found = _as_read(folder)
        except Exception:
            break
        if found == meant:
            return
        slim = _with_again(slim, whole, found, meant)
    path.write_text(json.dumps(whole, indent=2))


def _as_read(folder: Path) -> dict[str, Any]:
    return {
        key: value
        for key, value in AutoConfig.from_pretrained(folder).to_dict().items()
        if key not in _OF_FILE
    }


def _without_defaults(section: Mapping[str, Any]) -> dict[str, Any]:
    known = _defaults(str(section.get("model_type")))
    slim = {}
    for key, value in section.items():
        if isinstance(value, dict) and "model_type" in value:
            slim[key] = _without_defaults(value)
        elif (
            key in _KEPT
            or key not in known
            or known[key] != value
            or type(known[key]) is not type(value)
        ):
            slim[key] = value
    return slim


@lru_cache(maxsize=1024)
def _defaults(model_type: str) -> dict[str, Any]:
    try:
        return AutoConfig.for_model(model_type).to_dict() if model_type in CONFIG_MAPPING else {}
    except Exception:  # a few types are made of others that must be given
        return {}


def _with_again(
    slim: Mapping[str, Any], whole: Mapping[str, Any], found: Any, meant: Any
) -> dict[str, Any]:
    """`slim` with those of `whole`'s values again that are read as others without them."""
    again = dict(slim)
    for key in meant.keys() | found.keys():
        one = found.get(key)
        other = meant.get(key)
        if one == other or key not in whole:
            continue
        inner = (
            isinstance(slim.get(key), dict) and isinstance(one, dict) and isinstance(other, dict)
        )
        again[key] = _with_again(slim[key], whole[key], one, other) if inner else whole[key]
    return again
