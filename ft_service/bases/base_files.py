"""The files of a base's folder. Every file of a base is opened here.

A base comes from strangers, and server, plan, examiner, ranks and preview read it. Therefore only
regular files inside the folder are opened, without blocking, and only up to a size. A link to the
folder is followed first; in Hugging Face's cache, where a snapshot consists of links, the files may
lie anywhere in the model's folder.

`open_base_file`, `read_document` and similar functions open a file. `require_openable` checks a
whole folder by the same rule, for libraries that open its files themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ft_service.errors import SpecError

NOT_REGULAR = "it is not a regular file"
MAX_DEPTH = 64
"""Levels of nested lists and objects in a document; published ones have fewer than ten."""
MAX_ENTRIES = 10_000
"""Files and folders in a base's folder."""
TOKENIZER_FILE = "tokenizer.json"
_CACHED = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")
"""A model's folder in Hugging Face's cache, two above its files (`snapshots/<revision>`)."""
_TEMPLATES = "additional_chat_templates"
"""The only subfolder of a base that is read."""


@dataclass(frozen=True)
class Limit:
    """Most bytes of a kind of file.

    `values`: most numbers, strings, lists and objects in its JSON; each takes memory.
    """

    bytes: int
    values: int


DOCUMENT = Limit(bytes=8 * 2**20, values=500_000)
"""The limit of config.json and similar files.

The largest published ones list a few thousand added tokens.
"""
INDEX = Limit(bytes=64 * 2**20, values=1_000_000)
"""The limit of model.safetensors.index.json. With 200,000 tensors it has 20 MB."""
TOKENIZER = Limit(bytes=64 * 2**20, values=4_000_000)
"""The limit of tokenizer.json and other vocabularies.

The largest published ones have 40 MB and 2 million values.
"""
TEMPLATE = Limit(bytes=2**20, values=0)
_ORDER: tuple[tuple[str, Limit | None], ...] = (
    ("*.safetensors", None),
    ("*.index.json", INDEX),
    (TOKENIZER_FILE, TOKENIZER),
    ("vocab*", TOKENIZER),
    ("merges.txt", TOKENIZER),
    ("*.model", TOKENIZER),
    ("*.tiktoken", TOKENIZER),
    ("*.jinja", TEMPLATE),
    ("*.json", DOCUMENT),
)


def limit_of(name: str) -> Limit | None:
    """The limit of a file by its name. None: any size, since the file is not read as a whole."""
    return next((limit for pattern, limit in _ORDER if fnmatchcase(name, pattern)), None)


def tokenizer_fault(names: Iterable[str]) -> str | None:
    """Why the tokenizer among a base's files, by their `names`, cannot give the tokens that the
    base was trained with; None: nothing is known against it.

    A vocabulary of tiktoken's (Kimi, Hunyuan) holds no rule for splitting text, which stands in
    code of its publisher's. Others convert it with a rule of their own, and give other tokens for
    the same text.
    """
    held = set(names)
    found = next(
        (name for name in sorted(held) if name == "tiktoken.model" or name.endswith(".tiktoken")),
        None,
    )
    if found is None or TOKENIZER_FILE in held:
        return None
    return (
        f"its tokenizer is {found} without a {TOKENIZER_FILE}: the rule by which it splits text "
        "is its publisher's code, which "
        f"is never run, and readers of {found} alone give other tokens than the base was trained "
        f"with. Put a {TOKENIZER_FILE} "
        "into the folder that gives the publisher's tokens, or take another base"
    )


def cached_name(folder: Path) -> str | None:
    """ORG/NAME of a model's folder in Hugging Face's cache; None: it is another folder."""
    match = _CACHED.fullmatch(folder.name)
    return f"{match['organisation']}/{match['name']}" if match else None


def open_base_file(path: Path, folder: Path | None = None) -> BinaryIO:
    """Open a file of a base's folder for reading.

    `folder`: the base's folder; None: the file's parent.

    Raises SpecError if it is not a regular file inside the folder, or is too large; OSError if it
    is absent or unreadable.
    """
    real = _judged(path, _inside_of(path.parent if folder is None else folder))
    return open_regular(real, lambda why: unreadable_base(path, why))


def open_regular(path: Path, refusal: Callable[[str], Exception]) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises `refusal(reason)` for anything else; OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal(NOT_REGULAR)
    return os.fdopen(descriptor, "rb")


def require_openable(folder: Path) -> None:
    """Raise SpecError naming the first entry of a base's folder that may not be opened, and why."""
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
                        f"The base in {folder} holds more than {MAX_ENTRIES:,} entries: it is not "
                        "the folder of one model.",
                        param="model",
                        code="model_unreadable",
                    )
                if not entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    _judge_entry(entry, inside)


def is_base_file(path: Path, folder: Path | None = None) -> bool:
    """Whether a file of a base's folder exists and may be opened.

    `folder`: the base's folder; None: the file's parent.
    """
    try:
        _judged(path, _inside_of(path.parent if folder is None else folder))
    except (SpecError, OSError):
        return False
    return True


