"""Descriptions of bases: found in the cache, or made by a process with limits on time and memory.

    known(folder)      the document, if memory or the cache has it; a few calls of stat(2)
    ask(folder)        the same; if there is none, begin to make it, and return None at once
    describe(folder)   the same; if there is none, make it and wait

The cache keys a document by the base's files (`files_key`) and by the describer: the versions of the packages here, or the
image of a cluster's pods. A base that was copied or moved is not described again. A folder that cannot be described, because
the process hangs, dies, takes too much memory or prints something else, is refused with the reason, and tried again later.
One process at a time describes a base, and only a few bases are described at once.

`python -m ft_service.bases.describing FOLDER` is the process of a cluster's pod: it prints a document, or `{"error": why}`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from ft_service.bases.base_files import MAX_ENTRIES, require_openable
from ft_service.bases.description import (
    READ_WHOLE,
    Described,
    Description,
    Refusal,
    Versions,
    description_key,
    read_described,
    write_described,
)
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.helper_process import HelperFailed, Program, run_once

log = logging.getLogger(__name__)

DESCRIPTIONS = "descriptions"
"""The folder of documents in a cache."""
SECONDS = 300.0
"""Wall-clock limit on the description of a base. Most take ten seconds of a processor; on a busy host that lasts far longer."""
MEMORY_BYTES = 4 * 1024**3
"""Limit on the private memory of the describing process; importing torch and transformers takes a tenth of it."""
NICENESS = 10
AT_ONCE = 2
"""Bases that are described at the same time, without those that take longer than LONG_SECONDS."""
LONG_SECONDS = 15.0
MOST_AT_ONCE = 6
"""Processes at the same time, with those that take longer."""
FAILED_SECONDS = 600.0
"""Seconds until a folder that could not be described is tried again."""
LATER_SECONDS = 10.0
"""Seconds until the next try after a failure that is not the base's."""
LOOK_SECONDS = 2.0
"""Seconds until the cache is searched again for a document that it did not have: another process may write it."""
MARK_SECONDS = 43_200.0
"""Seconds between two marks on a document in the cache that say that it is used."""
MOST_DOCUMENTS = 256
"""Documents that are kept in memory."""
UNDESCRIBABLE = "model_undescribable"
"""Error code of a base whose description could not be made."""
_UNKNOWN_VERSIONS = Versions("", "", "", "")
_State = tuple[str, int, int, int]
"""Name, time of the last change in ns, bytes and inode of a file."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class DocumentFolder(Protocol):
    """A folder of documents by name, on a disk or in object storage. RunDir implements it."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, body: bytes) -> None: ...
    def list(self, prefix: str) -> Sequence[str]: ...
    def touch(self, key: str) -> None: ...


class DescribeError(Exception):
    """The base has no description. The message is a clause, such as `workers.describe took longer than 120 seconds`."""


class DescribeLaterError(DescribeError):
    """The base cannot be described now, and is not at fault: the cluster is away, or the service is about to end."""


class NotDescribedError(UnavailableError):
    """The base has no description yet."""

    code = "model_not_described"


Make = Callable[[Path, Callable[[], bool]], Described]
"""Describes a folder; the second argument returns whether to give up. Raises DescribeError, DescribeLaterError."""


