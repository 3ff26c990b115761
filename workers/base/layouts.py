"""The layouts of bases that are published quantised, and how their tensors are recognised.

bitsandbytes 4-bit   codes in `X.weight`, statistics in `X.weight.*`; the logical shape stands in
the bytes of
                     `X.weight.quant_state.bitsandbytes__nf4` (or fp4), which are JSON
FP8                  e4m3 codes in `X.weight` of the logical shape, scales in `X.weight_scale` or
`X.weight_scale_inv`;
                     torchao writes the same tensors as `X._weight_qdata` and `X._weight_scale`;
                     stacks of experts have no `.weight` in their names, and scales of each matrix
                     in `X_scale_inv` [experts, ..]; DeepSeek V4 has the scales in `X.scale`,
                     Mistral in `X.qscale_weight`, modelopt those of blocks as [rows, 1, cols, 1]
INT4                 eight codes an int32 in `X.weight_packed` [out, in / 8], scales of groups along
the inputs in
                     `X.weight_scale` [out, groups]
NVFP4                two codes a byte [out, in / 2] in `X.weight_packed` (compressed-tensors),
`X.weight` (modelopt) or
                     `X._weight_qdata` (torchao); e4m3 scales [out, in / 16] in `X.weight_scale`,
                     `X._weight_scale`; one of the whole, which divides these in
                     `X.weight_global_scale` and multiplies them in `X.weight_scale_2` and
                     `X._weight_per_tensor_scale`
MXFP4                the same, with exponents of two as scales [out, in / 32] and nothing of the
whole; stacks of experts
                     (gpt-oss): codes in `X_blocks` [experts, out, in / 32, 16], exponents in
                     `X_scales`; DeepSeek V4's
                     experts: codes in `X.weight`, exponents in `X.scale`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ft_service.bases.base_files import open_base_file, read_config
from ft_service.errors import SpecError
from ft_service.spec import WeightFormat
from workers.quant import mxfp4, nvfp4
from workers.quant.fp8_blocks import BLOCK, blocks_of

TORCHAO = "torchao"
MXFP4 = "mxfp4"
METHODS = ("bitsandbytes", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", TORCHAO, MXFP4)
"""Values of `quantization_config.quant_method` whose layouts may be among ours; the tensors
themselves decide.
"""
_BY_COLUMNS = ("gptq", "awq")
"""Values whose layouts keep eight outputs or eight inputs of several groups in one number."""
_CARD_BYTES = 65536
_MADE_FROM = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]{1,96}/[\w.-]{1,96})", re.M)
"""In the head of a model card."""
_METHOD_IN_NAME = re.compile(r"[-_.](?:gptq|awq)", re.I)
STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
SCALES = ("weight_scale_inv", "weight_scale")
NO_SCALE = "there is no weight_scale, weight_scale_inv, scale or qscale_weight for the FP8 codes"
_SCALES_ELSEWHERE = {"scale": SCALES[0], "qscale_weight": SCALES[0], "qscale_act": "input_scale"}
"""Last part of a name that DeepSeek V4 and Mistral give a scale of codes in FP8 → the one under
which it is known here, as transformers renames them.
"""
FP8_DTYPE = "F8_E4M3"
E5M2 = "F8_E5M2"
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64", "I64", "BOOL")
"""Integers are tables, such as those from a token to its experts, and stay as they are."""
LARGEST_SIZE = 2**31
"""Upper bound of a weight's dimensions."""
_TORCHAO_KINDS = (
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "NVFP4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "MXDynamicActivationMXWeightConfig",
)
"""What torchao calls the ways of using weights in FP8, NVFP4 and MXFP4; those of one format are
stored alike.
"""
_TORCHAO_NAME = re.compile(r"(.*\.)_weight_(qdata|scale|per_tensor_scale|act_per_tensor_scale)")
_FOUR_BIT = frozenset(
    {"nvfp4", "w4a16_nvfp4", "mxfp4", "w4a16_mxfp4", "nvfp4-pack-quantized", "mxfp4-pack-quantized"}
)
_OTHER_FORMAT = re.compile(
    r"nvfp4|mxfp[46]|int-quantized|marlin|mxfp8|w4a8|w4a16|int4|int8|awq|gptq", re.I
)
"""Formats that modelopt's `quant_algo` or compressed-tensors' `format` may name, and that are not
supported.
"""
FP8_STACK_SCALE = "_scale_inv"
FP8_BLOCK = 128
"""Rows, and columns, that share a scale in FP8 by blocks where config.json does not say; of the
format in which such weights are kept, columns.
"""
PACKED_DTYPE = "I32"
PACKED = 8
"""dtype of packed INT4 codes, and the number of codes that one of its numbers holds."""
_PACKED_CODES = "_packed"
WHOLE_SCALES = ("weight_scale_2", "weight_per_tensor_scale", "weight_global_scale")
"""Scales of a whole weight in NVFP4; the last one divides."""
CODES_DTYPE = "U8"
"""dtype of codes of four bits, two in a byte."""
_OF_EXPERTS = "expert_dtype"
"""Key by which DeepSeek V4 says, beside or in its quantization_config, that the codes of experts
have four bits.
"""
SIGNED_CODES = "I8"
"""The same where files call these bytes integers with a sign (DeepSeek V4)."""
EXPONENTS = "F8_E8M0"
MXFP4_SCALES = "_scales"
MXFP4_CODES = "_blocks"
_MXFP4_WIDTH = 16
_COMPANION = re.compile(
    r"\.weight\.|[._](weight|input|output|activation|kv|[qkv])_scale(_inv)?$|experts\.\w+_(scales|scale_inv)$|\.weight_shape$"
    r"|[._](weight_scale_2|(weight|input)_global_scale|weight(_act)?_per_tensor_scale)$"
)
_CHANGES_VALUES = {
    "pre_quant_scale": "a factor of the layer's inputs",
    "weight_zero_point": "zero points of the codes",
    "weight_g_idx": "an order of the inputs",
}
"""Last part of a tensor's name → what it says; without it, codes and scales stand for other
values.
"""


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantisation that a base's config.json names, None if it names none.

    Raises SpecError for an unknown method.
    """
    config = read_config(folder)
    inner = config.get("text_config")
    section = config.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, Mapping) else None
    )
    if section is None:
        return None
    method = _method_of(section) if isinstance(section, Mapping) else section
    named = _unreadable_format(section) if isinstance(section, Mapping) else None
    if named is not None:
        raise _unknown_method(named)
    if method in _BY_COLUMNS:
        raise _unknown_method(f"{method}, whose codes are packed across rows", _original_of(folder))
    if method not in METHODS or section.get("load_in_8bit") or section.get("_load_in_8bit"):
        raise _unknown_method("bitsandbytes in 8 bits" if method == "bitsandbytes" else method)
    of_torchao = _torchao_kinds(section) if method == TORCHAO else []
    if method == TORCHAO and (not of_torchao or not set(of_torchao) <= set(_TORCHAO_KINDS)):
        raise _unknown_method(f"torchao as {', '.join(of_torchao) or 'it does not say what'}")
    if section.get("format") == "pack-quantized":
        _require_int4(section)
    if section.get("transform_config"):
        raise _unknown_method(
            "compressed-tensors with a transform_config, whose rotations of weights and inputs "
            "are not applied"
        )
    return section if _OF_EXPERTS not in config else {_OF_EXPERTS: config[_OF_EXPERTS], **section}


def _method_of(section: Mapping[str, Any]) -> object:
    """The method that a section names; of one that only says by which of modelopt's algorithms
    (`quant_algo`), modelopt.
    """
    method = section.get("quant_method")
    return "modelopt" if method is None and isinstance(section.get("quant_algo"), str) else method


def _unreadable_format(section: Mapping[str, Any]) -> str | None:
    """Return the name of an unsupported format, such as NVFP4, wherever a section names it; None if
    it names none.
    """
    for key in ("quant_algo", "format"):
        said = section.get(key)
        if isinstance(said, str) and said.lower() not in _FOUR_BIT and _OTHER_FORMAT.search(said):
            return said.upper().removesuffix("-PACK-QUANTIZED")
    return None


def _require_int4(section: Mapping[str, Any]) -> None:
    """Raises SpecError where codes are packed that are no integers of four bits around zero, in the
    order of the inputs.
    """
    for weights in _weights_of_groups(section):
        given = {key: weights.get(key) for key in ("num_bits", "type", "symmetric", "actorder")}
        if given not in (
            {"num_bits": 4, "type": "int", "symmetric": True, "actorder": order}
            for order in (None, "weight")
        ):
            raise _unknown_method(f"compressed-tensors, packed, as {str(given)[:200]}")


def _weights_of_groups(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a section of compressed-tensors says about weights, group by group."""
    groups = section.get("config_groups")
    values = groups.values() if isinstance(groups, Mapping) else []
    weights = [group.get("weights") for group in values if isinstance(group, Mapping)]
    return [section for section in weights if isinstance(section, Mapping)]


