"""Logs of an attempt's processes: their end, or everything as it is printed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_service.engines.engine_directory import engine_of
from ft_service.rundir.attempt import Attempt
from ft_service.storage.locations import Places

_MAX_BYTES = 1024**2
_RANK = re.compile(r"(?:(node-\d+)/)?[^/]*/attempt_0/(\d+)/(stdout|stderr)\.log")


def attempt_logs(
    places: Places, job_id: str, number: int, rank: int | None = None
) -> dict[str, Path]:
    """Return source → file of what the processes of an attempt print.

    Where an engine trains it, these are the engine's, which print of all its jobs; they are of one
    project. `number` 0: nothing has been started. `rank`: as for `log_files`.
    """
    if not number:
        return {}
    attempt = Attempt(places.run(job_id), number, job_id=job_id)
    files = log_files(attempt.find_logs(), rank)
    engine = engine_of(attempt, places)
    if engine is not None and engine.has_order(
        attempt
    ):  # workers may write start.json, but no order into others' engines
        files |= {
            f"engine {source}": path
            for source, path in log_files(engine.attempt.find_logs(), rank).items()
        }
    return files


def log_files(folder: Path | None, rank: int | None = None) -> dict[str, Path]:
    """Return source → file, by name.

    `folder` None: no logs. `rank`: only the output of this rank (of each node); None: supervisor,
    torchrun and all ranks.
    """
    files: dict[str, Path] = {}
    if folder is None:
        return files
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        match = _RANK.fullmatch(name)
        if rank is None or (match and int(match[2]) == rank):
            node = f"{match[1]} " if match and match[1] else ""
            files[f"{node}rank {match[2]} {match[3]}" if match else name] = path
    return files


def tail(path: Path, lines: int) -> str:
    """Return the last `lines` lines of a file, at most 1 MiB of it; nothing if it was removed.

    Bytes that are not UTF-8 are replaced.
    """
    try:
        body = _last_bytes(path, path.stat().st_size)
    except FileNotFoundError:
        return ""
    return "".join(body.decode(errors="replace").splitlines(keepends=True)[-lines:])


@dataclass(frozen=True)
class LogFile:
    """A log file with its size when it was listed."""

    source: str
    path: Path
    size: int


def sized(files: Mapping[str, Path]) -> tuple[LogFile, ...]:
    """Return files with their sizes; files that were removed are left out."""
    listed = []
    for source, path in files.items():
        with contextlib.suppress(FileNotFoundError):
            listed.append(LogFile(source, path, path.stat().st_size))
    return tuple(listed)


def beginnings(files: Sequence[LogFile], lines: int) -> dict[str, int]:
    """Return source → the place where the last `lines` lines of a file begin, at most 1 MiB before
    its end when it was listed; files that were removed since are left out.
    """
    places = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            kept = b"".join(_last_bytes(file.path, file.size).splitlines(keepends=True)[-lines:])
            places[file.source] = max(0, file.size - len(kept))
    return places


def read_lines(file: LogFile, place: int, last: bool) -> tuple[list[str], int]:
    """Return whole lines from `place` on, about 1 MiB of them, and the place of the next line.

    `last`: the file is complete, and its last line may lack an end. A longer line comes in pieces.
    Bytes that are not UTF-8 are replaced.
    """
    try:
        with file.path.open("rb") as opened:
            opened.seek(place)
            body = opened.read(min(_MAX_BYTES, file.size - place))
    except FileNotFoundError:
        return [], file.size
    ends_here = place + len(body) >= file.size or not body
    whole = len(body) if (last and ends_here) else body.rfind(b"\n") + 1
    if not whole and len(body) >= _MAX_BYTES:
        whole = len(body)
    if not whole:
        return [], file.size if last else place
    lines = body[:whole].decode(errors="replace").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines], place + whole


def _last_bytes(path: Path, size: int) -> bytes:
    """Return the last bytes, at most 1 MiB, of a file's first `size` ones: it may have grown
    since.
    """
    with path.open("rb") as file:
        file.seek(max(0, size - _MAX_BYTES))
        return file.read(min(_MAX_BYTES, size))
