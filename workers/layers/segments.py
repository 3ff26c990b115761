"""Starts of the samples of the current micro-batch, the chunks into which layers cut them, the part
of its rows that this rank has, and the features and places of their pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.layers import packed_attention

_CHUNKED = "chunked_attention"
_CHUNK = "ft_chunk"
"""Attribute of an attention that cuts samples: tokens of the parts."""
FULL = "full_attention"
"""Kind of all layers of a decoder whose config names none."""
_TWO_WAY = "ft_two_way"
"""Attribute of an attention whose pictures see both ways."""


@dataclass(frozen=True)
class Bounds:
    """Positions of the segments in a row."""

    starts: Tensor | None
    """int32 [segments + 1], on the CPU: first token of each, and the end.

    None: a row is one segment.
    """
    on_device: Tensor | None
    """The same where the model computes, as far as it is there."""
    longest: int
    """Tokens of the longest segment."""
    longest_given: Tensor | None = None
    """The same as int32 [], on the CPU, of packed rows.

    Dynamo compiles a layer anew for each value of a number that stands outside of it, and not for
    those of a tensor.
    """
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What kernels make of it once for all layers."""


@dataclass(frozen=True)
class ImageInputs:
    """The features of all pictures of a micro-batch."""

    places: Tensor
    """int64 [n]: the placeholders, counted through all rows."""
    features: Tensor
    """[n, hidden]: what stands there in place of an embedding."""
    early: Tensor
    """[layers, n, hidden]: what is added to the results of the first decoder layers; of no layer
    where the base's tower gives none.
    """
    spans: Tensor
    """int32 [spans, 2], on the CPU: the first place and the end of every run of placeholders."""
    later: Callable[[], tuple[Tensor, Tensor]] | None = None
    """Computes features and early ones, in a forward that trains the tower; None: they are there.
    """

    def computed(self) -> ImageInputs:
        """The same with all features. Called within the forward that reads them."""
        if self.later is None:
            return self
        features, early = self.later()
        return replace(self, features=features, early=early, later=None)


@dataclass(frozen=True)
class RowPart:
    """The tokens that a rank has of each row, where several ranks share a micro-batch's rows: one
    after the other, all as many.
    """

    rank: int
    """Number of this one among them."""
    ranks: int
    length: int
    """Tokens of a part."""
    group: dist.ProcessGroup
    """Of the ranks that share a row, in the order of their parts."""

    @property
    def first(self) -> int:
        """Place in the row of the part's first token."""
        return self.rank * self.length


class Segments:
    """Segments of the current micro-batch, for its forward and what backward recomputes."""

    def __init__(self) -> None:
        self._whole: Bounds | None = None
        self._cut: dict[int, Bounds] = {}
        """Segments by chunk size, computed by the first layer that needs them."""
        self._longer: dict[int, bool] = {}
        """Whether the longest segment is longer than these numbers of tokens, which layers ask
        for.
        """
        self.lengths: Sequence[int] = ()
        """Tokens of the sample in each padded row, as far as they are known."""
        self.fused = False
        """Whether the micro-batch is on a GPU that has a fused kernel for its segments."""
        self.choosing = False
        """While an indexer chooses keys: large scores, of which backward wants nothing."""
        self.images: ImageInputs | None = None
        """What pictures give the decoder. None: the micro-batch has none."""
        self.part: RowPart | None = None
        """What the model is given of each row; segments are those of whole rows. None: whole rows.
        """
        self.faults: list[str] | None = None
        """While it is tried whether an architecture can be trained this way: what stands against
        it.
        """

    def use(
        self,
        starts: Tensor | None,
        on_device: Tensor | None = None,
        longest: int = 0,
        lengths: Sequence[int] = (),
        device: torch.device | None = None,
        images: ImageInputs | None = None,
        part: RowPart | None = None,
    ) -> None:
        """`starts`, `on_device`: as in `Bounds`; None: every row is one segment.

        `longest`: tokens of the longest segment. `lengths`: of the samples of padded rows.
        `device`: of these; None: a processor. `images`: None: there are no pictures. `part`: None:
        the model is given whole rows.
        """
        self.lengths = lengths
        self.images = images
        self.part = part
        where = device if on_device is None else on_device.device
        self.fused = where is not None and _has_kernel(where)
        self._whole = (
            None if starts is None else Bounds(starts, on_device, longest, _given(longest))
        )
        self._cut = {}
        self._longer = {limit: longest > limit for limit in self._longer}

    @property
    def packed(self) -> bool:
        return self._whole is not None

    @property
    def starts(self) -> Tensor:
        assert self._whole is not None
        assert self._whole.starts is not None
        return self._whole.starts

    @property
    def on_device(self) -> Tensor:
        assert self._whole is not None
        assert self._whole.on_device is not None
        return self._whole.on_device

    def bounds(self, length: int, chunk: int) -> Bounds:
        """The segments of a row of `length` tokens, in layers that see `chunk` of them (0: all
        before a token).
        """
        cut = chunk > 0 and self.has_longer(length, chunk)
        if self._whole is None:
            if not cut:
                return Bounds(None, None, length)
            # A range of Python would make a number of the length, and the compiler a variant of the
            # layer for each.
            return Bounds(
                torch.arange(0, length + chunk, chunk, dtype=torch.int32).clamp(max=length),
                None,
                chunk,
            )
        if not cut:
            return self._whole
        if chunk not in self._cut:
            self._cut[chunk] = _cut(self.starts, self._whole.on_device, chunk)
        return self._cut[chunk]

    def has_longer(self, length: int, limit: int) -> bool:
        """Whether any segment of a row of `length` tokens has more than `limit` tokens.

        A compiled layer is specialised on this answer, from the second micro-batch on, and not on
        the number of tokens.
        """
        if self._whole is None:
            return length > limit
        if limit not in self._longer:
            self._longer[limit] = self._whole.longest > limit
        return self._longer[limit]


