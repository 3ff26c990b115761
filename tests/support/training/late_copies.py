"""Copies to the host's memory, on a processor: each one is done as late as a GPU may do it, from
what then lies there.

What is read before its copy was waited for, overwritten or freed before, is not what it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ft_service import kernel_limits
from workers.attempt import prepared_model


class _Place:
    """A piece of memory, which is not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.uint8
        assert tensor.is_contiguous()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._span = tensor.storage_offset(), len(tensor)

    def bytes(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "freed before its copy was waited for"
        first, count = self._span
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore
        return whole[first : first + count]


@dataclass(eq=False)
class LateCopies:
    """`Copies` that are done when somebody waits for them."""

    blocks: list[Tensor] = field(default_factory=list[Tensor])
    asked: int = 0
    """Copies asked for, of whole tensors."""
    most: int = 0
    """Most of them that were under way at a time."""
    _queue: list[tuple[_Place, _Place]] = field(default_factory=list[tuple[_Place, _Place]])
    _done: int = 0
    _waited: int = 0
    _follows: bool = False

    def block(self) -> Tensor:
        """Memory of which PyTorch's allocator knows nothing, as it counts no pinned memory of a
        GPU's.
        """
        memory = np.full(kernel_limits.OFFLOAD_BLOCK_BYTES, 0xFF, dtype=np.uint8)
        self.blocks.append(torch.from_numpy(memory))
        return self.blocks[-1]

    def follow(self) -> None:
        self._follows = True

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert self._follows, "what is copied may not be computed yet"
        self._queue.append((_Place(into), _Place(source)))

    def mark(self) -> _LateMark:
        self._follows = False
        self.asked += 1
        self.most = max(self.most, self.asked - self._waited)
        return _LateMark(self, self.asked, self._done + len(self._queue))

    def do(self, number: int, until: int) -> None:
        self._waited = max(self._waited, number)
        while self._done < until:
            into, source = self._queue.pop(0)
            into.bytes().copy_(source.bytes())
            self._done += 1


@dataclass(frozen=True)
class _LateMark:
    copies: LateCopies
    number: int
    until: int

    def wait(self) -> None:
        self.copies.do(self.number, self.until)


@contextmanager
def on_small_scale(tile_rows: int = 8, block_bytes: int = 1000) -> Iterator[LateCopies]:
    """While it is entered, tiles and blocks are small, and offloaded inputs take these copies."""
    copies = LateCopies()
    with ExitStack() as entered:
        for change in (
            patch.object(kernel_limits, "TILE_ROWS", tile_rows),
            patch.object(kernel_limits, "OFFLOAD_BLOCK_BYTES", block_bytes),
            patch.object(prepared_model, "copies_for", lambda device: copies),
        ):
            entered.enter_context(change)
        yield copies
