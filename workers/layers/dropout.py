"""Dropout before adapters, computed from counters instead of a generator: whether a number is
dropped follows from (seed, step, sample, position in the sample, module, channel) and from nothing
else. So it is the same on any rank and number of ranks, among any other samples, in a recomputed
forward, and after a resume.

Each target of an arrow is a 32-bit hash of its sources:

    seed, step, sample ──▶ sample's key ──▶ + position: token's key  ┐
    module's name ──▶ module's key ──▶ + channel: channel's key      ┴──▶ number; below `rate` of
    all numbers: dropped

Masks are never kept: backward computes them again from the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant import gpu_kernels
from workers.quant.frozen_linear import watched

_NUMBERS_AT_ONCE = 1 << 16
"""Numbers a thread hashes at once on the CPU: with a spare for each 512 KiB."""

STRIDE = 0x9E3779B9 - (1 << 32)
"""Odd, and far from small multiples of 2^32: neighbours in a sequence get keys without a
pattern.
"""


def key_of(*sources: object) -> int:
    """A 32-bit key, as the int32 with the same bits."""
    digest = hashlib.sha256("/".join(map(str, sources)).encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def keys_from(first: Tensor | int, count: int, device: torch.device) -> Tensor:
    """int32 [count]: the key of each position, or channel, behind the key of what it belongs to."""
    keys = torch.arange(count, dtype=torch.int32, device=device) * STRIDE + first
    return _hash(keys, torch.empty_like(keys))


def kept_mask(tokens: Tensor, module: Tensor, channels: int, rate: float) -> Tensor:
    """Mask of the numbers that stay: bool [tokens, channels].

    `tokens`: their keys, int32; `module`: its key, int32 [].
    """
    tokens = tokens.reshape(-1)
    of_channels = keys_from(module, channels, tokens.device)
    lowest = round(rate * (1 << 32)) - (1 << 31)  # the smallest int32 is -2^31
    kernel = KERNEL.on(tokens.device)
    return (kernel.kept_mask if kernel else _kept_by_parts)(tokens, of_channels, lowest)


def even_numbers(tokens: Tensor, module: int, channels: int) -> Tensor:
    """Numbers spread evenly over [-1, 1): fp32 [tokens, channels].

    `tokens`: their keys, int32; `module`: a key.
    """
    of_channels = keys_from(module, channels, tokens.device)
    numbers = torch.bitwise_xor(tokens.reshape(-1, 1), of_channels)
    return _hash(numbers, torch.empty_like(numbers)).float() / (1 << 31)


def _compare(kernels: Any, device: torch.device) -> None:
    keys = keys_from(1, 100, device)
    assert torch.equal(kernels.kept_mask(keys, keys, 0), _kept_by_parts(keys, keys, 0)), (
        "it gives another mask"
    )


KERNEL = gpu_kernels.CheckedKernel("workers.layers.mask_kernel", _compare)


def _kept_by_parts(tokens: Tensor, channels: Tensor, lowest: int) -> Tensor:
    """bool [tokens, channels], some rows at a time, so that what lies between the many small steps
    stays in a CPU's cache.
    """
    kept = torch.empty(len(tokens), len(channels), dtype=torch.bool, device=tokens.device)
    at_once = (
        _NUMBERS_AT_ONCE * torch.get_num_threads()
        if tokens.device.type == "cpu"
        else max(1, kept.numel())
    )
    height = max(1, at_once // max(1, len(channels)))
    numbers = torch.empty(
        min(height, len(tokens)), len(channels), dtype=torch.int32, device=tokens.device
    )
    spare = torch.empty_like(numbers)
    for rows, out in zip(tokens.split(height), kept.split(height), strict=True):
        own = torch.bitwise_xor(rows.unsqueeze(1), channels, out=numbers[: len(rows)])
        torch.ge(_hash(own, spare[: len(rows)]), lowest, out=out)
    return kept


def _hash(numbers: Tensor, spare: Tensor) -> Tensor:
    """Hash int32 numbers in place: each bit depends on all of the number's.

    Products wrap around. `spare`: overwritten.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        numbers.bitwise_xor_(_shifted(numbers, shift, spare)).mul_(factor)
    return numbers.bitwise_xor_(_shifted(numbers, 16, spare))


