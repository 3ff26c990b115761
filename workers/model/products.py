"""The speed of this process's processor in matrix products, measured: fp32 and bf16, forward and
the input's gradient.
"""

from __future__ import annotations

import time
from functools import cache

import torch

from ft_service.host.processor import Products, processor_kind

_ROWS = 128
_WIDTH = 256
_FLOP = 2 * 2 * _ROWS * _WIDTH * _WIDTH
"""Of both products: 0.2 to 2 ms in fp32. Another size hardly changes which type is faster."""
_TIMES = 5


@cache
def products() -> Products:
    """Measure one core, once in this process: at most 0.1 s of it.

    The shortest of several times counts, in seconds of this thread, so that other processes hardly
    matter.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fp32, bf16 = (_FLOP / _seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    by_onednn = (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return Products(processor_kind(), fp32, bf16, by_onednn)


@torch.no_grad()
def _seconds(dtype: torch.dtype) -> float:
    x = torch.ones(_ROWS, _WIDTH, dtype=dtype, device="cpu")
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device="cpu")

    def measured() -> float:
        begun = time.thread_time()
        torch.matmul(torch.nn.functional.linear(x, weight), weight)
        return time.thread_time() - begun

    measured()  # finds and compiles its kernels
    return min(measured() for _ in range(_TIMES))
