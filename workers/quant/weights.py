"""The storage formats as weights: the parts of each format in a `RowQuantized`, by the names that
users write.
"""

from __future__ import annotations

from torch import Tensor

from ft_service.spec import WeightFormat
from workers.quant import fp8, fp8_blocks, mxfp4, nf4, nf4_fp32, nvfp4
from workers.quant.fp8_products import InFP8
from workers.quant.frozen_linear import Numerics, frozen_linear
from workers.quant.rowwise import RowQuantized


class NF4Weight(RowQuantized):
    """A frozen weight [rows, cols] in NF4 (see `workers.quant.nf4` for the parts)."""

    PARTS = ("codes", "scales", "row_max")
    NUMERICS = Numerics.register("nf4", nf4.NF4Parts, nf4)
    codes: Tensor
    scales: Tensor
    row_max: Tensor


class FP8Weight(RowQuantized):
    """A frozen weight [rows, cols] in FP8 (see `workers.quant.fp8` for the parts)."""

    PARTS = ("codes", "scale")
    NUMERICS = Numerics.register("fp8", fp8.FP8Parts, fp8)
    IN_FP8 = InFP8.register("fp8_products", fp8.FP8Parts, fp8)
    codes: Tensor
    scale: Tensor

    def linear_in_fp8(self, x: Tensor) -> Tensor:
        """`linear`, with the product itself in FP8 (see `workers.quant.fp8_products`)."""
        return frozen_linear(x, self.parts, self.IN_FP8.name, self.shape[1])


class FP8BlocksWeight(RowQuantized):
    """A frozen weight [rows, cols] in FP8 with scales of blocks (see `workers.quant.fp8_blocks` for
    the parts).
    """

    PARTS = ("codes", "scales")
    NUMERICS = Numerics.register("fp8_blocks", fp8_blocks.FP8BlocksParts, fp8_blocks)
    codes: Tensor
    scales: Tensor


class NF4FP32Weight(RowQuantized):
    """A frozen weight [rows, cols] in NF4 with fp32 block scales (see `workers.quant.nf4_fp32` for
    the parts).
    """

    PARTS = ("codes", "block_max")
    NUMERICS = Numerics.register("nf4_fp32", nf4_fp32.NF4FP32Parts, nf4_fp32)
    codes: Tensor
    block_max: Tensor


class NVFP4Weight(RowQuantized):
    """A frozen weight [rows, cols] in NVFP4 (see `workers.quant.nvfp4` for the parts)."""

    PARTS = ("codes", "scales", "whole")
    NUMERICS = Numerics.register("nvfp4", nvfp4.NVFP4Parts, nvfp4)
    codes: Tensor
    scales: Tensor
    whole: Tensor


class MXFP4Weight(RowQuantized):
    """A frozen weight [rows, cols] in MXFP4 (see `workers.quant.mxfp4` for the parts)."""

    PARTS = ("codes", "scales")
    NUMERICS = Numerics.register("mxfp4", mxfp4.MXFP4Parts, mxfp4)
    codes: Tensor
    scales: Tensor


QUANTIZED: dict[WeightFormat, type[RowQuantized]] = {
    "nf4": NF4Weight,
    "fp8": FP8Weight,
    "nf4_fp32": NF4FP32Weight,
    "fp8_blocks": FP8BlocksWeight,
    "nvfp4": NVFP4Weight,
    "mxfp4": MXFP4Weight,
}
"""Format name → the weight class that stores it.

"bf16" is not here: it is stored as a plain tensor.
"""

VERSIONS: dict[str, int] = {
    "nf4": 1,
    "fp8": 2,
    "nf4_fp32": 1,
    "fp8_blocks": 1,
    "nvfp4": 1,
    "mxfp4": 1,
}
"""Storage format → version of its arithmetic.

It counts up when an equal weight would be stored as other values.
"""
