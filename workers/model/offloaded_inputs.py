"""Inputs of decoder layers in the host's memory, between a layer's forward and its backward.

    forward      layer 1 │ layer 2 │ …            copies   out 1 │ out 2 │ …
    backward     … layer 2 │ layer 1                       in 1 (while layer 2 computes)

An input leaves while its own layer computes with it, and is back before its layer is computed
again: it is fetched while the layer behind that one has its backward. So the device holds at most
two, and copies take time only where they take longer than the layer between them. The last layer's
input stays: it is wanted first.

Copies go through blocks of pinned memory, in order on one stream of their own, beside the products.
A block may be used again as soon as the copy from it was asked for. What is computed with and what
is copied wait for each other on the device alone: the process never does.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ft_service.errors import SpecError
from ft_service.host.hardware import memory_bytes
from ft_service.kernel_limits import OFFLOAD_BLOCK_BYTES, offload_blocks
from ft_service.wording import bytes_text

OPTION = "distributed.activation_checkpointing"


class Mark(Protocol):
    """A moment behind copies that were asked for."""

    def wait(self) -> None:
        """Let what is computed from now on wait until those copies are done."""
        ...


class Copies(Protocol):
    """Copies between a device and the host's memory, done in order, beside what is computed."""

    def block(self) -> Tensor:
        """New host memory: uint8 [OFFLOAD_BLOCK_BYTES]."""
        ...

    def follow(self) -> None:
        """Let copies from now on wait for all that was computed before."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Ask for a copy. Both tensors must be left as they are until it is done."""
        ...

    def mark(self) -> Mark: ...


class OffloadedInputs:
    """The inputs of a model's layers."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._free: list[Tensor] = []
        self._under_way: tuple[Tensor, Mark] | None = None
        """The tensor on the device that is copied to or from."""
        self._newest: weakref.ref[_Input] | None = None

    def layer(self, number: int, *, stays: bool) -> saved_tensors_hooks:
        """Around the call of a checkpointed layer: its input is offloaded, or stays.

        `number`: of the layer, 0 the first of a forward.
        """

        def pack(x: Tensor) -> _Input:
            self.settle()
            before = None if number == 0 else self._newest
            kept = _Input(x.detach(), before, self._free)
            self._newest = weakref.ref(kept)
            if not stays:
                self._send(kept)
            return kept

        return saved_tensors_hooks(pack, self._unpack)

    def settle(self) -> None:
        """Let what is computed wait for the copy that is under way, whose tensor may then be
        freed.
        """
        if self._under_way is not None:
            self._under_way[1].wait()
            self._under_way = None

    def _send(self, kept: _Input) -> None:
        source = kept.tensor
        assert source is not None
        source = source.contiguous()
        count = offload_blocks(source.nbytes)
        while len(self._free) < count:
            self._free.append(self._copies.block())
        kept.blocks = [self._free.pop() for _ in range(count)]
        self._copies.follow()
        for block, part in _parts(kept.blocks, source):
            self._copies.copy(block, part)
        self._under_way = source, self._copies.mark()
        kept.tensor = None

    def _unpack(self, kept: _Input) -> Tensor:
        if kept.tensor is None:
            self._fetch(kept)
        self.settle()
        x = kept.tensor
        kept.tensor = None
        assert x is not None, "a layer is computed again once"
        before = None if kept.before is None else kept.before()
        if before is not None and before.tensor is None:
            self._fetch(before)
        return x

    @torch.no_grad()
    def _fetch(self, kept: _Input) -> None:
        self.settle()
        x = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        self._copies.follow()  # x may lie where something is still being computed with
        for block, part in _parts(kept.blocks, x):
            self._copies.copy(part, block)
        self._under_way = x, self._copies.mark()
        kept.tensor = x
        kept.release()


class _Input:
    """One layer's input, in blocks or on the device."""

    def __init__(self, x: Tensor, before: weakref.ref[_Input] | None, free: list[Tensor]) -> None:
        self.tensor: Tensor | None = x
        """On the device; None: in the blocks."""
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.blocks: Sequence[Tensor] = ()
        self.before = before
        """That of the layer before in the same forward, which backward wants next."""
        self._free = free

    def release(self) -> None:
        """Give the blocks back: copies are done in order, so that what is copied into them next
        waits.
        """
        self._free += self.blocks
        self.blocks = ()

    def __del__(self) -> None:
        self.release()  # of a forward without a backward


def _parts(blocks: Sequence[Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each block as far as it is used, with its part of the bytes of x."""
    of_block = len(blocks[0])
    for block, part in zip(blocks, x.view(-1).view(torch.uint8).split(of_block), strict=True):
        yield block[: len(part)], part


def copies_for(device: torch.device) -> Copies:
    """Those of a rank's device.

    Raises SpecError on a processor, whose tensors are in the host's memory.
    """
    if device.type != "cuda":
        raise SpecError(
            f"{OPTION} = 'offload': the ranks train on the CPU, whose layer inputs are in the "
            "host's memory already. Use 'tiled'.",
            param=OPTION,
        )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return CudaCopies(device, memory_bytes() // ranks)


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device, most: int) -> None:
        """`most`: bytes of host memory for this rank."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._most = most
        self._held = 0

    def block(self) -> Tensor:
        """Pinned memory. Raises SpecError where the host has no more of it."""
        self._held += OFFLOAD_BLOCK_BYTES
        if self._held > self._most:
            raise _no_memory(
                self._held, f"its share of this host's memory is {bytes_text(self._most)}"
            )
        try:
            # PyTorch rounds pinned memory up to a power of two, which a block is.
            return torch.empty(OFFLOAD_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise _no_memory(self._held, f"this host pins no more ({error})") from error

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def _no_memory(held: int, why: str) -> SpecError:
    return SpecError(
        f"{OPTION} = 'offload': a rank needs more than {bytes_text(held)} of pinned host memory "
        f"for its layers' inputs, and {why}. `ft plan` says how much a job needs. Lower "
        "training.max_length, use fewer ranks on this host, or a host with more memory.",
        param=OPTION,
        code="out_of_memory",
    )
