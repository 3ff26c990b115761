"""A check that a base's embedding has a row for every token that its tokenizer can produce."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ft_service.bases.base_files import TOKENIZER as LIMIT
from ft_service.bases.base_files import (
    TOKENIZER_FILE,
    read_bytes,
    require_few_values,
    shown,
    unreadable_base,
)
from ft_service.bases.description import Description
from ft_service.errors import SpecError

_FileState = tuple[int, int, int]
"""Time of the last change in ns, bytes and inode of a file.

A file that was replaced has another one.
"""


def refuse_ids_without_row(base: Description, folder: Path) -> None:
    """Raise SpecError if the tokenizer's largest id is beyond the embedding.

    More rows than ids are padding, which is fine.
    """
    embedding = max(
        (w for w in base.weights if w.kind == "embedding"), key=lambda w: w.rows, default=None
    )
    largest = largest_token_id(folder)
    if embedding is None or largest is None or largest < embedding.rows:
        return
    raise SpecError(
        f"The base's tokenizer and weights do not fit: {TOKENIZER_FILE} in {folder} has token ids "
        f"up to {largest}, the "
        f"embedding {embedding.name} has {embedding.rows} rows, for ids up to "
        f"{embedding.rows - 1}. Use the tokenizer that the "
        f"base was trained with, or a copy of the base whose embedding has at least {largest + 1} "
        "rows "
        "(resize_token_embeddings).",
        param="model",
        code="vocabulary_too_small",
    )


def largest_token_id(folder: Path) -> int | None:
    """The largest id of the vocabulary and of the added tokens in tokenizer.json.

    None: no such file, or it names no ids.

    Cached until the file changes: it may have tens of megabytes. Raises SpecError for a file that
    cannot be read.
    """
    path = folder / TOKENIZER_FILE
    try:
        return _largest(path, _state(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"][:2]))
        raise unreadable_base(
            path, f"it is no tokenizer ({place and place + ': '}{shown(str(fault['msg']))})"
        ) from None


class _Added(BaseModel):
    id: int


class _Model(BaseModel):
    vocab: dict[str, int] | list[Any] | None = None
    """Token → id; in a Unigram model, tokens in the order of their ids."""


class _Tokenizer(BaseModel):
    model: _Model
    added_tokens: list[_Added] | None = None


_TOKENIZER = TypeAdapter(_Tokenizer)


@lru_cache(maxsize=32)
def _largest(path: Path, state: _FileState) -> int | None:
    text = read_bytes(path, LIMIT)
    try:
        require_few_values(text, LIMIT)
    except ValueError as error:
        raise unreadable_base(path, str(error)) from None
    tokenizer = _TOKENIZER.validate_json(text)
    vocab = tokenizer.model.vocab or {}
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    return max((*ids, *(token.id for token in tokenizer.added_tokens or ())), default=None)


def _state(path: Path) -> _FileState:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
