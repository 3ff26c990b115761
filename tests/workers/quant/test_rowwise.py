"""The operations that FSDP2 and modules need of a row-quantised weight, one by one, and the refusal
of all others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workers.quant.weights import QUANTIZED

ROWS = 10
COLS = 200


@pytest.fixture(params=QUANTIZED.values())
def weight(request: pytest.FixtureRequest) -> Any:
    return request.param.quantize(
        torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    )


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(a.parts, b.parts, strict=True)
    )


def test_a_parameter_keeps_class_and_parts(weight: Any) -> None:
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    assert type(parameter) is type(weight)
    assert isinstance(parameter, nn.Parameter)
    assert same(parameter, weight)


def test_detach_shares_and_clone_copies(weight: Any) -> None:
    assert weight.detach().codes.data_ptr() == weight.codes.data_ptr()
    cloned = weight.clone()
    assert cloned.codes.data_ptr() != weight.codes.data_ptr()
    assert same(cloned, weight)


def test_empty_and_zeros_like(weight: Any) -> None:
    assert torch.empty_like(weight).shape == weight.shape
    assert not torch.zeros_like(weight).dequantize().any()
    on_meta: Any = torch.empty_like(weight, device="meta")
    assert on_meta.codes.is_meta


def test_to_changes_device_of_the_parts_and_dtype_of_the_face(weight: Any) -> None:
    assert weight.to("meta").parts[1].is_meta
    low = weight.to(torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert low.codes.dtype == weight.codes.dtype, "codes stay codes"
    assert same(low, weight)


@pytest.mark.parametrize("pieces", [1, 3, 4, 10])
def test_chunks_are_the_quantised_chunks(weight: Any, pieces: int) -> None:
    dense = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    for piece, rows in zip(torch.chunk(weight, pieces), torch.chunk(dense, pieces), strict=True):
        assert same(piece, type(weight).quantize(rows))


def test_split_along_columns_is_refused(weight: Any) -> None:
    with pytest.raises(NotImplementedError, match="split by rows"):
        torch.split(weight, 5, dim=1)


def test_padding_a_short_shard_and_cutting_it_again(weight: Any) -> None:
    """What FSDP2 does with the last shard: zeros of full height, copy, narrow to the logical rows,
    flatten; then the gather.
    """
    short = torch.chunk(weight, 3)[2]
    padded = short.new_zeros((4, COLS))
    padded.narrow(0, 0, 2).copy_(short)
    logical: Any = padded.narrow(0, 0, 2)
    assert logical.shape == (2, COLS)
    assert logical.codes.shape[0] == 4, "what is gathered keeps the padding rows"
    assert torch.equal(logical.dequantize(), short.dequantize())
    assert logical.view(-1) is not logical
    sent, metadata = logical.fsdp_pre_all_gather(None)
    made = logical.fsdp_post_all_gather(sent, metadata, torch.bfloat16)
    assert made is not None
    gathered, kept = made
    assert kept == sent
    assert gathered.dtype == torch.bfloat16
    cut: Any = torch.as_strided(gathered, (2, COLS), (COLS, 1))
    assert cut.codes.shape[0] == 2


def test_a_cut_that_does_not_start_at_the_first_row_is_refused(weight: Any) -> None:
    with pytest.raises(NotImplementedError, match="from row 3"):
        weight.narrow(0, 3, 2)


def test_a_later_gather_refills_the_same_wrapper(weight: Any) -> None:
    sent, metadata = weight.fsdp_pre_all_gather(None)
    assert weight.fsdp_post_all_gather(sent, metadata, torch.float32, out=weight) is None


def test_new_empty_of_no_rows(weight: Any) -> None:
    assert weight.new_empty((0, COLS)).dequantize().shape == (0, COLS)


def test_flatten_and_unflatten(weight: Any) -> None:
    names, meta = weight.__tensor_flatten__()
    again = type(weight).__tensor_unflatten__(
        {name: getattr(weight, name) for name in names}, meta, weight.shape, None
    )
    assert same(again, weight)


@pytest.mark.parametrize(
    "operation",
    [lambda w: w + 1, lambda w: w @ torch.ones(COLS), lambda w: w.t(), torch.linalg.norm],
)
def test_any_other_operation_is_refused_by_name(weight: Any, operation: Any) -> None:
    with pytest.raises(
        NotImplementedError,
        match=rf"{type(weight).__name__} without a name does not implement aten",
    ):
        operation(weight)


def test_a_refusal_names_the_parameter_also_where_it_is_gathered(weight: Any) -> None:
    weight.name = "model.layers.0.mlp.up_proj.weight"
    sent, metadata = weight.detach().fsdp_pre_all_gather(None)
    gathered, _ = weight.fsdp_post_all_gather(sent, metadata, torch.float32)
    for named in (weight, torch.chunk(weight, 2)[0], gathered):
        with pytest.raises(
            NotImplementedError,
            match=r"Weight model\.layers\.0\.mlp\.up_proj\.weight does not implement aten",
        ):
            _ = named + 1
