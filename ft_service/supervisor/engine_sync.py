"""Does for an engine what object_sync.py does for a job, whose arguments it takes: it copies the
engine's own directory, and the run directories of the jobs with a seat there.

    seats/ on object storage ─▶ arriving/ ─▶ the job's files ─▶ seats/, which the ranks read
    left/, by rank 0 ─▶ the seat's last files, its exit record ─▶ its files go, and its order

All of it is told by files of the engine's directory, so that a process that is killed goes on where
it was. An engine has one node (engines/sharing.py), and its disk is bounded: what no seat uses any
more is removed. Each seat has a thread of its own: one whose files are large, or denied, keeps no
other waiting. Nothing here needs torch.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ft_service.data.token_folder import IN_HOME, entries_of
from ft_service.errors import UnavailableError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.attempt_seal import SealedError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ErrorInfo, ExitReason
from ft_service.rundir.engine import (
    ARRIVING,
    ENGINE,
    SEATS,
    SeatOrder,
    arriving_key,
    left_key,
    seat_key,
)
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.project_runs import RUNS
from ft_service.spec import JobSpec
from ft_service.storage.object_store import ObjectStore
from ft_service.supervisor import object_sync
from ft_service.supervisor.object_sync import Sync, follow, patiently

log = logging.getLogger(__name__)

FLUSHED_AT_ONCE = 16


class EngineSync(Sync):
    """The node's copy of an engine's directory, and its objects."""

    def __init__(
        self, seats: Seats, objects: ObjectStore, run: RunDir, attempt: int, node: int
    ) -> None:
        super().__init__(objects, run, attempt, node)
        self._seats = seats
        seats.objects = objects

    def fetch(self) -> None:
        """Download what the engine starts from, and the orders of its first seats: they keep it
        from ending before their files are here.
        """
        self._download_documents()
        spec = self.run.read(ENGINE, EngineSpec)
        if spec is None or not Attempt(self.run, self.attempt).has_start():
            raise UnavailableError(
                f"{self.objects.url} holds no {ENGINE} and start.json of {self._prefix}"
            )
        self._take_orders()

    def listen(self) -> None:
        super().listen()
        self._take_orders()
        self._seats.tend()

    def flush(self) -> None:
        """Upload everything of the seats, of each its exit record last, and then of the engine."""
        self._seats.flush()
        super().flush()

    def _take_orders(self) -> None:
        """Bring the orders that are new."""
        for name in self.objects.list(f"{self._prefix}/{SEATS}"):
            key = name.removeprefix(f"{self._prefix}/")
            if not any(map(self.run.has, (key, arriving_key(key), left_key(key)))):
                order = self._remote.readable(key, SeatOrder)
                if order is not None and seat_key(order.job_id, order.attempt) == key:
                    self.run.write(arriving_key(key), order)


class Seats:
    """The seats of an engine on its node, each with a thread. For one thread besides these."""

    objects: ObjectStore
    """The storage, by its newest client."""

    def __init__(self, engine: RunDir) -> None:
        self._engine = engine
        self._home = engine.root.parents[1]
        self._lock = threading.Lock()
        """Held while it is decided who is attended to, and which files are used."""
        self._specs: dict[str, JobSpec] = {}
        """Specs of the seats whose files are here, or on their way, by the key of the order."""
        self._attended: dict[str, str] = {}
        """Key of the order → job, of the seats that have a thread."""
        self._flushed: set[str] = set()

    def tend(self) -> None:
        """Give a thread to each seat that has none; of a job's attempts, to one after the other."""
        with self._lock:
            seated = self._orders(SEATS)
            for key, order in seated.items():  # all of them, before one gives its files back
                spec = None if key in self._specs else _run(order).readable("spec.json", JobSpec)
                if spec is not None:
                    self._specs[key] = spec
            for key, order in {**seated, **self._orders(ARRIVING)}.items():
                if key not in self._attended and order.job_id not in self._attended.values():
                    self._attended[key] = order.job_id
                    threading.Thread(target=self._attend, args=(key, order), daemon=True).start()

    def flush(self) -> None:
        """Upload the rest of all seats. Raises UnavailableError, and FileNotFoundError for a file
        that was removed meanwhile: repeat it then.
        """
        keys = {
            key: order for key, order in self._orders(SEATS).items() if key not in self._flushed
        }
        with ThreadPoolExecutor(FLUSHED_AT_ONCE) as threads:
            done = [threads.submit(self._flush, key, order) for key, order in keys.items()]
        for one in done:
            one.result()

    def _flush(self, key: str, order: SeatOrder) -> None:
        try:
            self._sync(order).flush()
        except (UnavailableError, FileNotFoundError):
            raise
        except Exception:  # one seat must not keep the records of the others
            log.exception("%s could not be uploaded whole", key)
        self._flushed.add(key)

    def _attend(self, key: str, order: SeatOrder) -> None:
        try:
            if self._engine.has(arriving_key(key)) and not self._brought(key, order):
                return
            follow(partial(self._sync, order), until=lambda: self._engine.has(left_key(key)))
            patiently("flush", lambda: self._sync(order).flush())
            self._engine.path(key).unlink(missing_ok=True)  # first: else it would be flushed again
            self._give_back(key, order)
        except Exception:  # tried again at the next look
            log.exception("%s is not attended to", key)
        finally:
            with self._lock:
                del self._attended[key]

    def _brought(self, key: str, order: SeatOrder) -> bool:
        """Fetch a seat's files, and then let the ranks see its order.

        False: its attempt is over, or ends because of what cannot be fetched.
        """
        arriving = self._engine.path(arriving_key(key))
        try:
            patiently("fetch", lambda: self._fetch(key, order))
            self._engine.path(key).parent.mkdir(exist_ok=True)
            arriving.rename(self._engine.path(key))
            return True
        except SealedError as over:
            log.info("%s is not fetched: %s", key, over)
        except Exception as error:  # whatever it is ends this seat alone
            log.exception("%s cannot be fetched", key)
            why = f"The job's files could not be fetched to its engine: {error}"
            named = ErrorInfo(code=ExitReason.LAUNCH_FAILED.value, message=why)
            ended = exit_of(ExitReason.LAUNCH_FAILED, why, named)
            self._sync(order).end(ended)  # if storage is away altogether, all is tried again
        self._engine.put(left_key(key), b"")
        arriving.unlink()
        self._give_back(key, order)
        return False

    def _fetch(self, key: str, order: SeatOrder) -> None:
        """Raises SealedError if its attempt is over."""
        sync = self._sync(order)
        sync.check()
        spec, start = sync.fetch_documents()
        with self._lock:
            self._specs[key] = spec
        sync.fetch_files(spec, start)

    def _give_back(self, key: str, order: SeatOrder) -> None:
        """Remove a seat's files, but for those that other seats use."""
        with self._lock:
            run = _run(order).root
            mine = self._files_of(self._specs.pop(key, None)) | {run}
            kept = {path for spec in self._specs.values() for path in self._files_of(spec)}
            for path in mine:
                _remove(path, kept)

    def _files_of(self, spec: JobSpec | None) -> set[Path]:
        """The files and folders that a seat uses, its run directory among them."""
        if spec is None:
            return set()
        tokens = (entries_of(self._home / IN_HOME, data.sha256) for data in spec.data_files)
        named = (*spec.data_files, *spec.adapters_read)
        return {
            self._home / RUNS / spec.job_id,
            *(Path(one.path) for one in named),
            *(entry for of_file in tokens for entry in of_file),
        }

    def _sync(self, order: SeatOrder) -> Sync:
        return Sync(self.objects, _run(order), order.attempt, 0)

    def _orders(self, folder: str) -> Mapping[str, SeatOrder]:
        """Key in `seats/` → order, of the orders in a folder."""
        found = {key: self._engine.readable(key, SeatOrder) for key in self._engine.list(folder)}
        return {
            seat_key(order.job_id, order.attempt): order
            for order in found.values()
            if order is not None
        }


def _run(order: SeatOrder) -> RunDir:
    return RunDir(order.run_dir)


def _remove(path: Path, kept: Collection[Path]) -> None:
    """Remove a file or folder, but for what is kept of it."""
    if any(path.is_relative_to(one) for one in kept):
        return
    if any(one.is_relative_to(path) for one in kept):
        for below in path.iterdir():
            _remove(below, kept)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    return object_sync.main(arguments, partial(EngineSync, Seats(RunDir(arguments[2]))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
