"""The arrangement of a job's ranks: copies of the sharded model (replicate) times ranks that share
a copy (shard).
"""

from __future__ import annotations

from typing import Literal

from ft_service.errors import SpecError

Replicate = int | Literal["auto"]


def mesh_shape(replicate: Replicate, ranks: int) -> tuple[int, int]:
    """(replicate, shard) with replicate × shard = ranks. "auto": one copy; -1: as many as ranks.

    Raises SpecError if `ranks` is not a multiple of the copies.
    """
    copies = {"auto": 1, -1: ranks}.get(replicate, replicate)
    assert isinstance(copies, int)
    if ranks % copies:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise SpecError(
            f"distributed.replicate = {copies}: {ranks} ranks cannot be divided into {copies} "
            "equal groups. "
            f"Use one of {divisors}.",
            param="distributed.replicate",
        )
    return copies, ranks // copies


def check_reshard_size(size: int, shards: int) -> None:
    """Raise SpecError unless `shards` ranks can be divided into groups of `size`.

    With 1 rank nothing is resharded.
    """
    allowed = [n for n in range(2, shards) if shards % n == 0]
    if shards == 1 or size in allowed:
        return
    instead = (
        f"Use {' or '.join(map(str, allowed))}, true or false" if allowed else "Use true or false"
    )
    raise SpecError(
        f"distributed.reshard_after_forward = {size}: {shards} ranks share a copy, and cannot be "
        "cut into several groups of "
        f"{size}. {instead}.",
        param="distributed.reshard_after_forward",
    )
