"""Matrix products in FP8, on GPUs that multiply it: the other factor is rounded to FP8 row by row
on the way in.

With a weight's codes Q [rows, cols] and scales s [rows, 1], W = s ∘ Q:

    forward     x Wᵀ = (x Qᵀ) ∘ sᵀ        the weight's scales multiply the columns of the result
    backward    g W  = (g ∘ sᵀ) Q         they lie along the sum, and are folded into g before that
    is rounded

A weight's numbers are divided by their scale, those of the other factor multiplied with its
reciprocal: GPUs divide more slowly than they read and write. One of some seven thousand codes
becomes its neighbour by it, and the error is the same.

Both directions read the codes as they are stored; no dequantised weight is ever made. The backward
makes one transposed copy of the codes, since the hardware wants both factors contiguous along the
sum. Rounding and transposing are kernels of our own where Triton is there (`fp8_kernels`), and
elsewhere PyTorch's operations, which take as long as the products gain.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ft_service.kernel_limits import next_power
from workers.quant import fp8, gpu_kernels
from workers.quant.fp8 import FP8Parts
from workers.quant.frozen_linear import Numerics, reshaped

CAPABILITY = (8, 9)
"""The lowest compute capability of CUDA devices that multiply FP8."""
OFF_STREAM = (CAPABILITY, (2, 12))
"""On GPUs of this compute capability the product is not on the current stream in PyTorch before
this release, and so reads what is not yet written (pytorch#177651).
"""

BLOCK_ROWS = 256
"""Rows are filled up to a multiple of this.

For every number of rows that it has not met, the library looks for its fastest kernel, which took
an H200's host 165 microseconds instead of 44, and micro-batches of packed samples differ in theirs.
Some kernels also read scales in such blocks, past the last row (pytorch#133334).
"""


class InFP8(Numerics):
    """The arithmetic of `workers.quant.fp8`'s storage, multiplied without dequantising. x and grad
    are bf16.
    """

    def multiplied(self, parts: Sequence[Tensor], cols: int, dtype: torch.dtype) -> None:
        return None

    def linear(self, x: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        codes, scale = parts
        return _product(_rounded_input(x), codes.t(), scale.t(), x)

    def linear_grad(self, grad: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        codes, scale = parts
        flat = grad.reshape(-1, grad.shape[-1])
        folded = _rounded(flat, scale)
        by_columns = _transposed(codes).t()
        return _product(folded, by_columns, ones(cols, grad.device), grad)


@functools.lru_cache(maxsize=64)
def ones(cols: int, device: torch.device) -> Tensor:
    """Scales of columns that are not scaled, fp32 [1, cols]."""
    return torch.ones(1, cols, device=device)


class _LastInput(threading.local):
    """The last input that was rounded: q, k and v have the same one, as have gate and up.

    It is known by the very tensor and its version, and let go when that tensor is: nothing is kept
    for the sake of it.
    """

    tensor: weakref.ref[Tensor] | None = None
    version = -1
    parts: FP8Parts | None = None

    def find(self, x: Tensor) -> FP8Parts | None:
        known = self.tensor is not None and self.tensor() is x and self.version == x._version
        return self.parts if known else None

    def keep(self, x: Tensor, parts: FP8Parts) -> None:
        self.tensor = weakref.ref(x, self._forget)
        self.version = x._version
        self.parts = parts

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if reference is self.tensor:
            self.tensor = None
            self.parts = None


_last_input = _LastInput()


def _rounded_input(x: Tensor) -> FP8Parts:
    """`_rounded` of x [.., cols], once for all layers that have the same input."""
    if _inside_operator() or x.is_inference():
        return _rounded(x.reshape(-1, x.shape[-1]))
    parts = _last_input.find(x)
    if parts is None:
        parts = _rounded(x.reshape(-1, x.shape[-1]))
        _last_input.keep(x, parts)
    return parts


def _inside_operator() -> bool:
    """Whether this runs as a registered operator, below autograd.

    Compiled code calls those with buffers that it uses again for other values, which neither the
    tensor nor its version tells.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(
        torch._C.DispatchKey.AutogradFunctionality
    )


def _compare(kernels: ModuleType, device: torch.device) -> None:
    """Raise AssertionError if kernels round or turn other than plain operations on a processor, bit
    for bit.
    """
    x = torch.linspace(-3, 5, 3 * 128).view(3, 128).bfloat16()
    for factors in (None, torch.linspace(0.5, 2, 128).view(128, 1)):
        expected = _rounded_by_parts(x, factors)
        found = _rounded_by_kernel(
            kernels, x.to(device), None if factors is None else factors.to(device)
        )
        assert torch.equal(found.scale.cpu(), expected.scale), "it gives other scales"
        found, expected = (
            parts.codes[: len(x)].view(torch.uint8).cpu() for parts in (found, expected)
        )
        assert torch.equal(found, expected), "it gives other codes"
    codes = fp8.quantize(x).codes
    turned = kernels.transposed(codes.to(device))
    assert torch.equal(turned.view(torch.uint8).cpu(), codes.t().view(torch.uint8)), (
        "it turns codes otherwise"
    )


KERNEL = gpu_kernels.CheckedKernel("workers.quant.fp8_kernels", _compare)


def _rounded(x: Tensor, factors: Tensor | None = None) -> FP8Parts:
    """x [rows, cols] rounded to FP8 row by row, after each column is multiplied by its factor
    [cols, 1], if there are any. Rows that fill them up have a scale of zero, and any codes.
    """
    kernels = KERNEL.on(x.device) if x.dtype == torch.bfloat16 else None
    return (
        _rounded_by_parts(x, factors)
        if kernels is None
        else _rounded_by_kernel(kernels, x, factors)
    )


def _rounded_by_parts(x: Tensor, factors: Tensor | None) -> FP8Parts:
    if factors is not None:
        x = torch.mul(x, factors.t(), out=torch.empty_like(x))  # in fp32, rounded once to x's dtype
    rows = x.shape[0]
    codes, scales = _unfilled(x)
    scales.zero_()
    if rows:
        scale = scales[:rows].copy_(fp8.scales_of(x))
        for part, some, inverse in fp8.in_cache(codes[:rows], x, scale.reciprocal()):
            torch.mul(some, inverse, out=part)  # in fp32, rounded once
    return _as_filled(codes, scales)


def _rounded_by_kernel(kernels: ModuleType, x: Tensor, factors: Tensor | None) -> FP8Parts:
    codes, scales = _unfilled(x)
    kernels.quantise_rows(x, factors, codes, scales)
    return _as_filled(codes, scales)


def _unfilled(x: Tensor) -> FP8Parts:
    """Uninitialised storage for the rows of x [rows, cols], filled up; of scales whole blocks."""
    rows = filled_up(x.shape[0])
    codes = torch.empty(rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    return FP8Parts(codes, torch.empty(-(-rows // BLOCK_ROWS) * BLOCK_ROWS, 1, device=x.device))


def _as_filled(codes: Tensor, scales: Tensor) -> FP8Parts:
    rows = codes.shape[0]
    return FP8Parts(codes, scales if scales.shape[0] == rows else scales[:rows])


def filled_up(rows: int) -> int:
    """Rows of a product for so many: whole blocks, or below one the next power of two."""
    return next_power(rows) if 0 < rows < BLOCK_ROWS else -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def _transposed(codes: Tensor) -> Tensor:
    """[rows, cols] → [cols, rows], contiguous."""
    kernels = KERNEL.on(codes.device)
    return codes.t().contiguous() if kernels is None else kernels.transposed(codes)


def why_not(compute: torch.dtype, device: torch.device) -> str | None:
    """Why a device cannot multiply in FP8 for a job that computes in `compute`. None: it can."""
    if compute != torch.bfloat16:
        return f"the job computes in {str(compute).removeprefix('torch.')}"
    if device.type != "cuda":
        return "processors do not multiply FP8"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, below "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}"
        )
    if torch.version.hip is not None:
        return "AMD's GPUs are not known to multiply FP8 in the form that it is stored in"
    affected, mended = OFF_STREAM
    if capability == affected and _release(torch.__version__) < mended:
        return (
            f"PyTorch {torch.__version__} multiplies FP8 wrongly on GPUs of compute capability "
            f"{affected[0]}.{affected[1]} "
            f"(pytorch#177651); {mended[0]}.{mended[1]} does not"
        )
    return None


def _release(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as 2.11.0+cu130."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _product(x: FP8Parts, codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """x, rounded from rows of `like` [.., n], times codes [n, m], whose columns are contiguous,
    with a scale a column [1, m] → [.., m] in the dtype of `like`.

    Tensor cores add up with fewer bits, and take 5 to 13 % less time for it. On an H200 the results
    of 8,192 rows with outliers times weights of an 8B model's sizes were 0.1 to 2.3 % farther from
    exact ones than with all bits: rounding costs far more.
    """
    shape = *like.shape[:-1], codes.shape[1]
    if not x.codes.shape[0]:
        return like.new_empty(shape)
    y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  its public successor is newer than torch 2.11
        x.codes, codes, x.scale, scale.contiguous(), out_dtype=like.dtype, use_fast_accum=True
    )
    rows = like.numel() // like.shape[-1]
    return reshaped(y if rows == y.shape[0] else y.resize_(rows, y.shape[1]), *shape)
