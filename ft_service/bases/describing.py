"""Descriptions of bases: found in the cache, or made by a process with limits on time and memory.

    known(folder)      the document, if memory or the cache has it; a few calls of stat(2)
    ask(folder)        the same; if there is none, begin to make it, and return None at once
    describe(folder)   the same; if there is none, make it and wait

The cache keys a document by the base's files (`files_key`) and by the describer: the versions of
the packages here, or the image of a cluster's pods. A base that was copied or moved is not
described again. A folder that cannot be described, because the process crashes, takes too much
memory or processor time, or prints something else, is refused with the reason, and tried again
later. A process that the host killed or gave no time says nothing of the base: it is started again
after growing pauses. One process at a time describes a base, and only a few bases are described at
once, by project in turn.

`python -m ft_service.bases.describing FOLDER` is the process of a cluster's pod: it prints a
document, `{"error": why}`, or `{"later": why}`.
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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
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
from ft_service.errors import FtError, SpecError, UnavailableError, is_lost
from ft_service.host.helper_process import HelperFailed, Program, run_once
from ft_service.shared_work.losses import FIRST_SECONDS, Losses
from ft_service.shared_work.turns import Turn, Turns

log = logging.getLogger(__name__)

DESCRIPTIONS = "descriptions"
"""The folder of documents in a cache."""
CPU_SECONDS = 300
"""Limit on the processor time of a description. Most take ten seconds."""
SECONDS = 3600.0
"""Wall-clock limit, after which the host is said to have had no time for it."""
MEMORY_BYTES = 4 * 1024**3
"""Limit on the private memory of the describing process; importing torch and transformers takes a
tenth of it.
"""
NICENESS = 10
AT_ONCE = 2
"""Bases that are described at the same time, without those that take longer than LONG_SECONDS."""
LONG_SECONDS = 15.0
MOST_AT_ONCE = 6
"""Processes at the same time, with those that take longer."""
OF_PROJECT = 4
"""Of these, those of one project."""
FAILED_SECONDS = 600.0
"""Seconds until a folder that could not be described is tried again."""
RETRY_SECONDS = 5.0
"""Seconds after which whoever needs a description that is being made is told to ask again."""
LOOK_SECONDS = 2.0
"""Seconds until the cache is searched again for a document that it did not have: another process
may write it.
"""
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
    """The base has no description.

    The message is a clause, such as `workers.describe took longer than 120 seconds`.
    """


class DescribeLaterError(DescribeError):
    """The base cannot be described now, and is not at fault: the host killed the process or had no
    time for it, the cluster is away, or the service is about to end.
    """


class NotDescribedError(UnavailableError):
    """The base has no description yet."""

    code = "model_not_described"


Make = Callable[[Path, Callable[[], bool]], Described]
"""Describes a folder; the second argument returns whether to give up.

