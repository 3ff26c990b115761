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

Documents are read and written with few operations only (put, put-if-absent, get, has, list), so that object storage can hold
them too. A document is written whole or not at all. Whoever reads one goes by `RunDir.read` or `RunDir.readable`: workers write
here, disks lose bits, and what lies in a document's place may be a pipe, a link or anything else. What cannot be read within
bounds raises UnreadableDocumentError, which names the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from ft_service.errors import FtError

log = logging.getLogger(__name__)

Document = TypeVar("Document", bound=BaseModel)

MOST_BYTES = 64 * 1024**2
"""Of one document, unless the reader allows less: it is read whole, by processes that serve others too."""


class UnreadableDocumentError(FtError):
    """Something lies in a document's place that is no such document."""

    code = "unreadable_document"

    def __init__(self, key: str, why: str) -> None:
        """`why`: what is wrong with it, in words that follow its name."""
        super().__init__(f"{key} cannot be read: {why}.")
        self.key = key


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

    def get(self, key: str, most: int = MOST_BYTES) -> bytes | None:
        """The bytes of a document; None: there is none. Raises UnreadableDocumentError if it has more than `most` bytes or is
        no plain file, OSError if the disk does not give it.

        Links are not followed: who reads may see more than who wrote. Nothing is waited for, a pipe's writer neither.
        """
        with _opened_below(self.root, key) as file:
            # No more than there is: so much memory is taken at once.
            body = None if file is None else file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
        if body is not None and len(body) > most:
            raise UnreadableDocumentError(key, f"it has more than {most:,} bytes")
        return body

    def has(self, key: str) -> bool:
        """Whether anything lies there, readable or not."""
        return os.path.lexists(self.path(key))

    def put(self, key: str, body: bytes) -> None:
        """Write or replace, atomically and durably, whatever lies there."""
        with self._temporary(key, body) as temporary:
            try:
                os.replace(temporary, self.path(key))
            except IsADirectoryError:
                aside = tempfile.mkdtemp(prefix=".tmp-", dir=self.path(key).parent)
                os.replace(self.path(key), aside)
                os.replace(temporary, self.path(key))
                shutil.rmtree(aside, ignore_errors=True)
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

    def read(self, key: str, model: type[Document], most: int = MOST_BYTES) -> Document | None:
        """A JSON document, or None if it is not there. Raises UnreadableDocumentError if it is no document of this shape, and
        as `get`."""
        body = self.get(key, most)
        return None if body is None else parse_document(key, body, model)

    def readable(self, key: str, model: type[Document], most: int = MOST_BYTES) -> Document | None:
        """A document that its reader can do without: as `read`, but None too if it cannot be read, which the log says."""
        try:
            return self.read(key, model, most)
        except UnreadableDocumentError as error:
            log.warning("%s: %s", self.root, error.message)
            return None

    def readable_bytes(self, key: str, most: int = MOST_BYTES) -> bytes | None:
        """As `get`, but None too if it cannot be read, which the log says."""
        try:
            return self.get(key, most)
        except UnreadableDocumentError as error:
            log.warning("%s: %s", self.root, error.message)
            return None

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


def parse_document(key: str, body: bytes, model: type[Document]) -> Document:
    """The document that these bytes are. `key`: for the error. Raises UnreadableDocumentError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        said = "it is not JSON" if fault["type"] == "json_invalid" else f"{where[:100]}: {fault['msg'][:200]}".lstrip(": ")
        raise UnreadableDocumentError(key, said) from None
    except (ValueError, RecursionError) as error:
        raise UnreadableDocumentError(key, str(error)[:200] or type(error).__name__) from None


_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""A link, or a socket."""


@contextlib.contextmanager
def _opened_below(root: Path, key: str) -> Iterator[BinaryIO | None]:
    """A plain file, reached by no link below the root and by no `..`. None: there is none. Never waits, for a pipe say. Raises
    UnreadableDocumentError where something else lies."""
    parts = key.split("/")
    with contextlib.ExitStack() as stack:
        try:
            found = None if {"", ".", ".."}.intersection(parts) else _descend(root, parts, stack)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise UnreadableDocumentError(key, "it is no plain file") from None
            if error.errno not in _NOT_THERE:
                raise
            found = None
        if found is None:
            yield None
        elif not stat.S_ISREG(os.fstat(found).st_mode):
            raise UnreadableDocumentError(key, "it is no plain file")
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
