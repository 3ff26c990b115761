"""All that decides, beside a data file's bytes, which tokens it becomes. Loads no tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers

from ft_service.data.token_folder import entry_key
from ft_service.data.tokenizer_files import tokenizer_files
from ft_service.data.tokens.pairs import PAIRING
from ft_service.data.tokens.render import RENDERING
from ft_service.data.tokens.stored import FORMAT
from ft_service.rundir.directory import sha256_of


def tokens_key(model_path: str, sha256: str, *, pairs: bool = False) -> str:
    """The key of a data file's token set for a base. `sha256`: of the data file; `pairs`: its lines hold pairs. Raises OSError.

    Not part of it: training.max_length, since samples are stored uncut.
    """
    return entry_key(sha256, tokenizing_digest(model_path, pairs=pairs))


def tokenizing_digest(model_path: str, *, pairs: bool = False) -> str:
    """Of the contents of the tokenizer's files, its chat templates among them, and of the code that reads them."""
    folder = Path(model_path)
    how: dict[str, Any] = {
        "files": {path.relative_to(folder).as_posix(): sha256_of(path) for path in tokenizer_files(folder)},
        "format": FORMAT,
        "rendering": RENDERING,
        "libraries": [transformers.__version__, tokenizers.__version__, jinja2.__version__],
    }
    if pairs:
        how["pairs"] = PAIRING
    return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:40]
