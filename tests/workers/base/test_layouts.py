"""Layouts of published weights, recognised by the shapes of their tensors."""

from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from workers.base.layouts import FP8Layout, announced_formats, fp8_layout, int4_shape, mxfp4_shape


@pytest.mark.parametrize(
    ("codes", "scales", "layout"),
    [
        ((256, 300), (), FP8Layout("tensors", 256, 300)),
        ((256, 300), (256, 1), FP8Layout("rows", 1, 300)),
        ((256, 300), (2, 3), FP8Layout("blocks", 128, 128)),
        ((4, 256, 300), (4, 2, 1), FP8Layout("tensors", 128, 300)),
    ],
)
def test_scales_of_fp8_say_what_shares_them(
    codes: tuple[int, ...], scales: tuple[int, ...], layout: FP8Layout
) -> None:
    assert fp8_layout("w", codes, scales, (128, 128)) == layout


def test_names_in_an_index_and_config_json_say_what_the_codes_are() -> None:
    """Of DeepSeek V4: FP8 by blocks, but for routed experts."""
    held = [
        "a.q_proj.weight",
        "a.q_proj.scale",
        "m.experts.0.w1.weight",
        "m.experts.0.w1.scale",
        "a.hc.scale",
    ]
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    expected = {"a.q_proj.weight": "fp8_blocks", "m.experts.0.w1.weight": "mxfp4"}
    assert announced_formats(held, {**section, "expert_dtype": "fp4"}) == expected
    assert set(announced_formats(held, section).values()) == {"fp8_blocks"}


def test_codes_and_scales_that_do_not_belong_together_are_refused_by_name() -> None:
    assert int4_shape("w", (6, 8), (6, 2)) == (6, 64)
    assert mxfp4_shape("w", (2, 6, 3, 16), (2, 6, 3)) == (2, 6, 96)
    for read in (
        lambda: fp8_layout("w", (256, 300), (3, 3), (128, 128)),
        lambda: int4_shape("w", (6, 8), (5, 2)),
        lambda: mxfp4_shape("w", (2, 6, 3, 16), (2, 6, 2)),
    ):
        with pytest.raises(
            SpecError, match="tensor w is quantised in a layout that is not supported"
        ):
            read()
