"""The run directory: the only contract between the service and the workers. (Keys of an attempt: attempt.py, of checkpoints:
checkpoints.py.)

    spec.json                             JobSpec, resolved, immutable
    origins.json                          Origins, by rank 0 of the first attempt (see manifest.py)
    base-status.json                      by rank 0: the base's files as they were when their contents were last read
    reference.bin  reference.json         of pairs of answers, by rank 0: their log-probabilities before the first step (see
                                          workers/training/reference.py)
    evaluations/step-<s>-a<n>.json        Evaluation, by rank 0: answers to a few prompts at a step (see evaluations.py)
    attempts/<n>/start.json               Start, by the launcher, before anything runs
    attempts/<n>/control.json             Control, by the reconciler, rewritten as the user changes their mind
    attempts/<n>/supervisor.lock          held by the supervisor as long as it lives
    attempts/<n>/launched.json            Launched, by the launcher of a cluster, once the attempt's Job was created
    attempts/<n>/supervisor.json          ProcessIdentity, by the supervisor, once it holds the attempt
    attempts/<n>/stop.json                Stop, by a supervisor that was told to go (SIGTERM)
    attempts/<n>/events/<seq>.jsonl       immutable event segments, by rank 0 (see events.py)
    attempts/<n>/logs/                    output of supervisor, torchrun and ranks
    attempts/<n>/outcome.json             Outcome, by the first rank that knows how the attempt ends
    attempts/<n>/exit.json                Exit, by the supervisor, last, or by the launcher: it seals the attempt, as a later
                                          one's start does (see fence.py)
    checkpoints/step-<s>-a<n>/            DCP shards (and adapter/), then COMPLETE (CheckpointMarker) last; DAMAGED by a later
                                          attempt
    adapter/  metrics.csv  manifest.json  the outcome
    tensorboard/                          event files, by rank 0, where the job's integrations ask for them
    adapters/step-<s>-a<n>/               adapters of checkpoints, made when they are asked for
    exports/<format>/                     forms of the outcome for other programs, made by the service when they are asked for;
                                          exports/<format>.json says what came of it (see documents.py)
    served.json                           Served, with the outcome: what the adapter is worth where it is served
    probes.json                           Probes, with the outcome: by which whoever serves the adapter is verified
    serving.json                          by the service: where the adapter is served (ft_service/serving/handoff.py)
    result.json                           Result, last of all; names the attempt
    tokens/                               token sets that a rank made because it saw none of the service's; gone with success
    ranks.lock                            held (shared) by every living rank of any attempt

What belongs to one of several nodes (supervisor.lock, supervisor.json, exit.json) lies in attempts/<n>/nodes/<k>/, and
attempts/<n>/exit.json is made of theirs; ranks.lock is ranks-<k>.lock then.

Documents are read and written with four operations only (put, put-if-absent, get, list), so that object storage can hold them
too. A document is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel

Document = TypeVar("Document", bound=BaseModel)


class RunDir:
    """A run directory on a local file system. Keys are relative paths with forward slashes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def path(self, key: str) -> Path:
        """Where a key lives. For readers of large files (checkpoints, adapters, logs); documents go through get and put."""
        return self.root / key

    def plain(self, key: str) -> Path | None:
        """Where a file or folder lies that is in the run directory itself; None: there is none, or a link or `..` leads
        elsewhere. For those who read what workers have written and see more than they do."""
        path = self.path(key)
        own = os.path.realpath(path) == f"{os.path.realpath(self.root)}/{key}"
        return path if own and path.exists() else None

    def get(self, key: str) -> bytes | None:
        """A document; None: there is none. Links are not followed: who reads may see more than who wrote."""
        with _opened_below(self.root, key) as file:
            return None if file is None else file.read()

    def put(self, key: str, body: bytes) -> None:
        """Write or replace, atomically and durably."""
        with self._temporary(key, body) as temporary:
            os.replace(temporary, self.path(key))
        _sync_folder(self.path(key).parent)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write, unless the key exists; True if this call wrote it. Of several writers exactly one gets True."""
        with self._temporary(key, body) as temporary:
            try:
                os.link(temporary, self.path(key))
            except FileExistsError:
                return False
        _sync_folder(self.path(key).parent)
        return True

    def list(self, prefix: str) -> list[str]:
        """Keys of the files below a folder, sorted; empty if there is no such folder."""
        found: list[str] = []
        for folder, _, names in os.walk(self.path(prefix)):  # a glob fails when a folder goes meanwhile
            below = Path(folder).relative_to(self.root)
            found += [(below / name).as_posix() for name in names if not name.startswith(".tmp-")]
        return sorted(found)

    def size(self, key: str) -> int | None:
        """Bytes of a file; None: there is no such file."""
        path = self.path(key)
        return path.stat().st_size if path.is_file() else None

    def digest(self, key: str) -> str | None:
        """SHA-256 of a file that is there; None: not cheap to tell here."""
        return sha256_of(self.path(key))

    def read(self, key: str, model: type[Document]) -> Document | None:
        """A JSON document, or None if it is not there. Raises pydantic.ValidationError on a document of another shape."""
        body = self.get(key)
        return None if body is None else model.model_validate_json(body)

    def write(self, key: str, document: BaseModel) -> None:
        self.put(key, _to_json(document))

    def write_if_absent(self, key: str, document: BaseModel) -> bool:
        return self.put_if_absent(key, _to_json(document))

    @contextlib.contextmanager
    def _temporary(self, key: str, body: bytes):
        folder = self.path(key).parent
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            yield name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


@contextlib.contextmanager
def _opened_below(root: Path, key: str) -> Iterator[BinaryIO | None]:
    """A plain file, reached by no link below the root and by no `..`. None: there is none. Never waits, for a pipe say."""
    parts = key.split("/")
    with contextlib.ExitStack() as stack:
        try:
            found = None if {"", ".", ".."}.intersection(parts) else _descend(root, parts, stack)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            found = None
        if found is None or not stat.S_ISREG(os.fstat(found).st_mode):
            yield None
        else:
            yield stack.enter_context(open(found, "rb", closefd=False))


def _descend(root: Path, parts: Sequence[str], stack: contextlib.ExitStack) -> int:
    """A descriptor of what lies there, closed with the stack."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, at)
    for depth, part in enumerate(parts, 1):
        at = os.open(part, _PLAIN | (os.O_DIRECTORY if depth < len(parts) else 0), dir_fd=at)
        stack.callback(os.close, at)
    return at


def _to_json(document: BaseModel) -> bytes:
    return document.model_dump_json(indent=2).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(folder: Path) -> Path:
    """Where a folder is filled before it is there, whole: what lies here is nobody's once who fills it has ended."""
    return folder.with_name(f"{folder.name}.tmp")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
