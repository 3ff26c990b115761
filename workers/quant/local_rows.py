"""What a rank holds of a tensor that may be sharded."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor


def local_rows(tensor: Any) -> Any:
    """Return this rank's rows of a sharded tensor, or a tensor that is whole on every rank itself.

    Both share memory with the argument, and belong to its graph: detach it first where that must
    not be.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
