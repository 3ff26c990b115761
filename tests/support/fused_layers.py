"""What the GPU's kernels of norms, rotary positions and gating return, on a processor by PyTorch's
operations.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from workers.layers import fused


def kernels_of_the_processor() -> Any:
    """In place of the kernels' module, with PyTorch's operations."""

    def graded(act: Any, inputs: list[Any], grads: Any) -> Any:
        with torch.enable_grad():
            own = [x.detach().requires_grad_() for x in inputs]
            return torch.autograd.grad(act(*own), own, grads)

    def normed(x: Any, weight: Any, eps: float, form: int) -> Any:
        return fused.norm(x, weight, eps, fused.Form(form)), torch.full((1,), eps)

    def normed_grad(grad: Any, x: Any, weight: Any, root: Any, form: int) -> Any:
        return graded(lambda x: fused.norm(x, weight, float(root), fused.Form(form)), [x], grad)[0]

    def rotated(query: Any, key: Any, cos: Any, sin: Any, *, back: bool) -> Any:
        def act(query: Any, key: Any) -> Any:
            return fused.rotate(query, key, cos, sin)

        return graded(act, [query, key], (query, key)) if back else act(query, key)

    def gated_grad(grad: Any, gate: Any, up: Any) -> Any:
        return graded(fused.gate, [gate, up], grad)

    return SimpleNamespace(
        normed=normed,
        normed_grad=normed_grad,
        rotated=rotated,
        gated=fused.gate,
        gated_grad=gated_grad,
    )
