"""A model as a stored form holds it, written back as plain weights: for losses of what no loader of ours reads."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


class RestoredFolder:
    """A new folder with the configuration and tokenizer of `like`, and one file for each tensor that is put into it."""

    def __init__(self, folder: Path, like: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._places: dict[str, str] = {}
        for path in [*like.glob("*.json"), *like.glob("*.jinja"), *like.glob("*.model")]:
            if path.name != _INDEX:
                (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")

    def put(self, tensor: str, values: Tensor) -> None:
        file = f"model-{len(self._places):05d}.safetensors"
        save_file({tensor: values.contiguous()}, self._folder / file, metadata={"format": "pt"})
        self._places[tensor] = file

    def close(self) -> None:
        """Write the index: the folder is a model now."""
        index = {"metadata": {}, "weight_map": self._places}
        (self._folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
