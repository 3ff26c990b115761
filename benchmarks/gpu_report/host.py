"""Time of the host to launch what a layer is made of: each alone, on so few tokens that the device
is never waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_report.ceilings import synchronize
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed_job import RANK
from workers.layers import fused, packed_attention
from workers.layers.linear import _Call, products
from workers.layers.scored_attention import AttentionPattern
from workers.quant import fp8_products
from workers.quant.fp8 import FP8Parts
from workers.quant.frozen_linear import PLAIN
from workers.quant.weights import FP8Weight, NF4Weight

TOKENS = 64
WIDTH = 256
CALLS = 100
LARGE = 8192, 4096
"""Rows and columns of products whose number of rows the library has not met before."""


def measure(context: Context) -> None:
    device = context.place
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"a sum": lambda: x + x, "a product": lambda: x @ x.t()}
    calls |= products_of(device, x)
    if context.on_gpu:
        calls |= kernels_of(device, x)
    for name, act in calls.items():
        context.rows.run(name, partial(host_time, act))
    if context.on_gpu:
        for name, of_rows in by_rows(device).items():
            context.rows.run(name, partial(time_of_new_rows, of_rows))


def host_time(act: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of the host a call, the median of five rounds."""
    rounds: list[float] = []
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            act()
        rounds.append(time.perf_counter() - began)
    return {"microseconds": 1e6 * sorted(rounds[1:])[2] / CALLS}


def time_of_new_rows(of_rows: Callable[[int], Any]) -> dict[str, float]:
    """Microseconds of the host a call of another number of rows, which the library meets for the
    first time and again.
    """
    found: dict[str, float] = {}
    of_rows(LARGE[0])
    for name in ("microseconds", "microseconds_again"):
        synchronize()
        began = time.perf_counter()
        for number in range(1, CALLS + 1):
            of_rows(LARGE[0] - 7 * number)
        found[name] = 1e6 * (time.perf_counter() - began) / CALLS
    return found


def by_rows(device: torch.device) -> dict[str, Callable[[int], Any]]:
    """Products of the first rows of a large input."""
    rows, cols = LARGE
    x, weight = (
        torch.randn(count, cols, device=device, dtype=torch.bfloat16) for count in (rows, cols)
    )
    found: dict[str, Callable[[int], Any]] = {
        "a product of new rows": lambda count: x[:count] @ weight.t()
    }
    if fp8_products.why_not(torch.bfloat16, device) is None:
        codes, scale = FP8Weight.quantize(weight).parts
        given = fp8_products._rounded(x)
        of_weight = codes.t(), scale.t().contiguous()

        def in_fp8(count: int) -> Tensor:
            return fp8_products._product(
                FP8Parts(given.codes[:count], given.scale[:count]), *of_weight, x[:count]
            )

        found["a product in FP8 of new rows"] = in_fp8
        found["a product in FP8 of new rows, filled up"] = lambda count: in_fp8(
            fp8_products.filled_up(count)
        )
    return found


def products_of(device: torch.device, x: Tensor) -> dict[str, Callable[[], Any]]:
    """A layer with its adapter, and three with one input, in each format."""
    a, b = (
        nn.Parameter(torch.randn(shape, device=device)) for shape in ((RANK, WIDTH), (WIDTH, RANK))
    )
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    stored: dict[str, tuple[str, list[Tensor]]] = {"bf16": (PLAIN, [weight])}
    stored["nf4"] = "nf4", list(NF4Weight.quantize(weight).parts)
    if fp8_products.why_not(torch.bfloat16, device) is None:
        stored["fp8"] = FP8Weight.IN_FP8.name, list(FP8Weight.quantize(weight).parts)
    found: dict[str, Callable[[], Any]] = {}
    given = x[None].clone().requires_grad_()
    for name, (format_name, parts) in stored.items():
        one = _Call(format_name, WIDTH, 2.0, len(parts), None, 0.0), (a, b, None, *parts)
        for count in (1, 3):
            what = f"{name}: {'an adapted layer' if count == 1 else 'three of one input'}"
            found[what] = partial(products, given, [one] * count)
            found[f"{what}, and backward"] = partial(
                both, partial(products, given, [one] * count), [given, a, b]
            )
    return found


def kernels_of(device: torch.device, x: Tensor) -> dict[str, Callable[[], Any]]:
    by = fused.KERNEL.on(device)
    rows = x[None].clone().requires_grad_()
    factor = torch.ones(WIDTH, device=device, dtype=torch.bfloat16)
    heads = [
        torch.randn(1, 2, TOKENS, 128, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    angles = [torch.randn(1, TOKENS, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=device)
    pattern = AttentionPattern(0.1)
    found: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
        "a norm": (
            lambda: fused.FusedNorm.apply(rows, factor, 1e-6, fused.Form.ROUNDED, by),
            [rows],
        ),
        "a SwiGLU": (lambda: fused.FusedGate.apply(rows, rows, by), [rows]),
        "rotary positions": (
            lambda: fused.FusedRotation.apply(heads[0], heads[1], *angles, by),
            heads[:2],
        ),
        "attention": (
            partial(
                packed_attention.attend_packed,
                *heads,
                starts=starts,
                longest=TOKENS,
                pattern=pattern,
            ),
            heads,
        ),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, (act, inputs) in found.items():
        calls[name] = act
        calls[f"{name}, and backward"] = partial(both, act, inputs)
    nf4 = NF4Weight.quantize(x)
    fp8 = FP8Weight.quantize(x)
    calls["nf4 dequantised"] = lambda: nf4.dequantize(torch.bfloat16)
    if fp8_products.why_not(torch.bfloat16, device) is None:
        codes = fp8.parts[0]
        rounded = fp8_products._rounded(x)
        ones = fp8_products.ones(TOKENS, device)
        calls["rounded to FP8"] = lambda: fp8_products._rounded(x)
        calls["FP8 codes transposed"] = lambda: fp8_products._transposed(codes)
        calls["a product in FP8"] = lambda: fp8_products._product(rounded, codes.t(), ones, x)
    return calls


def both(act: Callable[[], Any], inputs: list[Tensor]) -> None:
    made = act()
    made = list(made) if isinstance(made, tuple) else [made]
    torch.autograd.grad(made, inputs, [torch.empty_like(tensor) for tensor in made])
