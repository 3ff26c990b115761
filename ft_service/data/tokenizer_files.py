"""The files of a base's folder that determine how text becomes tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ft_service.bases.base_files import document_or_none, is_base_file

PATTERNS = (
    *(
        "tokenizer*",
        "chat_template*",
        "*.jinja",
        "additional_chat_templates/*.jinja",
        "*.model",
        "vocab*",
        "merges.txt",
    ),
    *("special_tokens_map.json", "added_tokens.json", "config.json"),
)
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that determine how images become pixels and tokens."""
_STOPS = "generation_config.json"


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a base's folder, sorted by path."""
    return sorted(
        path
        for path in {path for pattern in PATTERNS for path in folder.glob(pattern)}
        if is_base_file(path, folder)
    )


def tokenizer_state(model_path: str) -> str:
    """A digest of sizes and times of a base's tokenizer files, which changes when one of them does.

    Does not read the files.
    """
    folder = Path(model_path)
    files = [
        *tokenizer_files(folder),
        *(path for name in (_STOPS, *IMAGE_FILES) if is_base_file(path := folder / name)),
    ]
    states = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def stops_of(folder: Path) -> frozenset[int]:
    """The ids of the tokens that end generation, from generation_config.json, else from
    config.json.
    """
    for name in (_STOPS, "config.json"):
        given = (document_or_none(folder / name) or {}).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        if stops := frozenset(token for token in ids if isinstance(token, int)):
            return stops
    return frozenset()
