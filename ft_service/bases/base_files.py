"""Files of a base's folder: the one place where any of them is opened.

A base comes from strangers, and everyone's process reads it: server, plan, examiner, ranks and preview. So only regular files
that lie inside the folder are opened, without waiting, and only up to a size. Inside means inside what a link to the folder
leads to; in Hugging Face's cache, where a snapshot is made of links, inside the model's whole folder there.

`open_base_file`, `read_document` and their like open a file for us. `require_openable` judges a whole folder by the same rule,
for libraries that open its files by themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ft_service.errors import SpecError

NOT_REGULAR = "it is not a regular file"
MAX_DEPTH = 64
"""Lists and objects inside each other in a document; published ones have below ten."""
MAX_ENTRIES = 10_000
"""Files and folders in a base's folder."""
_CACHED = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")
"""A model's folder in Hugging Face's cache, two above its files (`snapshots/<revision>`)."""
_TEMPLATES = "additional_chat_templates"
"""The one folder below a base's that is read too."""


@dataclass(frozen=True)
class Limit:
    """How large a kind of file may be. `values`: numbers, texts, lists and objects in its JSON, each of which takes memory."""

    bytes: int
    values: int


DOCUMENT = Limit(bytes=8 * 2**20, values=500_000)
"""config.json and its like. The largest that are published list a few thousand added tokens."""
INDEX = Limit(bytes=64 * 2**20, values=1_000_000)
"""model.safetensors.index.json. One of 200,000 tensors has 20 MB."""
TOKENIZER = Limit(bytes=64 * 2**20, values=4_000_000)
"""tokenizer.json, and vocabularies in other forms. The largest that are published have 40 MB and 2 million values."""
TEMPLATE = Limit(bytes=2**20, values=0)
_ORDER: tuple[tuple[str, Limit | None], ...] = (
    ("*.safetensors", None),
    ("*.index.json", INDEX),
    ("tokenizer.json", TOKENIZER),
    ("vocab*", TOKENIZER),
    ("merges.txt", TOKENIZER),
    ("*.model", TOKENIZER),
    ("*.tiktoken", TOKENIZER),
    ("*.jinja", TEMPLATE),
    ("*.json", DOCUMENT),
)


def limit_of(name: str) -> Limit | None:
    """The limit of a file by its name. None: it is of any size, since it is not read as a whole."""
    return next((limit for pattern, limit in _ORDER if fnmatchcase(name, pattern)), None)


def cached_name(folder: Path) -> str | None:
    """ORG/NAME of a model's folder in Hugging Face's cache; None: it is not one."""
    found = _CACHED.fullmatch(folder.name)
    return f"{found['organisation']}/{found['name']}" if found else None


def open_base_file(path: Path, folder: Path | None = None) -> BinaryIO:
    """A file of a base's folder, opened to be read. `folder`: the base's, if that is not the file's own.

    Raises SpecError for what is not a regular file inside the folder, or is too large; OSError if it is absent or unreadable.
    """
    real = _judged(path, _inside_of(path.parent if folder is None else folder))
    return open_regular(real, lambda why: unreadable_base(path, why))


def open_regular(path: Path, refusal: Callable[[str], Exception]) -> BinaryIO:
    """A regular file. Raises what `refusal` makes of the reason for anything else, without waiting for it; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal(NOT_REGULAR)
    return os.fdopen(descriptor, "rb")


def require_openable(folder: Path) -> None:
    """Raises SpecError naming the first entry of a base's folder that may not be opened, and why."""
    try:
        _require_openable(folder)
    except OSError as error:
        message = f"The base in {folder} cannot be read: {error.strerror or error}."
        raise SpecError(message, param="model", code="model_unreadable") from None


def _require_openable(folder: Path) -> None:
    inside = _inside_of(folder)
    for place in (folder, folder / _TEMPLATES):
        if place != folder and not place.is_dir():
            continue
        with os.scandir(place) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_ENTRIES:
                    raise SpecError(
                        f"The base in {folder} holds more than {MAX_ENTRIES:,} entries: it is not the folder of one model.",
                        param="model",
                        code="model_unreadable",
                    )
                if not entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    _judge_entry(entry, inside)


def is_base_file(path: Path, folder: Path | None = None) -> bool:
    """True if a file of a base's folder is there and may be opened. `folder`: the base's, if that is not the file's own."""
    try:
        _judged(path, _inside_of(path.parent if folder is None else folder))
    except (SpecError, OSError):
        return False
    return True