def _shifted(numbers: Tensor, by: int, out: Tensor) -> Tensor:
    """Numbers shifted to the right, with zeros from the left."""
    return torch.bitwise_right_shift(numbers, by, out=out).bitwise_and_((1 << (32 - by)) - 1)


@dataclass(frozen=True)
class Keys:
    """What the masks of one module in one forward follow from."""

    tokens: Tensor
    """int32, as many as the input has rows."""
    module: Tensor
    """int32 []."""


def product(x: Tensor, a: Tensor, keys: Keys, rate: float) -> Tensor:
    """`dropped_linear` for use inside an autograd function."""
    return (dropped_linear if watched() else _product)(x, a, keys.tokens, keys.module, rate)


def product_grad(
    grad: Tensor, x: Tensor, a: Tensor, keys: Keys, rate: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x and a behind `product`, from grad [.., r]."""
    return (_dropped_linear_grad if watched() else _product_grad)(
        grad, x, a, keys.tokens, keys.module, rate
    )


def _product(x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float) -> Tensor:
    kept = kept_mask(tokens, module, x.shape[-1], rate).view(x.shape)
    return F.linear(x.where(kept, 0), a) / (1 - rate)


def _product_grad(
    grad: Tensor, x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    grad = grad / (1 - rate)
    kept = kept_mask(tokens, module, x.shape[-1], rate).view(x.shape)
    of_a = grad.flatten(0, -2).mT @ x.where(kept, 0).flatten(0, -2)
    of_x = grad @ a
    return of_x.mul_(kept), of_a


@torch.library.custom_op("ft_service::dropped_linear", mutates_args=())
def dropped_linear(x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float) -> Tensor:
    """x [.., cols] with `rate` of its numbers dropped and the rest scaled up, times the transposed
    a [r, cols] → [.., r].

    `tokens`: the key of every token, int32, as many as x has rows; `module`: int32 []. Opaque to
    the compiler, which knows no integers that wrap around; backward keeps x, a and the keys.
    """
    return _product(x, a, tokens, module, rate)


@torch.library.custom_op("ft_service::dropped_linear_grad", mutates_args=())
def _dropped_linear_grad(
    grad: Tensor, x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    return _product_grad(grad, x, a, tokens, module, rate)


@dropped_linear.register_fake
def _(x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], a.shape[0])


@_dropped_linear_grad.register_fake
def _(
    grad: Tensor, x: Tensor, a: Tensor, tokens: Tensor, module: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(a)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.rate = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_dropped_linear_grad(grad, *ctx.saved_tensors, ctx.rate), None, None, None


dropped_linear.register_autograd(_backward, setup_context=_setup_context)


class Dropping:
    """The dropout of one adapted module.

    It is no `nn.Module`, so that nothing of it is sharded, converted or saved.
    """

    def __init__(self, rate: float, module: str) -> None:
        """`module`: its name in the base, the same whatever options the job is run with."""
        self.rate = rate
        self._key = key_of("module", module)
        self._tokens: Tensor | None = None
        self._rows: slice | None = None
        self._module: Tensor | None = None

    @staticmethod
    def look_at(droppings: Iterable[Dropping], rows: slice | None) -> None:
        """Let modules be given only these rows of the current tokens, counted through all samples;
        None: all of them.
        """
        for dropping in droppings:
            dropping._rows = rows

    def use(self, tokens: Tensor) -> None:
        """Set the keys of the tokens for the coming forward and its backward: int32 [samples,
        length].
        """
        self._tokens = tokens
        if self._module is None or self._module.device != tokens.device:
            self._module = torch.tensor(self._key, dtype=torch.int32, device=tokens.device)

    def concerns(self, x: Tensor) -> bool:
        """Whether x [rows, length, cols] is of the current tokens: not of the one before the first,
        for which layers that look back insert zeros (Zaya).
        """
        alone = self._tokens is not None and self._rows is None and self._tokens.shape[-1] != 1
        return x.shape[-2] != 1 or not alone

    @property
    def keys(self) -> Keys:
        assert self._tokens is not None, "a forward in training needs the keys of its tokens"
        assert self._module is not None
        tokens = self._tokens if self._rows is None else self._tokens.reshape(-1)[self._rows]
        return Keys(tokens, self._module)

    def __call__(self, x: Tensor, a: Tensor) -> Tensor:
        """x [.., cols] and a [r, cols] → [.., r]."""
        keys = self.keys
        return dropped_linear(x, a, keys.tokens, keys.module, self.rate)
