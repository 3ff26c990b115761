"""New text files that appear only once they are whole."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ft_service.errors import SpecError


def refuse_existing(out: Path, param: str = "out") -> None:
    """Raise SpecError for a file that is there already. `param`: the argument that names it."""
    if out.exists():
        raise SpecError(f"{out} exists: name a new file.", param=param)


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """Open a new text file, compressed if its name says so, which appears only if the block
    succeeds.
    """
    temporary = path.with_name(f"{path.name}.part")
    try:
        with (
            _compressed(temporary)
            if path.suffix == ".gz"
            else temporary.open("w", encoding="utf-8") as lines
        ):
            yield lines
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _compressed(path: Path) -> Iterator[IO[str]]:
    """Open a gzip file without name and time, so that equal records give equal bytes, and a server
    recognises them.
    """
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as lines,
    ):
        yield lines