def _given(longest: int) -> Tensor:
    return torch.tensor(longest, dtype=torch.int32)


CURRENT = Segments()
"""The segments of this process, which trains one model on one micro-batch at a time."""


def chunk_in(config: Any) -> int:
    """Tokens of the parts of a sample that do not see each other, in some layers of a decoder; 0:
    no layer cuts samples.
    """
    return config.attention_chunk_size if _CHUNKED in _kinds(config) else 0


def tell_chunks(model: nn.Module) -> None:
    """Tell every attention of a model the same for itself, by its place among the layers.

    If it looked at its place while it computes, each layer would be compiled by itself.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        index = getattr(module, "layer_idx", None)
        kinds = _kinds(config)
        if index is not None and index < len(kinds) and kinds[index] == _CHUNKED:
            setattr(module, _CHUNK, chunk_in(config))


def chunk_of(module: nn.Module) -> int:
    """What `tell_chunks` told an attention; 0: it sees whole samples."""
    return getattr(module, _CHUNK, 0)


def tell_two_way(model: nn.Module, kinds: Sequence[str]) -> None:
    """Tell every attention in layers of these kinds that the tokens of a picture see each other in
    both directions. Of a decoder that names no kinds all layers are `FULL`.
    """
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        own = _kinds(getattr(module, "config", None))
        if index is not None:
            setattr(module, _TWO_WAY, (own[index] if index < len(own) else FULL) in kinds)


def kinds_in(config: Any) -> list[str]:
    """Kinds of a decoder's layers, in their order."""
    return list(dict.fromkeys(_kinds(config))) or [FULL]


def spans_of(module: nn.Module) -> Tensor | None:
    """The runs of the micro-batch's placeholders (`ImageInputs.spans`), for an attention whose
    pictures see both ways. None: it is causal.
    """
    images = CURRENT.images
    if images is None or not getattr(module, _TWO_WAY, False) or not len(images.spans):
        return None
    return images.spans


def _kinds(config: object) -> Sequence[str]:
    """Kinds of attention, layer by layer; empty if the config does not name them."""
    return getattr(config, "layer_types", None) or ()


def tempered(module: nn.Module, query: Tensor) -> Tensor:
    """Queries [rows, heads, length, d] of whole rows with the temperature of their place in their
    own sample.

    Llama 4 makes queries longer the farther they stand in what it is given, in layers without
    rotation: 1 + attn_scale * log(1 + floor((place + 1) / floor_scale)). Which is that of a place
    in the sample in padded rows only, and where no other rank has what is before.
    """
    part = CURRENT.part
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    if part is None and not CURRENT.packed:
        return query
    row = torch.arange(query.shape[2], device=query.device)
    given = row if part is None else row % part.length
    place = row
    if CURRENT.packed:
        starts = CURRENT.starts if query.device.type == "cpu" else CURRENT.on_device
        place = row - starts[torch.bucketize(row, starts[1:], right=True)]
    ratio = _temperature(module, place) / _temperature(module, given)
    return (query * ratio.view(1, 1, -1, 1)).to(query.dtype)


def _temperature(module: Any, places: Tensor) -> Tensor:
    return (
        torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale
        + 1.0
    )


def _cut(starts: Tensor, on_device: Tensor | None, chunk: int) -> Bounds:
    """The samples that start there, each from its beginning cut into parts of `chunk` tokens."""
    parts = [part for start, end in pairwise(starts.tolist()) for part in range(start, end, chunk)]
    cut = torch.tensor([*parts, int(starts[-1])], dtype=torch.int32)
    moved = None if on_device is None else cut.to(on_device.device, non_blocking=True)
    return Bounds(cut, moved, chunk, _given(chunk))


def _has_kernel(device: torch.device) -> bool:
    """Whether PyTorch has a fused kernel for segments on a device, which computes there what it
    should.
    """
    return packed_attention.KERNEL.on(device) is not None
