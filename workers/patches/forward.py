"""A module's forward, replaced on the instance: parameter names stay, and hooks (FSDP2's among
them) run outside of it.

Used by the other patches here, and by what wraps the forward of decoder layers:
workers/model/compiling.py and workers/model/activation_checkpointing.py.

Replaces: `forward` of one `torch.nn.Module`, which torch looks up on the instance at each call.
Written for: torch 2.13
Fails when upstream changes: tests/workers/patches/test_forward.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, by: Callable[..., Any]) -> None:
    """Let `by` be called wherever the module is."""
    module.forward = by


def restore_forward(module: nn.Module) -> None:
    """Let the forward of the module's class be called again.

    Raises AttributeError if it was not replaced.
    """
    del module.forward
