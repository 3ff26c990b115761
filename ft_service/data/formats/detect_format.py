"""Detection of a data file's compression, container and format, from its contents alone. Pure."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Collection, Sequence
from enum import Enum
from itertools import islice

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.errors import SpecError

HEAD_BYTES = 64 * 1024
"""The size of a file's beginning from which its container is recognised, in bytes."""
DELIMITERS = ",;\t"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SAMPLE_LINES = 20
"""Lines at a file's beginning that decide whether it is a table."""
_LONGEST_NAME = 64
"""Characters of a column's name in a table whose header is of no known format, at most."""

_WORDS_OF_A_NAME = 5
"""Words of a column's name, at most."""

DATA_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files' names.

Uploads with other endings are refused; the contents decide the container.
"""
COMPRESSED_ENDINGS = (".gz", ".zst")


def may_hold_data(filename: str) -> bool:
    name = filename.lower()
    for ending in COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    return name.endswith(DATA_ENDINGS)


def refuse_no_data_file(filename: str, param: str) -> None:
    """Raise SpecError for a name with another ending than those of data files.

    `param`: the field that holds the name.

    Bytes that a client sends from memory have no ending: OpenAI's clients call them `upload` and
    `unknown_file`.
    """
    if not filename or ("." in filename and not may_hold_data(filename)):
        message = (
            f"{param}: the name must end in {' or '.join(DATA_ENDINGS)}, or have no ending; "
            f"it is {filename!r}."
        )
        raise SpecError(message, param=param, code="invalid_filename")


class Format(Enum):
    """A format of records. The value is its name in messages."""

    CHAT = "OpenAI chat (messages)"
    PROMPT_COMPLETION = "prompt and completion"
    TEXT = "plain text (text)"
    SHAREGPT = "ShareGPT (conversations)"
    ALPACA = "Alpaca (instruction, input, output)"
    GEMINI = "Gemini (contents)"
    OPENAI_PAIRS = "OpenAI preference pairs (input, preferred_output, non_preferred_output)"
    TRL_PAIRS = "preference pairs (prompt, chosen, rejected)"
    PROMPTS = "prompts to grade (messages)"
    """Which the job's method decides, since their keys are those of conversations."""

    @property
    def is_pairs(self) -> bool:
        return self in (Format.OPENAI_PAIRS, Format.TRL_PAIRS)


FORMAT_KEYS: Sequence[tuple[Format, frozenset[str]]] = (
    (Format.OPENAI_PAIRS, frozenset({"input", "preferred_output"})),
    (Format.OPENAI_PAIRS, frozenset({"input", "non_preferred_output"})),
    (Format.OPENAI_PAIRS, frozenset({"input", "preferred_completion"})),
    (Format.OPENAI_PAIRS, frozenset({"input", "non_preferred_completion"})),
    (Format.TRL_PAIRS, frozenset({"chosen", "rejected"})),
    (Format.CHAT, frozenset({"messages"})),
    (Format.SHAREGPT, frozenset({"conversations"})),
    (Format.SHAREGPT, frozenset({"conversation"})),
    (Format.GEMINI, frozenset({"contents"})),
    (Format.ALPACA, frozenset({"instruction", "output"})),
    (Format.PROMPT_COMPLETION, frozenset({"prompt", "completion"})),
    (Format.TEXT, frozenset({"text"})),
)
"""Sets of keys, each of which identifies a format. The first set that a record holds decides."""


def recognise(keys: Collection[str]) -> Format | None:
    """The format of a record with these keys. None: not a known format."""
    given = set(keys)
    return next((format for format, own_keys in FORMAT_KEYS if own_keys <= given), None)


class Compression(Enum):
    GZIP = "gzip"
    ZSTD = "zstd"


def compression_of(head: bytes) -> Compression | None:
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    return Compression.ZSTD if head.startswith(b"\x28\xb5\x2f\xfd") else None


_UTF_16 = "it is encoded as UTF-16: save it as UTF-8 (Excel: CSV UTF-8; `iconv -f UTF-16 -t UTF-8`)"
_SIGNS: Sequence[tuple[bytes, str]] = (
    (
        b"PK\x03\x04",
        "it is an Excel workbook or a ZIP archive: export CSV UTF-8 from Excel, or give the "
        "archive's file",
    ),
    (b"\xd0\xcf\x11\xe0", "it is an Excel workbook of the old form: export CSV UTF-8 from Excel"),
    (b"BZh", "it is compressed by bzip2: give it as it is, or compressed by gzip or zstd"),
    (b"\xfd7zXZ\x00", "it is compressed by xz: give it as it is, or compressed by gzip or zstd"),
    (b"%PDF-", 'it is a PDF: write its text as {"text": "…"}, one document to a line'),
    *(
        (b"\x80" + bytes([version]), "it is a pickle of Python: write its records as JSON lines")
        for version in range(2, 6)
    ),
    (b"\x93NUMPY", "it is an array of NumPy: write its records as JSON lines"),
    (b"SQLite format 3\0", "it is a database of SQLite: export its table as CSV"),
    (
        b"version https://git-lfs",
        "it is a pointer of Git LFS, and not the file that it names: `git lfs pull` gets that",
    ),
    (b"\xff\xfe\x00\x00", "it is encoded as UTF-32: save it as UTF-8"),
    (b"\x00\x00\xfe\xff", "it is encoded as UTF-32: save it as UTF-8"),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
)
"""Beginnings of files that are not data files, and what to do. The first one that fits decides."""


