"""Safe unpacking of tar archives from elsewhere."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from ft_service.errors import FtError


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar of regular files into a new folder.

    Raises FtError for a member that is a link, a device, or outside the folder.

    Members are read, not extracted: Python 3.11.0 to 3.11.3, which distributions still ship, have
    no `tarfile.data_filter`.
    """
    target.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if (
                    path.is_absolute()
                    or ".." in path.parts
                    or not (member.isreg() or member.isdir())
                ):
                    raise FtError(
                        f"The archive contains {member.name!r}, which is not a regular file "
                        "inside it: nothing was unpacked."
                    )
                source = tar.extractfile(member)
                if source is not None:
                    _write(source, target / path)
    except tarfile.TarError as error:
        raise FtError(f"The download is not a complete archive ({error}). Try again.") from None


def _write(source: IO[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with source, path.open("wb") as file:
        while chunk := source.read(1024 * 1024):
            file.write(chunk)
