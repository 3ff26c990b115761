"""Datasets that are folders, as Hugging Face's `datasets` saves them and as its hub keeps them: which of their files hold a
split's records, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ft_service.bases.origin import ORIGIN
from ft_service.data.formats.recognise import may_hold_data
from ft_service.errors import DataError

_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_SPLIT_NAME = re.compile(r"(.*?)(?:-\d{5}-of-\d{5})?(?:\.[a-z0-9]+)+$", re.IGNORECASE)


def dataset_files(folder: Path, split: str) -> tuple[str, ...]:
    """The data files of one split, named from the folder; where a folder has one split only, of that. Raises DataError."""
    if (folder / _SPLITS).is_file():  # datasets' DatasetDict.save_to_disk
        names = _listed(folder / _SPLITS, "splits")
        chosen = _chosen(folder, split, [name for name in names if isinstance(name, str)])
        return tuple(f"{chosen}/{name}" for name in _saved(folder / chosen))
    if (folder / _STATE).is_file():  # Dataset.save_to_disk
        return _saved(folder)
    where = folder / "data" if (folder / "data").is_dir() else folder
    files = sorted(path for path in where.iterdir() if path.is_file() and may_hold_data(path.name) and path.name != ORIGIN)
    if not files:
        raise DataError(f"{folder}: the folder holds no data files (JSON lines, CSV, Parquet or Arrow).")
    splits: dict[str, list[str]] = {}
    for path in files:
        found = _SPLIT_NAME.fullmatch(path.name)
        splits.setdefault(found[1] if found else path.stem, []).append(path.relative_to(folder).as_posix())
    return tuple(splits[_chosen(folder, split, list(splits))])


def _chosen(folder: Path, split: str, splits: Sequence[str]) -> str:
    """One of a folder's splits: the one that is meant, or the only one."""
    if split in splits or len(splits) == 1:
        return split if split in splits else splits[0]
    named = ", ".join(splits)
    raise DataError(f"{folder}: the folder has the splits {named}, and none is called {split}. Name a file of it instead.")


def _saved(folder: Path) -> tuple[str, ...]:
    """The Arrow files of a dataset that was saved to disk."""
    names: list[str] = []
    for entry in _listed(folder / _STATE, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not (folder / name).is_file() or Path(name).name != name:
            raise DataError(f"{folder}: {_STATE} names a file {name!r}, which the folder does not hold.")
        names.append(name)
    return tuple(names)


def _listed(path: Path, key: str) -> list[object]:
    try:
        listed = json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{path}: has no list of {key.strip('_')}, so this is no dataset that was saved whole.")
    return listed
