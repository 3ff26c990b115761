"""Copies a run directory from object storage to a node, and what an attempt writes back to object
storage.

    python -m ft_service.supervisor.object_sync fetch|follow|flush URL RUN_DIR ATTEMPT NODE

RUN_DIR is `<home>/runs/<job>`; an object's key is its path below that home. Uploads follow the
order of writes in the run directory: a checkpoint's COMPLETE comes after all its files, from
whichever node; an event that names a checkpoint comes after it; `result.json` after the adapter,
exit records last. Once the attempt is sealed on object storage (attempt_seal.py), only its own logs
and records are uploaded. Nothing here needs torch. An engine's directory is that of engine_sync.py.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ft_service.data.token_folder import IN_HOME
from ft_service.errors import FtError, UnavailableError
from ft_service.rundir.attempt import ATTEMPTS, Attempt, AttemptKeys, is_segment
from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.checkpoints import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    MARKER,
    checkpoint_faults,
    checkpoint_key,
    complete_checkpoints,
    has_marker,
    is_damage,
    is_marker,
    mark_damaged,
    marker_key,
    step_of,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, Exit, Result, Start
from ft_service.rundir.evaluations import EVALUATIONS, PROBES, SERVED
from ft_service.rundir.events import MOST_SEGMENT_BYTES, parse_events
from ft_service.shared_work.losses import pause_seconds
from ft_service.spec import JobSpec
from ft_service.storage.locations import ObjectRunDir
from ft_service.storage.object_store import ObjectStore

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 0.5
MOST_FOLLOW_SECONDS = 8.0
"""Longest pause while storage fails."""
LOOK_SECONDS = 3.0
"""Pause between looks for requests of the service, and for the seal where nothing is at risk: each
request costs money.
"""
LOGS_SECONDS = 10.0
"""Pause between uploads of the growing logs."""
FLUSH_SECONDS = 60.0
"""Time for which the flush waits for other nodes' shards of the last checkpoint."""
DOWNLOADS = 16
"""Documents that are downloaded at once."""
TRY_SECONDS = {"fetch": 14.0, "flush": 3600.0}
"""Verb → how long after the first try the last one may begin if storage does not answer. A fetch is
the next attempt's to repeat; what the last flush leaves here goes with the pod's disk.
"""
FIRST_PAUSE_SECONDS = 2.0
MOST_PAUSE_SECONDS = 60.0
_MOST_BYTES = 2**40
"""Largest size of a file that one node uploads whole: values of pairs grow with the data."""
_OUTCOME = ("adapter", "metrics.csv", "manifest.json", PROBES, SERVED)


