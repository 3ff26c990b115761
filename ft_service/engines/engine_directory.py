"""An engine's directory (rundir/engine.py), and the exit records of jobs whose engine has ended
without writing them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ft_service.data.token_folder import IN_HOME, entries_of
from ft_service.engines.sharing import fault_groups
from ft_service.errors import FtError
from ft_service.jobs.reasons import Reason, Retry
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, succeeded_exit
from ft_service.rundir.documents import Exit, ExitReason, Start
from ft_service.rundir.engine import ENGINE, SEATS, SeatOrder, data_folder, seat_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places

log = logging.getLogger(__name__)

PREFIX = "engine-"
"""Beginning of every engine's id."""
LOSSES = "losses.json"
_CLEAN = (ExitReason.STOPPED, ExitReason.CANCELLED, ExitReason.SUCCEEDED)
_NOT_TAKEN = "The engine ended before it took the job."
_VANISHED = "The engine's processes vanished; the host may have restarted."
_LEFT = "The engine ended without saying how the job ended."


class LostSeats(BaseModel):
    """`losses.json`: the seats that an engine lost.

    Decided once, since it says which jobs share an engine again.
    """

    model_config = ConfigDict(frozen=True)

    groups: dict[str, str]
    """Key of a seat's order → fault group of the job from then on."""


class EngineDirectory:
    """The directory of one engine, with its only attempt."""

    def __init__(self, places: Places, engine_id: str) -> None:
        """`places`: of its directory, and of its jobs' run directories."""
        self.engine_id = engine_id
        self.run = places.engine(engine_id)
        self._places = places
        self.attempt = Attempt(self.run, 1, job_id=engine_id)

    def prepare(self, spec: EngineSpec, slots: Sequence[int], ranks: int, priority: int) -> None:
        """Write what the engine needs to start, unless that is there.

        `priority`: that of its first job.
        """
        self.run.write_if_absent(ENGINE, spec)
        own = Start(
            job_id=spec.engine_id,
            attempt=1,
            world_size=ranks,
            generation=1,
            checkpoint=None,
            slots=list(slots),
            priority=priority,
        )
        self.attempt.write_start(own)

    def has_order(self, seat: Attempt) -> bool:
        return self.run.has(_key(seat))

    def order(self, seat: Attempt) -> None:
        """Order the engine to train an attempt of a job."""
        order = SeatOrder(job_id=seat.job_id, attempt=seat.number, run_dir=str(seat.run.root))
        self.run.write_if_absent(_key(seat), order)

    def show(self, spec: JobSpec, home: Path) -> None:
        """Put what the ranks read of a job into the engine's data folder, where they see only that:
        data files of FT_HOME and their tokens, by hard links if the file system has them. Raises
        LaunchError if there is no room.
        """
        shown = data_folder(self.run.root)
        try:
            for data in spec.data_files:
                for path in (Path(data.path), *entries_of(home / IN_HOME, data.sha256)):
                    if path.is_relative_to(home):
                        _show(path, shown / path.relative_to(home))
        except OSError as error:
            raise LaunchError(f"The job's data cannot be shown to its engine: {error}.") from error

    def hide(self) -> None:
        """Remove what `show` has put there: the engine has ended."""
        shutil.rmtree(data_folder(self.run.root), ignore_errors=True)

    def fault_group(self, seat: Attempt) -> str | None:
        """Fault group of a job whose seat was lost with the engine; None: its seat was not."""
        losses = self.run.readable(LOSSES, LostSeats)
        return None if losses is None else losses.groups.get(_key(seat))

    def settle(self, ended: Exit | None, asked: Attempt) -> None:
        """Write the exit record of every seat that has none, `asked` among them, after the engine
        has ended. `ended`: the engine's own record; None: it left none.

        An order that a stopped engine has not taken is a stop, and so is the end of every seat if a
        cluster took the engine's place back, which no job has caused. Else the seat was lost with
        the engine: ENGINE_LOST if others were too, and the engine's own reason if it was the only
        one, or if the host lacked something.
        """
        ordered = [self._seat(key) for key in self.run.list(SEATS)]
        seats = {
            _key(seat): seat
            for seat in (*ordered, asked)
            if seat is not None and not seat.has_exit()
        }
        for key, seat in list(seats.items()):
            if (result := seat.read_result()) is not None:
                seat.write_exit(succeeded_exit(result))
                del seats[key]
        if ended is not None and self._is_nobodys(ended):
            for seat in seats.values():
                seat.write_exit(ended)
            return
        own = _own_exit(ended)
        clean = ended is not None and ended.reason in _CLEAN
        groups = self._lost([seat for seat in seats.values() if not clean or seat.has_segment(0)])
        shared = exit_of(ExitReason.ENGINE_LOST, own.message, own.error) if len(groups) > 1 else own
        for key, seat in seats.items():
            seat.write_exit(shared if key in groups else exit_of(ExitReason.STOPPED, _NOT_TAKEN))

    def _is_nobodys(self, ended: Exit) -> bool:
        """Whether the engine ended because its host lacked something, or because a cluster took its
        place back: its ranks did not agree to stop then.
        """
        if ended.reason is ExitReason.STOPPED:
            return not self.attempt.has_outcome()
        return ended.reason not in _CLEAN and Reason(ended.reason.value).retry is Retry.LATER

    def _lost(self, seats: Sequence[Attempt]) -> dict[str, str]:
        """Fault groups of the lost seats, as they were first decided."""
        groups = fault_groups(self.engine_id, [seat.job_id for seat in seats])
        self.run.write_if_absent(
            LOSSES, LostSeats(groups={_key(seat): groups[seat.job_id] for seat in seats})
        )
        losses = self.run.readable(LOSSES, LostSeats)
        return {} if losses is None else losses.groups

    def _seat(self, key: str) -> Attempt | None:
        """The attempt of an order; None: it is gone, or names another engine, or the order was
        replaced by ranks, which may write there on a shared volume.
        """
        order = self.run.readable(key, SeatOrder)
        if order is None or seat_key(order.job_id, order.attempt) != key:
            return None
        try:
            run = self._places.run(order.job_id)
        except FtError as error:
            log.warning("%s", error.message)
            return None
        seat = Attempt(run, order.attempt, job_id=order.job_id)
        start = seat.readable_start()
        return seat if start is not None and start.engine == str(self.run.root) else None


