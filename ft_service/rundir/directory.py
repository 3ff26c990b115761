"""Run directory: the only contract between the service and the workers. (Keys of an attempt:
attempt.py, of checkpoints: checkpoints.py.)

    spec.json                             JobSpec, resolved, immutable
    origins.json                          Origins, by rank 0 of the first attempt (see manifest.py)
    base-status.json                      by rank 0: the base's files as they were when their
                                          contents were last read
    reference.bin  reference.json         by rank 0: log-probabilities of answer pairs before the
                   first step (see
                                          workers/training/reference_logprobs.py)
    evaluations/step-<s>-a<n>.json        Evaluation, by rank 0: answers to a few prompts at a step
                                          (see evaluations.py)
    attempts/<n>/start.json               Start, by the reconciler or `ft run`, before anything
                                          runs; it may name an engine, which then does what ranks
                                          and supervisor do (an engine's own directory: see
                                          engine.py)
    attempts/<n>/control.json             Control, by the reconciler, rewritten as the user changes
                                          their mind; by a cluster's launcher, which gives a place
                                          back
    attempts/<n>/presence.json            Presence, by the reconciler, rewritten now and then while
                                          ranks live by commands
    attempts/<n>/supervisor.lock          held by the supervisor while it is alive
    attempts/<n>/launched.json            Launched, by the launcher of a cluster, once the attempt's
                                          Job was created
    attempts/<n>/supervisor.json          ProcessIdentity, by the supervisor, once it holds the
                                          attempt
    attempts/<n>/energy.json              Energy, by the supervisor, rewritten while its ranks run
    attempts/<n>/stop.json                Stop, by a supervisor that was asked to stop (SIGTERM), or
                                          by Slurm's batch script
    attempts/<n>/events/<seq>.jsonl       immutable event segments, by rank 0 (see events.py)
    attempts/<n>/logs/                    output of supervisor, torchrun and ranks
    attempts/<n>/outcome.json             Outcome, by the first rank that knows it
    attempts/<n>/exit.json                Exit, by the supervisor, last, or by the launcher: it
                                          seals the attempt, as a later one's start does (see
                                          attempt_seal.py)
    checkpoints/step-<s>-a<n>/            DCP shards (and adapter/), then COMPLETE
                                          (CheckpointMarker) last; DAMAGED by a later attempt
    adapter/  metrics.csv  manifest.json  the outcome
    tensorboard/                          event files, by rank 0, where the job's integrations ask
                                          for them
    adapters/step-<s>-a<n>/               adapters of checkpoints, made on request
    exports/<format>/                     the outcome in formats of other programs, made by the
                                          service on request; their state is exports/<format>.json
                                          (see documents.py)
    served.json                           ServedQuality, with the outcome: quality of the adapter by
                                          how it is served
    forgetting.json                       Forgetting, with the outcome: what the tuned model has
                                          lost of what its base knew
    suites.json                           Suites, by the service: accuracies in tasks of `ft eval
                                          --suite`
    probes.json                           Probes, with the outcome: they verify a server of the
                                          adapter
    serving.json                          by the service: where the adapter is served
                                          (ft_service/serving/handoff.py)
    result.json                           Result, last of all; names the attempt
    tokens/                               token sets that a rank made because it did not see the
                                          service's; removed on success
    ranks.lock                            held (shared) by every living rank of any attempt

With several nodes, each node's supervisor.lock, supervisor.json, energy.json and exit.json
are in attempts/<n>/nodes/<k>/, and attempts/<n>/exit.json is made from theirs; ranks.lock is
ranks-<k>.lock then.

Documents are read and written with few operations (put, put-if-absent, get, has, list), which
object storage offers too. A document is written whole or not at all. Readers use `RunDir.read` or
`RunDir.readable`: workers write here, disks corrupt files, and a pipe or a link may be in a
document's place. A document that cannot be read within bounds raises UnreadableDocumentError, which
names the file.
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
"""Largest size of a document, unless the reader sets a lower limit: it is read whole, by processes
that serve others.
"""


class UnreadableDocumentError(FtError):
    """Error for a file in a document's place that is not a valid document."""

    code = "unreadable_document"

    def __init__(self, key: str, why: str) -> None:
        """`why`: clause that says what is wrong with it."""
        super().__init__(f"{key} cannot be read: {why}.")
        self.key = key


