"""RMS norms, rotary positions and gated feed-forwards as one kernel a direction, for CUDA in
Triton; import it only there.

Each reads its inputs once and rounds where PyTorch's separate operations round, so that what is
between two roundings is the same up to the order of sums and the last bits of an exponential.
`workers.layers.fused` says which formulas they compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ft_service.kernel_limits import next_power
from workers.quant.gpu_kernels import KernelLauncher

_ELEMENTS = 4096
"""Numbers that a program has at a time, where a row is shorter."""
_HEADS = 8
"""Heads that a program rotates at a time."""
_GATED = 1024
"""Numbers of a gated feed-forward that a program has."""


@triton.jit
def _normed(
    x,
    weight,
    y,
    root,
    rows,
    cols,
    stride,
    share,
    eps,
    form: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, block)
    there = (row < rows)[:, None] & (column < cols)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0).to(tl.float32)
    own = tl.rsqrt(tl.sum(value * value, axis=1) * share + eps)
    tl.store(root + row, own, mask=row < rows)
    value = value * own[:, None]
    if form != 3:
        factor = tl.load(weight + column, mask=column < cols, other=0).to(tl.float32)[None, :]
        if form == 0:
            value = value.to(y.dtype.element_ty).to(tl.float32)
        value = value * (factor + 1.0 if form == 2 else factor)
    tl.store(y + row[:, None] * cols + column[None, :], value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _normed_grad(
    grad,
    x,
    weight,
    root,
    of_x,
    rows,
    cols,
    stride,
    share,
    form: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, block)
    there = (row < rows)[:, None] & (column < cols)[None, :]
    at = row[:, None] * cols + column[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0).to(tl.float32)
    given = tl.load(grad + at, mask=there, other=0).to(tl.float32)
    if form != 3:
        factor = tl.load(weight + column, mask=column < cols, other=0).to(tl.float32)[None, :]
        given = given * (factor + 1.0 if form == 2 else factor)
        if form == 0:
            given = given.to(of_x.dtype.element_ty).to(tl.float32)
    own = tl.load(root + row, mask=row < rows, other=0)
    of_mean = tl.sum(given * value, axis=1) * -0.5 * (own * own * own) * share
    found = given * own[:, None] + of_mean[:, None] * (2.0 * value)
    tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=there)


@triton.jit
def _turned_heads(
    x,
    y,
    cos,
    sin,
    at,
    angle,
    stride_of_head,
    half,
    heads: tl.constexpr,
    back: tl.constexpr,
    several: tl.constexpr,
    block: tl.constexpr,
):
    channel = tl.arange(0, block)
    inside = channel < half
    cos_1 = tl.load(cos + angle + channel, mask=inside, other=0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angle + half + channel, mask=inside, other=0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angle + channel, mask=inside, other=0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angle + half + channel, mask=inside, other=0).to(tl.float32)[None, :]
    for first in range(0, heads, several):
        head = first + tl.arange(0, several)
        there = (head < heads)[:, None] & inside[None, :]
        own = at + head[:, None] * stride_of_head + channel[None, :]
        one = tl.load(x + own, mask=there, other=0).to(tl.float32)
        two = tl.load(x + own + half, mask=there, other=0).to(tl.float32)
        kept_1 = (one * cos_1).to(y.dtype.element_ty)
        kept_2 = (two * cos_2).to(y.dtype.element_ty)
        if back:
            moved_1 = (two * sin_2).to(y.dtype.element_ty)
            moved_2 = (-one * sin_1).to(y.dtype.element_ty)
        else:
            moved_1 = (-two * sin_1).to(y.dtype.element_ty)
            moved_2 = (one * sin_2).to(y.dtype.element_ty)
        turned_1 = kept_1.to(tl.float32) + moved_1.to(tl.float32)
        turned_2 = kept_2.to(tl.float32) + moved_2.to(tl.float32)
        tl.store(y + own, turned_1.to(y.dtype.element_ty), mask=there)
        tl.store(y + own + half, turned_2.to(y.dtype.element_ty), mask=there)


@triton.jit
def _rotated(
    query,
    key,
    turned_query,
    turned_key,
    cos,
    sin,
    length,
    half,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    angle_row,
    queries: tl.constexpr,
    keys: tl.constexpr,
    back: tl.constexpr,
    several: tl.constexpr,
    block: tl.constexpr,
):
    row = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    angle = row * angle_row + token * (2 * half)
    at = row * query_row + token * query_token
    _turned_heads(
        query, turned_query, cos, sin, at, angle, query_head, half, queries, back, several, block
    )
    at = row * key_row + token * key_token
    _turned_heads(key, turned_key, cos, sin, at, angle, key_head, half, keys, back, several, block)


@triton.jit
def _gated(gate, up, y, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    value = tl.load(gate + at, mask=there, other=0).to(tl.float32)
    other = tl.load(up + at, mask=there, other=0).to(tl.float32)
    active = tl.div_rn(value, 1.0 + tl.exp(-value)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (active * other).to(y.dtype.element_ty), mask=there)


@triton.jit
def _gated_grad(grad, gate, up, of_gate, of_up, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    given = tl.load(grad + at, mask=there, other=0).to(tl.float32)
    value = tl.load(gate + at, mask=there, other=0).to(tl.float32)
    other = tl.load(up + at, mask=there, other=0).to(tl.float32)
    grown = 1.0 + tl.exp(-value)
    active = tl.div_rn(value, grown).to(of_up.dtype.element_ty).to(tl.float32)
    tl.store(of_up + at, (given * active).to(of_up.dtype.element_ty), mask=there)
    share = tl.div_rn(1.0, grown)
    of_active = (given * other).to(of_gate.dtype.element_ty).to(tl.float32)
    of_value = of_active * share * (1.0 + value * (1.0 - share))
    tl.store(of_gate + at, of_value.to(of_gate.dtype.element_ty), mask=there)


_norm = KernelLauncher(_normed)
_norm_grad = KernelLauncher(_normed_grad)
_rotate = KernelLauncher(_rotated)
_gate = KernelLauncher(_gated)
_gate_grad = KernelLauncher(_gated_grad)


def normed(x: Tensor, weight: Tensor | None, eps: float, form: int) -> tuple[Tensor, Tensor]:
    """Norm of x, contiguous in its shape, and 1 / root mean square of each row, fp32 [rows]. x [..,
    cols]: contiguous, or [rows, cols] at one distance. `weight` [cols]; form 3 has none.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    root = torch.empty(_rows_of(x), device=x.device)
    _launch(_norm, x, (x, x if weight is None else weight, y, root), (float(eps),), form)
    return y, root


