"""The folder of token sets on this host, so that each data file is tokenised once.

    FT_TOKENS         the folder; unset: FT_HOME/tokens, which supervisors pass to their workers;
    empty: tokens are not kept

An entry's key begins with the data file's SHA-256, so that a pod can be given the entries of its
own files only. The folder is managed like that of quantised bases
(ft_service/bases/cache_folder.py) and takes at most half of its disk. Ranks only read it: what they
tokenise themselves is kept in their run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ft_service.bases.cache_folder import Cache

FOLDER = "FT_TOKENS"
NOT_KEPT = "tokens_not_kept"
"""`error.code` if a file's tokens could not be stored: the disk is at fault, not the file."""
IN_HOME = "tokens"
IN_RUN = "tokens"
"""Folder in the run directory for token sets that the ranks made themselves, until the job has
ended.
"""


def folder_of(environment: Mapping[str, str], home: Path) -> Path | None:
    """The folder of this host's token sets. None: tokens are not kept. `home`: FT_HOME."""
    given = environment.get(FOLDER)
    if given is None:
        return home / IN_HOME
    return Path(given).expanduser().absolute() if given else None


def entry_key(sha256: str, how: str) -> str:
    """The key of an entry. `sha256`: the data file's; `how`: a digest of everything else that
    determines its tokens.
    """
    return f"{sha256}.{how}"


def entries_of(folder: Path, sha256: str) -> list[Path]:
    """Complete entries of a data file for all tokenizers, sorted by name."""
    return sorted(path for path in folder.glob(f"{sha256}.*") if path.is_dir())


def remove_entries(folder: Path | None, sha256: str) -> None:
    """Remove the token sets of a data file, since they hold its text.

    Those that a job is reading stay.
    """
    for entry in [] if folder is None else entries_of(folder, sha256):
        Cache(entry.parent).remove(entry.name)
