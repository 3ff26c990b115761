"""Our arithmetic on the device against the same on a processor: the storage formats, products,
experts, dropout, odd sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_report.ceilings import seconds
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context

SHAPES = ((96, 100), (300, 1000), (257, 64), (1, 128))
"""Rows and columns of weights: blocks that end inside a row, a prime, a single row."""
INPUT_ROWS = (1, 7, 130)
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Largest relative distance between two devices, by the type of the arithmetic."""
ROUNDED_OTHERWISE = 1e-3
"""Share of codes that may differ: values between two codes."""


def measure(context: Context) -> None:
    from workers.quant.weights import QUANTIZED

    device = context.place
    for name, weight_class in QUANTIZED.items():
        for shape in SHAPES[: 2 if context.tiny else None]:
            case = f"{name} {shape[0]} x {shape[1]}"
            context.rows.run(
                f"{case}: quantise, dequantise",
                lambda c=weight_class, s=shape: formats_agree(c, s, device),
            )
            for dtype in CLOSE:
                kind = str(dtype).removeprefix("torch.")
                context.rows.run(
                    f"{case}: products, {kind}",
                    lambda c=weight_class, s=shape, d=dtype: products_agree(c, s, d, device),
                )
        context.rows.run(f"{name}: experts", lambda c=weight_class: experts_agree(c, device))
    context.rows.run("bf16: experts", lambda: experts_agree(None, device))
    context.rows.run("fp8: products in FP8", lambda: products_in_fp8(device))
    context.rows.run("dropout's mask", lambda: masks_agree(device))
    side = 256 if context.tiny else 4096
    for name, weight_class in QUANTIZED.items():
        context.rows.run(
            f"{name} {side} x {side}: time", lambda c=weight_class: times(c, side, device)
        )


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = (tensor.detach().double().cpu() for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def formats_agree(
    weight_class: Any, shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    weight = drawn(*shape).bfloat16()
    here = weight_class.quantize(weight)
    there = weight_class.quantize(weight.to(device))
    differing = max(
        float((a.view(torch.uint8) != b.cpu().view(torch.uint8)).float().mean())
        for a, b in zip(here.parts, there.parts, strict=True)
    )
    moved = here.to(device)
    apart = distance(moved.dequantize(torch.float32), here.dequantize(torch.float32))
    return {
        "ok": differing <= ROUNDED_OTHERWISE and apart < 1e-6,
        "bytes_differing": differing,
        "dequantised_apart": apart,
    }


def products_agree(
    weight_class: Any, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Forward and backward for inputs of several heights; the truth is a dense product in fp64,
    with the weight as it is in the type of the arithmetic.
    """
    weight = weight_class.quantize(drawn(*shape).bfloat16())
    dense = weight.dequantize(dtype).double()
    moved = weight.to(device)
    worst = {"forward": 0.0, "backward": 0.0}
    for rows in INPUT_ROWS:
        x = drawn(rows, shape[1], seed=1).to(dtype)
        grad = drawn(rows, shape[0], seed=2).to(dtype)
        there = x.to(device).requires_grad_()
        y = moved.linear(there)
        y.backward(grad.to(device))
        assert there.grad is not None
        worst["forward"] = max(worst["forward"], distance(y, x.double() @ dense.t()))
        worst["backward"] = max(worst["backward"], distance(there.grad, grad.double() @ dense))
    return {"ok": max(worst.values()) < CLOSE[dtype], **worst}


def experts_agree(weight_class: Any, device: torch.device) -> dict[str, Any]:
    """Stacked experts, one of which no token meets, against a dense product an expert."""
    from workers.layers.experts import ExpertsLinear

    experts = 5
    rows = 80
    cols = 48
    stack = drawn(experts * rows, cols).bfloat16()
    layer: Any = ExpertsLinear(
        torch.empty(experts, rows, cols, dtype=torch.bfloat16, device="meta"), weight_class
    )
    stored: Any = stack if weight_class is None else weight_class.quantize(stack)
    layer.weight = torch.nn.Parameter(stored.to(device), requires_grad=False)
    dense = (
        (stack if weight_class is None else stored.dequantize(torch.float32))
        .double()
        .unflatten(0, (experts, rows))
    )
    counts = torch.tensor([3, 0, 17, 1, 9])
    x = drawn(30, cols, seed=1).bfloat16()
    grad = drawn(30, rows, seed=2).bfloat16()
    there = x.to(device).requires_grad_()
    y = layer(there, counts.to(device))
    y.backward(grad.to(device))
    assert there.grad is not None
    expert_of = torch.repeat_interleave(torch.arange(experts), counts)
    forward = distance(y, torch.einsum("nc,nrc->nr", x.double(), dense[expert_of]))
    backward = distance(there.grad, torch.einsum("nr,nrc->nc", grad.double(), dense[expert_of]))
    return {
        "ok": max(forward, backward) < CLOSE[torch.bfloat16],
        "forward": forward,
        "backward": backward,
    }


def products_in_fp8(device: torch.device) -> dict[str, Any]:
    """For heights that are no multiple of what the hardware likes.

    Rounding the input to FP8 alone moves a product by 3 %.
    """
    from workers.quant.fp8_products import KERNEL, why_not
    from workers.quant.weights import FP8Weight

    if reason := why_not(torch.bfloat16, device):
        raise SkippedError(reason)
    fault = KERNEL.fault(device)
    weight = FP8Weight.quantize(drawn(96, 160).to(device).bfloat16())
    dense = weight.dequantize(torch.float32).double().cpu()
    worst = 0.0
    for rows in (*INPUT_ROWS, 255, 257):
        x = drawn(rows, 160, seed=1).bfloat16().to(device).requires_grad_()
        y = weight.linear_in_fp8(x)
        grad = drawn(rows, 96, seed=2).bfloat16()
        y.backward(grad.to(device))
        assert x.grad is not None
        worst = max(
            worst,
            distance(y, x.detach().double().cpu() @ dense.t()),
            distance(x.grad, grad.double() @ dense),
        )
    return {"ok": worst < 0.06 and fault is None, "apart": worst, "kernels": fault or "are used"}


def masks_agree(device: torch.device) -> dict[str, Any]:
    from workers.layers.dropout import kept_mask, keys_from

    def mask(where: torch.device) -> Tensor:
        tokens = keys_from(11, 777, where)
        return kept_mask(tokens, torch.tensor(5, dtype=torch.int32, device=where), 333, 0.1).cpu()

    here = mask(torch.device("cpu"))
    there = mask(device)
    return {"ok": bool(torch.equal(here, there)), "kept": float(here.float().mean())}


def times(weight_class: Any, side: int, device: torch.device) -> dict[str, Any]:
    """Compared with a dense product of the same shape, with 4,096 rows of input (64 in the smallest
    form).
    """
    weight = weight_class.quantize(torch.randn(side, side, device=device).bfloat16())
    x = torch.randn(64 if side < 1024 else 4096, side, device=device, dtype=torch.bfloat16)
    dense = weight.dequantize(torch.bfloat16)
    acts: Iterator[tuple[str, Callable[[], Tensor]]] = iter(
        (
            ("dequantise_us", lambda: weight.dequantize(torch.bfloat16)),
            ("product_us", lambda: weight.linear(x)),
            ("dense_product_us", lambda: x @ dense.t()),
        )
    )
    with torch.no_grad():
        return {name: 1e6 * seconds(act) for name, act in acts}
