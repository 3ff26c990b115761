"""Small objects between the ranks, and the errors of one of them; alone where there is no process
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_DONE = object()

Wait = Callable[[Callable[[], bool]], None]
"""Lets this rank do something else until a function, asked on rank 0, says so.

Called by all ranks together.
"""


class FailedElsewhere(Exception):
    """Raised where another rank's error ends what all ranks do together; that rank reports it."""


def alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def from_first(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value, on every rank.

    Called by all together. `group`: of all ranks; None: the one of collectives at large.
    """
    if alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order. Called by all together. `group`: as of `from_first`."""
    if alone():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_all(act: Callable[[], T]) -> T:
    """What `act` returns on this rank.

    Called by all together: an error on one rank ends it on all, so that none waits for a rank that
    has left. `act` makes the same collectives everywhere, even where it fails. Raises this rank's
    own error, or FailedElsewhere.
    """
    failed, value = _tried(act)
    if any(from_all(failed is not None)):
        raise failed or FailedElsewhere
    return value  # pyright: ignore[reportReturnType]


def by_first(act: Callable[[], T], wait: Wait | None = None) -> T:
    """What `act` returns on rank 0, on every rank.

    Called by all together. Raises as `on_all`. `wait`: what the ranks do meanwhile, while `act`
    runs in a thread; None: nothing.
    """
    first = alone() or dist.get_rank() == 0
    if wait is not None:
        threads = ThreadPoolExecutor(1)
        acting = threads.submit(act) if first else None
        threads.shutdown(wait=False)
        wait(lambda: acting is None or acting.done())
        act = act if acting is None else acting.result
    failed, value = _tried(act) if first else (None, None)
    ended, value = from_first((failed is not None, value))
    if ended:
        raise failed or FailedElsewhere
    return value  # pyright: ignore[reportReturnType]


def _tried(act: Callable[[], T]) -> tuple[Exception | None, T | None]:
    try:
        return None, act()
    except Exception as error:
        return error, None


def together(work: Iterator[None]) -> None:
    """Do this rank's part, and wait for those of the others. What one raises, all do."""
    while True:
        state: bool | Exception
        try:
            state = next(work, _DONE) is not _DONE
        except Exception as error:
            state = error
        states = from_all(state)
        for said in (state, *states):  # one's own first, which knows where it was raised
            if isinstance(said, Exception):
                raise said
        if not any(states):
            return
