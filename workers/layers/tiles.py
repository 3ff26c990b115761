"""A feed-forward with its adapters by tiles of rows: it computes every token by itself, so that of
what lies between its layers only a tile's has to exist at a time.

Forward keeps the module's input and nothing of what lies between. Backward computes one tile
after the other again, and at once its gradients. Inside of activation checkpointing that is all the
recomputation there is: the layer's own ends where the input was kept, unless what follows the
feed-forward, such as a norm, keeps more.

Tiles are other shapes for the products: their sums may be rounded otherwise, and are as exact.
Adapters' gradients are summed over the tiles in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ft_service.kernel_limits import tile_rows
from workers.layers.dropout import Dropping
from workers.layers.linear import LoraLinear
from workers.quant.direct_function import DirectFunction, once_differentiable

Forward = Callable[[Tensor], Tensor]


def by_tiles(forward: Forward, x: Tensor, height: int) -> Tensor:
    """What `forward` makes of x [.., cols] in tiles of `height` rows; its results have x's
    shape.
    """
    rows = x.reshape(1, -1, x.shape[-1])
    y = torch.empty_like(rows)
    for tile in _tiles(rows.shape[1], height):
        y[:, tile] = forward(rows[:, tile])
    return y.view(x.shape)


def _tiles(rows: int, height: int) -> Iterator[slice]:
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


class Tiled:
    """The forward of a module that computes every token by itself.

    The module that it holds is not a submodule, so that it keeps one name.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """`forward`: the module's, with its adapters in place."""
        self._module = module
        self._forward = forward
        layers = (own for own in module.modules() if isinstance(own, LoraLinear))
        self._droppings = [own.dropping for own in layers if own.dropping is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., cols] → the same shape."""
        rows = x.shape[:-1].numel()
        height = tile_rows(rows)
        if height == rows:
            return self._forward(x)
        trained = self._trained()
        if not torch.is_grad_enabled() or not (x.requires_grad or trained):
            return self._all_of(x, height)
        kept: Any = _Kept.apply(x, self, height, *trained)
        with torch.no_grad():
            y = self._all_of(x.detach(), height)
        joined: Any = _Joined.apply(kept, y)
        return joined

    def gradients(
        self, x: Tensor, grad: Tensor, height: int, *, of_input: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Those of x, or None, and of the trained parameters in their order, from that of the
        output; each [.., cols] in x's shape.
        """
        rows, of_rows = (own.reshape(1, -1, own.shape[-1]) for own in (x, grad))
        trained = self._trained()
        of_x = torch.empty_like(rows) if of_input else None
        sums: list[Tensor | None] = [None] * len(trained)
        for tile in _tiles(rows.shape[1], height):
            given = rows[:, tile].detach().requires_grad_(of_input)
            with torch.enable_grad(), self._dropping(tile):
                made = self._forward(given)
            wanted = [*([given] if of_input else ()), *trained]
            found = list(torch.autograd.grad(made, wanted, of_rows[:, tile], allow_unused=True))
            del made
            if of_x is not None:
                of_given = found.pop(0)
                of_x[:, tile] = 0 if of_given is None else of_given
            sums = [_added(total, own) for total, own in zip(sums, found, strict=True)]
        return of_x if of_x is None else of_x.view(x.shape), [
            own if own is None else own.to(parameter.dtype)
            for own, parameter in zip(sums, trained, strict=True)
        ]

    def _all_of(self, x: Tensor, height: int) -> Tensor:
        rows = x.reshape(1, -1, x.shape[-1])
        y = torch.empty_like(rows)
        for tile in _tiles(rows.shape[1], height):
            with self._dropping(tile):
                y[:, tile] = self._forward(rows[:, tile])
        return y.view(x.shape)

    def _trained(self) -> list[nn.Parameter]:
        """As they are now: FSDP2 puts gathered ones in the place of shards."""
        return [own for own in self._module.parameters() if own.requires_grad]

    @contextmanager
    def _dropping(self, tile: slice) -> Iterator[None]:
        """While it is entered, dropout is that of these rows of the micro-batch."""
        Dropping.look_at(self._droppings, tile)
        try:
            yield
        finally:
            Dropping.look_at(self._droppings, None)


def _added(total: Tensor | None, own: Tensor | None) -> Tensor | None:
    if total is None or own is None:
        return own.float() if total is None and own is not None else total
    return total + own


class _Kept(DirectFunction):
    """x, for whose gradient the module is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: Tiled, height: int, *trained: Tensor) -> Tensor:
        ctx.tiled = tiled
        ctx.height = height
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        of_x, of_trained = ctx.tiled.gradients(
            x, grads[0], ctx.height, of_input=ctx.needs_input_grad[0]
        )
        return of_x, None, None, *of_trained


class _Joined(DirectFunction):
    """What was computed of the kept input; its gradient goes there."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None
