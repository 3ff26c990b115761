"""Which text each token id stands for, as a digest by which two bases are compared."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import (
    TOKENIZER,
    TOKENIZER_FILE,
    parse_document,
    read_bytes,
    unreadable_base,
)

_OTHERS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
"""Files that hold the vocabulary of a base without tokenizer.json."""
_PARTS = ("model", "normalizer", "pre_tokenizer")


def vocabulary_digest(folder: Path) -> str:
    """Digest of how text becomes ids: of the vocabulary with its merges, of what is done to text
    before, and of added tokens; 64 hexadecimal digits. Chat template and special roles are not part
    of it, nor is the order of keys. Empty: the folder has no tokenizer.

    Cached until a file changes. Raises SpecError for a file that cannot be read.
    """
    found = [folder / name for name in (TOKENIZER_FILE, *_OTHERS) if (folder / name).is_file()]
    whole = [path for path in found if path.name == TOKENIZER_FILE] or found
    try:
        states = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in whole)
    except OSError as error:
        raise unreadable_base(folder, error.strerror or "it cannot be read") from None
    return _digest(states)


@lru_cache(maxsize=32)
def _digest(states: tuple[tuple[Path, int, int], ...]) -> str:
    if not states:
        return ""
    digest = hashlib.sha256()
    for path, _, _ in states:
        text = read_bytes(path, TOKENIZER)
        if path.name == TOKENIZER_FILE:
            try:
                text = _canonical(parse_document(text, TOKENIZER))
            except ValueError as error:
                raise unreadable_base(path, str(error)) from None
        digest.update(f"\n{path.name}\n".encode() + text)
    return digest.hexdigest()


def _canonical(document: dict[str, Any]) -> bytes:
    added = document.get("added_tokens")
    tokens = [
        (token.get("id"), token.get("content"))
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
    ]
    parts = {name: document.get(name) for name in _PARTS}
    return json.dumps({**parts, "added": tokens}, sort_keys=True).encode()
