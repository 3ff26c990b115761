"""Data files as numbered records and faults: decompressed, taken out of their container, parsed by
the file's format.

The service and the workers read files with this module, so both accept the same ones. One pass, in
bounded memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

from ft_service.data.chat_line import KEYS, without_nulls
from ft_service.data.formats.columns import AS_THEY_ARE, LABELS, Columns
from ft_service.data.formats.containers import Expanding, Numbered, UnreadableError, elements, lines
from ft_service.data.formats.detect_format import (
    HEAD_BYTES,
    Compression,
    Container,
    Format,
    compression_of,
    container_of,
    delimiter_of,
    recognise,
    why_unreadable,
)
from ft_service.data.formats.local_images import with_files_read
from ft_service.data.formats.media import refuse_media
from ft_service.data.formats.normalize import as_record, columns_of
from ft_service.data.formats.tabular import arrow_rows, csv_rows
from ft_service.data.formats.unknown_formats import unknown_format
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.prompt_line import parse_prompt
from ft_service.data.sample_kinds import GradedPrompt, PromptCompletion, Record, label_of
from ft_service.rundir.directory import sha256_of

NOTED = 20
"""Unknown keys that a file's report names, at most."""
_NAME = 80
"""Characters of such a key, at most."""


@dataclass
class FileFormat:
    """The detected container, compression and format of a file."""

    container: Container = Container.LINES
    compression: Compression | None = None
    format: Format | None = None
    """None: no record of a known format was read so far."""
    unused: tuple[str, ...] = ()
    """Keys of records that the format does not have and that are left out; the first NOTED of
    them.
    """
    joined: tuple[str, ...] = ()
    """The file's names of prompt and completion, if these are strings, which no chat template
    writes unless it is applied.
    """
    columns: tuple[str, ...] = ()
    """The file's names of the keys of its first record; the first NOTED of them."""
    labelled: bool = False
    """Whether a record had a label, good or bad."""

    @property
    def word(self) -> str:
        """The name of a record in messages."""
        return self.container.word

    def __str__(self) -> str:
        packed = f", compressed by {self.compression.value}" if self.compression else ""
        return (
            f"{self.format.value if self.format else 'of no known format'} in "
            f"{self.container.value}{packed}"
        )


