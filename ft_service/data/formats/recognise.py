"""What a file is, by its contents alone. Pure."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Collection, Sequence
from enum import Enum

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.errors import SpecError

HEAD_BYTES = 64 * 1024
"""Of a file's beginning, that a container is recognised by."""
DELIMITERS = ",;\t"
_MARK = b"\xef\xbb\xbf"
_LOOKED_AT = 20
"""Lines of a file that are looked at to tell a table from lines of text."""
_LONGEST_NAME = 64
"""Characters of a column's name in a table whose header is not known."""


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


def container_of(head: bytes, columns: Columns = AS_THEY_ARE) -> Container:
    """The container of a file that begins so, once it is decompressed. What is nothing else is JSON lines."""
    if head.startswith(b"PAR1"):
        return Container.PARQUET
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return Container.ARROW
    text = head.removeprefix(_MARK).lstrip()
    if text.startswith(b"["):
        return Container.ARRAY
    is_table = not text.startswith((b"{", b'"{')) and delimiter_of(head, columns) is not None
    return Container.CSV if is_table else Container.LINES


def delimiter_of(head: bytes, columns: Columns = AS_THEY_ARE) -> str | None:
    """What separates the cells of a table: what makes its header that of a known format, else what cuts its first lines into
    equally many cells. None: it is not a table."""
    lines = head.removeprefix(_MARK).lstrip().decode(errors="replace").splitlines()[:_LOOKED_AT]
    rows = {delimiter: _cells(lines, delimiter) for delimiter in DELIMITERS}
    for delimiter, (names, *_) in rows.items():
        given = [name for cell in names if (name := columns.name(cell.strip())) is not None]
        if recognise(given) is not None:
            return delimiter
    return next((delimiter for delimiter, cells in rows.items() if _is_table(cells)), None)


def _cells(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """The header and the rows behind it, as far as they can be read."""
    found: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        found.extend(csv.reader(lines, delimiter=delimiter))
    return found or [[]]


def _is_table(rows: Sequence[Sequence[str]]) -> bool:
    """Whether what has no known header is a table all the same: names that are words, and rows as wide as they."""
    names = [name.strip() for name in rows[0]]
    words = all(0 < len(name) <= _LONGEST_NAME and not set(name) & set("{}[]<>") for name in names)
    wide = [len(row) for row in rows[1:-1] if row] or [len(row) for row in rows[1:] if row]
    return len(names) > 1 and words and bool(wide) and all(width == len(names) for width in wide)
