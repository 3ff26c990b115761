"""Numbered records of JSON lines and JSON arrays, and decompression.

Memory is bounded by the longest record.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from ft_service.data.chat_line import MAX_LINE_BYTES, load_object
from ft_service.data.formats.detect_format import Compression
from ft_service.data.json_faults import goes_on
from ft_service.data.line_errors import Fault, LineError, not_utf8

Row = dict[str, Any] | Fault
Numbered = Iterator[tuple[int, Row]]

CHUNK_BYTES = 256 * 1024
MAX_EXPANSION = 500
"""Largest ratio of decompressed to compressed size; text rarely exceeds 30."""
LEAST_EXPANDED = 256 * 1024**2
"""Decompressed bytes that are allowed at any ratio."""
_IN_STRING = re.compile(rb'["\\]')
_BRACKETS = re.compile(rb'["\[\]{}]')
_IN_ARRAY = re.compile(rb'["\[\]{},]')


class UnreadableError(Exception):
    """The rest of the file cannot be read. The message says why."""


class Expanding(io.RawIOBase):
    """The contents of a compressed file.

    Raises UnreadableError if it is damaged or expands too much.
    """

    def __init__(self, file: BinaryIO, compression: Compression, size: int) -> None:
        """`size`: bytes of the compressed file."""
        self._name = compression.value
        self._limit = max(LEAST_EXPANDED, MAX_EXPANSION * size)
        self._read = 0
        self._inner = _expanded(file, compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._inner.read(len(buffer))
        except Exception as error:  # gzip, zlib and zstandard each raise errors of their own
            raise UnreadableError(f"its {self._name} data is damaged: {error}") from None
        self._read += len(content)
        if self._read > self._limit:
            raise UnreadableError(
                f"its {self._name} data expands to more than {MAX_EXPANSION} times its size: give "
                "the file as it was before"
            )
        buffer[: len(content)] = content
        return len(content)


def _expanded(file: BinaryIO, compression: Compression) -> BinaryIO:
    if compression is Compression.GZIP:
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    try:
        import zstandard
    except ImportError:
        raise UnreadableError(
            "it is compressed by zstd, which needs zstandard here: pip install zstandard"
        ) from None
    return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))


def lines(file: BinaryIO) -> Numbered:
    """Numbered rows of JSON lines, from 1. Blank lines at the end are left out; others are faults.

    Raises UnreadableError if the first line's object goes on in the second: each line would be at
    fault for another reason.
    """
    blank: list[int] = []
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        too_long = len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        if not too_long and not line.strip():
            blank.append(number)
            continue
        if number == 1 and not too_long:
            _refuse_several_lines(line)
        yield from ((earlier, _row(earlier, b"")) for earlier in blank)
        blank.clear()
        yield number, _row(number, None if too_long else line.rstrip(b"\r\n"))


def _refuse_several_lines(first: bytes) -> None:
    text = first.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if goes_on(text, error):
            raise UnreadableError(
                "its first object goes on in the second line: write one object to a line (`jq -c "
                ". FILE` does), or put all of "
                "them into one JSON array, [{…}, {…}]"
            ) from None
    except (ValueError, RecursionError):  # the line's own fault says so
        pass


def elements(file: BinaryIO) -> Numbered:
    """Numbered elements of a JSON array, from 1.

    Raises UnreadableError if the array does not end, or something follows it.
    """
    splitter = _Splitter()
    number = 0
    while chunk := file.read(CHUNK_BYTES):
        for text in splitter.feed(chunk):
            number += 1
            yield (
                number,
                _row(number, text)
                if text != b""
                else Fault(number, "", "is empty: there is a comma too many"),
            )
    if not splitter.ended:
        raise UnreadableError(
            "the JSON array does not end: the file is cut off, or a bracket or a quote is missing"
        )


class _Splitter:
    """Splits the text of a JSON array into its elements by quotes, brackets and commas."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._parts: list[bytes] = []
        self._length = self._elements = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """The text of each element that ends in this chunk; None for one that is too long.

        Raises UnreadableError.
        """
        begin = 0
        at = int(self._escaped)
        self._escaped = False
        while found := self._pattern().search(chunk, at):
            at = found.end()
            sign = found[0]
            if self._in_string:
                self._in_string = sign != b'"'
                self._escaped = sign == b"\\" and at == len(chunk)
                at += sign == b"\\"
            elif sign == b'"':
                self._in_string = True
            elif sign in b"[{":
                self._depth += 1
                begin = at if self._depth == 1 else begin
            elif sign == b",":
                yield self._cut(chunk[begin : at - 1])
                begin = at
            else:
                self._depth -= 1
                if self._depth == 0:
                    if (last := self._cut(chunk[begin : at - 1])) != b"" or self._elements > 1:
                        yield last
                    self.ended = True
                    begin = at
                    break
        if self.ended and chunk[begin:].strip():
            raise UnreadableError(
                "something follows the end of the JSON array: a file holds one array, or one "
                "object a line"
            )
        self._keep(chunk[begin:])

    def _pattern(self) -> re.Pattern[bytes]:
        return _IN_STRING if self._in_string else _IN_ARRAY if self._depth == 1 else _BRACKETS

    def _keep(self, part: bytes) -> None:
        self._length += len(part)
        self._parts = [*self._parts, part] if self._length <= MAX_LINE_BYTES else []

    def _cut(self, part: bytes) -> bytes | None:
        self._keep(part)
        text = b"".join(self._parts).strip() if self._length <= MAX_LINE_BYTES else None
        self._parts = []
        self._length = 0
        self._elements += 1
        return text


def _row(number: int, text: bytes | None) -> Row:
    """The object of a record, or its fault. `text`: None if it is too long."""
    if text is None:
        return Fault(
            number,
            "",
            f"is longer than {MAX_LINE_BYTES // 2**20} MiB, the most for one record, images in "
            "base64 included: split it, or leave it out",
        )
    if number == 1:  # Windows' editors put a byte order mark before the first line
        text = text.removeprefix(b"\xef\xbb\xbf")
    if not text:
        return Fault(number, "", "is blank; blank lines may only stand at the end")
    try:
        return load_object(text.decode())
    except UnicodeDecodeError as error:
        return Fault(number, "", not_utf8(text[error.start], f"position {error.start + 1}"))
    except LineError as error:
        return Fault(number, error.field, error.reason)
