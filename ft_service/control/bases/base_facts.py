"""Facts about a base, from its description and from the files of its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import MAX_ENTRIES, document_or_none
from ft_service.bases.catalogue import pickled_weights
from ft_service.bases.description import Described
from ft_service.bases.origin import licence_of, read_origin
from ft_service.errors import FtError
from ft_service.plan.vocabulary_check import refuse_ids_without_row

PICKLED = "It has no weights in safetensors, only {name}, which is pickled and never read."


@dataclass(frozen=True)
class BaseFacts:
    """Facts about a base; None: unknown."""

    family: str | None = None
    """model_type of the decoder."""
    parameters: int | None = None
    """Number of the decoder's parameters."""
    format: str | None = None
    """Storage of the weights in its files: a dtype, or the method of quantisation."""
    context: int | None = None
    """Number of positions that it was made for."""
    chat_template: bool = False
    """Whether it has a chat template. Without one, a job brings its own or trains on bare text."""
    images: bool | None = None
    """Whether jobs learn from images in chats. None: not described yet."""
    licence: str | None = None
    repository: str | None = None
    """ORG/NAME that `ft pull` has fetched it from."""
    commit: str | None = None
    described: bool = True
    """False: it is being described, and facts that need the description are unknown."""
    trainable: bool | None = True
    """Whether a job without options would be accepted. None: not described yet."""
    why_not: str | None = None


def base_facts(folder: Path, document: Described | None) -> BaseFacts:
    """The facts of a base, cached until a file of its folder changes.

    `document`: its description or refusal; None: it is not described yet.
    """
    try:
        with os.scandir(folder) as entries:
            states = tuple(sorted(_state(entry) for entry in islice(entries, MAX_ENTRIES + 1)))
    except OSError as error:
        return BaseFacts(trainable=False, why_not=f"its folder cannot be read: {error.strerror}")
    return _facts(folder, document, states)


@lru_cache(maxsize=1024)
def _facts(
    folder: Path, document: Described | None, states: tuple[tuple[str, int, int], ...]
) -> BaseFacts:
    """`states`: of the files, as the key of the cache."""
    origin = read_origin(folder)
    known: dict[str, Any] = {
        "licence": licence_of(folder),
        "chat_template": _has_template(folder),
        "repository": origin.repository if origin else None,
        "commit": origin.commit if origin else None,
    }
    base = document and document.base
    refused = document and document.refused
    if base is not None:
        known |= {
            "family": base.model_type,
            "parameters": sum(weight.numel for weight in base.weights),
            "format": base.layout,
            "context": base.dimensions.max_positions,
            "images": base.images is not None,
        }
    elif refused is not None:
        known["family"] = refused.model_type
    if (pickled := pickled_weights(folder)) is not None:
        return BaseFacts(**known, trainable=False, why_not=PICKLED.format(name=pickled))
    if document is None:
        return BaseFacts(**known, described=False, trainable=None)
    try:
        refuse_ids_without_row(document.description(), folder)
    except FtError as error:
        return BaseFacts(**known, trainable=False, why_not=error.message)
    return BaseFacts(**known)


def _has_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")):
        return True
    return bool((document_or_none(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _state(entry: os.DirEntry[str]) -> tuple[str, int, int]:
    """Name, time of the last change in ns, and bytes of an entry; for a broken link, those of the
    link.
    """
    try:
        state = entry.stat()
    except OSError:
        state = entry.stat(follow_symlinks=False)
    return entry.name, state.st_mtime_ns, state.st_size
