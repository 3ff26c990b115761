"""The names of transformers' models, which it reads from the sources of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import import_utils


def read_once() -> None:
    """Have transformers read these sources once. Call it before anything is imported from transformers.models.

    It asks for the same folder twice, by the folder's name and by that of the file in it: a sixth of its import.
    """
    read: Any = import_utils.create_import_structure_from_path

    def of_folder(path: str | Path) -> Any:
        return read(Path(path).parent if Path(path).name == "__init__.py" else Path(path))

    import_utils.create_import_structure_from_path = of_folder
