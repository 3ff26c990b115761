"""The file of a multipart body, written to its final file system while it arrives.

Starlette's form parser would write the whole file to the system's temporary folder first and copy
it later: it would be written twice, and that folder is often too small for training files.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from api.http.bodies import drain
from api.http.threads import in_thread
from ft_service.errors import SpecError
from ft_service.rundir.directory import sync_folder

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

TEMPORARY_PREFIX = ".upload-"
_BUFFER_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 16 * 1024
"""Limit on the headers and values of all other parts together."""
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_MAX_NAME = 255


@dataclass(frozen=True)
class ReceivedFile:
    """The file of a body, and its fields."""

    fields: dict[str, str]
    """Parts without a filename."""
    filename: str
    """The name without folders and control characters; may be empty."""
    path: Path
    """A temporary file; removed after the request unless it was moved away."""
    bytes: int
    sha256: str


@asynccontextmanager
async def received(
    request: Request, folder: Path, limit: int, *, part: str, instead: str
) -> AsyncIterator[ReceivedFile]:
    """Read a multipart body with one file, in the part `part`, of at most `limit` bytes, into a
    temporary file in `folder`. `instead`: a sentence that says what to do with a larger one.

    Raises SpecError naming the part, and OSError, for example if the disk is full. The temporary
    file is removed at the end.
    """
    stream = request.stream()
    try:
        descriptor, path = await in_thread(_temporary, folder)
    except OSError:
        await drain(stream, limit)
        raise
    try:
        form = _FormParser(descriptor, limit, part, instead)
        try:
            await _feed(stream, form, _boundary(request, part))
        except (SpecError, OSError):
            await drain(stream, limit)
            raise
        finally:
            os.close(descriptor)
        yield ReceivedFile(form.fields, form.filename, path, form.bytes, form.sha256.hexdigest())
    finally:
        path.unlink(missing_ok=True)


def _temporary(folder: Path) -> tuple[int, Path]:
    """Open a new file in a folder, which is created if it is missing.

    Return its descriptor and path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)
    return descriptor, Path(name)


def keep(upload: ReceivedFile, path: Path) -> None:
    """Move the file to its name, durably: a record that survives a power failure must not name a
    file that did not.
    """
    upload.path.rename(path)
    sync_folder(path.parent)


def clean_filename(name: str) -> str:
    """Return the last part of a path of any system, without control characters."""
    return _NOT_IN_NAMES.sub("", name.replace("\\", "/").rsplit("/", 1)[-1]).strip()[-_MAX_NAME:]


def _boundary(request: Request, part: str) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise SpecError(f"The body must be multipart/form-data with a part {part}.", param=part)
    return options[b"boundary"]


async def _feed(stream: AsyncIterator[bytes], form: _FormParser, boundary: bytes) -> None:
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for chunk in stream:
            parser.write(chunk)
            if len(form.buffer) >= _BUFFER_BYTES:
                await in_thread(form.flush)
        parser.finalize()
    except FormParserError as error:
        raise SpecError(f"The multipart body cannot be read: {error}.", param=form.part) from None
    if not form.complete:
        raise SpecError("The multipart body ends early.", param=form.part)
    if not form.has_file:
        raise form.no_file()
    await in_thread(form.finish)


class _FormParser:
    """Callbacks of the parser, which collect small parts and write the file's bytes to a
    descriptor.
    """

    def __init__(self, descriptor: int, limit: int, part: str, instead: str) -> None:
        self.part = part
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self.buffer = bytearray()
        self.has_file = False
        self.complete = False
        self._descriptor = descriptor
        self._limit = limit
        self._instead = instead
        self._small_bytes = 0
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._part = ""
        self._in_file = False
        self._value = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value_data,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def flush(self) -> None:
        """Write the collected bytes."""
        view = memoryview(self.buffer)
        self.sha256.update(view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        view.release()
        self.buffer = bytearray()

    def no_file(self) -> SpecError:
        """Return the refusal of a body whose part has no filename, as a field of a form has
        none.
        """
        message = f"{self.part} is required: a part of that name with a filename."
        return SpecError(message, param=self.part, code="missing_required_parameter")

    def finish(self) -> None:
        self.flush()
        os.fsync(self._descriptor)

    def _part_begin(self) -> None:
        self._header_name = self._header_value = self._disposition = b""
        self._value = bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header_name += data[start:end]

    def _header_value_data(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode(errors="replace")
        self._in_file = b"filename" in options
        if not self._in_file:
            return
        if self._part != self.part or self.has_file:
            message = f"{self._part}: one file is taken, in the part named {self.part}."
            raise SpecError(message, param=self._part or self.part)
        self.has_file = True
        self.filename = clean_filename(options[b"filename"].decode(errors="replace"))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._count(end - start)
            self._value += data[start:end]
            return
        self.bytes += end - start
        if self.bytes > self._limit:
            message = f"{self.part}: larger than {self._limit} bytes. {self._instead}"
            raise SpecError(message, param=self.part, code="file_too_large")
        self.buffer += data[start:end]

    def _part_end(self) -> None:
        if self._in_file:
            return
        if self._part in self.fields:
            raise SpecError(f"{self._part} is given twice: keep one.", param=self._part)
        self.fields[self._part] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.complete = True

    def _count(self, size: int) -> None:
        self._small_bytes += size
        if self._small_bytes > _MAX_FIELD_BYTES:
            if self._part == self.part and not self.has_file:
                raise self.no_file()
            message = f"The parts other than {self.part} hold more than {_MAX_FIELD_BYTES} bytes."
            raise SpecError(message, param=self._part or self.part)
