"""What FSDP2's collectives carry, counted."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedCollectives(TorchDispatchMode):
    """Records (operation, dtype, bytes this rank contributes) of FSDP2's collectives, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "allgather_base" in name or "reduce_scatter_base" in name:
            kind = "gather" if "allgather" in name else "reduce"
            sent = args[1]
            self.log.append((kind, str(sent.dtype).removeprefix("torch."), sent.nbytes))
        return func(*args, **(kwargs or {}))