def read_bytes(path: Path, limit: Limit | None = None) -> bytes:
    """All of a file, `limit`: that of its name. Raises SpecError and OSError as `open_base_file` does."""
    most = (limit or limit_of(path.name) or DOCUMENT).bytes
    with open_base_file(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise unreadable_base(path, _too_large(most))
    return text


def copy_base_file(path: Path, target: Path) -> None:
    """Copy a file of a base's folder. Raises SpecError and OSError as `open_base_file` does."""
    with open_base_file(path) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)


def read_text(path: Path) -> str:
    """All of a small text in UTF-8. Raises SpecError; OSError if it is absent or unreadable."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise unreadable_base(path, f"it is not text in UTF-8 ({error.reason})") from None


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object, read as tolerantly as transformers does, which writes Infinity where it means it.

    Raises SpecError for a file that may not be opened, is too large, or is not such an object; OSError.
    """
    limit = limit_of(path.name) or DOCUMENT
    try:
        return parse_document(read_bytes(path, limit), limit)
    except ValueError as error:
        raise unreadable_base(path, str(error)) from None


def document_or_none(path: Path) -> dict[str, Any] | None:
    """`read_document`; None: it is absent, or is not one. For files without which a base is whole."""
    try:
        return read_document(path)
    except (SpecError, OSError):
        return None


def parse_document(
    text: bytes,
    limit: Limit,
    what: str = "it",
    *,
    unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
    constant: Callable[[str], NoReturn] | None = None,
) -> dict[str, Any]:
    """A JSON object of bounded depth and number of values. `unique`, `constant`: json's hooks for objects and for NaN.

    Raises ValueError that names `what`. It refuses before it builds: text of a few megabytes can stand for gigabytes of lists.
    """
    require_few_values(text, limit, what)
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        said = str(error)
        said = said if len(said) <= 80 else f"{said[:77]}..."
        raise ValueError(f"{what} cannot be read as JSON ({type(error).__name__}: {said})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object")
    _require_flat(value, what)
    return value


def require_few_values(text: bytes, limit: Limit, what: str = "it") -> None:
    """Raises ValueError for JSON that may hold more values than the limit allows: every one but the first follows a comma, or
    what opens a list or an object.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > limit.values:
        raise ValueError(f"{what} holds more than {limit.values:,} values")


def unreadable_base(path: Path, why: str) -> SpecError:
    """The refusal of a base because of one of its files."""
    return SpecError(
        f"The base's {path.name} in {path.parent}: {why}. Copy or download it anew.", param="model", code="model_unreadable"
    )


def _too_large(most: int) -> str:
    return f"it has more than {most // 2**20} MiB, which no such file of a published base has"


def _inside_of(folder: Path) -> Path:
    """The real folder in which files of a base may lie."""
    real = Path(os.path.realpath(folder))
    in_cache = real.parent.name == "snapshots" and cached_name(real.parent.parent) is not None
    return real.parent.parent if in_cache else real


def _judge_entry(entry: os.DirEntry[str], inside: Path) -> None:
    try:
        _judged(Path(entry.path), inside, is_link=entry.is_symlink())
    except FileNotFoundError:  # a link inside, to what has not arrived: for whoever looks for it there is no such file
        return
    except OSError as error:
        raise unreadable_base(Path(entry.path), error.strerror or "it cannot be read") from None


def _judged(path: Path, inside: Path, *, is_link: bool = True) -> Path:
    """The real path of a file that may be opened. Raises SpecError, OSError."""
    real = Path(os.path.realpath(path)) if is_link else path  # unlike `resolve`, of a loop too
    if is_link and not real.is_relative_to(inside):
        raise unreadable_base(path, "it is a link that leads out of the base's folder; put the file itself there")
    state = real.stat()
    if not stat.S_ISREG(state.st_mode):
        raise unreadable_base(path, NOT_REGULAR)
    limit = limit_of(path.name)
    if limit is not None and state.st_size > limit.bytes:
        raise unreadable_base(path, _too_large(limit.bytes))
    return real


def _require_flat(document: dict[str, Any], what: str) -> None:
    """Raises ValueError for lists and objects that lie too deep inside each other: who prints or copies them would fail."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for held in level:
            inner += [one for one in (held.values() if isinstance(held, dict) else held) if isinstance(one, (dict, list))]
        if not inner:
            return
        level = inner
    raise ValueError(f"{what} holds more than {MAX_DEPTH} lists or objects inside each other")