def describe_in_process(
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    *,
    command: Sequence[str] = (sys.executable, "-P", "-m", "workers.describe"),
    seconds: float = SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Described:
    """Run `python -m workers.describe FOLDER` under limits. Raises DescribeError, DescribeLaterError."""
    program = Program(
        command=(*command, str(folder)),
        memory_bytes=memory_bytes,
        niceness=NICENESS,
        expendable=True,
        variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        said = run_once(program, seconds=seconds, stop=stop)
    except (HelperFailed, SpecError) as error:
        raise DescribeError(error.message) from None
    except OSError as error:
        raise DescribeLaterError(f"the process that describes bases cannot be started: {error}") from None
    return described_by(json.dumps(said).encode())


def described_by(text: bytes) -> Described:
    """Parse the document that a describing process printed. Raises DescribeError for anything else."""
    try:
        return read_described(text)
    except (ValueError, RecursionError) as error:
        raise DescribeError(f"the process that describes bases printed what is {str(error)[:300]}") from None


def main(folder: Path) -> None:
    """Describe a folder under limits, and print the document or the error."""
    try:
        text = write_described(describe_in_process(folder))
    except DescribeError as error:
        text = json.dumps({"error": str(error)}).encode()
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def versions_name(versions: Versions) -> str:
    """The name of the describer that these versions are."""
    return " ".join(astuple(versions))


def files_key(folder: Path) -> str:
    """Digest of the files that a description depends on. Raises SpecError and OSError as `description_key`."""
    return description_key(folder, _UNKNOWN_VERSIONS)


def files_state(folder: Path) -> str:
    """Digest of names, sizes and times of the files of a base: another one after any change, without reading them. Raises
    OSError."""
    return hashlib.sha256(repr(_states(folder)).encode()).hexdigest()


@dataclass
class _Remembered:
    document: Described
    until: float = math.inf
    """Wall-clock time after which it is made again."""
    file: str = ""
    """Name in the cache; empty: not known."""
    marked_at: float = -math.inf
    """Time of the last mark that the file in the cache is used (monotonic clock)."""


class _Recent(OrderedDict[_Key, _Value]):
    """A mapping that keeps the entries that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


class Descriptions:
    """The descriptions of bases. Thread-safe."""

    def __init__(
        self,
        folder: DocumentFolder | None,
        describer: str | None,
        make: Make | None = None,
        *,
        failed_seconds: float = FAILED_SECONDS,
        missing: str | None = None,
        waits: Callable[[Path], str | None] | None = None,
    ) -> None:
        """`folder`: the cache; None: documents are kept only in memory. `describer`: name of the versions or image that
        describes; None: documents of any describer are taken. `make`: makes a document; None: another process does. `missing`:
        a sentence that says why nothing here makes documents, and what to do. `waits`: returns why `make` has not begun yet
        with a base; None: it does not say.
        """
        self._folder, self._make = folder, make
        self._describer = None if describer is None else hashlib.sha256(describer.encode()).hexdigest()[:16]
        self._failed_seconds, self.missing, self._waits = failed_seconds, missing, waits
        self._guard = threading.Lock()
        self._keys = _Recent[Path, tuple[tuple[_State, ...], str]](4 * MOST_DOCUMENTS)
        self._documents = _Recent[str, _Remembered](MOST_DOCUMENTS)
        self._missed = _Recent[str, float](4 * MOST_DOCUMENTS)
        """Key → last time that the cache had no document (monotonic clock)."""
        self._making: dict[str, Future[Described]] = {}
        self._later: dict[str, tuple[float, str]] = {}
        """Key → time of the next try (monotonic clock), and why the last one failed."""
        self._waiting: deque[tuple[str, Path]] = deque()
        self._begun: dict[str, float] = {}
        """Key of a base that is being described → start time (monotonic clock)."""
        self._closed = threading.Event()

    def known(self, folder: Path) -> Described | None:
        """The document of a base, if there is one. A folder that cannot be read has a refusal."""
        try:
            return self._known(self._key(folder), folder)
        except FtError as error:
            return _refused("", error.message, error.code)
        except OSError as error:
            return _refused("", f"The base in {folder} cannot be read: {error.strerror or error}.", "model_unreadable")

    def ask(self, folder: Path, *, first: bool = True) -> Described | None:
        """`known`; None: it is being made, if this process makes documents. `first`: before bases without a waiting user."""
        described = self.known(folder)
        if described is None:
            self._begin(folder, first=first)
        return described

    def describe(self, folder: Path) -> Described:
        """`known`, or made now, which takes seconds. Raises NotDescribedError if this process makes no documents."""
        described = self.known(folder)
        if described is not None:
            return described
        future = self._begin(folder, first=True)
        if future is None:
            raise self._not_described(folder)
        while not futures.wait([future], 1.0).done:
            self._begin(folder, first=True)
        return future.result()

    def description(self, folder: Path) -> Description:
        """The description, if the base has one. Raises NotDescribedError, and SpecError for a base that was refused."""
        described = self.known(folder)
        if described is None:
            raise self._not_described(folder)
        return described.description()

    def add(self, folder: Path, document: Described) -> None:
        """Add a document that another describer made of the same files. Raises SpecError if the files differ."""
        if document.key != description_key(folder, document.versions):
            raise SpecError(f"The base in {folder} has other files than the one that was described.", param="model")
        self._remember(self._key(folder), folder, _Remembered(document))

    def delay(self, folder: Path) -> str | None:
        """The reason why a base without a description cannot be described now; None: none is known."""
        if self.missing is not None:
            return self.missing
        if self._waits is not None and (why := self._waits(folder)) is not None:
            return f"The base in {folder} is not described yet: {why}"
        with self._guard:
            found = self._keys.get(folder)
            return None if found is None else self._later.get(self._name(found[1]), (0.0, None))[1]

    def close(self) -> None:
        """Stop the descriptions that are being made, and begin no others."""
        self._closed.set()

    def _begin(self, folder: Path, *, first: bool) -> Future[Described] | None:
        try:
            key = self._key(folder)
        except (FtError, OSError):  # the folder has changed since `known`
            return None
        with self._guard:
            if self._make is None or self._closed.is_set() or time.monotonic() < self._later.get(key, (0.0, ""))[0]:
                return None
            self._later.pop(key, None)
            if (found := self._documents.get(key)) is not None:  # made a moment ago
                future = Future[Described]()
                future.set_result(found.document)
                return future
            if (future := self._making.get(key)) is None:
                future = self._making[key] = Future[Described]()
                (self._waiting.appendleft if first else self._waiting.append)((key, folder))
            elif first and (key, folder) in self._waiting:
                self._waiting.remove((key, folder))
                self._waiting.appendleft((key, folder))
            if self._waiting and self._has_room():
                threading.Thread(target=self._work, name="describing", daemon=True).start()
            return future

    def _has_room(self) -> bool:
        """Whether one more may begin now."""
        recent = time.monotonic() - LONG_SECONDS
        return sum(begun > recent for begun in self._begun.values()) < AT_ONCE and len(self._begun) < MOST_AT_ONCE

    def _work(self) -> None:
        """Describe waiting bases until none is left."""
        while True:
            with self._guard:
                if self._closed.is_set():
                    while self._waiting:
                        self._making.pop(self._waiting.popleft()[0]).set_exception(_ended())
                if not self._waiting or not self._has_room():
                    return
                key, folder = self._waiting.popleft()
                future, self._begun[key] = self._making[key], time.monotonic()
            made = self._make_document(key, folder)
            if isinstance(made, UnavailableError):
                with self._guard:
                    del self._making[key], self._begun[key]
                    self._later[key] = time.monotonic() + LATER_SECONDS, made.message
                future.set_exception(made)
                continue
            self._remember(key, folder, made)
            with self._guard:
                del self._making[key], self._begun[key]
            future.set_result(made.document)

    def _make_document(self, key: str, folder: Path) -> _Remembered | UnavailableError:
        """A description or refusal; an error: neither can be made now."""
        assert self._make is not None
        try:
            document = self._make(folder, self._closed.is_set)
            if document.key != description_key(folder, document.versions):
                raise DescribeError("its files changed while it was described")
            return _Remembered(document)
        except DescribeError as error:
            if self._closed.is_set():
                return _ended()
            if isinstance(error, DescribeLaterError):
                log.warning("the base in %s cannot be described now: %s", folder, error)
                return UnavailableError(
                    f"The base in {folder} cannot be described now: {str(error).rstrip('.')}.", param="model"
                )
            why = str(error)
        except (FtError, OSError) as error:
            why = error.message if isinstance(error, FtError) else f"its files cannot be read: {error.strerror or error}"
        except Exception as error:
            log.exception("the base in %s could not be described", folder)
            why = f"{type(error).__name__}; see the server's log"
        log.warning("the base in %s cannot be described: %s", folder, why)
        message = f"The base in {folder} cannot be described, so it cannot be tuned here: {why.rstrip('.')}."
        return _Remembered(_refused(key, message, UNDESCRIBABLE), time.time() + self._failed_seconds)

    def _not_described(self, folder: Path) -> NotDescribedError:
        if (why := self.delay(folder)) is not None:
            return NotDescribedError(why, param="model", retry_after=None)
        return NotDescribedError(
            f"The base in {folder} is being described. Try again in a moment.", param="model", retry_after=5
        )

    def _key(self, folder: Path) -> str:
        """Name of a base's document in the cache; a digest is reused until a file changes. Raises FtError, OSError."""
        require_openable(folder)
        states = _states(folder)
        with self._guard:
            found = self._keys.get(folder)
        if found is None or found[0] != states:
            found = states, files_key(folder)
            with self._guard:
                self._keys[folder] = found
        return self._name(found[1])

    def _name(self, digest: str) -> str:
        return digest if self._describer is None else f"{digest}-{self._describer}"

    def _known(self, key: str, folder: Path) -> Described | None:
        now = time.monotonic()
        with self._guard:
            for name in (key, _refusal_name(key, folder)):
                found = self._documents.get(name)
                if found is not None and time.time() < found.until:
                    self._documents.move_to_end(name)
                    self._mark_used(found)
                    return found.document
            if now - self._missed.get(key, -LOOK_SECONDS) < LOOK_SECONDS:
                return None
        found = self._read(key, folder)
        with self._guard:
            if found is None:
                self._missed[key] = now
                return None
            self._documents[key if found.document.refused is None else _refusal_name(key, folder)] = found
            self._mark_used(found)
        return found.document

    def _mark_used(self, found: _Remembered) -> None:
        """Mark a document in the cache twice a day, since `ft prune` removes documents that were not used for days."""
        if self._folder is not None and found.file and time.monotonic() - found.marked_at > MARK_SECONDS:
            found.marked_at = time.monotonic()
            self._folder.touch(found.file)

    def _remember(self, key: str, folder: Path, made: _Remembered) -> None:
        refused = made.document.refused is not None
        name = _refusal_name(key, folder) if refused else key
        with self._guard:
            self._missed.pop(key, None)
            self._documents[name] = made
        made.file = name if refused else f"{name}.json"
        body = (f"{made.until}\n".encode() if refused else b"") + write_described(made.document)
        try:
            if self._folder is not None and self._describer is not None:
                self._folder.put(made.file, body)
        except (OSError, FtError) as error:  # the disk is full, or object storage is away; memory has the document
            log.warning("the description of a base could not be stored in the cache: %s", error)

    def _read(self, key: str, folder: Path) -> _Remembered | None:
        """The cache's document; None also for a document that cannot be read, which is then made again."""
        if self._folder is None:
            return None
        try:
            names = [f"{key}.json"]
            if self._describer is None:
                names = [name for name in self._folder.list("") if name.startswith(key) and name.endswith(".json")]
            for name in names:
                if (text := self._folder.get(name)) is not None:
                    return _Remembered(read_described(text), file=name)
            until, _, text = (self._folder.get(_refusal_name(key, folder)) or b"0").partition(b"\n")
            if time.time() < float(until):
                return _Remembered(read_described(text), float(until))
        except (OSError, ValueError, FtError) as error:
            log.warning("a description of a base in the cache cannot be read, and is made again: %s", error)
        return None


def _refusal_name(key: str, folder: Path) -> str:
    """Name of a refusal in the cache. A refusal names its folder, so that another folder with the same files has its own."""
    return f"{key}.{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.refused"


def _refused(key: str, message: str, code: str) -> Described:
    return Described(key, _UNKNOWN_VERSIONS, refused=Refusal(message, code=code))


def _ended() -> UnavailableError:
    return UnavailableError("The service ended while the base was described.")


def _states(folder: Path) -> tuple[_State, ...]:
    """States of the files that a description depends on, sorted by name. Raises OSError."""
    found: list[_State] = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MAX_ENTRIES + 1):
            if entry.name in READ_WHOLE or entry.name.endswith(".safetensors"):
                try:
                    state = entry.stat()
                except OSError:  # a link that leads nowhere
                    state = entry.stat(follow_symlinks=False)
                found.append((entry.name, state.st_mtime_ns, state.st_size, state.st_ino))
    return tuple(sorted(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
