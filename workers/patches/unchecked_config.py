"""A value set in a config past its own checks: a config may refuse None where its model's class
takes it.

Replaces: nothing of transformers but what `PreTrainedConfig.__setattr__` would have refused.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_unchecked_config.py
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def set_unchecked(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set an attribute of a config that it has already."""
    vars(config)[name] = value
