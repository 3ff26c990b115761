"""Linear layers of classes of their own that compute what `torch.nn.Linear` does (Falcon's), as
that class, so that they can be stored, adapted and sharded as any other.

Replaces: the class of instances of subclasses of `torch.nn.Linear`, where a small copy computes the
same.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_plain_linears.py
"""

from __future__ import annotations

from torch import nn

from workers.layers.linear import computes_as_linear


def make_linears_plain(model: nn.Module) -> None:
    """Make every such layer of a model a plain linear layer."""
    for module in model.modules():
        if (
            isinstance(module, nn.Linear)
            and type(module) is not nn.Linear
            and computes_as_linear(module)
        ):
            module.__class__ = nn.Linear
