"""What a family of architectures may say of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """What differs from the rules. `types`: the model types, as config.json names them."""

    types: tuple[str, ...]
    experts_transposed: bool = False
    """Whether the base's files stack experts as [experts, in, out]."""
    experts_either_way: bool = False
    """Whether they stack them so or the other way round, and only their shapes say which."""
    renamed: Mapping[str, str] = field(default_factory=lambda: {r"\.block_sparse_moe\.": ".mlp.", r"^backbone\.": "model."})
    """Regex on a tensor's name in the files → what the model has there. Tensors of one name then follow each other by rows."""
    beside_layers: tuple[str, ...] = ()
    """Lists of linear layers, by their last names, that the decoder has beside its layers."""
    parameters: tuple[str, ...] = ()
    """Last names of parameters that are buffers in other families."""
    turned: tuple[str, ...] = ()
    """Last names of linear layers that the files hold as [in, out]."""
    other_layers: tuple[str, ...] = ()
    """Last names of matrices that multiply otherwise than a linear layer's: neither adapted nor quantised."""
    names_in_adapter: Mapping[str, str] = field(default_factory=dict[str, str])
    """Part of the name of an adapter's tensor → what its file has there, since PEFT would rename it and then miss it."""
    not_adapted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Last name of linear layers that cannot have an adapter → why."""


DEFAULT = Family(types=())
"""Of which nothing differs."""
