"""Rotary frequencies that depend on a sample's length, for each sample its own.

With the kinds `longrope` and `dynamic` transformers takes one set of frequencies for a whole batch,
by the longest of its samples, and `dynamic` also by what came before. A sample's loss would then
depend on the other samples of its micro-batch. Here every sample, packed or padded, is rotated as
it is alone, whether the rank has all of it or a part; and a sequence of the preview, of which a
forward has a part, by all that is known of it.

Replaces: the forward of transformers' rotary embeddings of these kinds.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_sample_positions.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.segments import CURRENT, RowPart
from workers.patches.forward import replace_forward

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on how many tokens there are."""

_CACHED = "max_seq_len_cached"
"""Attribute with the number of tokens that the current frequencies are for."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [rows, length, channels]."""


def rotate_by_sample(model: nn.Module) -> None:
    """Let the rotary embeddings of a model take each sample of the current micro-batch by itself,
    where that matters.
    """
    for module in model.modules():
        if any(kind in BY_LENGTH for kind in _kinds(module)):
            replace_forward(module, _RotatedBySample(module, module.forward))


def rotate_by_length(model: nn.Module, length: Callable[[], int]) -> None:
    """Let the rotary embeddings of a model take the sequence of the current forward as one of
    `length()` tokens, where that matters: it may be a part of it.
    """
    for module in model.modules():
        if any(kind in BY_LENGTH for kind in _kinds(module)):
            replace_forward(module, _RotatedByLength(module.forward, length))


def _kinds(module: nn.Module) -> list[str]:
    """Kinds of a rotary embedding; some have one for each kind of layer.

    Empty for other modules.
    """
    kind: Any = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        return [kind]
    return [str(value) for value in kind.values()] if isinstance(kind, dict) else []


class _RotatedBySample:
    """Replaces a rotary embedding's forward.

    The module that it holds is not a submodule, so that it keeps one name.
    """

    def __init__(self, module: nn.Module, stock: Callable[..., Rotation]) -> None:
        self._module = module
        self._stock = stock

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Rotation:
        if CURRENT.part is not None:
            return self._of_part(CURRENT.part, x, position_ids, *args, **kwargs)
        if CURRENT.packed:
            return _in_a_row(
                [
                    self._alone(x, own, *args, **kwargs)
                    for own in position_ids.split(CURRENT.starts.diff().tolist(), dim=1)
                ]
            )
        if len(CURRENT.lengths) < 2:
            return self._alone(x, position_ids, *args, **kwargs)
        length = position_ids.shape[-1]
        rows = [self._alone(x, position_ids[:1, :own], *args, **kwargs) for own in CURRENT.lengths]
        return _stacked([cos for cos, _ in rows], length), _stacked(
            [sin for _, sin in rows], length
        )

    def _of_part(
        self, part: RowPart, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Rotation:
        """The same of the rank's part of every row."""
        if CURRENT.packed:
            spans = pairwise((CURRENT.starts - part.first).tolist())
            return _in_a_row(
                [
                    self._as_long(end - begin, x, own, *args, **kwargs)
                    for begin, end in spans
                    if (own := position_ids[:, max(0, begin) : max(0, end)]).numel()
                ]
            )
        rows = [
            self._as_long(own, x, position_ids[:1, : max(0, own - part.first)], *args, **kwargs)
            for own in CURRENT.lengths
        ]
        return _stacked([cos for cos, _ in rows], part.length), _stacked(
            [sin for _, sin in rows], part.length
        )

    def _as_long(
        self, length: int, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Rotation:
        """Some positions of a sample of `length` tokens, which its last one tells the module."""
        rotate = _RotatedByLength(self._alone, lambda: length)
        return rotate(x, position_ids, *args, **kwargs)

    def _alone(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Rotation:
        module: Any = self._module
        for name in [
            name for name in vars(module) if name.endswith(_CACHED)
        ]:  # of the kind `dynamic`: it restarts
            before = name.removesuffix(_CACHED)
            setattr(module, name, module.original_max_seq_len)
            original = getattr(module, f"{before}original_inv_freq", None)
            if original is not None:
                setattr(module, f"{before}inv_freq", original.to(x.device, copy=True))
        return self._stock(x, position_ids, *args, **kwargs)


class _RotatedByLength:
    """Replaces a rotary embedding's forward: the last place of the whole sequence stands behind
    those of the part.
    """

    def __init__(self, stock: Callable[..., Rotation], length: Callable[[], int]) -> None:
        self._stock = stock
        self._length = length

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Rotation:
        last = position_ids.new_full((len(position_ids), 1), self._length() - 1)
        cos, sin = self._stock(x, torch.cat([position_ids, last], dim=1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]


def _in_a_row(parts: list[Rotation]) -> Rotation:
    """Rotations [1, own, channels] one after the other."""
    cosines, sines = zip(*parts, strict=True)
    return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)


def _stacked(rows: list[Tensor], length: int) -> Tensor:
    """Rows [1, own, channels] one above the other; padding, which no target sees, is not
    rotated.
    """
    return torch.cat([nn.functional.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])
