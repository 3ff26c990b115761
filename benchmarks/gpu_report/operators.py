"""Parts of a step of an 8B model, each alone: products, dequantising, rounding, attention, norms,
the head.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_report.ceilings import seconds
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed_job import LLAMA, RANK, TINY, log_normal
from ft_service.kernel_limits import chunk_rows
from workers.layers import cudnn_attention, fused, low_rank, packed_attention
from workers.layers.scored_attention import AttentionPattern, Kernel, Longest
from workers.layers.segments import Bounds
from workers.model import head
from workers.quant import fp8_products, nf4
from workers.quant.weights import FP8Weight

TOKENS = 8192
REPEATS = 20
"""Of a backward whose bits are compared."""


def measure(context: Context) -> None:
    device = context.place
    llama = TINY if context.tiny else LLAMA
    tokens = 64 if context.tiny else TOKENS
    shapes = sorted(set(llama.shapes_of_layer().values()))
    for rows, cols in shapes:
        _products(context, device, tokens, rows, cols)
    context.rows.run(
        "head and loss of a chunk",
        lambda: _head(
            device, min(tokens, chunk_rows(llama.vocabulary)), llama.vocabulary, llama.hidden
        ),
    )
    heads = llama.heads, llama.groups or llama.heads
    even = (tokens // 4,) * 4
    for name, lengths in ((None, even), (None, log_normal(tokens)), ("FA3", even), ("FA4", even)):
        for repeatable in (True, False):
            case = f"attention of {len(lengths)} samples in a row{f', {name}' if name else ''}"
            chosen = partial(
                _attention, device, lengths, *heads, implementation=name, repeatable=repeatable
            )
            context.rows.run(case + ("" if repeatable else ", gradients in any order"), chosen)
    for lengths in (even, log_normal(tokens)):
        context.rows.run(
            f"attention of {len(lengths)} samples in a row, cuDNN",
            partial(_by_cudnn, device, lengths, *heads),
        )
    _elementwise(context, device, tokens, llama.hidden, llama.intermediate)


def _products(context: Context, device: torch.device, tokens: int, rows: int, cols: int) -> None:
    x = _drawn(device, tokens, cols)
    grad = _drawn(device, tokens, rows)
    weight = _drawn(device, rows, cols)
    down = _drawn(device, tokens, RANK)
    b = _drawn(device, RANK, rows)
    work = 2 * tokens * rows * cols
    named = f"{rows} x {cols}"
    y = torch.empty_like(grad)

    def timed(case: str, act: Callable[[], Any], flops: float = 0, moved: float = 0) -> None:
        context.rows.run(f"{named}, {case}", lambda: _figures(seconds(act), flops, moved))

    timed("bf16 product", lambda: x @ weight.t(), work)
    timed("bf16 product added to what is there", lambda: y.addmm_(x, weight.t()), work)
    timed(f"x times A, N = {RANK}", lambda: x @ weight[:RANK].t(), moved=x.nbytes)
    timed("B's product alone", lambda: torch.mm(down, b), moved=grad.nbytes)
    timed("B's product added to what is there", lambda: y.addmm_(down, b), moved=2 * grad.nbytes)
    timed("A's gradient", lambda: down.t() @ x, moved=x.nbytes)
    if context.on_gpu and low_rank.takes(y, RANK):
        timed(
            "B's product added to what is there by our kernel",
            lambda: low_rank.add(y, down, b),
            moved=2 * grad.nbytes,
        )
    parts = nf4.quantize(weight)
    timed(
        "nf4 dequantised",
        lambda: nf4.dequantize(parts, cols, torch.bfloat16),
        moved=2.516 * rows * cols,
    )
    timed(
        "nf4 by bitsandbytes",
        lambda: nf4._dequantize_by_parts(parts, cols, torch.bfloat16),
        moved=2.516 * rows * cols,
    )
    if fp8_products.why_not(torch.bfloat16, device) is None:
        stored = FP8Weight.quantize(weight)
        numerics = FP8Weight.IN_FP8
        timed("rounded to FP8", lambda: fp8_products._rounded(x), moved=3 * x.numel())
        factors = stored.parts[1]
        timed(
            "gradient times scales, rounded to FP8",
            lambda: fp8_products._rounded(grad, factors),
            moved=3 * grad.numel(),
        )
        context.rows.run(f"{named}, rounded to FP8 by torchao", lambda: _rounded_by_torchao(x))
        timed(
            "FP8 codes transposed",
            lambda: fp8_products._transposed(stored.codes),
            moved=2 * rows * cols,
        )
        timed("FP8 forward", lambda: numerics.linear(x.view_as(x), list(stored.parts), cols), work)
        timed("FP8 backward", lambda: numerics.linear_grad(grad, list(stored.parts), cols), work)


def _rounded_by_torchao(x: Tensor) -> dict[str, float]:
    rounded = torchao_rounding()
    return _figures(seconds(lambda: rounded(x)), 0, 3 * x.numel())


def torchao_rounding() -> Callable[[Tensor], Any]:
    """torchao's kernel that rounds rows to FP8, which jobs do without.

    Raises SkippedError where it is not installed.
    """
    sys.modules.pop("torchao", None)  # kept out until here
    try:
        name = "torchao.prototype.moe_training.kernels.float8_rowwise"
        return importlib.import_module(name).triton_fp8_rowwise_2d_scale_and_cast
    except (ImportError, AttributeError) as error:
        raise SkippedError(f"{type(error).__name__}: {error}") from None


def _figures(took: float, flops: float, moved: float) -> dict[str, float]:
    found = {"ms": 1e3 * took}
    return (
        found
        | ({"tflops": flops / took / 1e12} if flops else {})
        | ({"tb_per_s": moved / took / 1e12} if moved else {})
    )


def _drawn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _head(device: torch.device, rows: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    x = _drawn(device, rows, hidden).requires_grad_()
    weight = _drawn(device, vocabulary, hidden)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    took = seconds(lambda: head._HeadLoss.apply(x, weight, None, targets, None, 1.0))
    return {
        "rows": rows,
        **_figures(took, 4 * rows * vocabulary * hidden, 0),
        "note": head.KERNEL.fault(device) or "",
    }


def _attention(
    device: torch.device,
    lengths: Sequence[int],
    heads: int,
    groups: int,
    *,
    implementation: str | None,
    repeatable: bool,
) -> dict[str, Any]:
    """`implementation`: PyTorch's name of another FlashAttention, whose package is installed; None:
    its own. `repeatable`: with gradients added up in one order, as jobs do it.
    """
    if device.type != "cuda":
        raise SkippedError("processors have no kernel for packed rows")
    with _implemented_by(implementation), nullcontext() if repeatable else _in_any_order():
        return _packed_attention(device, lengths, heads, groups)


@contextmanager
def _implemented_by(implementation: str | None) -> Iterator[None]:
    from torch.nn import attention

    if implementation is None:
        yield
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise SkippedError(f"PyTorch {torch.__version__} knows none but its own")
    try:
        attention.activate_flash_attention_impl(implementation)
    except ImportError as error:
        raise SkippedError(str(error)) from None
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def _in_any_order() -> Any:
    return patch.object(packed_attention, "deterministic_mode", nullcontext)


def _by_cudnn(
    device: torch.device, lengths: Sequence[int], heads: int, groups: int
) -> dict[str, Any]:
    fault = cudnn_attention.KERNEL.fault(device) if device.type == "cuda" else "it needs a GPU"
    if fault is not None:
        raise SkippedError(fault)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    bounds = Bounds(starts, starts.to(device), max(lengths))

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, _: Tensor, __: Longest, pattern: AttentionPattern
    ) -> Tensor:
        if not cudnn_attention.takes(query, key, value, bounds, pattern):
            raise SkippedError("cuDNN does not compute it on this GPU")
        return cudnn_attention.attend_packed(query, key, value, bounds, pattern)

    return _packed_attention(device, lengths, heads, groups, kernel)


def _packed_attention(
    device: torch.device,
    lengths: Sequence[int],
    heads: int,
    groups: int,
    kernel: Kernel = packed_attention.attend_packed,
) -> dict[str, Any]:
    tokens = sum(lengths)
    longest = max(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    query, key, value = (
        _drawn(device, 1, n, tokens, 128).requires_grad_() for n in (heads, groups, groups)
    )
    pattern = AttentionPattern(128**-0.5)
    grad = _drawn(device, 1, tokens, heads, 128)

    def attend() -> Tensor:
        return kernel(query, key, value, starts, longest, pattern)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), [query, key, value], grad)

    work = 2 * sum(length**2 for length in lengths) * heads * 128
    with torch.no_grad():
        forward = seconds(attend)
    took = {
        "forward_ms": 1e3 * forward,
        "forward_tflops": work / forward / 1e12,
        "both_ms": 1e3 * seconds(both),
    }
    first = both()
    same = all(
        torch.equal(one, own)
        for _ in range(REPEATS)
        for one, own in zip(first, both(), strict=True)
    )
    return {**took, "gradients_have_the_same_bits_again": same}


def _elementwise(
    context: Context, device: torch.device, tokens: int, hidden: int, intermediate: int
) -> None:
    """Forward and backward, by PyTorch's operations and by the kernels."""
    x = _drawn(device, tokens, hidden).requires_grad_()
    weight = _drawn(device, hidden)
    factors = [_drawn(device, tokens, intermediate).requires_grad_() for _ in range(2)]
    heads = [
        _drawn(device, 1, tokens, n, 128).transpose(1, 2).requires_grad_()
        for n in (hidden // 128 or 1, 1)
    ]
    angles = _drawn(device, 1, tokens, 128), _drawn(device, 1, tokens, 128)
    stock: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
        "RMS norm": (lambda: fused.norm(x, weight, 1e-6, fused.Form.ROUNDED), [x]),
        "SwiGLU": (lambda: fused.gate(*factors), factors),
        "rotary positions": (lambda: fused.rotate(heads[0], heads[1], *angles)[0], heads[:1]),
    }
    by = fused.KERNEL.on(device)
    ours: dict[str, Callable[[], Any]] = {
        "RMS norm": lambda: fused.FusedNorm.apply(x, weight, 1e-6, fused.Form.ROUNDED, by),
        "SwiGLU": lambda: fused.FusedGate.apply(*factors, by),
        "rotary positions": lambda: fused.FusedRotation.apply(heads[0], heads[1], *angles, by)[0],  # pyright: ignore[reportIndexIssue]
    }
    for name, (act, inputs) in stock.items():
        found = {"stock_ms": 1e3 * seconds(lambda a=act, i=inputs: _both(a, i))}
        if by is not None:
            found["fused_ms"] = 1e3 * seconds(lambda a=ours[name], i=inputs: _both(a, i))
        context.rows.add(
            f"{name}, forward and backward", "ok", fused.KERNEL.fault(device) or "", **found
        )


def _both(act: Callable[[], Any], inputs: list[Tensor]) -> None:
    y = act()
    torch.autograd.grad(y, inputs, torch.ones_like(y))