def block_size(section: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in FP8 by blocks."""
    return declared_block(section) or (FP8_BLOCK, FP8_BLOCK)


def declared_block(section: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as config.json says; None if it does not."""
    given = [
        section.get("weight_block_size"),
        *(weights.get("block_structure") for weights in _weights_of_groups(section)),
    ]
    block = next((size for size in given if size), None)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        return None
    return block[0], block[1]


def _original_of(folder: Path) -> str:
    """The release that a quantised one was made from, by its model card or else by its folder's
    name; empty: not known.
    """
    try:
        with open_base_file(folder / "README.md") as file:
            card = file.read(_CARD_BYTES).decode(errors="replace")
    except (OSError, SpecError):
        card = ""
    named = _MADE_FROM.search(card)
    if named:
        return named[1]
    name, *method = _METHOD_IN_NAME.split(folder.name)
    return name if method else ""


def _unknown_method(shown: object, original: str = "") -> SpecError:
    instead = (
        f" Take the release in bf16 that it was made from: {original[:160]}." if original else ""
    )
    shown = "a method that its config.json does not name" if shown is None else shown
    return SpecError(
        f"The base is published quantised by {str(shown)[:240]}. Bases can be plain (bf16, fp16, "
        "fp32), bitsandbytes "
        "4-bit, NVFP4, MXFP4, FP8 with scales by rows, tensors or blocks, or INT4 around zero in "
        "groups." + instead,
        param="model",
    )


def _torchao_kinds(section: Mapping[str, Any]) -> list[str]:
    """The kinds of quantisation that a section of torchao's names."""
    given = section.get("quant_type")
    kinds = given.values() if isinstance(given, Mapping) else [given]
    return [
        str(kind.get("_type") if isinstance(kind, Mapping) else kind)[:80] for kind in kinds if kind
    ]


def logical_names(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Tensor of a base's files → the name under which its layout is known here: its own, but for
    torchao's weights and packed codes.

    `dtypes`: tensor → dtype. What torchao writes for other formats keeps its names, which the model
    does not have.
    """
    return {name: _logical_name(name, dtypes) for name in dtypes}


def _logical_name(name: str, dtypes: Mapping[str, str]) -> str:
    stem, _, last = name.rpartition(".")
    codes = dtypes.get(f"{stem}.weight")
    own = _SCALES_ELSEWHERE.get(last) if codes == FP8_DTYPE else None
    if codes == SIGNED_CODES and dtypes[name] == EXPONENTS and last in ("scale", SCALES[0]):
        own = SCALES[1]
    if own is not None:
        return name if f"{stem}.{own}" in dtypes else f"{stem}.{own}"
    stem = name.removesuffix(MXFP4_CODES)
    if (
        stem != name
        and dtypes[name] == dtypes.get(stem + MXFP4_SCALES) == "U8"
        and stem not in dtypes
    ):
        return stem
    stem = name.removesuffix(_PACKED_CODES)
    if (
        stem != name
        and stem.endswith(".weight")
        and dtypes[name] in (PACKED_DTYPE, CODES_DTYPE)
        and stem not in dtypes
    ):
        return stem
    match = _TORCHAO_NAME.fullmatch(name)
    if match is None or dtypes.get(f"{match[1]}_weight_qdata") not in (FP8_DTYPE, CODES_DTYPE):
        return name
    logical = f"{match[1]}weight" if match[2] == "qdata" else f"{match[1]}weight_{match[2]}"
    return name if logical in dtypes else logical


def is_companion(name: str) -> bool:
    """Whether a tensor of a quantised base belongs to a quantised weight and is no parameter of a
    model.
    """
    return _COMPANION.search(name) is not None


@dataclass(frozen=True)
class Bitsandbytes:
    """The state of one 4-bit weight.

    `block`: elements that share a scale; `nested_offset`: None if scales are plain fp32.
    """

    shape: tuple[int, int]
    block: int
    nested_offset: float | None
    nested_block: int | None

    @classmethod
    def read(cls, name: str, kind: str, text: bytes, codes: int) -> Bitsandbytes:
        """The state from `text`, the bytes of the tensor that holds it.

        `codes`: how many bytes of codes there are.

        Raises SpecError for a state that no 2-D weight has.
        """
        try:
            state = json.loads(text)
            shape = [int(size) for size in state["shape"]]
            block = int(state["blocksize"])
            offset = state.get("nested_offset")
            offset = None if offset is None else float(offset)
            nested = None if offset is None else int(state["nested_blocksize"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise unknown_layout(name, f"its bitsandbytes {kind} state cannot be read") from None
        if (
            len(shape) != 2
            or not all(0 <= size < LARGEST_SIZE for size in (*shape, block))
            or block == 0
            or block % 16
        ):
            raise unknown_layout(
                name,
                f"bitsandbytes {kind} of shape {str(shape)[:80]} in blocks of {str(block)[:80]}",
            )
        if 2 * codes < shape[0] * shape[1]:
            raise unknown_layout(
                name,
                f"its {codes} bytes of codes are too few for the shape {shape} of its "
                "bitsandbytes state",
            )
        return cls((shape[0], shape[1]), block, offset, nested)


def int4_shape(
    name: str, codes: tuple[int, ...], scales: tuple[int, ...] | None
) -> tuple[int, int]:
    """(out, in) of packed codes and their scales, None: there are none.

    Raises SpecError where they do not belong together.
    """
    if (
        scales is None
        or len(codes) != 2
        or len(scales) != 2
        or codes[0] != scales[0]
        or codes[1] * PACKED % max(1, scales[1])
    ):
        raise unknown_layout(name, f"INT4 codes packed as {codes} with scales of shape {scales}")
    return codes[0], codes[1] * PACKED


@dataclass(frozen=True)
class FP8Layout:
    """How many rows and columns of a matrix share one scale, the last ones fewer."""

    by: Literal["tensors", "rows", "blocks"]
    height: int
    width: int

    def __str__(self) -> str:
        return f"FP8 by {self.by}" + (
            f" of {self.height} x {self.width}" if self.by == "blocks" else ""
        )

    @property
    def format(self) -> WeightFormat | None:
        """The format that keeps codes and scales as they are, of a stack's matrices whichever way
        round they are read. None: none does.
        """
        if self.by != "blocks":
            return "fp8"
        return "fp8_blocks" if self.width % FP8_BLOCK == 0 == self.height % FP8_BLOCK else None


def fp8_layout(
    name: str, codes: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]
) -> FP8Layout:
    """The layout of a matrix [rows, cols], or of those of a stack [experts, rows, cols], by the
    shapes of codes and scales.

    `block`: rows and columns that share a scale, where the scales are those of blocks. Raises
    SpecError for scales that do not belong to the codes.
    """
    if len(codes) not in (2, 3):
        raise unknown_layout(name, f"FP8 codes of shape {codes}")
    *experts, rows, cols = codes
    if len(scales) == 4 and scales[1::2] == (1, 1):  # modelopt's blocks
        scales = scales[::2]
    own = scales[len(experts) :]
    of_each = scales[: len(experts)] == tuple(experts) and len(own) <= 2
    grid = (*own, 1, 1)[:2] if of_each else None
    if grid == (1, 1) or scales in ((), (1,)):
        return FP8Layout("tensors", rows, cols)
    if experts and grid == (2, 1) and rows % 2 == 0:  # gate and up have their own
        return FP8Layout("tensors", rows // 2, cols)
    if grid == (rows, 1):
        return FP8Layout("rows", 1, cols)
    if grid == (-(-rows // block[0]), -(-cols // block[1])):
        return FP8Layout("blocks", *block)
    raise unknown_layout(
        name,
        f"FP8 codes of shape {codes} with scales of shape {scales}, which are neither those of "
        "rows, nor one, nor those of "
        f"blocks of {block[0]} x {block[1]}",
    )


def mxfp4_shape(
    name: str, blocks: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, int, int]:
    """(experts, out, in) of codes and scales in MXFP4.

    Raises SpecError where they do not belong together.
    """
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _MXFP4_WIDTH:
        raise unknown_layout(
            name, f"MXFP4 in blocks of shape {blocks} with scales of shape {scales}"
        )
    return blocks[0], blocks[1], blocks[2] * blocks[3] * 2


@dataclass(frozen=True)
class FourBitLayout:
    """A weight [rows, cols] whose codes E2M1 lie in [rows, cols / 2]."""

    format: Literal["nvfp4", "mxfp4"]
    shape: tuple[int, int]
    block: int
    """Columns that share a scale."""
    swizzled: bool
    """Whether scales lie in tiles of 128 rows and 4 columns, each as [32, 16], as torchao stores
    them for its kernels.
    """


def four_bit_layout(
    name: str, codes: tuple[int, ...], scales: tuple[int, ...], dtype: str
) -> FourBitLayout:
    """The layout by the shapes of codes and scales, and by the scales' dtype.

    Raises SpecError where they do not belong together.
    """
    of_dtype: dict[str, tuple[Literal["nvfp4", "mxfp4"], int]] = {
        FP8_DTYPE: ("nvfp4", nvfp4.BLOCK),
        "U8": ("mxfp4", mxfp4.BLOCK),
        EXPONENTS: ("mxfp4", mxfp4.BLOCK),
    }
    if dtype in of_dtype and len(codes) == 2:
        stored, block = of_dtype[dtype]
        rows = codes[0]
        cols = codes[1] * 2
        swizzled = -(-rows // 128) * 32, -(-cols // (4 * block)) * 16
        if cols % block == 0 and scales in ((rows, cols // block), swizzled):
            return FourBitLayout(stored, (rows, cols), block, swizzled=scales == swizzled)
    raise unknown_layout(
        name,
        f"codes of four bits in {codes} with scales {dtype} of shape {scales}, which are neither "
        "those of NVFP4 (F8_E4M3, one "
        f"for every {nvfp4.BLOCK} columns) nor those of MXFP4 (one for every {mxfp4.BLOCK})",
    )


def refuse_what_changes_values(names: Iterable[str]) -> None:
    """Raises SpecError for a tensor without which codes and scales would be read as other values.

    `names`: all of a base's.
    """
    for name in names:
        what = _CHANGES_VALUES.get(name.rpartition(".")[2])
        if what is not None:
            raise unknown_layout(
                name.rpartition(".")[0], f"{name} has {what}, which are not applied here"
            )


def announced_formats(names: Iterable[str], section: Mapping[str, Any]) -> dict[str, WeightFormat]:
    """Logical name of a weight → format, as far as names of tensors and config.json's `section` say
    it without the files.
    """
    held = set(names)
    blocks = {name.removesuffix(MXFP4_CODES) for name in held if name.endswith(MXFP4_CODES)}
    found: dict[str, WeightFormat] = {
        stack: "mxfp4" for stack in blocks if stack + MXFP4_SCALES in held
    }
    of_scaled: WeightFormat = "fp8" if declared_block(section) is None else "fp8_blocks"
    in_mxfp4 = "mxfp4" in str(section.get("format"))
    scales = (*SCALES, *_SCALES_ELSEWHERE)
    for weight in {
        name.removesuffix(scale) + "weight"
        for scale in scales
        for name in held
        if name.endswith(f".{scale}")
    }:
        if any(weight.removesuffix("weight") + whole in held for whole in WHOLE_SCALES):
            found[weight] = "nvfp4"
        elif weight in held:
            found[weight] = (
                "mxfp4"
                if section.get(_OF_EXPERTS) == "fp4" and ".experts." in weight
                else of_scaled
            )
        elif weight + _PACKED_CODES in held and in_mxfp4:
            found[weight] = "mxfp4"
    return found


def unknown_dtype(name: str, dtype: str) -> SpecError:
    """The refusal of a tensor whose numbers stand for nothing by themselves."""
    if dtype == E5M2:
        return unknown_layout(
            name, f"its FP8 codes are e5m2 ({dtype}), and only e4m3 ({FP8_DTYPE}) is read"
        )
    return unknown_layout(
        name,
        f"its {dtype} numbers are codes of a format that config.json does not name (GPTQ, AWQ …)",
    )


def unknown_layout(name: str, why: str) -> SpecError:
    return SpecError(
        f"The base's tensor {name} is quantised in a layout that is not supported: {why}.",
        param="model",
    )


def of_columns(scales: Tensor, layout: FP8Layout, cols: int) -> Tensor:
    """The scales [rows, ..] that the files hold, as one for each of `cols` columns or one for all
    of them.
    """
    return (
        scales if layout.width >= cols else scales.repeat_interleave(layout.width, dim=1)[:, :cols]
    )


def as_kept(scales: Tensor, layout: FP8Layout, cols: int) -> Tensor:
    """The same as the layout's format keeps them: one a row, or one for every 128 columns."""
    if layout.by != "blocks":
        return scales
    return scales.repeat_interleave(layout.width // BLOCK, dim=1)[:, : blocks_of(cols)]
