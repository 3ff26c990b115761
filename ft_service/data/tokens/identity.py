"""All that decides, beside a data file's bytes, which tokens it becomes. Loads no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers

from ft_service.data.data_file import PAIRING
from ft_service.data.token_folder import entry_key
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokenizer_files import stops_of, tokenizer_files
from ft_service.data.tokens.render import CLOCK, RENDERING
from ft_service.data.tokens.stored import FORMAT
from ft_service.rundir.directory import sha256_of

_WITH_TEMPLATE = ("tokenizer_config.json", "chat_template.json")


def tokens_key(model_path: str, sha256: str, options: TokenOptions = DEFAULT, *, pairs: bool = False) -> str:
    """The key of a data file's token set for a base. `sha256`: of the data file; `pairs`: it holds pairs of answers.
    Raises OSError.

    Not part of it: training.max_length, since samples are stored uncut.
    """
    return entry_key(sha256, tokenizing_digest(model_path, options, pairs=pairs))


def tokenizing_digest(model_path: str, options: TokenOptions = DEFAULT, *, pairs: bool = False) -> str:
    """Of the contents of the tokenizer's files, its chat templates among them, of the code that reads them, and of what a job
    says about it; of the date only where a template may write it.
    """
    folder = Path(model_path)
    files = tokenizer_files(folder)
    given = options.given()
    if not may_write_date(files, options.chat_template):
        given.pop("date", None)
    how: dict[str, Any] = {
        "files": {path.relative_to(folder).as_posix(): sha256_of(path) for path in files},
        "stops": sorted(stops_of(folder)),
        "format": FORMAT,
        "rendering": RENDERING,
        "libraries": [transformers.__version__, tokenizers.__version__, jinja2.__version__],
        **({"options": given} if given else {}),
    }
    if pairs:
        how["pairs"] = PAIRING
    return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:40]


def may_write_date(files: Sequence[Path], chat_template: str) -> bool:
    """Whether the chat template that is used may write the date. `files`: the tokenizer's."""
    if chat_template:
        return CLOCK in chat_template
    return any(CLOCK.encode() in path.read_bytes() for path in files if path.suffix == ".jinja" or path.name in _WITH_TEMPLATE)