_WRAPPED = re.compile(
    rb'\s*\{\s*"(data|dataset|train|examples|instances|items|records|rows|samples)"\s*:\s*\[\s*\{'
    rb'(?!\s*"(?:role|from|content|value|speaker)")'
)
"""The beginning of one object that holds all records, and not the turns of one."""
_LONGEST_FIRST_LINE = 2048
"""Bytes of a text's first line, if it is all that is seen of the file."""
_WORD = re.compile(r"[^\W\d_]{2}")
_PLAIN_TEXT = (
    'it is plain text, which is not JSON: write {"text": "…"}, one document to a line, or a table '
    "whose first row names its "
    "columns"
)


def why_unreadable(head: bytes, columns: Columns = AS_THEY_ARE) -> str | None:
    """Why a file with this beginning cannot be read, and what to do.

    None: it may be a data file. `columns`: its names of columns.
    """
    for sign, reason in _SIGNS:
        if head.startswith(sign):
            return reason
    # UTF-16 without a byte order mark: every other byte of its first characters is 0.
    if len(head) >= 4 and {head[:4:2], head[1:4:2]} & {b"\0\0"} and any(head[:4]):
        return _UTF_16
    text = head.removeprefix(_BYTE_ORDER_MARK)
    if (found := _WRAPPED.match(text)) and (key := found[1].decode()) not in columns.ours:
        return (
            f"it is one object whose {key} holds the records: write them one to a line (`jq -c "
            f"'.{key}[]' FILE`)"
        )
    if text[:256].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page, perhaps one that links to the data: download the file itself"
    return (
        _PLAIN_TEXT
        if _is_plain_text(text) and container_of(head, columns) is Container.LINES
        else None
    )


def _is_plain_text(text: bytes) -> bool:
    """Return whether the first lines are words, and none of them begins as JSON does."""
    if b"\n" not in text and len(text) > _LONGEST_FIRST_LINE:
        return False  # a line that is too long, which says so itself
    lines = [line for line in text.splitlines()[:_SAMPLE_LINES] if line.strip()]
    try:
        words = b"\n".join(lines[:-1] or lines).decode()
    except UnicodeDecodeError:
        return False
    begins = any(line.lstrip().startswith((b"{", b"[", b'"')) for line in lines)
    return (
        not begins
        and words not in ("null", "true", "false")
        and "\0" not in words
        and _WORD.search(words) is not None
    )


class Container(Enum):
    """A way to store records in a file. The value is its name in messages."""

    LINES = "JSON lines"
    ARRAY = "a JSON array"
    CSV = "CSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"

    @property
    def word(self) -> str:
        """The name of one record in messages.

        Records are numbered from 1; a header does not count.
        """
        return {Container.LINES: "line", Container.ARRAY: "element"}.get(self, "row")


_OF_DATA = re.compile(r"[?.!]\s*\Z|\A\s*\d+(?:\.\d+)?\s*\Z")


def is_data(names: Sequence[str]) -> bool:
    """Return whether a table's first row is data, and not the names of its columns: sentences or
    numbers.
    """
    return any(len(name.split()) > _WORDS_OF_A_NAME or _OF_DATA.search(name) for name in names)


def container_of(head: bytes, columns: Columns = AS_THEY_ARE) -> Container:
    """The container of a file.

    `head`: its beginning, decompressed. A file without the signs of another one is JSON lines.
    """
    if head.startswith(b"PAR1"):
        return Container.PARQUET
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return Container.ARROW
    text = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"["):
        return Container.ARRAY
    is_table = not text.startswith((b"{", b'"{')) and delimiter_of(head, columns) is not None
    return Container.CSV if is_table else Container.LINES


def delimiter_of(head: bytes, columns: Columns = AS_THEY_ARE) -> str | None:
    """The delimiter of a table's cells: the one with which its header has the columns of a known
    format, else the one that splits its first lines into equal numbers of cells. None: the file is
    not a table.
    """
    text = head.removeprefix(_BYTE_ORDER_MARK).lstrip().decode(errors="replace")
    # Not splitlines(), which also ends lines at characters that cells hold, such as U+2028.
    lines = list(islice(io.StringIO(text, newline=""), _SAMPLE_LINES))
    rows = {delimiter: _cells(lines, delimiter) for delimiter in DELIMITERS}
    for delimiter, (names, *_) in rows.items():
        given = [name for cell in names if (name := columns.name(cell.strip())) is not None]
        if recognise(given) is not None:
            return delimiter
    return next((delimiter for delimiter, cells in rows.items() if _is_table(cells)), None)


def _cells(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """The header and the rows after it, up to the first row that is not CSV."""
    rows: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        rows.extend(csv.reader(lines, delimiter=delimiter))
    return rows or [[]]


def _is_table(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether rows with an unknown header are a table: the names are short words, and all
    rows have their width.
    """
    names = [name.strip() for name in rows[0]]
    are_words = all(
        0 < len(name) <= _LONGEST_NAME and not set(name) & set("{}[]<>") for name in names
    )
    widths = [len(row) for row in rows[1:-1] if row] or [len(row) for row in rows[1:] if row]
    return (
        len(names) > 1
        and are_words
        and bool(widths)
        and all(width == len(names) for width in widths)
    )
