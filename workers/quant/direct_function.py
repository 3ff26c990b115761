"""Autograd functions whose calls cost the host less than those of `torch.autograd.Function`: a
small product takes as long.

They know no transforms of functorch, such as vmap. Everything else about them is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd import function


class DirectFunction(function._SingleLevelFunction):
    """Base of a function with `forward(ctx, ..)` and `backward(ctx, ..)`."""

    apply: ClassVar[Callable[..., Any]]
    """Calls it: PyTorch's own, below the look for transforms."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator, called only where gradients get a graph: elsewhere its guard has nothing
    to do.
    """
    guarded = function.once_differentiable(backward)

    def run(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