def normed_grad(grad: Tensor, x: Tensor, weight: Tensor | None, root: Tensor, form: int) -> Tensor:
    """The gradient of `normed`'s x, in the shape of `grad`, which is contiguous."""
    of_x = torch.empty_like(grad)
    _launch(_norm_grad, x, (grad, x, x if weight is None else weight, root, of_x), (), form)
    return of_x


def _rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _launch(
    kernel: KernelLauncher,
    x: Tensor,
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    form: int,
) -> None:
    """Run a kernel of norms on the rows of x. `numbers`: what it takes after their size."""
    rows = _rows_of(x)
    cols = x.shape[-1]
    stride = cols if x.is_contiguous() else x.stride(0)
    block = next_power(cols)
    height = max(1, _ELEMENTS // block)
    warps = min(16, max(4, height * block // 512))
    if rows:
        sizes = rows, cols, stride, 1 / cols, *numbers
        kernel((-(-rows // height), 1, 1), tensors, sizes, form, height, block, num_warps=warps)


def rotated(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    """query and key [rows, heads, length, d], each in its own strides and dense, channels last,
    turned by their places' angles; `back`: the gradients. cos, sin [1 or rows, length, d],
    contiguous.
    """
    turned = torch.empty_like(query), torch.empty_like(key)
    rows, heads, length, width = query.shape
    strides = *query.stride()[:3], *key.stride()[:3]
    angle_row = cos.stride(0) if cos.shape[0] > 1 else 0
    if rows * length:
        numbers = length, width // 2, *strides, angle_row
        constants = heads, key.shape[1], back, _HEADS, next_power(width // 2)
        _rotate((rows * length, 1, 1), (query, key, *turned, cos, sin), numbers, *constants)
    return turned


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of gate times up, both contiguous."""
    y = torch.empty_like(gate)
    if y.numel():
        _gate((-(-y.numel() // _GATED), 1, 1), (gate, up, y), (y.numel(),), _GATED)
    return y


def gated_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; all are contiguous."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        _gate_grad(
            (-(-gate.numel() // _GATED), 1, 1), (grad, gate, up, *grads), (gate.numel(),), _GATED
        )
    return grads
