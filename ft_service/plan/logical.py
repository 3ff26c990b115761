"""A base's tensors by their logical shapes, whatever format they are stored in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft_service.bases.contents import BaseContents, StoredTensor
from ft_service.bases.published_layouts import (
    FP8_DTYPE,
    FP8_STACK_SCALE,
    KINDS,
    MXFP4_SCALES,
    NO_SCALE,
    PACKED_DTYPE,
    PLAIN_DTYPES,
    SCALES,
    STATE,
    Bitsandbytes,
    FP8Layout,
    block_size,
    fp8_layout,
    int4_shape,
    is_companion,
    mxfp4_shape,
    quantization_of,
    unknown_dtype,
    unknown_layout,
)
from ft_service.spec import WeightFormat

_CODES = ("U8", "I8")


@dataclass(frozen=True)
class LogicalTensor:
    """One parameter of the model. `held`: the format that its values are kept in because the base holds them quantised."""

    name: str
    shape: tuple[int, ...]
    held: WeightFormat | None = None
    by_outputs: bool = False
    """Whether stacked matrices lie there [out, in], whatever the architecture's own parameter does."""


def logical_tensors(contents: BaseContents) -> list[LogicalTensor]:
    """The tensors of a base without the companions of quantised weights. Raises SpecError, naming the tensor, for an unknown
    layout.
    """
    quantization = quantization_of(contents.config)
    if quantization is None:
        _require_plain(contents.tensors)
        return [LogicalTensor(tensor.name, tensor.shape) for tensor in contents.tensors]
    by_name = {tensor.name: tensor for tensor in contents.tensors}
    block = block_size(quantization)
    return [_logical(tensor, by_name, block) for tensor in contents.tensors if not is_companion(tensor.name)]


def _require_plain(tensors: Iterable[StoredTensor]) -> None:
    """Raises SpecError for a weight of codes in a base that says nothing of quantisation. Other tensors may be masks."""
    for tensor in tensors:
        if tensor.dtype in _CODES and tensor.name.endswith(".weight"):
            raise unknown_dtype(tensor.name, tensor.dtype)


def _logical(tensor: StoredTensor, by_name: Mapping[str, StoredTensor], block: tuple[int, int]) -> LogicalTensor:
    for kind in KINDS:
        state = by_name.get(f"{tensor.name}{STATE}{kind}")
        if state is not None:
            quantized = Bitsandbytes.read(tensor.name, kind, state.content, tensor.bytes)
            return LogicalTensor(tensor.name, quantized.shape, "nf4_fp32")
    if tensor.dtype == FP8_DTYPE:
        return LogicalTensor(tensor.name, tensor.shape, _fp8_layout(tensor, by_name, block).format)
    scales = by_name.get(tensor.name + MXFP4_SCALES)
    if scales is not None:
        return LogicalTensor(tensor.name, mxfp4_shape(tensor.name, tensor.shape, scales.shape), by_outputs=True)
    scales = by_name.get(f"{tensor.name}_scale")
    if tensor.dtype == PACKED_DTYPE and tensor.name.endswith(".weight"):
        return LogicalTensor(tensor.name, int4_shape(tensor.name, tensor.shape, None if scales is None else scales.shape))
    if tensor.dtype not in PLAIN_DTYPES:
        raise unknown_dtype(tensor.name, tensor.dtype)
    return LogicalTensor(tensor.name, tensor.shape)


def _fp8_layout(tensor: StoredTensor, by_name: Mapping[str, StoredTensor], block: tuple[int, int]) -> FP8Layout:
    module = tensor.name.removesuffix(".weight")
    names = [tensor.name + FP8_STACK_SCALE, *(f"{module}.{scale}" for scale in SCALES)]
    scales = next((by_name[name] for name in names if name in by_name), None)
    if scales is None:
        raise unknown_layout(tensor.name, NO_SCALE)
    return fp8_layout(tensor.name, tensor.shape, scales.shape, block)