class Sync:
    """One node's copy of a run directory, and its objects."""

    def __init__(self, objects: ObjectStore, run: RunDir, attempt: int, node: int) -> None:
        self.objects = objects
        self.run = run
        self.attempt = attempt
        self._keys = AttemptKeys(attempt)
        self._own = (self._keys.node(), self._keys.node(node, 2))
        """This node's keys if it is the only one, and if there are several: start.json, which says
        so, may not be here yet.
        """
        self._home = run.root.parent.parent
        self._prefix = run.root.relative_to(self._home).as_posix()
        sizes = {
            key[len(self._prefix) + 1 :]: size for key, size in objects.list(self._prefix).items()
        }
        self._remote_segments = {key: size for key, size in sizes.items() if is_segment(key)}
        """Sizes of the segments of events that were on storage at first. A long job has a hundred
        thousand: what is done at every look must not go through them.
        """
        self._remote_sizes = {
            key: size for key, size in sizes.items() if key not in self._remote_segments
        }
        """Known sizes of the run directory's other objects, by key; `_refresh` reads what other
        processes have written.
        """
        self._next_segment = 0
        """The first segment of this attempt that may not be on storage: they are numbered without
        gaps.
        """
        self._remote = ObjectRunDir(objects, self._prefix, run.root)
        self._fence = Fence(self._remote, attempt)
        self._published = False
        self._logged_at = float("-inf")

    # From storage to here
    # ------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Download all documents, the data files, and the checkpoint to resume from.

        Raises FtError if it is damaged.
        """
        self.fetch_files(*self.fetch_documents())

    def fetch_documents(self) -> tuple[JobSpec, Start]:
        """Download all documents, and return those that name the other files."""
        self._download_documents()
        spec = self.run.read("spec.json", JobSpec)
        start = Attempt(self.run, self.attempt).read_start()
        if spec is None or start is None:
            raise UnavailableError(
                f"{self.objects.url} holds no spec.json and start.json of {self._prefix}"
            )
        return spec, start

    def _download_documents(self) -> None:
        documents = {
            key: size for key, size in self._remote_sizes.items() if self._is_document(key)
        } | self._remote_segments
        with ThreadPoolExecutor(DOWNLOADS) as threads:
            list(threads.map(self._download, documents, documents.values()))

    def fetch_files(self, spec: JobSpec, start: Start) -> None:
        """Download the data files, and the checkpoint to resume from. Raises FtError if that is
        damaged.
        """
        for data in spec.data_files:
            if not Path(data.path).is_file():
                self.objects.download(
                    Path(data.path).relative_to(self._home).as_posix(), Path(data.path)
                )
            self._fetch_tokens(data.sha256)
        for adapter in spec.adapters_read:
            self._fetch_folder(Path(adapter.path))
        if start.checkpoint is not None:
            self._fetch_checkpoint(start.checkpoint)

    def _fetch_folder(self, folder: Path) -> None:
        """Download a folder of another job's run directory: an adapter that this job reads."""
        for key in self.objects.list(folder.relative_to(self._home).as_posix()):
            self.objects.download(key, self._home / key)

    def _fetch_tokens(self, sha256: str) -> None:
        """Download the tokens of a data file; the ranks tokenise it themselves if they are missing
        or incomplete.
        """
        try:
            for key, size in self.objects.list(IN_HOME).items():
                if key.startswith(f"{IN_HOME}/{sha256}.") and ".." not in key.split("/"):
                    self._download_of_size(key, size)
        except (
            UnavailableError,
            FileNotFoundError,
        ) as error:  # such as a policy that does not name the folder
            log.warning("the tokens of a data file are not fetched: %s", error)

    def _is_document(self, key: str) -> bool:
        parts = key.split("/")
        if parts[0] == ATTEMPTS:
            return "logs" not in parts
        if parts[0] == EVALUATIONS:
            return True
        return (parts[0] == CHECKPOINTS and parts[-1] in (MARKER, "position.json")) or len(
            parts
        ) == 1

    def _fetch_checkpoint(self, name: str) -> None:
        for key in self._below(checkpoint_key(name)):
            self._download(key, self._remote_sizes[key])
        faults = checkpoint_faults(self.run, name)
        if faults:
            self._fence.check()
            # The next attempt resumes from an older one.
            mark_damaged(self._remote, name, faults)
            raise FtError(f"Checkpoint {name} is damaged on object storage: {faults[0]}.")

    def _download(self, key: str, size: int) -> None:
        self._download_of_size(f"{self._prefix}/{key}", size)

    def _download_of_size(self, key: str, size: int) -> None:
        """Download an object, unless a file of its size is here."""
        path = self._home / key
        if not path.is_file() or path.stat().st_size != size:
            self.objects.download(key, path)

    def check(self) -> None:
        """Raise SealedError if the attempt is sealed on object storage."""
        self._fence.check()

    def end(self, ended: Exit) -> None:
        """Write the exit record of an attempt that no process has begun, on object storage."""
        Attempt(self._remote, self.attempt).write_exit(ended)

    def listen(self) -> None:
        """Download what the service, or another node, has written for the attempt, above all its
        seal.
        """
        for key in (self._keys.control, self._keys.stop):
            body = self._remote.readable_bytes(key)
            if body is not None and body != self.run.readable_bytes(key):
                self.run.put(key, body)
        seal = self._fence.seal(LOOK_SECONDS)
        if seal is not None and (body := self._remote.readable_bytes(seal)) is not None:
            self.run.put_if_absent(seal, body)

    # From here to storage
    # ------------------------------------------------------------------------------

    def push(self, *, logs: bool = False) -> bool:
        """Upload what is new. False: a checkpoint, and events that name it, wait for other nodes'
        shards.
        """
        for key in (self._keys.stop, *(own.supervisor for own in self._own), self._keys.outcome):
            self._put_once(key)
        try:
            self._fence.check(LOOK_SECONDS)
            done = self._push_training()
        except SealedError as over:
            log.info("%s", over)
            done = True
        if logs or time.monotonic() - self._logged_at > LOGS_SECONDS:
            self._push_changed(self.run.list(self._keys.logs))
            self._push_energy()
            self._logged_at = time.monotonic()
        return done

    def _push_training(self) -> bool:
        """Upload the ranks' files. False: as `push`. Raises SealedError."""
        for key in ("origins.json", "reference.bin", "reference.json", *self.run.list(EVALUATIONS)):
            self._put_once(key)
        self._push_shards()
        mine = [
            name for name in complete_checkpoints(self.run) if name.endswith(f"-a{self.attempt}")
        ]
        # Each is tried, even after a failure.
        done = sum(self._push_checkpoint(name) for name in mine) == len(mine)
        if done:  # older checkpoints are removed once the newer one is complete on storage
            self._remove_old()
        done = self._push_events() and done
        if done:
            self._push_outcome()
        return done

    def flush(self) -> None:
        """Upload everything, then this node's exit record, then the attempt's if it is written
        here.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self.push(logs=True) and time.monotonic() < deadline:
            time.sleep(FOLLOW_SECONDS)
        for own in reversed(
            self._own
        ):  # this node's, then the attempt's, which is the same where there is one node
            self._put_once(own.exit)

    def _put_once(self, key: str) -> None:
        if (
            key not in self._remote_sizes
            and (body := self.run.readable_bytes(key, _MOST_BYTES)) is not None
        ):
            self.objects.put_if_absent(f"{self._prefix}/{key}", body)
            self._remote_sizes[key] = len(body)

    def _push_changed(self, keys: Sequence[str]) -> None:
        for key in keys:
            size = self.run.size(key)
            if size is not None and self._remote_sizes.get(key) != size:
                self.objects.upload(self.run.root / key, f"{self._prefix}/{key}")
                self._remote_sizes[key] = size

    def _push_energy(self) -> None:
        """Upload what this node has measured, which is rewritten with the same size."""
        for key in (own.energy for own in self._own if self.run.has(own.energy)):
            self.objects.upload(self.run.root / key, f"{self._prefix}/{key}")

    def _push_shards(self) -> None:
        """Upload the files of this attempt's checkpoints without the markers, since other nodes'
        markers wait for them.
        """
        keys = self.run.list(CHECKPOINTS)
        self._push_changed(
            [key for key in keys if f"-a{self.attempt}/" in key and not is_marker(key)]
        )
        for key in keys:
            if is_damage(key):
                self._put_once(key)

    def _push_checkpoint(self, name: str) -> bool:
        """Upload the marker if the files that it names are on storage.

        Returns whether the marker is there.
        """
        key = marker_key(name)
        if key in self._remote_sizes:
            return True
        marker = self.run.readable(key, CheckpointMarker)
        if (
            marker is None
        ):  # removed since a newer one is complete; or unreadable, so that readers ignore it
            return True
        if any(
            self._remote_sizes.get(f"{checkpoint_key(name)}/{file.name}") != file.bytes
            for file in marker.files
        ):
            self._refresh(checkpoint_key(name))
            if any(
                self._remote_sizes.get(f"{checkpoint_key(name)}/{file.name}") != file.bytes
                for file in marker.files
            ):
                return False
        self._fence.check()
        self._put_once(key)
        return True

    def _remove_old(self) -> None:
        """Remove from storage what rank 0 has removed here, marker first. Other nodes have only
        shards and remove theirs once the checkpoint has no marker on storage and a newer one has.
        Files of later attempts are never touched."""
        if self.run.has(self._keys.segment(0)):  # rank 0's node
            for name in {key.split("/")[1] for key in self._below(CHECKPOINTS)}:
                if (
                    _attempt(name) <= self.attempt
                    and not (self.run.root / CHECKPOINTS / name).is_dir()
                ):
                    self._fence.check()
                    self._remove_remote(name)
            return
        mine = self._shards_only()
        if len(mine) > 1:
            self._refresh(CHECKPOINTS)
            for name in mine:
                if marker_key(name) not in self._remote_sizes and self._newer_complete(name):
                    shutil.rmtree(self.run.root / CHECKPOINTS / name)

    def _remove_remote(self, name: str) -> None:
        self._refresh(checkpoint_key(name))
        for key in sorted(self._below(checkpoint_key(name)), key=lambda key: not is_marker(key)):
            self.objects.remove(f"{self._prefix}/{key}")
            del self._remote_sizes[key]

    def _shards_only(self) -> list[str]:
        folder = self.run.root / CHECKPOINTS
        paths = folder.glob(f"step-*-a{self.attempt}")
        return [path.name for path in paths if path.is_dir() and not has_marker(path)]

    def _newer_complete(self, name: str) -> bool:
        complete = (key.split("/")[1] for key in self._below(CHECKPOINTS) if is_marker(key))
        return any(step_of(other) > step_of(name) for other in complete)

    def _push_events(self) -> bool:
        """Upload segments in order, up to one that names a checkpoint which is not on storage
        yet.
        """
        while self.run.has(key := self._keys.segment(self._next_segment)):
            if key not in self._remote_segments and not self._push_segment(key):
                return False
            self._next_segment += 1
        return True

    def _push_segment(self, key: str) -> bool:
        """Upload a segment. False: as `_push_events`."""
        body = self.run.readable_bytes(key, MOST_SEGMENT_BYTES)
        if body is None:
            return True
        named = [event.checkpoint for event in parse_events(key, body)[0] if event.checkpoint]
        if any(
            not self._push_checkpoint(name) for name in named if CHECKPOINT_NAME.fullmatch(name)
        ):
            return False
        self.objects.put_if_absent(f"{self._prefix}/{key}", body)
        return True

    def _push_outcome(self) -> None:
        """Upload the outcome once, if it is this attempt's, over one of an earlier attempt."""
        if self._published or Attempt(self.run, self.attempt).read_result() is None:
            return
        there = self._remote.readable("result.json", Result)
        if there is None or there.attempt < self.attempt:
            for key in [found for name in _OUTCOME for found in self.run.list(name) or [name]]:
                self._put_outcome(key)
            self._put_outcome("result.json")
        self._published = True

    def _put_outcome(self, key: str) -> None:
        """Upload a file under its final name; an existing object is replaced only after another
        look at the seal (attempt_seal.py).
        """
        size = self.run.size(key)
        if size is None:
            return
        self._fence.check()
        if not self.objects.upload_if_absent(self.run.root / key, f"{self._prefix}/{key}"):
            self._fence.check()
            self.objects.upload(self.run.root / key, f"{self._prefix}/{key}")
        self._remote_sizes[key] = size

    def _below(self, prefix: str) -> list[str]:
        return [key for key in self._remote_sizes if key.startswith(f"{prefix}/")]

    def _refresh(self, prefix: str) -> None:
        """Read the sizes of the objects below a folder, since other nodes write too."""
        for key in self._below(prefix):
            del self._remote_sizes[key]
        objects = self.objects.list(f"{self._prefix}/{prefix}")
        self._remote_sizes.update(
            {key[len(self._prefix) + 1 :]: size for key, size in objects.items()}
        )


