"""Formats divide by constants as every device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.quant.division import divided
from workers.quant.weights import QUANTIZED


class Divisions(TorchDispatchMode):
    """Refuses to divide by a number, which a GPU does by multiplying with its reciprocal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::div"):
            assert isinstance(args[1], Tensor), f"divided by {args[1]}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight_class", QUANTIZED.values(), ids=QUANTIZED)
def test_no_format_divides_by_a_number(weight_class: Any) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with Divisions():
        weight_class.quantize(weight).dequantize(torch.bfloat16)


def test_quotients_are_rounded_to_the_nearest_and_keep_their_type() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(divided(numbers, 255), (numbers.double() / 255).float())
    assert divided(numbers.bfloat16(), 6).dtype == torch.bfloat16
