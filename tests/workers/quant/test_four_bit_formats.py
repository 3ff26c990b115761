"""NVFP4 and MXFP4: values as torchao and compressed-tensors decode them, bit by bit; rows
independent; bytes; errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from torch import Tensor

from ft_service.spec import FORMATS
from workers.quant import e2m1, mxfp4, nf4, nvfp4
from workers.quant.mxfp4 import MXFP4Parts
from workers.quant.nvfp4 import NVFP4Parts

FOUR_BITS: list[Any] = [nvfp4, mxfp4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the last bit, the sign of zeros too."""
    size = {2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    return ours.dtype == theirs.dtype and torch.equal(
        ours.contiguous().view(size), theirs.contiguous().view(size)
    )


def weight_of(rows: int, cols: int) -> Tensor:
    random = torch.Generator().manual_seed(rows + cols)
    return torch.randn(rows, cols, generator=random) * torch.logspace(-6, 2, rows).unsqueeze(1)


def test_every_byte_is_the_two_values_of_compressed_tensors_and_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    ours = e2m1.decode(codes, torch.ones(1, 1), 512, 512, torch.float32)
    assert same(ours, unpack_fp4_from_uint8(codes, 1, 512, dtype=torch.float32))
    assert torch.equal(e2m1.encode(ours), codes)
    assert torch.equal(e2m1.encode(ours), pack_fp4_to_uint8(ours))


def test_values_halfway_go_to_the_even_code_and_large_ones_to_six() -> None:
    halfway = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0]])
    near = e2m1.decode(
        e2m1.encode(torch.cat([halfway, -halfway])), torch.ones(2, 1), 8, 8, torch.float32
    )
    assert near[0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert torch.equal(near[1], -near[0])


def test_the_nearest_values_by_arithmetic_are_those_of_the_codes() -> None:
    values = torch.arange(-600, 601).div(100)[None, :-1]
    around = torch.tensor(e2m1._LAST_BELOW)
    borders = torch.cat([torch.nextafter(around, around + side) for side in (-1, 0, 1)])
    values = torch.cat([values, torch.cat([borders, -borders])[None]], dim=1)
    cols = values.shape[1]
    by_codes = e2m1.decode(e2m1.encode(values), torch.ones(1, 1), cols, cols, torch.float32)
    near = e2m1.nearest_(values.clone())
    assert torch.equal(near, by_codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchao_decodes_the_same_values(dtype: torch.dtype) -> None:
    tensors = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = weight_of(40, 320)
    factor = tensors.per_tensor_amax_to_scale(weight.abs().max())
    theirs = tensors.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=factor)
    whole = torch.stack([factor, torch.ones(())]).expand(40, 2)
    assert same(
        nvfp4.dequantize(NVFP4Parts(theirs.qdata, theirs.scale, whole), 320, dtype),
        theirs.dequantize(dtype),
    )
    theirs = mx.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    parts = MXFP4Parts(theirs.qdata.view(torch.uint8), theirs.scale.view(torch.uint8))
    assert same(mxfp4.dequantize(parts, 320, dtype), theirs.dequantize(dtype))


@pytest.mark.parametrize("numerics", FOUR_BITS)
@pytest.mark.parametrize("cols", [320, 100, 3])
def test_quantising_rows_is_taking_rows_of_the_quantised(numerics: Any, cols: int) -> None:
    weight = weight_of(13, cols)
    weight[4] = 0
    whole = numerics.quantize(weight)
    planned = numerics.empty_parts(13, cols, "cpu")
    assert [(p.shape, p.dtype) for p in whole] == [(p.shape, p.dtype) for p in planned]
    values = numerics.dequantize(whole, cols, torch.float32)
    assert values.shape == weight.shape
    assert not values[4].any()
    for start, end in [(0, 5), (5, 10), (10, 13), (4, 4)]:
        for part, rows in zip(numerics.quantize(weight[start:end]), whole, strict=True):
            assert torch.equal(part.view(torch.uint8), rows[start:end].view(torch.uint8))
        some = type(whole)(*(part[start:end] for part in whole))
        assert same(numerics.dequantize(some, cols, torch.float32), values[start:end])


@pytest.mark.parametrize(("numerics", "a_row"), [(nvfp4, 2048 + 256 + 8), (mxfp4, 2048 + 128)])
def test_bytes_of_a_row(numerics: Any, a_row: int) -> None:
    assert sum(part.nbytes for part in numerics.quantize(torch.randn(3, 4096))) == 3 * a_row
    assert FORMATS[numerics.__name__.rpartition(".")[2]].bytes_of_row(4096) == a_row


def test_the_error_of_normally_distributed_weights() -> None:
    """NVFP4's is that of NF4, within 5 %; MXFP4's, with powers of two as scales, a quarter more."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    error: dict[str, float] = {}
    for numerics in (nf4, *FOUR_BITS):
        back = numerics.dequantize(numerics.quantize(weight), 4096, torch.float32)
        error[numerics.__name__.rpartition(".")[2]] = float((back - weight).norm() / weight.norm())
    assert error["nvfp4"] < 1.05 * error["nf4"]
    assert error["nf4"] < error["mxfp4"] < 1.3 * error["nf4"]
