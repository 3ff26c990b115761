"""Folders of token sets on this host, so that a data file is tokenised once, by whoever examines it.

    FT_TOKENS         the folder; unset: FT_HOME/tokens, which supervisors tell their workers; empty: none is kept

An entry's key begins with the data file's SHA-256, so that a pod can be shown what belongs to its own files. The folder is kept
as that of quantised bases is (ft_service/bases/cache_folder.py), and takes half of its disk at most. A rank reads it and never
writes there: what it has to tokenise itself it keeps in its run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ft_service.bases.cache_folder import Cache

FOLDER = "FT_TOKENS"
NOT_KEPT = "tokens_not_kept"
"""`error.code` where a file's tokens could not be stored: the disk is at fault, not the file."""
IN_HOME = "tokens"
IN_RUN = "tokens"
"""Where the ranks of a job keep what they tokenised themselves, as long as the job is not done."""


def folder_of(environment: Mapping[str, str], home: Path) -> Path | None:
    """The folder of this host's token sets. None: none are kept. `home`: FT_HOME."""
    given = environment.get(FOLDER)
    if given is None:
        return home / IN_HOME
    return Path(given).expanduser().absolute() if given else None


def entry_key(sha256: str, how: str) -> str:
    """The key of an entry. `sha256`: of the data file; `how`: a digest of all else that decides its tokens."""
    return f"{sha256}.{how}"


def entries_of(folder: Path, sha256: str) -> list[Path]:
    """Complete entries for a data file, by whichever tokenizer, by name."""
    return sorted(path for path in folder.glob(f"{sha256}.*") if path.is_dir())


def remove_entries(folder: Path | None, sha256: str) -> None:
    """Remove what a data file was made into: it holds the same words. What a job is reading stays."""
    for entry in [] if folder is None else entries_of(folder, sha256):
        Cache(entry.parent).remove(entry.name)
