"""The names of an adapter's tensors in its file: those in the model, except where PEFT renames
tensors as it loads them.

PEFT loads an adapter by the rules that rename the base's files. For some bases these rules match
names that the model already has, and PEFT would skip such tensors with only a warning. The file
then has other names, which PEFT turns into the model's, and lists them in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_KEY = "renamed_modules"
_TIED = "tied_tensors"
_LORA = ".lora_"
MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of what DoRA trains beside A and B: one number for each output row."""


@dataclass(frozen=True)
class AdapterNames:
    """The mapping between names in the model and in the file.

    Names begin with `base_model.model.`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a module in the model → its name in the file, where they differ."""
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    """Second name of a tensor that is in the file twice, since PEFT looks for both → its first
    name.
    """

    @classmethod
    def of_file(cls, metadata: Mapping[str, str] | None) -> AdapterNames:
        """Read the names from the metadata of an adapter's safetensors file.

        Raises ValueError for invalid metadata.
        """
        return cls(*(_names_in(metadata or {}, key) for key in (_KEY, _TIED)))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that `of_file` reads."""
        return {
            key: json.dumps(dict(names))
            for key, names in ((_KEY, self.renamed), (_TIED, self.tied))
            if names
        }

    def in_file(self, name: str) -> str:
        """The name in the file of a tensor, by its name in the model."""
        return _rename(name, self.renamed)

    def in_model(self, name: str) -> str:
        """The name in the model of a tensor, by its name in the file."""
        return _rename(name, self._in_model)

    @cached_property
    def _in_model(self) -> Mapping[str, str]:
        return {in_file: in_model for in_model, in_file in self.renamed.items()}


def _names_in(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    try:
        names = json.loads(metadata.get(key, "{}"))
    except RecursionError:
        names = None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"the metadata {key} of the adapter's file is not an object of names")
    return names


def is_lora(name: str) -> bool:
    """Whether a trained parameter of this name is an adapter's, and not of a module that is trained
    whole.
    """
    return _LORA in name


def peft_name(name: str) -> str:
    """The name that PEFT gives a tensor on disk, by its plain name in a model: without the
    adapter's.
    """
    name = name.replace(".default.", ".")
    return name.removesuffix(".weight") if name.endswith(f".{MAGNITUDE}.weight") else name


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    module, lora, rest = name.partition(_LORA)
    return f"{renamed.get(module, module)}{lora}{rest}"
