"""Numbered rows of tables (CSV, Parquet and Arrow) as objects of JSON.

Columns that the format does not have are not read.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, BinaryIO

from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.formats import media
from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.formats.containers import Numbered, Row, UnreadableError
from ft_service.data.formats.detect_format import Container, is_data, recognise
from ft_service.data.formats.normalize import LOOKED_AT, columns_of
from ft_service.data.json_faults import json_fault
from ft_service.data.line_errors import Fault, not_utf8
from ft_service.wording import shown_value

BATCH_BYTES = 4 * 1024**2
"""Approximate size of the part of a table that is turned into rows at once, in bytes."""
MOST_ROWS = 1024
"""Rows of that part, at most."""
_JSON_COLUMNS = ("messages", "conversations", "conversation", "tools", "functions")
"""Columns that hold JSON as text in tables without lists, such as CSV."""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def csv_rows(file: BinaryIO, delimiter: str, columns: Columns = AS_THEY_ARE) -> Numbered:
    """Numbered rows of a CSV table, from 1; the header is row 0. Raises UnreadableError."""
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    number = 0
    try:
        names = [name.strip() for name in next(reader)]
        _refuse_data(names, columns)
        _refuse_duplicates(names)
        json_columns = _json_columns(columns)
        while (cells := next(reader, None)) is not None:
            if cells:  # a blank line is not a row
                number += 1
                yield number, _csv_row(number, names, cells, json_columns)
    except csv.Error as error:
        raise UnreadableError(f"row {number + 1} is not CSV: {error}") from None
    finally:
        text.detach()  # the caller opened the file and closes it


def _refuse_data(names: Sequence[str], columns: Columns) -> None:
    """Raise UnreadableError if a table begins with data in place of the names of its columns."""
    is_named = (
        recognise([ours for name in names if (ours := columns.name(name)) is not None]) is not None
    )
    if not is_named and not set(names) & set(columns.ours) and is_data(names):
        raise UnreadableError(
            "its first row is data, and not the names of its columns: "
            f"{shown_value(', '.join(names))}. Put a row of names "
            "before it, such as instruction and output"
        )


def _refuse_duplicates(names: Sequence[str]) -> None:
    """Raise UnreadableError if two columns have the same name, unless that is empty."""
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UnreadableError(f"two columns are called {duplicate}: keep one")


def _csv_row(
    number: int, names: Sequence[str], cells: Sequence[str], json_columns: Collection[str]
) -> Row:
    if len(cells) != len(names):
        return Fault(number, "", f"has {len(cells)} cells, and the header has {len(names)} columns")
    for name, cell in zip(names, cells, strict=True):
        if found := _NOT_UTF8.search(cell):
            return Fault(
                number, name, not_utf8(ord(found[0]) - 0xDC00, f"character {found.start() + 1}")
            )
    return _row(number, dict(zip(names, cells, strict=True)), json_columns)


def _json_columns(columns: Columns) -> set[str]:
    """The file's names of the columns that may hold JSON as text."""
    return {name for name in (*_JSON_COLUMNS, *columns.ours) if columns.name(name) in _JSON_COLUMNS}


def _row(number: int, cells: Mapping[str, Any], json_columns: Collection[str]) -> Row:
    """A row without empty cells; JSON that columns hold as text is parsed."""
    given = {name: value for name, value in cells.items() if value is not None}
    for name in json_columns:
        if isinstance(value := given.get(name), str):
            if not value.strip():
                del given[name]
                continue
            try:
                given[name] = json.loads(value)
            except json.JSONDecodeError as error:
                return Fault(number, name, json_fault(value, error))
            except (ValueError, RecursionError):
                return Fault(number, name, "is not usable JSON")
    return given


def arrow_rows(
    file: BinaryIO, container: Container, names: list[str], columns: Columns = AS_THEY_ARE
) -> Numbered:
    """Numbered rows of a Parquet or Arrow file, from 1.

    `names`: a list that receives the names of all columns. Raises UnreadableError.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise UnreadableError(
            f"it is {container.value}, which needs pyarrow here: pip install pyarrow"
        ) from None
    number = 0
    try:
        json_columns = _json_columns(columns)
        with closing(_batches(file, container, names, columns)) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, _row(number, row, json_columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableError(
            f"{container.value} cannot be read after row {number}: {' '.join(str(error).split())}"
        ) from None


def _batches(
    file: BinaryIO, container: Container, names: list[str], columns: Columns
) -> Generator[Any]:
    if container is Container.PARQUET:
        yield from _parquet_batches(file, names, columns)
        return
    import pyarrow as pa

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        opened = pa.ipc.open_file(file)
        batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
    else:
        opened = batches = pa.ipc.open_stream(file)
    names[:] = opened.schema.names
    needed = _needed_columns(names, columns)
    for batch in batches:
        selected = batch.select(needed)
        step = _rows_at_once(selected.nbytes, selected.num_rows)
        yield from (selected.slice(begin, step) for begin in range(0, selected.num_rows, step))


def _parquet_batches(file: BinaryIO, names: list[str], columns: Columns) -> Iterator[Any]:
    """Batches of a Parquet file.

    Pages are read when they are needed, since a row group may be as large as the file.
    """
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file, buffer_size=1024**2, pre_buffer=False) as table:
        metadata = table.metadata
        size = sum(
            metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)
        )
        rows = _rows_at_once(size, metadata.num_rows)
        names[:] = table.schema_arrow.names
        yield from table.iter_batches(
            batch_size=rows, columns=_needed_columns(names, columns), use_threads=False
        )


def _needed_columns(names: Sequence[str], columns: Columns) -> list[str]:
    """The file's names of the columns that its format has, in their order; all names if the format
    is not known. Raises UnreadableError if two of them are the same.
    """
    ours = {name: columns.name(name) for name in names}
    format = recognise([name for name in ours.values() if name is not None])
    known = (
        {*columns_of(format), *LOOKED_AT, "full_chosen", *media.COLUMNS}
        if format is not None and not columns.of_prompts
        else set(ours.values())
    )
    needed = [name for name in names if ours[name] in known]
    _refuse_duplicates(needed)
    return needed


def _rows_at_once(size: int, rows: int) -> int:
    """Rows to turn into objects at once. `size`, `rows`: bytes and rows of the table."""
    return max(1, min(MOST_ROWS, BATCH_BYTES * rows // max(1, size)))
