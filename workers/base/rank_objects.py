"""Small objects between the ranks; alone where there is no process group."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def from_first(value: T) -> T:
    """Rank 0's value, on every rank. Called by all together."""
    if alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: T) -> list[T]:
    """Every rank's value, in rank order. Called by all together."""
    if alone():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