def read_bytes(path: Path, limit: Limit | None = None) -> bytes:
    """Read a whole file. `limit`: None: that of its name.

    Raises SpecError and OSError as `open_base_file`.
    """
    most = (limit or limit_of(path.name) or DOCUMENT).bytes
    with open_base_file(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise unreadable_base(path, _too_large(most))
    return text


def copy_base_file(path: Path, target: Path) -> None:
    """Copy a file of a base's folder. Raises SpecError and OSError as `open_base_file`."""
    with open_base_file(path) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)


def read_text(path: Path) -> str:
    """Read a small text in UTF-8. Raises SpecError; OSError if it is absent or unreadable."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise unreadable_base(path, f"it is not text in UTF-8 ({error.reason})") from None


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object as tolerantly as transformers, which writes Infinity.

    Raises SpecError for a file that may not be opened, is too large, or holds anything else;
    OSError.
    """
    limit = limit_of(path.name) or DOCUMENT
    try:
        return parse_document(read_bytes(path, limit), limit)
    except ValueError as error:
        raise unreadable_base(path, str(error)) from None


def document_or_none(path: Path) -> dict[str, Any] | None:
    """`read_document` of a file that a base does not need; None: it is absent or cannot be read."""
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
    """Parse a JSON object of bounded depth and number of values.

    `unique`, `constant`: json's hooks for objects and for NaN.

    Raises ValueError that names `what`, before memory is taken: a few megabytes of text can stand
    for gigabytes of lists.
    """
    require_few_values(text, limit, what)
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} cannot be read as JSON ({type(error).__name__}: {_cut(str(error))})"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object")
    _require_flat(value, what)
    return value


def require_few_values(text: bytes, limit: Limit, what: str = "it") -> None:
    """Raise ValueError for JSON that may hold more values than the limit allows: every value except
    the first follows a comma or an opening bracket.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > limit.values:
        raise ValueError(f"{what} holds more than {limit.values:,} values")


def unreadable_base(path: Path, why: str) -> SpecError:
    """The refusal of a base because of one of its files."""
    return SpecError(
        f"The base's {path.name} in {path.parent}: {why}. Copy or download it again.",
        param="model",
        code="model_unreadable",
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
    except (
        FileNotFoundError
    ):  # a link inside the folder to a file that does not exist yet: it counts as absent
        return
    except OSError as error:
        raise unreadable_base(Path(entry.path), error.strerror or "it cannot be read") from None


def _judged(path: Path, inside: Path, *, is_link: bool = True) -> Path:
    """The real path of a file that may be opened. Raises SpecError, OSError."""
    real = Path(os.path.realpath(path)) if is_link else path  # `resolve` raises for a loop of links
    if is_link and not real.is_relative_to(inside):
        raise unreadable_base(
            path, "it is a link that leads out of the base's folder; put the file itself there"
        )
    state = real.stat()
    if not stat.S_ISREG(state.st_mode):
        raise unreadable_base(path, NOT_REGULAR)
    limit = limit_of(path.name)
    if limit is not None and state.st_size > limit.bytes:
        raise unreadable_base(path, _too_large(limit.bytes))
    return real


def _require_flat(document: dict[str, Any], what: str) -> None:
    """Raise ValueError for lists and objects that are nested too deeply to be printed or copied."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            inner += [
                part
                for part in (value.values() if isinstance(value, dict) else value)
                if isinstance(part, (dict, list))
            ]
        if not inner:
            return
        level = inner
    raise ValueError(f"{what} holds more than {MAX_DEPTH} lists or objects inside each other")


def shown(value: object) -> str:
    """A value for a message: strings quoted, anything cut to 80 characters."""
    return _cut(repr(value) if isinstance(value, str) else str(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, with the quantisation that ModelOpt may have written to a file of its own.

    Raises SpecError if it is missing or broken.
    """
    path = folder / "config.json"
    try:
        document = read_document(path)
    except OSError as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None
    _require_kinds(path, document, "")
    announced = document_or_none(folder / "hf_quant_config.json")
    if announced is not None and document.get("quantization_config") is None:
        quantization = announced.get("quantization")
        document["quantization_config"] = {
            "quant_method": "modelopt",
            **(quantization if isinstance(quantization, dict) else {}),
        }
    return document


def _require_kinds(path: Path, section: Mapping[str, Any], prefix: str) -> None:
    """Raise SpecError for a name or a section of a config.json that has another type.

    `prefix`: the section's own name.
    """
    for key, kind, wanted in (
        ("model_type", str, "a name"),
        ("architectures", list, "a list of names"),
    ):
        given = section.get(key)
        names = given if isinstance(given, list) else [given]
        if given is not None and not (
            isinstance(given, kind) and all(isinstance(name, str) for name in names)
        ):
            raise unreadable_base(
                path, f"it says {prefix}{key} = {shown(given)}, and that must be {wanted}"
            )
    for part, inner in section.items():
        if inner is None or not part.endswith("_config"):
            continue
        if not isinstance(inner, Mapping):
            raise unreadable_base(
                path, f"it says {prefix}{part} = {shown(inner)}, and that must be an object"
            )
        _require_kinds(path, inner, f"{prefix}{part}.")
