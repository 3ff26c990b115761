"""The form of a new job: between its fields and a create body, and the body as Python, command line and YAML. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

_OURS = ("lora", "precision", "training", "distributed", "checkpoint", "priority")
"""Keys of a create body that the openai client takes in `extra_body`."""


def given_options(body: Mapping[str, Any]) -> set[str]:
    """Dotted names of the options that a create body gives."""
    given: set[str] = set()
    for section in _OURS:
        inner = body.get(section)
        given |= {f"{section}.{name}" for name in inner} if isinstance(inner, dict) else set()
    method = body.get("method") or {}
    kind = method.get("supervised") if isinstance(method, dict) else None
    for values in (body.get("hyperparameters"), (kind or {}).get("hyperparameters")):
        for name, value in (values or {}).items():
            if value != "auto":
                given.add(f"training.{'learning_rate' if name == 'learning_rate_multiplier' else name}")
    return given


def yaml_text(body: Mapping[str, Any]) -> str:
    """A create body as a SPEC file has it."""
    return yaml.safe_dump(dict(body), sort_keys=False, allow_unicode=True, width=100)
