"""Reading rows of bases that are published quantised, by layout:

    bitsandbytes NF4    codes and block scales in row-major order, the scales plain or nested
                        (quantised in blocks of 256)
    FP8 by rows         e4m3 codes and one scale a row (`weight_scale`: fbgemm, compressed-tensors,
                        torchao)
    FP8 by tensors      e4m3 codes and one scale, which becomes the scale of every row
    FP8 by blocks       e4m3 codes and one scale a block, 128×128 as a rule (`weight_scale_inv`:
                        DeepSeek, Qwen), which becomes a scale of each of its rows
    NVFP4, MXFP4        codes of four bits and one scale for every 16 or 32 inputs
                        (compressed-tensors, modelopt, torchao)
    INT4 in groups      codes of four bits and one scale a group of inputs (compressed-tensors: Kimi
                        K2)
    stacks of experts   in FP8 and MXFP4 (see `workers.base.expert_stacks`)

Where the layout's rows are rows of one of our formats, `parts` gives them as they are. Elsewhere
`rows` gives the values that the base's codes represent, to be quantised again. Scales of
activations, which serve inference, are not read.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ft_service.spec import WeightFormat
from workers.base.base_tensors import Safetensors
from workers.base.expert_stacks import FP8Stack, MXFP4Stack, Stack, usable_exponents
from workers.base.layouts import (
    CODES_DTYPE,
    EXPONENTS,
    FP8_BLOCK,
    FP8_DTYPE,
    FP8_STACK_SCALE,
    KINDS,
    MXFP4_SCALES,
    NO_SCALE,
    PACKED,
    PACKED_DTYPE,
    PLAIN_DTYPES,
    SCALES,
    SIGNED_CODES,
    STATE,
    WHOLE_SCALES,
    Bitsandbytes,
    FP8Layout,
    as_kept,
    block_size,
    four_bit_layout,
    fp8_layout,
    int4_shape,
    is_companion,
    of_columns,
    quantization_of,
    refuse_what_changes_values,
    unknown_dtype,
    unknown_layout,
)
from workers.quant.nf4 import BLOCK
from workers.quant.weights import QUANTIZED

_NESTED_BLOCK = 256


class StoredWeight(Protocol):
    """One weight [rows, cols] of a base that holds it quantised."""

    layout: str
    """Name of the layout for messages."""
    shape: tuple[int, ...]
    format: WeightFormat | None
    """The format that keeps it as it is; None: the job's format is used."""
    exact: bool
    """Whether `parts` gives that format's parts; otherwise the values are quantised again."""

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The parts of rows [start, end). Only where the layout is exact."""
        ...

    def rows(self, start: int, end: int) -> Tensor:
        """The values of rows [start, end), fp32."""
        ...


class StoredBase:
    """A base's tensors by their logical names and shapes, whatever they are stored as."""

    def __init__(self, files: Safetensors, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)) -> None:
        """`block`: rows and columns that share a scale in FP8 by blocks."""
        self._files = files
        self._block = block
        self._stored: dict[str, StoredWeight | None] = {}
        self.declared = False
        """Whether config.json says that something is quantised."""

    @classmethod
    def open(cls, files: Safetensors, folder: str | Path) -> StoredBase:
        """Open a base with the quantisation that its config.json names.

        Raises SpecError for an unknown method.
        """
        quantization = quantization_of(Path(folder))
        if quantization is None:
            return cls(files)
        refuse_what_changes_values(files.names())
        base = cls(files, block_size(quantization))
        base.declared = True
        return base

    def names(self) -> list[str]:
        """The tensors but for the companions of quantised weights, such as their scales."""
        return [name for name in self._files.names() if not (self.declared and is_companion(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self.stored(name)
        return self._files.shape(name) if stored is None else stored.shape

    def by_outputs(self, name: str) -> bool:
        """Whether the files hold stacked matrices as [out, in], however the architecture's own
        parameter is laid out.
        """
        stored = self.stored(name)
        return isinstance(stored, Stack) and stored.by_outputs

    def rows(
        self, name: str, start: int, end: int, index: int | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Rows [start, end) as values: in the dtype of its file where it is plain, else exact in
        bf16 or fp32.
        """
        stored = self.stored(name)
        if isinstance(stored, Stack):
            assert index is not None, "it is a stack"
            return stored.matrix(index, transposed=transposed).rows(start, end)
        return (
            self._files.rows(name, start, end, index, transposed=transposed)
            if stored is None
            else stored.rows(start, end)
        )

    def whole(self, name: str) -> Tensor:
        """All of a small plain tensor, which may be one number."""
        return self._files.whole(name)

    def stored(self, name: str) -> StoredWeight | None:
        """Return how a tensor is quantised, None if it is plain.

        Raises SpecError, naming it, for an unknown layout.
        """
        if name not in self._stored:
            self._stored[name] = _recognise(self._files, name, self._block)
        return self._stored[name]


def _recognise(files: Safetensors, name: str, block: tuple[int, int]) -> StoredWeight | None:
    for kind in KINDS:
        if f"{name}{STATE}{kind}" in files:
            return Bitsandbytes4Bit(files, name, kind)
    dtype = files.dtype(name)
    if dtype == FP8_DTYPE:
        stack = len(files.shape(name)) == 3 and name + FP8_STACK_SCALE in files
        return FP8Stack(files, name, block) if stack else _fp8(files, name, block)
    if name + MXFP4_SCALES in files:
        return MXFP4Stack(files, name)
    if dtype == PACKED_DTYPE and name.endswith(".weight"):
        return PackedInt4(files, name)
    scale = name.removesuffix("weight") + SCALES[1]
    if scale in files and (
        dtype == CODES_DTYPE or (dtype == SIGNED_CODES and files.dtype(scale) == EXPONENTS)
    ):
        return FourBit(files, name)
    if dtype not in PLAIN_DTYPES:
        raise unknown_dtype(name, dtype)
    return None


class Bitsandbytes4Bit:
    """A `Params4bit` as `save_pretrained` writes it.

    Blocks run through the row-major weight and know no rows.
    """

    format: WeightFormat | None = "nf4_fp32"

    def __init__(self, files: Safetensors, name: str, kind: str) -> None:
        text = bytes(files.whole(f"{name}{STATE}{kind}").tolist())
        state = Bitsandbytes.read(name, kind, text, files.bytes(name))
        if state.nested_block not in (None, _NESTED_BLOCK):
            raise unknown_layout(name, f"nested statistics in blocks of {state.nested_block}")
        self._files = files
        self._name = name
        self._kind = kind
        self._block = state.block
        self._offset = state.nested_offset
        self.shape = state.shape
        self.layout = f"bitsandbytes {kind.upper()}"
        self.exact = kind == "nf4" and self._block % BLOCK == 0 and self.shape[1] % self._block == 0

    def parts(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cols = self.shape[1]
        blocks = cols // self._block
        codes = self._bytes(start * cols // 2, end * cols // 2).view(end - start, cols // 2)
        scales = self._scales(start * blocks, end * blocks).view(end - start, blocks)
        return codes, scales.repeat_interleave(self._block // BLOCK, dim=1)

    def rows(self, start: int, end: int) -> Tensor:
        rows, cols = self.shape
        if start >= end:
            return torch.empty(0, cols)
        first = start * cols // self._block
        last = -(-end * cols // self._block)
        begin = first * self._block
        stop = min(last * self._block, rows * cols)
        codes = self._bytes(begin // 2, -(-stop // 2))
        scales = self._scales(first, last)
        values = torch.ops.bitsandbytes.dequantize_4bit(
            codes.reshape(-1, 1), scales, self._block, self._kind, (stop - begin,), torch.float32
        )
        return values.reshape(-1)[start * cols - begin : end * cols - begin].view(end - start, cols)

    def _bytes(self, start: int, end: int) -> Tensor:
        """Bytes [start, end) of the codes, which may be packed into wider elements; `start` lies
        between two of these.
        """
        width = self._files.rows(self._name, 0, 0).element_size()
        codes = self._files.rows(self._name, start // width, -(-end // width))
        return codes.reshape(-1).view(torch.uint8)[: end - start]

    def _scales(self, start: int, end: int) -> Tensor:
        """The largest magnitudes of blocks [start, end), fp32."""
        scales = self._files.rows(f"{self._name}.absmax", start, end)
        if self._offset is None or start >= end:
            return scales.float()
        first = start // _NESTED_BLOCK
        nested = self._files.rows(f"{self._name}.nested_absmax", first, -(-end // _NESTED_BLOCK))
        levels = self._files.whole(f"{self._name}.nested_quant_map")
        of_block = torch.arange(start, end) // _NESTED_BLOCK - first
        return levels[scales.long()] * nested[of_block] + self._offset


def _fp8(files: Safetensors, name: str, block: tuple[int, int]) -> StoredWeight:
    module = name.removesuffix(".weight")
    scale = next((s for s in (f"{module}.{last}" for last in SCALES) if s in files), None)
    if scale is None:
        raise unknown_layout(name, NO_SCALE)
    codes = files.shape(name)
    if len(codes) != 2:
        raise unknown_layout(name, f"FP8 codes of shape {codes}")
    return FP8(files, name, scale, fp8_layout(name, codes, files.shape(scale), block))


class FP8:
    """e4m3 codes [rows, cols], and a scale for all of them, for each row or for each block."""

    def __init__(self, files: Safetensors, name: str, scale: str, layout: FP8Layout) -> None:
        rows, cols = files.shape(name)
        self.shape = (rows, cols)
        self.layout = str(layout)
        self.format: WeightFormat | None = layout.format
        self.exact = self.format is not None
        self._files = files
        self._name = name
        self._scale = scale
        self._layout = layout

    def parts(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._files.rows(self._name, start, end), as_kept(
            self._grid(start, end), self._layout, self.shape[1]
        )

    def rows(self, start: int, end: int) -> Tensor:
        return self._files.rows(self._name, start, end).float() * of_columns(
            self._grid(start, end), self._layout, self.shape[1]
        )

    def _grid(self, start: int, end: int) -> Tensor:
        """The scales of rows [start, end), fp32 [end - start, scales of a row]."""
        if self._layout.by == "tensors":
            return self._files.whole(self._scale).float().reshape(1, 1).expand(end - start, 1)
        height = self._layout.height
        first = start // height
        held = self._files.rows(self._scale, first, -(-end // height)).float()
        of_row = torch.arange(start, end) // height - first
        return (held.flatten(1) if held.ndim > 1 else held.unsqueeze(1))[of_row]


class FourBit:
    """NVFP4 or MXFP4 by compressed-tensors, modelopt or torchao: codes E2M1 [rows, cols / 2] and
    scales of blocks of a row.
    """

    exact = True

    def __init__(self, files: Safetensors, name: str) -> None:
        """Raises SpecError for codes and scales that do not belong together."""
        module = name.removesuffix("weight")
        self._files = files
        self._name = name
        self._scale = module + SCALES[1]
        self._layout = four_bit_layout(
            name, files.shape(name), files.shape(self._scale), files.dtype(self._scale)
        )
        self.format: WeightFormat | None = self._layout.format
        self.shape: tuple[int, ...] = self._layout.shape
        self.layout = self._layout.format.upper()
        self._whole = [module + scale for scale in WHOLE_SCALES if module + scale in files]
        if len(self._whole) > (self.format == "nvfp4"):
            raise unknown_layout(
                name, f"{self.layout} with the scales {' and '.join(self._whole)} of the whole"
            )

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        codes = self._files.rows(self._name, start, end).view(torch.uint8)
        scales = self._scales(start, end)
        if self.format == "mxfp4":
            return codes, usable_exponents(self._name, scales)
        if scales.float().isnan().any():
            raise unknown_layout(
                self._name, f"NVFP4 with scales in {self._scale} that are no numbers"
            )
        return codes, scales, self._of_whole.expand(end - start, 2)

    def rows(self, start: int, end: int) -> Tensor:
        weight = QUANTIZED[self._layout.format]
        return weight(
            self.parts(start, end), (end - start, self.shape[1]), torch.float32
        ).dequantize()

    def _scales(self, start: int, end: int) -> Tensor:
        if not self._layout.swizzled or start >= end:
            rows = self._files.rows(self._scale, start, end)
            return rows[:, : self.shape[1] // self._layout.block].contiguous()
        first = start // 128
        tiles = self._files.rows(self._scale, 32 * first, 32 * -(-end // 128))
        across = tiles.shape[1] // 16
        in_order = (
            tiles.view(torch.uint8)
            .reshape(-1, across, 32, 4, 4)
            .permute(0, 3, 2, 1, 4)
            .reshape(-1, across * 4)
        )
        rows = in_order[
            start - 128 * first : end - 128 * first, : self.shape[1] // self._layout.block
        ]
        return rows.contiguous().view(tiles.dtype)

    @cached_property
    def _of_whole(self) -> Tensor:
        """Factor and divisor of all scales: fp32 [1, 2]."""
        if not self._whole:
            return torch.ones(1, 2)
        (name,) = self._whole
        held = self._files.whole(name) if self._files.shape(name) in ((), (1,)) else torch.zeros(1)
        if held.dtype != torch.float32 or not (held.isfinite().all() and held > 0):
            raise unknown_layout(self._name, f"NVFP4 whose {name} is not one positive fp32 number")
        own = held.reshape(1, 1)
        one = torch.ones(1, 1)
        return torch.cat([one, own] if name.endswith(WHOLE_SCALES[-1]) else [own, one], dim=1)


class PackedInt4:
    """Codes of four bits around zero, eight in an int32, the first in its lowest bits, with one
    scale a group of inputs.
    """

    format: WeightFormat | None = None
    """None: the job's format is used."""
    exact = False

    def __init__(self, files: Safetensors, name: str) -> None:
        """Raises SpecError for codes and scales that do not belong together."""
        self._files = files
        self._name = name
        self._scale = f"{name}_scale"
        self.shape: tuple[int, ...] = int4_shape(
            name, files.shape(name), files.shape(self._scale) if self._scale in files else None
        )
        self.layout = f"INT4 in groups of {self.shape[1] // max(1, files.shape(self._scale)[1])}"

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("no format here holds them")

    def rows(self, start: int, end: int) -> Tensor:
        return from_int4(
            self._files.rows(self._name, start, end), self._files.rows(self._scale, start, end)
        )


def from_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """The values [rows, cols] fp32 of packed codes [rows, cols / 8] int32 and scales [rows,
    groups].
    """
    codes = ((packed.unsqueeze(2) >> (4 * torch.arange(PACKED, dtype=torch.int32))) & 15).flatten(
        1
    ).float() - 8
    return codes * scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


class PlainBase:
    """The tensors that a base would hold if it were saved in bf16: quantised weights by the values
    that they stand for.
    """

    def __init__(self, files: Safetensors, folder: Path) -> None:
        """Raises SpecError for a method of quantisation that is not known."""
        self._files, self._base = files, StoredBase.open(files, folder)
        self.declared = self._base.declared
        """Whether config.json says that something is quantised."""
        self._names = dict.fromkeys(self._base.names())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that transformers saves: stacks that are published transposed are [experts, in,
        out].
        """
        stored = self._base.stored(name) if self.declared else None
        if isinstance(stored, Stack) and stored.by_outputs:
            return stored.shape[0], stored.shape[2], stored.shape[1]
        return self._files.shape(name) if stored is None else stored.shape

    def dtype(self, name: str) -> str:
        return (
            "BF16"
            if self.declared and self._base.stored(name) is not None
            else self._files.dtype(name)
        )

    def mxfp4_stack(self, name: str) -> MXFP4Stack | None:
        """A stack of experts that is published in MXFP4; None: it is none."""
        stored = self._base.stored(name) if self.declared else None
        return stored if isinstance(stored, MXFP4Stack) else None

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows [start, end); of a stack, matrices."""
        stored = self._base.stored(name) if self.declared else None
        if isinstance(stored, Stack):
            matrices = torch.stack(
                [stored.matrix(index).rows(0, stored.shape[1]) for index in range(start, end)]
            )
            return matrices.mT if stored.by_outputs else matrices
        return self._base.rows(name, start, end)

    def whole(self, name: str) -> Tensor:
        """All of a tensor that is small, or is replaced."""
        stored = self._base.stored(name) if self.declared else None
        return (
            self._files.whole(name) if stored is None else self.rows(name, 0, self.shape(name)[0])
        )
