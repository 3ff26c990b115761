"""Downloads of folders and adapters as tar streams: nothing is built on disk or in memory, and the
length is known.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi.responses import StreamingResponse

from ft_service.control.admission.tuned_models import Tuned, refuse_pruned
from ft_service.errors import NotFoundError
from ft_service.rundir.verified_files import refuse_damaged
from ft_service.serving import worker_tasks
from ft_service.storage.locations import Places

_CHUNK = 1024**2


@dataclass(frozen=True)
class Member:
    """One file of the archive, with its size at the time of listing."""

    path: Path
    header: bytes
    size: int

    @property
    def padding(self) -> int:
        return -self.size % tarfile.BLOCKSIZE


def adapter_folder(model: Tuned, places: Places) -> Path:
    """Return the folder with a model's adapter, unchanged since it was written.

    A checkpoint's is made at its first use.

    Raises NotFoundError if it is gone or damaged. All files are read once after each change of
    theirs.
    """
    refuse_pruned(model, places)
    if model.checkpoint is not None:
        whole = places.whole_run(model.job.id, model.checkpoint.name)
        folder = worker_tasks.make_checkpoint_adapter(whole, model.checkpoint.name)
    else:
        folder = places.run(model.job.id).plain(model.adapter_key)
    if not isinstance(folder, Path) or not folder.is_dir() or not any(folder.iterdir()):
        message = f"The adapter of {model.name} is gone from the service's disk."
        raise NotFoundError(message, param="job_id", code="no_adapter")
    refuse_damaged(folder, model.name)
    return folder


def adapter_archive(model: Tuned, places: Places) -> StreamingResponse:
    """Return the tar of a model's adapter, in a folder `adapter/`.

    Raises NotFoundError as `adapter_folder`.
    """
    name = (
        model.job.id if model.checkpoint is None else f"{model.job.id}-step-{model.checkpoint.step}"
    )
    return folder_archive(adapter_folder(model, places), f"{name}-adapter", "adapter")


def folder_archive(folder: Path, name: str, prefix: str) -> StreamingResponse:
    """Return a folder as a tar named `name`, its files in a folder `prefix`."""
    files = members(folder, prefix)
    headers = {
        "content-length": str(length(files)),
        "content-disposition": f'attachment; filename="{name}.tar"',
    }
    return StreamingResponse(stream(files), media_type="application/x-tar", headers=headers)


def members(folder: Path, prefix: str) -> list[Member]:
    """Return the regular files below a folder, by name, each in `prefix/`.

    Links are left out: an archive holds nothing from outside the folder.
    """
    plain = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [_member(path, f"{prefix}/{path.relative_to(folder).as_posix()}") for path in plain]


def length(files: list[Member]) -> int:
    """Return the number of bytes that `stream` yields."""
    return (
        sum(len(file.header) + file.size + file.padding for file in files) + 2 * tarfile.BLOCKSIZE
    )


def stream(files: list[Member]) -> Iterator[bytes]:
    """Yield the archive. Raises OSError if a file has become shorter than it was."""
    for file in files:
        yield file.header
        yield from _contents(file)
        yield bytes(file.padding)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(path: Path, name: str) -> Member:
    state = path.stat()
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = state.st_size, int(state.st_mtime), 0o644
    return Member(path, info.tobuf(tarfile.PAX_FORMAT), state.st_size)


def _contents(file: Member) -> Iterator[bytes]:
    left = file.size
    with file.path.open("rb") as source:
        while left:
            chunk = source.read(min(left, _CHUNK))
            if not chunk:
                raise OSError(f"{file.path} has become shorter while it was read")
            left -= len(chunk)
            yield chunk
