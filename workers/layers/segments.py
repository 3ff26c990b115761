"""Starts of the samples of the current micro-batch, and the chunks into which layers cut them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers import packed_attention

LEAST_LONGEST = 256
"""Upper bound of the longest segment that a fused kernel is given at least."""

_CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class Bounds:
    """Positions of the segments in a row."""

    starts: Tensor
    """int32 [segments + 1], on the CPU: first token of each, and the end."""
    on_device: Tensor | None
    """The same where the model computes, as far as it is there."""
    longest: int
    """Tokens of the longest segment; where a fused kernel takes them, rounded up (`rounded`)."""
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What kernels make of it once for all layers."""


class Segments:
    """Segments of the current micro-batch, for its forward and what backward recomputes."""

    def __init__(self) -> None:
        self._whole: Bounds | None = None
        self._cut: dict[int, Bounds] = {}
        """Segments by chunk size, computed by the first layer that needs them."""
        self.lengths: Sequence[int] = ()
        """Tokens of the sample in each padded row, as far as they are known."""
        self.fused = False
        """Whether the micro-batch is on a GPU that has a fused kernel for its segments."""
        self.choosing = False
        """While an indexer chooses keys: large scores, of which backward wants nothing."""
        self.faults: list[str] | None = None
        """While it is tried whether an architecture can be trained this way: what stands against it."""

    def use(
        self,
        starts: Tensor | None,
        on_device: Tensor | None = None,
        longest: int = 0,
        lengths: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """`starts`, `on_device`: as in `Bounds`; None: every row is one segment. `longest`: tokens of the longest segment.
        `lengths`: of the samples of padded rows. `device`: of these; None: a processor.
        """
        self.lengths = lengths
        where = device if on_device is None else on_device.device
        self.fused = where is not None and _has_kernel(where)
        self._whole = None if starts is None else Bounds(starts, on_device, rounded(longest) if self.fused else longest)
        self._cut = {}

    @property
    def packed(self) -> bool:
        return self._whole is not None

    @property
    def starts(self) -> Tensor:
        assert self._whole is not None
        return self._whole.starts

    @property
    def on_device(self) -> Tensor:
        assert self._whole is not None
        assert self._whole.on_device is not None
        return self._whole.on_device

    def bounds(self, length: int, chunk: int) -> Bounds:
        """The segments of a row of `length` tokens, in layers that see `chunk` of them (0: all before a token)."""
        if self._whole is None:
            starts = [*range(0, length, chunk or length), length]
            return Bounds(torch.tensor(starts, dtype=torch.int32), None, min(length, chunk or length))
        if not chunk or self._whole.longest <= chunk:
            return self._whole
        if chunk not in self._cut:
            self._cut[chunk] = _cut(self._whole, chunk)
        return self._cut[chunk]


def rounded(longest: int) -> int:
    """The next power of two, at least LEAST_LONGEST.

    A fused kernel needs only an upper bound, by which it chooses the blocks that it starts. Dynamo specialises compiled layers
    on the number, so that they would be compiled anew at nearly every micro-batch.
    """
    return max(LEAST_LONGEST, 1 << (longest - 1).bit_length())


CURRENT = Segments()
"""The segments of this process, which trains one model on one micro-batch at a time."""


def chunk_in(config: Any) -> int:
    """Tokens of the parts of a sample that do not see each other, in some layers of a decoder; 0: no layer cuts samples."""
    return config.attention_chunk_size if _CHUNKED in _kinds(config) else 0


def chunk_of(module: nn.Module) -> int:
    """The same of one attention, by its place among the layers."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = _kinds(config)
    return chunk_in(config) if index is not None and index < len(kinds) and kinds[index] == _CHUNKED else 0


def _kinds(config: object) -> Sequence[str]:
    """Kinds of attention, layer by layer; empty if the config does not name them."""
    return getattr(config, "layer_types", None) or ()


def tempered(module: nn.Module, query: Tensor) -> Tensor:
    """Queries [rows, heads, length, d] with the temperature of their place in their own sample.

    Llama 4 makes queries longer the farther they stand in the row, in layers without rotation: 1 + attn_scale * log(1 +
    floor((place + 1) / floor_scale)). Which is that of a place in the sample in padded rows only.
    """
    if not (CURRENT.packed and getattr(module, "attn_temperature_tuning", False)) or getattr(module, "use_rope", True):
        return query
    row = torch.arange(query.shape[2], device=query.device)
    starts = CURRENT.starts if query.device.type == "cpu" else CURRENT.on_device
    sample = torch.bucketize(row, starts[1:], right=True)
    ratio = _temperature(module, row - starts[sample]) / _temperature(module, row)
    return (query * ratio.view(1, 1, -1, 1)).to(query.dtype)


def _temperature(module: Any, places: Tensor) -> Tensor:
    return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


def _cut(whole: Bounds, chunk: int) -> Bounds:
    """The same samples, each from its beginning cut into parts of `chunk` tokens."""
    starts = [part for start, end in pairwise(whole.starts.tolist()) for part in range(start, end, chunk)]
    cut = torch.tensor([*starts, int(whole.starts[-1])], dtype=torch.int32)
    on_device = None if whole.on_device is None else cut.to(whole.on_device.device, non_blocking=True)
    return Bounds(cut, on_device, chunk)


def _has_kernel(device: torch.device) -> bool:
    """Whether PyTorch has a fused kernel for segments on a device, which computes there what it should."""
    return device.type == "cuda" and packed_attention.kernel_fault(device) is None
