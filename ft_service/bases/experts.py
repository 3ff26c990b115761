"""Mixtures of experts as bases publish them: what config.json and their matrices are called."""

from __future__ import annotations

from collections.abc import Collection

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that say how many experts a layer has."""
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k")
"""Keys that say how many of them a token meets."""
_DOWN = ("down_proj", "w2")


def projection_of(matrix: str, matrices: Collection[str]) -> str:
    """The stack that a matrix of one expert belongs to. `matrices`: the names of all the matrices of an expert."""
    if matrix in _DOWN:
        return "down_proj"
    return "up_proj" if set(matrices) == {"up_proj", "down_proj"} else "gate_up_proj"
