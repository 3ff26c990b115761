"""What a file is, by its contents alone. Pure."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from enum import Enum

from ft_service.errors import SpecError

HEAD_BYTES = 64 * 1024
"""Of a file's beginning, that a container is recognised by."""
DELIMITERS = ",;\t"
_MARK = b"\xef\xbb\xbf"


DATA_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Of names of data files. They keep out what cannot be one; what a file is, its contents say."""
COMPRESSED_ENDINGS = (".gz", ".zst")


def may_hold_data(filename: str) -> bool:
    name = filename.lower()
    for ending in COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    return name.endswith(DATA_ENDINGS)


def refuse_no_data_file(filename: str, param: str) -> None:
    """Raise SpecError for a name that no data file has. `param`: what the name was sent as."""
    if not may_hold_data(filename):
        message = f"{param}: the name must end in {' or '.join(DATA_ENDINGS)}, and {filename!r} does not."
        raise SpecError(message, param=param, code="invalid_filename")


class Format(Enum):
    """A format of records. The value: what users are told."""

    CHAT = "OpenAI chat (messages)"
    PROMPT_COMPLETION = "prompt and completion"
    TEXT = "plain text (text)"
    SHAREGPT = "ShareGPT (conversations)"
    ALPACA = "Alpaca (instruction, input, output)"
    OPENAI_PAIRS = "OpenAI preference pairs (input, preferred_output, non_preferred_output)"
    TRL_PAIRS = "preference pairs (prompt, chosen, rejected)"

    @property
    def is_pairs(self) -> bool:
        return self in (Format.OPENAI_PAIRS, Format.TRL_PAIRS)


SIGNS: Sequence[tuple[Format, Sequence[frozenset[str]]]] = (
    (Format.OPENAI_PAIRS, (frozenset({"input", "preferred_output"}), frozenset({"input", "non_preferred_output"}))),
    (Format.OPENAI_PAIRS, (frozenset({"input", "preferred_completion"}), frozenset({"input", "non_preferred_completion"}))),
    (Format.TRL_PAIRS, (frozenset({"chosen", "rejected"}),)),
    (Format.CHAT, (frozenset({"messages"}),)),
    (Format.SHAREGPT, (frozenset({"conversations"}), frozenset({"conversation"}))),
    (Format.ALPACA, (frozenset({"instruction", "output"}),)),
    (Format.PROMPT_COMPLETION, (frozenset({"prompt", "completion"}),)),
    (Format.TEXT, (frozenset({"text"}),)),
)
"""Keys that a format is recognised by, one of the sets; what tells most comes first."""


def recognise(keys: Collection[str]) -> Format | None:
    """The format of a record that has these keys. None: of no known one."""
    given = set(keys)
    return next((format for format, signs in SIGNS if any(sign <= given for sign in signs)), None)


class Compression(Enum):
    GZIP = "gzip"
    ZSTD = "zstd"


def compression_of(head: bytes) -> Compression | None:
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    return Compression.ZSTD if head.startswith(b"\x28\xb5\x2f\xfd") else None


class Container(Enum):
    """What holds the records. The value: what users are told."""

    LINES = "JSON lines"
    ARRAY = "a JSON array"
    CSV = "CSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"

    @property
    def word(self) -> str:
        """What one of its records is called. Records are numbered from 1; a header is none."""
        return {Container.LINES: "line", Container.ARRAY: "element"}.get(self, "row")


def container_of(head: bytes) -> Container:
    """The container of a file that begins so, once it is decompressed. What is nothing else is JSON lines."""
    if head.startswith(b"PAR1"):
        return Container.PARQUET
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return Container.ARROW
    text = head.removeprefix(_MARK).lstrip()
    if text.startswith(b"["):
        return Container.ARRAY
    return Container.CSV if not text.startswith(b"{") and delimiter_of(head) is not None else Container.LINES


def delimiter_of(head: bytes) -> str | None:
    """What separates the cells of a table whose header names a known format. None: it is no such table."""
    first = head.removeprefix(_MARK).lstrip().split(b"\n", 1)[0].decode(errors="replace").rstrip("\r")
    for delimiter in DELIMITERS:
        try:
            names = next(csv.reader([first], delimiter=delimiter), [])
        except csv.Error:
            continue
        if recognise([name.strip() for name in names]) is not None:
            return delimiter
    return None
