"""DCP's file writer, raising the disk's error: a failed write of a tensor may end in one about its
archive instead.

Replaces: `fs` of `torch.distributed.checkpoint.FileSystemWriter`, by a file system derived from its
own.
Written for: torch 2.13
Fails when upstream changes: tests/workers/patches/test_checkpoint_writer.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from ft_service.host import disk


def checkpoint_writer(folder: Path) -> FileSystemWriter:
    """A writer of shards into a folder, whose writes raise OSError with the path where the disk
    failed.
    """
    writer = FileSystemWriter(folder)
    writer.fs = _Files()
    return writer


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            cause = disk.os_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, os.fspath(path)) from None