def _attempt(name: str) -> int:
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match[2]) if match else 0


def main(
    arguments: Sequence[str], make: Callable[[ObjectStore, RunDir, int, int], Sync] | None = None
) -> int:
    """`make`: None: `Sync`."""
    verb, url, run_dir, attempt, node = arguments
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )

    def made() -> Sync:
        return (make or Sync)(ObjectStore(url), RunDir(run_dir), int(attempt), int(node))

    if verb == "follow":
        follow(made, until=lambda: False)
    try:
        patiently(verb, lambda: made().fetch() if verb == "fetch" else made().flush())
    except (FtError, FileNotFoundError):
        return 1  # the log says why
    except SealedError as over:
        log.error("%s: %s", verb, over)
        return 1
    print("{}")  # the reply that it is done
    return 0


def patiently(verb: str, work: Callable[[], None]) -> None:
    """Do it, again after pauses while storage does not answer, for as long as `verb` may take.

    Raises what its last try raises.
    """
    began = time.monotonic()
    for tries in itertools.count(1):
        pause = pause_seconds(tries, first=FIRST_PAUSE_SECONDS, longest=MOST_PAUSE_SECONDS)
        try:
            work()
            return
        except (FtError, FileNotFoundError) as error:
            log.error("%s: %s", verb, error)
            # a file may have been removed between the look and the upload
            passes = isinstance(error, UnavailableError | FileNotFoundError)
            if not passes or time.monotonic() + pause > began + TRY_SECONDS[verb]:
                raise
        time.sleep(pause)


def follow(make: Callable[[], Sync], until: Callable[[], bool]) -> None:
    """Copy changes until it is so. An outage of the storage only delays them, and so does one that
    denies something until its rights are given.
    """
    sync: Sync | None = None
    look_at = 0.0
    failures = 0
    told = ""
    while not until():
        try:
            sync = sync or make()
            if time.monotonic() >= look_at:
                sync.listen()
                look_at = time.monotonic() + LOOK_SECONDS
            sync.push()
            if told:
                log.info("object storage takes what has waited for it")
            failures, told = 0, ""
        except UnavailableError as error:
            if error.message != told:
                log.warning("%s", error.message)
            told = error.message
            failures += 1
            sync = None
        except FileNotFoundError:  # a file that was removed between the look and the upload
            pass
        time.sleep(
            pause_seconds(failures, first=FOLLOW_SECONDS, longest=MOST_FOLLOW_SECONDS)
            if failures
            else FOLLOW_SECONDS
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
