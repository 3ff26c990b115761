"""Bases of several models built where packages of their towers are not installed: text needs no
tower.

Replaces: `transformers.AutoModel.from_config`, while the published class is built.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_absent_towers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AutoModel, PreTrainedConfig


class MissingTower(nn.Module):
    """Placeholder of a tower whose package is not installed: nothing of it is read, sharded or
    adapted.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config


@contextmanager
def allow_missing_towers(text: type) -> Iterator[None]:
    """Let AutoModel build a `MissingTower` where a package is not installed, except for configs of
    type `text`.
    """
    stock = AutoModel.__dict__["from_config"]

    def made(config: PreTrainedConfig, **options: Any) -> nn.Module:
        try:
            return stock.__get__(None, AutoModel)(config, **options)
        except ImportError:
            if isinstance(config, text):
                raise
            return MissingTower(config)

    AutoModel.from_config = made
    try:
        yield
    finally:
        AutoModel.from_config = stock