Raises DescribeError, DescribeLaterError.
"""


def describe_in_process(
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    *,
    command: Sequence[str] = (sys.executable, "-P", "-m", "workers.describe"),
    seconds: float = SECONDS,
    cpu_seconds: int = CPU_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Described:
    """Run `python -m workers.describe FOLDER` under limits.

    Raises DescribeError, DescribeLaterError.
    """
    program = Program(
        command=(*command, str(folder)),
        memory_bytes=memory_bytes,
        cpu_seconds=cpu_seconds,
        niceness=NICENESS,
        expendable=True,
        variables={
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    try:
        said = run_once(program, seconds=seconds, stop=stop)
    except (HelperFailed, SpecError) as error:
        raise (DescribeLaterError if is_lost(error) else DescribeError)(error.message) from None
    except OSError as error:
        raise DescribeLaterError(
            f"the process that describes bases cannot be started: {error}"
        ) from None
    return described_by(json.dumps(said).encode())


def described_by(text: bytes) -> Described:
    """Parse the document that a describing process printed.

    Raises DescribeError for anything else.
    """
    try:
        return read_described(text)
    except (ValueError, RecursionError) as error:
        raise DescribeError(
            f"the process that describes bases printed what is {str(error)[:300]}"
        ) from None


def main(folder: Path) -> None:
    """Describe a folder under limits, and print the document or the error."""
    try:
        text = write_described(describe_in_process(folder))
    except DescribeError as error:
        text = json.dumps(
            {"later" if isinstance(error, DescribeLaterError) else "error": str(error)}
        ).encode()
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def versions_name(versions: Versions) -> str:
    """The name of the describer that these versions are."""
    return " ".join(astuple(versions))


def files_key(folder: Path) -> str:
    """Digest of the files that a description depends on.

    Raises SpecError and OSError as `description_key`.
    """
    return description_key(folder, _UNKNOWN_VERSIONS)


def files_state(folder: Path) -> str:
    """Digest of names, sizes and times of the files of a base: another one after any change,
    without reading them. Raises OSError.
    """
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


@dataclass(frozen=True)
class _Asked:
    """A base whose description somebody asked for."""

    key: str
    folder: Path
    is_awaited: bool
    """Whether a user waits for it."""


@dataclass
class _Making:
    """A description that is to be made, or is being made."""

    future: Future[Described] = field(default_factory=Future)
    asked: set[tuple[str, bool]] = field(default_factory=set)
    """Projects that asked for it, and whether a user waits."""
    begun_at: float | None = None
    """Start time (monotonic clock). None: it waits for its turn."""


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
        lost_seconds: float = FIRST_SECONDS,
        missing: str | None = None,
        waits: Callable[[Path], str | None] | None = None,
    ) -> None:
        """`folder`: the cache; None: documents are kept only in memory.

        `describer`: name of the versions or image that describes; None: documents of any describer
        are taken. `make`: makes a document; None: another process does. `failed_seconds`,
        `lost_seconds`: pause after a refusal, and after the first time that the host is at fault.
        `missing`: a sentence that says why nothing here makes documents, and what to do. `waits`:
        returns why `make` has not begun yet with a base; None: it does not say.
        """
        self._folder = folder
        self._make = make
        self._describer = (
            None if describer is None else hashlib.sha256(describer.encode()).hexdigest()[:16]
        )
        self._failed_seconds = failed_seconds
        self.missing = missing
        self._waits = waits
        self._guard = threading.Lock()
        self._keys = _Recent[Path, tuple[tuple[_State, ...], str]](4 * MOST_DOCUMENTS)
        self._documents = _Recent[str, _Remembered](MOST_DOCUMENTS)
        self._missed = _Recent[str, float](4 * MOST_DOCUMENTS)
        """Key → last time that the cache had no document (monotonic clock)."""
        self._making: dict[str, _Making] = {}
        self._turns = Turns[_Asked](MOST_AT_ONCE, OF_PROJECT)
        self._lost = Losses("the description of a base", first=lost_seconds)
        self._closed = threading.Event()

    def known(self, folder: Path) -> Described | None:
        """The document of a base, if there is one. A folder that cannot be read has a refusal."""
        try:
            return self._known(self._key(folder), folder)
        except FtError as error:
            return _refused("", error.message, error.code)
        except OSError as error:
            return _refused(
                "",
                f"The base in {folder} cannot be read: {error.strerror or error}.",
                "model_unreadable",
            )

    def ask(self, folder: Path, project: str = "", *, first: bool = True) -> Described | None:
        """`known`; None: it is being made, if this process makes documents.  `project`: for
        which it is made, in its turn. `first`: before bases without a waiting user.
        """
        described = self.known(folder)
        if described is None:
            self._begin(folder, project, first=first)
        return described

    def describe(self, folder: Path) -> Described:
        """`known`, or made now, which takes seconds.

        Raises NotDescribedError if this process makes none, or cannot now.
        """
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
        """The description, if the base has one.

        Raises NotDescribedError, and SpecError for a base that was refused.
        """
        described = self.known(folder)
        if described is None:
            raise self._not_described(folder)
        return described.description()

    def add(self, folder: Path, document: Described) -> None:
        """Add a document that another describer made of the same files.

        Raises SpecError if the files differ.
        """
        if document.key != description_key(folder, document.versions):
            raise SpecError(
                f"The base in {folder} has other files than the one that was described.",
                param="model",
            )
        self._remember(self._key(folder), folder, _Remembered(document))

    def delay(self, folder: Path) -> str | None:
        """The reason why a base without a description cannot be described now; None: none is
        known.
        """
        if self.missing is not None:
            return self.missing
        if self._waits is not None and (why := self._waits(folder)) is not None:
            return f"The base in {folder} is not described yet: {why}"
        lost = self._lost_now(folder)
        return None if lost is None else lost[1]

    def close(self) -> None:
        """Stop the descriptions that are being made, and begin no others."""
        self._closed.set()

    def _begin(self, folder: Path, project: str = "", *, first: bool) -> Future[Described] | None:
        try:
            key = self._key(folder)
        except (FtError, OSError):  # the folder has changed since `known`
            return None
        with self._guard:
            if self._make is None or self._closed.is_set() or self._lost.pending(key) is not None:
                return None
            if (found := self._documents.get(key)) is not None:  # made a moment ago
                future = Future[Described]()
                future.set_result(found.document)
                return future
            making = self._making.setdefault(key, _Making())
            if making.begun_at is None and (project, first) not in making.asked:
                making.asked.add((project, first))
                self._turns.put(project, _Asked(key, folder, first))
            if (turn := self._next()) is not None:
                threading.Thread(
                    target=self._work, args=[turn], name="describing", daemon=True
                ).start()
            return making.future

    def _has_room(self) -> bool:
        """Whether one more may begin now."""
        recent = time.monotonic() - LONG_SECONDS
        begun = [making.begun_at for making in self._making.values() if making.begun_at is not None]
        return sum(at > recent for at in begun) < AT_ONCE and len(begun) < MOST_AT_ONCE

    def _work(self, turn: Turn[_Asked] | None) -> None:
        """Describe the base whose turn it is, and the next ones until none may begin."""
        while turn is not None:
            key = turn.item.key
            folder = turn.item.folder
            made = self._make_document(key, folder)
            if isinstance(made, _Remembered):
                self._remember(key, folder, made)
            with self._guard:
                future = self._making.pop(key).future
                self._turns.end(turn)
                turn = self._next()
            if isinstance(made, _Remembered):
                future.set_result(made.document)
            else:
                future.set_exception(made)

    def _next(self) -> Turn[_Asked] | None:
        """The turn that begins now, of a base that a user waits for if there is any; None: none may
        begin.
        """
        if self._closed.is_set():
            for key in [key for key, making in self._making.items() if making.begun_at is None]:
                self._making.pop(key).future.set_exception(_ended())
        while self._has_room():
            turn = self._turns.take(lambda asked: asked.is_awaited) or self._turns.take()
            if turn is None:
                break
            making = self._making.get(turn.item.key)
            if making is not None and making.begun_at is None:
                making.begun_at = time.monotonic()
                return turn
            self._turns.end(turn, cost=0.0)  # it was asked for twice, and had its other turn
        return None

    def _make_document(self, key: str, folder: Path) -> _Remembered | NotDescribedError:
        """A description or refusal; an error: neither can be made now."""
        assert self._make is not None
        try:
            document = self._make(folder, self._closed.is_set)
            if document.key != description_key(folder, document.versions):
                raise DescribeError("its files changed while it was described")
            self._lost.forget(key)
            return _Remembered(document)
        except (DescribeLaterError, UnavailableError) as error:
            if self._closed.is_set():
                return _ended()
            why = str(error).rstrip(".")
            why = (
                f"The base in {folder} cannot be described now, through no fault of its own, "
                f"and is tried again: {why}."
            )
            return _not_now(why, self._lost.add(key, why))
        except DescribeError as error:
            if self._closed.is_set():
                return _ended()
            why = str(error)
        except (FtError, OSError) as error:
            why = (
                error.message
                if isinstance(error, FtError)
                else f"its files cannot be read: {error.strerror or error}"
            )
        except Exception as error:
            log.exception("the base in %s could not be described", folder)
            why = f"{type(error).__name__}; see the server's log"
        self._lost.forget(key)
        log.warning("the base in %s cannot be described: %s", folder, why)
        message = (
            f"The base in {folder} cannot be described, so it cannot be tuned here: "
            f"{why.rstrip('.')}."
        )
        return _Remembered(
            _refused(key, message, UNDESCRIBABLE), time.time() + self._failed_seconds
        )

    def _not_described(self, folder: Path) -> NotDescribedError:
        if self.missing is not None:
            return NotDescribedError(self.missing, param="model", retry_after=None)
        lost = self._lost_now(folder)
        why = (
            self.delay(folder) or f"The base in {folder} is being described. Try again in a moment."
        )
        return _not_now(why, RETRY_SECONDS if lost is None else lost[0])

    def _lost_now(self, folder: Path) -> tuple[float, str] | None:
        """Seconds until the next try, and why the last one was lost; None: none was, or the next
        one is due.
        """
        with self._guard:
            found = self._keys.get(folder)
        return None if found is None else self._lost.pending(self._name(found[1]))

    def _key(self, folder: Path) -> str:
        """Name of a base's document in the cache; a digest is reused until a file changes.

        Raises FtError, OSError.
        """
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
            self._documents[
                key if found.document.refused is None else _refusal_name(key, folder)
            ] = found
            self._mark_used(found)
        return found.document

    def _mark_used(self, found: _Remembered) -> None:
        """Mark a document in the cache twice a day, since `ft prune` removes documents that were
        not used for days.
        """
        if (
            self._folder is not None
            and found.file
            and time.monotonic() - found.marked_at > MARK_SECONDS
        ):
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
        except (
            OSError,
            FtError,
        ) as error:  # the disk is full, or object storage is away; memory has the document
            log.warning("the description of a base could not be stored in the cache: %s", error)

    def _read(self, key: str, folder: Path) -> _Remembered | None:
        """The cache's document; None also for a document that cannot be read, which is then made
        again.
        """
        if self._folder is None:
            return None
        try:
            names = [f"{key}.json"]
            if self._describer is None:
                names = [
                    name
                    for name in self._folder.list("")
                    if name.startswith(key) and name.endswith(".json")
                ]
            for name in names:
                if (text := self._folder.get(name)) is not None:
                    return _Remembered(read_described(text), file=name)
            until, _, text = (self._folder.get(_refusal_name(key, folder)) or b"0").partition(b"\n")
            if time.time() < float(until):
                return _Remembered(read_described(text), float(until))
        except (OSError, ValueError, FtError) as error:
            log.warning(
                "a description of a base in the cache cannot be read, and is made again: %s", error
            )
        return None


def _refusal_name(key: str, folder: Path) -> str:
    """Name of a refusal in the cache.

    A refusal names its folder, so that another folder with the same files has its own.

    Up to 0.2.0 the names ended in `.refused`, and among those refusals are ones of processes that
    the host had killed.
    """
    return f"{key}.{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.refusal"


def _refused(key: str, message: str, code: str) -> Described:
    return Described(key, _UNKNOWN_VERSIONS, refused=Refusal(message, code=code))


def _not_now(why: str, seconds: float) -> NotDescribedError:
    return NotDescribedError(why, param="model", retry_after=max(1, math.ceil(seconds)))


def _ended() -> NotDescribedError:
    return _not_now("The service ended while the base was described.", 1)


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
