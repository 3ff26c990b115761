"""Layouts of published weights, recognised by the shapes of their tensors."""

from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from workers.base.layouts import FP8Layout, fp8_layout, int4_shape, mxfp4_shape


@pytest.mark.parametrize(
    ("codes", "scales", "layout"),
    [
        ((256, 300), (), FP8Layout("tensors", 256, 300)),
        ((256, 300), (256, 1), FP8Layout("rows", 1, 300)),
        ((256, 300), (2, 3), FP8Layout("blocks", 128, 128)),
        ((4, 256, 300), (4, 2, 1), FP8Layout("tensors", 128, 300)),
    ],
)
def test_scales_of_fp8_say_what_shares_them(codes: tuple[int, ...], scales: tuple[int, ...], layout: FP8Layout) -> None:
    assert fp8_layout("w", codes, scales, (128, 128)) == layout


def test_codes_and_scales_that_do_not_belong_together_are_refused_by_name() -> None:
    assert int4_shape("w", (6, 8), (6, 2)) == (6, 64)
    assert mxfp4_shape("w", (2, 6, 3, 16), (2, 6, 3)) == (2, 6, 96)
    for read in (
        lambda: fp8_layout("w", (256, 300), (3, 3), (128, 128)),
        lambda: int4_shape("w", (6, 8), (5, 2)),
        lambda: mxfp4_shape("w", (2, 6, 3, 16), (2, 6, 2)),
    ):
        with pytest.raises(SpecError, match="tensor w is quantised in a layout that is not supported"):
            read()
