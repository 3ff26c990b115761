"""Data files of a dataset that is a folder, saved by Hugging Face's `datasets` or downloaded from
its hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ft_service.bases.origin import ORIGIN
from ft_service.data.formats.detect_format import may_hold_data
from ft_service.errors import DataError

_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_SPLIT_NAME = re.compile(r"(.*?)(?:-\d{5}-of-\d{5})?(?:\.[a-z0-9]+)+$", re.IGNORECASE)


def dataset_files(folder: Path, split: str) -> tuple[str, ...]:
    """The data files of a split in their order, relative to the folder.

    A folder's only split is taken whatever its name. Raises DataError.
    """
    if (folder / _SPLITS).is_file():  # datasets' DatasetDict.save_to_disk
        names = _listed(folder / _SPLITS, "splits")
        chosen = _chosen(folder, split, [name for name in names if isinstance(name, str)])
        return tuple(f"{chosen}/{name}" for name in _saved(folder / chosen))
    if (folder / _STATE).is_file():  # Dataset.save_to_disk
        return _saved(folder)
    parent = folder / "data" if (folder / "data").is_dir() else folder
    files = sorted(
        path
        for path in parent.iterdir()
        if path.is_file() and may_hold_data(path.name) and path.name != ORIGIN
    )
    if not files:
        raise DataError(
            f"{folder}: the folder holds no data files (JSON lines, CSV, Parquet or Arrow)."
        )
    splits: dict[str, list[str]] = {}
    for path in files:
        match = _SPLIT_NAME.fullmatch(path.name)
        splits.setdefault(match[1] if match else path.stem, []).append(
            path.relative_to(folder).as_posix()
        )
    return tuple(splits[_chosen(folder, split, list(splits))])


def _chosen(folder: Path, split: str, splits: Sequence[str]) -> str:
    """The folder's split of this name, or its only split. Raises DataError."""
    if split in splits or len(splits) == 1:
        return split if split in splits else splits[0]
    names = ", ".join(splits)
    raise DataError(
        f"{folder}: the folder has the splits {names}, and none is called {split}. Name a file of "
        "it instead."
    )


def _saved(folder: Path) -> tuple[str, ...]:
    """The Arrow files of a dataset that was saved to disk. Raises DataError."""
    names: list[str] = []
    for entry in _listed(folder / _STATE, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not (folder / name).is_file() or Path(name).name != name:
            raise DataError(
                f"{folder}: {_STATE} names a file {name!r}, which the folder does not hold."
            )
        names.append(name)
    return tuple(names)


def _listed(path: Path, key: str) -> list[object]:
    try:
        listed = json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, list) or not listed:
        raise DataError(
            f"{path}: has no list of {key.strip('_')}, so this is not a completely saved dataset."
        )
    return listed
