"""Size and SHA-256 of files, to check their contents later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ft_service.rundir.directory import sha256_of


class _Name(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    """Path below the folder that the file belongs to."""


class FileDigest(BaseModel):
    """Size and SHA-256 of a file."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Return the digest of an existing file. Raises OSError."""
        return FileDigest(bytes=path.stat().st_size, sha256=sha256_of(path))

    def fault(self, size: int | None, sha256: Callable[[], str | None]) -> str | None:
        """Return the fault of a file as a clause that follows its name; None: none.

        `size`: bytes; None: the file is missing. `sha256`: called only if the size is right; its
        None: the storage cannot compute it.
        """
        if size is None:
            return "is missing"
        if size != self.bytes:
            return f"has {size} bytes instead of {self.bytes}"
        return (
            "has other contents than when it was written"
            if sha256() not in (None, self.sha256)
            else None
        )


class NamedFile(FileDigest, _Name):
    """Digest of one of several files, with its name, which comes first in JSON."""

    @classmethod
    def below(cls, folder: Path, path: Path) -> NamedFile:
        """Return the digest of a file below a folder. Raises OSError."""
        return cls(name=path.relative_to(folder).as_posix(), **FileDigest.of(path).model_dump())
