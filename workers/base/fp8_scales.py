"""The scales of rows of FP8 codes: as a base's files hold them, for every column, and as the formats here keep them."""

from __future__ import annotations

from torch import Tensor

from ft_service.bases.published_layouts import FP8Layout
from workers.quant.fp8_blocks import BLOCK, blocks_of


def of_columns(scales: Tensor, layout: FP8Layout, cols: int) -> Tensor:
    """The scales [rows, ..] that the files hold, as one for each of `cols` columns or one for all of them."""
    return scales if layout.width >= cols else scales.repeat_interleave(layout.width, dim=1)[:, :cols]


def as_kept(scales: Tensor, layout: FP8Layout, cols: int) -> Tensor:
    """The same as the layout's format keeps them: one a row, or one for every 128 columns."""
    if layout.by != "blocks":
        return scales
    return scales.repeat_interleave(layout.width // BLOCK, dim=1)[:, : blocks_of(cols)]
