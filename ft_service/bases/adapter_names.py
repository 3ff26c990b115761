"""What the tensors of an adapter are called in its file: what they are in the model, but where PEFT renames them.

PEFT puts an adapter on a model of Transformers by the rules that rename the base's files. Of some bases these rules match names
that the model has already, and PEFT would miss what is called so, with no more than a warning. Such an adapter's file has the
names of the base's files, and says in its metadata by which family's rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.bases.families.family import DEFAULT, Family
from ft_service.bases.families.known import family_of

_KEY = "names_of"


@dataclass(frozen=True)
class AdapterNames:
    """The names of an adapter's tensors, both ways; with `base_model.model.` in front."""

    family: Family

    @classmethod
    def of_base(cls, config: Mapping[str, Any]) -> AdapterNames:
        """Those of adapters on a base with this config.json."""
        return cls(family_of(config))

    @classmethod
    def of_file(cls, metadata: Mapping[str, str] | None) -> AdapterNames:
        """Those of an adapter whose safetensors file has this metadata."""
        kind = (metadata or {}).get(_KEY)
        return cls(DEFAULT if kind is None else family_of({"model_type": kind}))

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of them."""
        return {_KEY: self.family.types[0]} if self.family.names_in_adapter else {}

    def in_file(self, name: str) -> str:
        for ours, theirs in self.family.names_in_adapter.items():
            if ours in name:
                return name.replace(ours, theirs, 1)
        return name

    def in_model(self, name: str) -> str:
        for ours, theirs in self.family.names_in_adapter.items():
            if theirs in name:
                return name.replace(theirs, ours, 1)
        return name