class RunDir:
    """Run directory on a local file system. Keys are relative paths with forward slashes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def path(self, key: str) -> Path:
        """Return the path of a key, for large files (checkpoints, adapters, logs); documents are
        read by `get` and written by `put`.
        """
        return self.root / key

    def plain(self, key: str) -> Path | None:
        """Return the path of a file or folder that is in the run directory itself; None: it does
        not exist, or a link or `..` leads elsewhere. For readers with more permissions than the
        workers that wrote it.
        """
        path = self.path(key)
        own = os.path.realpath(path) == f"{os.path.realpath(self.root)}/{key}"
        return path if own and path.exists() else None

    def get(self, key: str, most: int = MOST_BYTES) -> bytes | None:
        """Return the bytes of a document; None: it does not exist.

        Raises UnreadableDocumentError if it is larger than `most` bytes or not a regular file, and
        OSError if the disk fails.

        Links are not followed, since the reader may have more permissions than the writer. A pipe
        does not block the call.
        """
        with _opened_below(self.root, key) as file:
            # Not `most`: that much memory would be allocated at once.
            body = (
                None if file is None else file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
            )
        if body is not None and len(body) > most:
            raise UnreadableDocumentError(key, f"it has more than {most:,} bytes")
        return body

    def has(self, key: str) -> bool:
        """Return whether a file exists there, readable or not."""
        return os.path.lexists(self.path(key))

    def put(self, key: str, body: bytes) -> None:
        """Write a document atomically and durably, replacing what is there."""
        with self._temporary(key, body) as temporary:
            try:
                os.replace(temporary, self.path(key))
            except IsADirectoryError:
                replaced = tempfile.mkdtemp(prefix=".tmp-", dir=self.path(key).parent)
                os.replace(self.path(key), replaced)
                os.replace(temporary, self.path(key))
                shutil.rmtree(replaced, ignore_errors=True)
        sync_folder(self.path(key).parent)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write a document unless the key exists; True if this call wrote it.

        Of several writers exactly one gets True.
        """
        with self._temporary(key, body) as temporary:
            try:
                os.link(temporary, self.path(key))
            except FileExistsError:
                return False
        sync_folder(self.path(key).parent)
        return True

    def touch(self, key: str) -> None:
        """Set the time of a document's last change to now, if it is on this host and may be
        written.
        """
        with contextlib.suppress(OSError):
            os.utime(self.root / key)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys of the files below a folder; empty if there is no such folder."""
        keys: list[str] = []
        above = len(f"{self.root}/")
        # A glob fails when a folder is removed meanwhile.
        for folder, _, names in os.walk(self.path(prefix)):
            keys += [f"{folder}/{name}"[above:] for name in names if not name.startswith(".tmp-")]
        return sorted(keys)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes; None: it does not exist."""
        path = self.path(key)
        return path.stat().st_size if path.is_file() else None

    def digest(self, key: str) -> str | None:
        """Return the SHA-256 of an existing file; None: this storage cannot compute it cheaply."""
        return sha256_of(self.path(key))

    def read(self, key: str, model: type[Document], most: int = MOST_BYTES) -> Document | None:
        """Read a JSON document; None: it does not exist.

        Raises UnreadableDocumentError if it does not fit the model, and as `get`.
        """
        body = self.get(key, most)
        return None if body is None else parse_document(key, body, model)

    def readable(self, key: str, model: type[Document], most: int = MOST_BYTES) -> Document | None:
        """Read an optional document: as `read`, but None also if it is unreadable, which is
        logged.
        """
        try:
            return self.read(key, model, most)
        except UnreadableDocumentError as error:
            log.warning("%s: %s", self.root, error.message)
            return None

    def readable_bytes(self, key: str, most: int = MOST_BYTES) -> bytes | None:
        """Read bytes as `get`, but None also if they are unreadable, which is logged."""
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
    """Parse a document. `key`: for the error. Raises UnreadableDocumentError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        why = (
            "it is not JSON"
            if fault["type"] == "json_invalid"
            else f"{where[:100]}: {fault['msg'][:200]}".lstrip(": ")
        )
        raise UnreadableDocumentError(key, why) from None
    except (ValueError, RecursionError) as error:
        raise UnreadableDocumentError(key, str(error)[:200] or type(error).__name__) from None


_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""errno of a link, or a socket."""


@contextlib.contextmanager
def _opened_below(root: Path, key: str) -> Iterator[BinaryIO | None]:
    """Open a regular file without following links or `..` below the root; None: it does not exist.

    Never blocks, for example on a pipe. Raises UnreadableDocumentError for anything but a regular
    file.
    """
    parts = key.split("/")
    with contextlib.ExitStack() as stack:
        try:
            descriptor = (
                None if {"", ".", ".."}.intersection(parts) else _descend(root, parts, stack)
            )
        except OSError as error:
            if error.errno in _NO_FILE:
                raise UnreadableDocumentError(key, "it is not a regular file") from None
            if error.errno not in _NOT_THERE:
                raise
            descriptor = None
        if descriptor is None:
            yield None
        elif not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableDocumentError(key, "it is not a regular file")
        else:
            yield stack.enter_context(open(descriptor, "rb", closefd=False))


def _descend(root: Path, parts: Sequence[str], stack: contextlib.ExitStack) -> int:
    """Return a descriptor of the file, closed with the stack."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, at)
    for depth, part in enumerate(parts, 1):
        at = os.open(part, _PLAIN | (os.O_DIRECTORY if depth < len(parts) else 0), dir_fd=at)
        stack.callback(os.close, at)
    return at


def _to_json(document: BaseModel) -> bytes:
    return document.model_dump_json(indent=2).encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(folder: Path) -> Path:
    """Return the temporary path of a folder while it is filled.

    What is left there after its writer has ended can be removed.
    """
    return folder.with_name(f"{folder.name}.tmp")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
