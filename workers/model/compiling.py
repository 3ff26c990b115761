"""torch.compile of decoder layers, one by one: layers of one structure share their code, so its
time does not grow with depth.

What is compiled is a layer's `forward`; FSDP2's hooks run outside of it, and so do the collectives.
A layer is compiled whole or not at all, since a graph break inside one would cost what compiling
gains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workers.patches.forward import replace_forward

VARIANTS_PER_LAYER = 8
"""Compiled variants of one layer structure: with and without gradients, after the embedding or a
layer, one sample or more.
"""

log = logging.getLogger(__name__)


def compile_layers(layers: Sequence[nn.Module], warn: Callable[[str], None]) -> None:
    """Compile the layers' forward at their first call.

    If that fails, `warn` gets the reason and all layers run uncompiled.
    """
    import torch._dynamo.exc  # here: it takes a second to import, and most jobs do without
    import torch._functorch.config

    limit = VARIANTS_PER_LAYER * len(layers)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, limit
    )
    torch._functorch.config.force_non_lazy_backward_lowering = (
        True  # fail in forward, where going on uncompiled is possible
    )
    compiler = _Compiler(
        (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit), warn
    )
    for layer in layers:
        replace_forward(layer, compiler.compiled(layer.forward))


class _Compiler:
    """The layers of one model: once compiling fails for one of them, all of them run as they
    are.
    """

    def __init__(
        self, errors: tuple[type[BaseException], ...], warn: Callable[[str], None]
    ) -> None:
        self._errors = errors
        self._warn = warn
        self._failed = False

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(forward, fullgraph=True, dynamic=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return forward(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except self._errors as error:
                self._give_up(error)
                return forward(*args, **kwargs)

        return call

    def _give_up(self, error: BaseException) -> None:
        self._failed = True
        log.warning("torch.compile failed; the decoder layers run uncompiled", exc_info=error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:300] if lines else type(error).__name__
        self._warn(
            "distributed.compile: the decoder layers could not be compiled and run uncompiled, "
            f"more slowly: {reason}"
        )
