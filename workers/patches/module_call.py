"""A module's call, replaced on the instance: unlike `forward`, before all hooks, FSDP2's among
them.

Replaces: `torch.nn.Module.__call__` of one module, by the attribute under which torch keeps a
compiled call.
Written for: torch 2.13
Fails when upstream changes: tests/workers/patches/test_module_call.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_call(module: nn.Module, by: Callable[..., Any]) -> None:
    """Let `by` be called wherever the module is. `call_itself` calls the module with its hooks."""
    module._compiled_call_impl = by


def restore_call(module: nn.Module) -> None:
    """Let the module be called again."""
    module._compiled_call_impl = None


def call_itself(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the module with its hooks, whatever replaces its call."""
    return module._call_impl(*args, **kwargs)