@dataclass
class DataReader:
    """The records of a file, or of the files of a folder one after the other.

    Iterate once, while it is open.
    """

    paths: Sequence[Path]
    columns: Columns = AS_THEY_ARE
    """The files' names of columns."""
    reads_paths: bool = False
    """Pictures that records name by paths are read, where each file is; else such a record is at
    fault.
    """
    shape: FileFormat = field(default_factory=FileFormat)

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._columns: list[str] = []
        self._folder = Path()
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @cached_property
    def size(self) -> int:
        """Bytes of all files. Raises OSError."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def share(self) -> float:
        """The share of the bytes that has been read, in [0, 1]."""
        here = self._file.tell() if self._file is not None and not self._file.closed else 0
        return min(1.0, (self._done + here) / max(1, self.size))

    def digest(self) -> str:
        """SHA-256 of one file's bytes; for several files, SHA-256 of their digests.

        Raises OSError.
        """
        if len(self.paths) == 1:
            return sha256_of(self.paths[0])
        return hashlib.sha256("\n".join(map(sha256_of, self.paths)).encode()).hexdigest()

    def look(self) -> None:
        """Detect the file's format from its first record of a known one, and close the file.

        Raises OSError.
        """
        with self, closing(iter(self)) as records:
            next((record for _, record in records if self.shape.format is not None), None)

    def __iter__(self) -> Generator[tuple[int, Record | Fault]]:
        """Numbered records or their faults, from 1 through all files; fault 0: the rest cannot be
        read. Raises OSError.
        """
        parse = self._prompt if self.columns.of_prompts else self._record
        before = number = 0
        for path in self.paths:
            self._folder = path.parent
            try:
                for number, row in self._rows(path):
                    yield (
                        before + number,
                        row if isinstance(row, Fault) else parse(before + number, row),
                    )
            except UnreadableError as error:
                where = f"{path.name}: " if len(self.paths) > 1 else ""
                yield 0, Fault(0, "", f"{where}{error}")
                return
            before += number
            self._done += path.stat().st_size

    def _rows(self, path: Path) -> Numbered:
        self._stack.close()
        self._file = file = self._stack.enter_context(path.open("rb"))
        compression = compression_of(_head(file))
        content: BinaryIO = file
        if compression is not None:
            raw = Expanding(file, compression, os.fstat(file.fileno()).st_size)
            content = cast(BinaryIO, BufferedReader(raw, HEAD_BYTES))
        head = content.peek(HEAD_BYTES) if isinstance(content, BufferedReader) else _head(content)
        if (reason := why_unreadable(head, self.columns)) is not None:
            raise UnreadableError(reason)
        container = container_of(head, self.columns)
        if container in (Container.PARQUET, Container.ARROW) and compression is not None:
            raise UnreadableError(
                f"it is {container.value} within {compression.value}: give the {container.value} "
                "file as it is"
            )
        if self.shape.format is None:
            self.shape.container = container
            self.shape.compression = compression
        match container:
            case Container.LINES:
                return lines(content)
            case Container.ARRAY:
                return elements(content)
            case Container.CSV:
                return csv_rows(content, delimiter_of(head, self.columns) or ",", self.columns)
            case Container.PARQUET | Container.ARROW:
                return arrow_rows(file, container, self._columns, self.columns)

    def _record(self, number: int, row: dict[str, object]) -> Record | Fault:
        if not self.shape.columns:
            self.shape.columns = tuple(name[:_NAME] for name in (self._columns or row))[:NOTED]
        try:
            named = without_nulls(self.columns.record(row))
            record = as_record(
                self._format(named, row),
                named,
                paths=self.reads_paths,
                labels=self.columns.labels,
            )
            if self.reads_paths:
                record = with_files_read(record, self._folder)
        except LineError as error:
            return Fault.of(number, error)
        if label_of(record) is not None:
            self.shape.labelled = True
        if isinstance(record, PromptCompletion) and not self.shape.joined:
            given = dict(self.columns.pairs)
            self.shape.joined = tuple(given.get(name, name) for name in ("prompt", "completion"))
        return record

    def _prompt(self, number: int, row: dict[str, object]) -> GradedPrompt | Fault:
        self.shape.format = Format.PROMPTS
        try:
            named = self.columns.record(row)
            # An item's image may be a container's.
            refuse_media({"messages": named.get("messages")}, columns=())
            own = {key: named[key] for key in KEYS if key in named}
            return parse_prompt(named | without_nulls(own))
        except LineError as error:
            return Fault(number, error.field, error.reason)

    def _format(self, named: dict[str, object], row: dict[str, object]) -> Format:
        """The file's format, which its first record of a known format decides.

        `named`: `row` under the format's names. Raises LineError.
        """
        if self.shape.format is None:
            format = recognise([ours for ours, _ in self.columns.pairs]) or recognise(named)
            if format is None and not row:
                return Format.CHAT
            if format is None:
                raise LineError(
                    "", unknown_format(self.shape.container, self._columns or list(row))
                )
            self.shape.format = format
            self._note_unused([name for name in self._columns if name not in row])
        self._note_unused(row)
        return self.shape.format

    def _note_unused(self, names: Iterable[str]) -> None:
        """Collect the file's names of columns that its format does not have."""
        assert self.shape.format is not None
        known = [
            *columns_of(self.shape.format),
            *(LABELS if self.columns.labels is not False else ()),
        ]
        unused = [name[:_NAME] for name in names if self.columns.name(name) not in known]
        if unused and len(self.shape.unused) < NOTED:
            self.shape.unused = tuple(dict.fromkeys((*self.shape.unused, *unused)))[:NOTED]


def open_data(
    path: Path,
    files: Sequence[str] = (),
    columns: Columns = AS_THEY_ARE,
    *,
    reads_paths: bool = False,
) -> DataReader:
    """The reader of a file, or of some `files` of the folder `path` (dataset_files).

    `columns`: their names of columns. `reads_paths`: as of DataReader.
    """
    paths = [path / name for name in files] if files else [path]
    return DataReader(paths, columns, reads_paths)


def estimate_samples(
    path: Path, files: Sequence[str] = (), columns: Columns = AS_THEY_ARE, *, most: int
) -> int:
    """The number of records, faulty ones included: counted up to `most`, estimated beyond that from
    the share of the bytes that they take. Raises OSError.
    """
    with open_data(path, files, columns) as reader, closing(iter(reader)) as records:
        counted = sum(1 for _ in islice(records, most))
        return counted if counted < most else round(counted / reader.share)


def _head(file: BinaryIO) -> bytes:
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return head
