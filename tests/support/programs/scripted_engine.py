"""Plays an engine and its ranks without torch, and the ranks of a job alone: `scripted_engine.py
SCRIPTS RUN_DIR ATTEMPT`.

SCRIPTS is `JOB:step,step;JOB:step;*:step`: what is done for each job, one step of every seat in a
round. A job can be paused from its first step on: one that is to have a checkpoint by then writes
that first. Steps are those of scripted_worker.py (event, checkpoint=S, succeed, refuse), and

    hold         wait until there is a file `go` in the home or the run directory, or the seat is
                 stopped
    read=FILE    fail unless the file, in the home, can be read and not written
    see=FILE     fail unless the file is in the home of an engine with a disk of its own
    die          crash, with every seat

The engine keeps to its contract (ft_service/rundir/engine.py): it takes orders, obeys each seat's
control.json and its own, says which seats it has left, and ends when it was idle for as long as
engine.json says.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from scripted_worker import play  # pyright: ignore[reportMissingImports]

from ft_service.host.lifetime import hold_rank_lock
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Desired, ExitReason, Outcome, OutcomeKind
from ft_service.rundir.engine import ARRIVING, ENGINE, SEATS, SeatOrder, left_key
from ft_service.rundir.engine_spec import EngineSpec

ROUND_SECONDS = 0.02
_REASONS = {"succeed": ExitReason.SUCCEEDED, "refuse": ExitReason.PERMANENT_ERROR}


def main() -> int:
    scripts = dict(part.split(":", 1) for part in sys.argv[1].split(";"))
    run = RunDir(sys.argv[2])
    hold_rank_lock(run.root)
    own = Attempt(run, int(sys.argv[3]))
    engine = run.read(ENGINE, EngineSpec)
    if engine is None:
        steps = _steps(scripts, own.job_id)
        while steps and not _asked(own):
            _round(own, steps)
        if not own.has_outcome():
            _stopped(own)
        return 0
    seats: dict[str, tuple[Attempt, list[str]]] = {}
    idle_since = time.monotonic()
    while not _asked(own) and time.monotonic() < idle_since + engine.idle_seconds:
        arriving = run.list(ARRIVING)
        for key in run.list(SEATS):
            if key in seats or run.has(left_key(key)) or len(seats) == engine.most_seats:
                continue
            order = run.read(key, SeatOrder)
            assert order is not None
            seat = Attempt(RunDir(order.run_dir), order.attempt, job_id=order.job_id)
            if seat.has_exit():
                run.put(left_key(key), b"")
            else:
                seats[key] = (seat, _steps(scripts, order.job_id))
        for key, (seat, steps) in list(seats.items()):
            if _turn(seat, steps):
                run.put(left_key(key), b"")
                del seats[key]
        if seats or arriving:
            idle_since = time.monotonic()
        time.sleep(ROUND_SECONDS)
    for key, (seat, _) in seats.items():
        _end(seat, ExitReason.STOPPED)
        run.put(left_key(key), b"")
    _stopped(own)
    return 0


def _turn(seat: Attempt, steps: list[str]) -> bool:
    """One round of a seat; True if it has ended."""
    if seat.has_exit():
        return True
    desired = _desired(seat)
    if desired is Desired.CANCEL:
        seat.write_exit(exit_of(ExitReason.CANCELLED, "cancelled in the engine"))
    elif desired is Desired.PAUSE:
        _end(seat, ExitReason.STOPPED)
    elif reason := _round(seat, steps):
        seat.write_exit(exit_of(reason, "ended in the engine"))
    return seat.has_exit()


def _round(seat: Attempt, steps: list[str]) -> ExitReason | None:
    """Do the next step; the reason of the exit if it was the last."""
    step = steps[0]
    if step == "hold" and not any(
        (folder / "go").exists() for folder in (seat.run.root, seat.run.root.parents[1])
    ):
        time.sleep(ROUND_SECONDS)
        return None
    if step == "die":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    if step == "refuse":
        seat.write_outcome(Outcome(kind=OutcomeKind.FAILED, permanent=True))
    elif step.startswith("see="):
        (seat.run.root.parents[1] / step.removeprefix("see=")).read_bytes()
    elif step.startswith("read="):
        _read(seat.run.root.parents[2] / step.removeprefix("read="))
    elif step != "hold":
        play(step, seat.run.root, seat.number)
    steps.pop(0)
    return _REASONS.get(step)


def _read(path: Path) -> None:
    path.read_bytes()
    with contextlib.suppress(OSError):
        path.write_text("changed")
        raise AssertionError(f"{path} can be written")


def _end(seat: Attempt, reason: ExitReason) -> None:
    _stopped(seat)
    seat.write_exit(exit_of(reason, "stopped in the engine"))


def _stopped(attempt: Attempt) -> None:
    attempt.write_outcome(
        Outcome(kind=OutcomeKind.STOPPED, checkpoint=newest_checkpoint(attempt.run))
    )


def _asked(own: Attempt) -> bool:
    return own.read_stop() is not None or _desired(own) is Desired.PAUSE


def _desired(attempt: Attempt) -> Desired:
    control = attempt.read_control()
    return Desired.RUN if control is None else control.desired


def _steps(scripts: dict[str, str], job_id: str) -> list[str]:
    return scripts.get(job_id, scripts["*"]).split(",")


if __name__ == "__main__":
    sys.exit(main())
