"""Towers of bases made of several models, where a package that they are built with is absent.

A job needs no tower, so an empty module stands in its place: the text decoder beside it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel


class AbsentTower(nn.Module):
    """The place of a tower of which nothing is known here, not even what its modules are called."""


@contextmanager
def absent_where_not_installed() -> Iterator[None]:
    """While it is entered, a part of a model that cannot be imported is an `AbsentTower`."""
    stock = AutoModel.__dict__.get("from_config")
    build = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **options: Any) -> PreTrainedModel | AbsentTower:
        try:
            return build(config, **options)
        except ImportError:
            return AbsentTower()

    AutoModel.from_config = staticmethod(from_config)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if stock is None:
            del AutoModel.from_config
        else:
            AutoModel.from_config = stock


def are_all_known(model: nn.Module) -> bool:
    """Whether every tower of a model that was built so is there."""
    return not any(isinstance(module, AbsentTower) for module in model.modules())
