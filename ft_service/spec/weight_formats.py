"""The storage formats of frozen weights: what each holds, in one table that the plan, the rules and
the workers read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["bf16", "fp8", "nf4", "nf4_fp32", "fp8_blocks", "nvfp4", "mxfp4"]
"""nf4_fp32: NF4 with fp32 block scales, which keeps bases published in bitsandbytes NF4 without a
loss. fp8_blocks: FP8 with a scale for every 128 columns of a row instead of one per row, which
keeps bases published in FP8 by blocks. nvfp4 and mxfp4: E2M1 codes with a scale for every 16 or 32
columns, which keep bases published in NVFP4 or MXFP4.
"""

AS_PUBLISHED = "as_published"
"""In place of a format: the one that holds a weight as the base is published; bf16 for those
published plain, or in a layout that no format holds.
"""
FormatChoice = WeightFormat | Literal["as_published"]

ServedAs = Literal["int4_g128", "int4_g64", "int4_g32", "fp8", "nvfp4", "mxfp4", "int8", "8da4w"]
"""A form in which a merged model is served, and for which an adapter can be trained: INT4 with a
scale for every 128, 64 or 32 columns of a row, FP8 or INT8 with one for each row, NVFP4, MXFP4, or
8da4w: INT4 by 32 columns whose inputs are rounded to INT8, token by token.
"""
Merged = Literal["bf16", "fp8", "int4", "nvfp4", "mxfp4"]
"""What `ft merge` writes: the values of its --to."""


@dataclass(frozen=True)
class StorageFormat:
    """What a format stores of a row.

    All formats are row-aligned: rows are independent of each other.
    """

    code_bits: int
    """Bits of a weight's own code."""
    block: int = 0
    """Columns that share a scale; 0: those of the row have one, or none."""
    block_bytes: int = 0
    """Bytes of a block's scale."""
    row_bytes: int = 0
    """Bytes of what a row has once."""
    kept_by: frozenset[FormatChoice] | None = None
    """Values of `precision` that keep a weight published in this format; others convert it.

    None: all keep it.
    """

    def bytes_of_row(self, cols: int) -> int:
        """Bytes of a row of `cols` columns. Codes smaller than a byte fill whole blocks."""
        blocks = -(-cols // self.block) if self.block else 0
        codes = blocks * self.block if self.code_bits < 8 else cols
        return codes * self.code_bits // 8 + blocks * self.block_bytes + self.row_bytes


FORMATS: dict[WeightFormat, StorageFormat] = {
    "bf16": StorageFormat(16),
    "fp8": StorageFormat(8, row_bytes=4),
    "nf4": StorageFormat(4, block=64, block_bytes=1, row_bytes=4),
    "nf4_fp32": StorageFormat(4, block=64, block_bytes=4),
    "fp8_blocks": StorageFormat(
        8, block=128, block_bytes=4, kept_by=frozenset({"fp8", "fp8_blocks", AS_PUBLISHED})
    ),
    "nvfp4": StorageFormat(
        4, block=16, block_bytes=1, row_bytes=8, kept_by=frozenset({"nvfp4", AS_PUBLISHED})
    ),
    "mxfp4": StorageFormat(4, block=32, block_bytes=1, kept_by=frozenset({"mxfp4", AS_PUBLISHED})),
}
"""By the names that users write.

Plain weights of other dtypes than bf16 have as many bits as these.
"""


def keeps(choice: FormatChoice, published: WeightFormat) -> bool:
    """Return whether a weight published in a format stays in it where `precision` says `choice`."""
    kept_by = FORMATS[published].kept_by
    return kept_by is None or choice in kept_by


@dataclass(frozen=True)
class ServedForm:
    """How a `ServedAs` is exported."""

    exported_as: str
    """The value of `ft export --format`."""
    group: int = 0
    """Columns that share a scale; 0: those of the row."""
    merged_to: Merged | None = None
    """What `ft merge --to` calls it; None: torchao writes it, as an export alone."""
    rounds_inputs: bool = False
    """Whether inputs of layers are rounded too."""

    @property
    def how(self) -> str:
        """The commands that write it, for messages."""
        exported = f"ft export --format {self.exported_as}"
        return (
            exported if self.merged_to is None else f"ft merge --to {self.merged_to}, or {exported}"
        )


SERVED_FORMS: dict[ServedAs, ServedForm] = {
    "int4_g128": ServedForm("merged-int4", 128, "int4"),
    "int4_g64": ServedForm("merged-int4", 64, "int4"),
    "int4_g32": ServedForm("merged-int4", 32, "int4"),
    "fp8": ServedForm("merged-fp8", merged_to="fp8"),
    "nvfp4": ServedForm("merged-nvfp4", FORMATS["nvfp4"].block, "nvfp4"),
    "mxfp4": ServedForm("merged-mxfp4", FORMATS["mxfp4"].block, "mxfp4"),
    "int8": ServedForm("torchao-int8"),
    "8da4w": ServedForm("torchao-8da4w", 32, rounds_inputs=True),
}