def engine_of(attempt: Attempt, places: Places) -> EngineDirectory | None:
    """The engine in which an attempt has a seat, by its start.json; None: it has ranks of its own,
    or names another folder.
    """
    start = attempt.readable_start()
    folder = None if start is None or start.engine is None else Path(start.engine)
    if folder is None or folder.parent != places.engines_dir or not folder.name.startswith(PREFIX):
        return None
    return EngineDirectory(places, folder.name)


def _show(path: Path, shown: Path) -> None:
    """Put a file or folder where ranks see it, complete or not at all, unless it is there.

    A missing one is left to the ranks, which report it.
    """
    if shown.exists() or not path.exists():
        return
    shown.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=shown.parent) as folder:
        copy = Path(folder) / shown.name
        if path.is_dir():
            shutil.copytree(path, copy, copy_function=_link_or_copy)
        else:
            _link_or_copy(path, copy)
        try:
            copy.rename(shown)
        except OSError:
            if not shown.exists():  # else another process of the service was faster
                raise


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _key(seat: Attempt) -> str:
    return seat_key(seat.job_id, seat.number)


def _own_exit(ended: Exit | None) -> Exit:
    """Exit record of a seat that was lost with its engine, and alone there."""
    if ended is None:
        return exit_of(ExitReason.WORKER_KILLED, _VANISHED)
    if ended.reason in _CLEAN:
        return exit_of(ExitReason.WORKER_ERROR, _LEFT)
    return (
        exit_of(ExitReason.WORKER_ERROR, ended.message, ended.error)
        if ended.reason is ExitReason.UNREADABLE
        else ended
    )
