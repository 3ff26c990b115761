"""The loop over sweeps: it stops jobs that cannot become the best, and names the best one at the
end.

It has no state of its own: its decisions depend only on what is stored with the jobs, so it may
stop at any time, and several processes may run it at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ft_service.errors import UnavailableError
from ft_service.host.loops import every
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Halt, Job, State
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.records import Sweep
from ft_service.store.sql import Store
from ft_service.sweeps.halving import Standing, SweepJob, SweepJobProgress, best_of, jobs_to_stop

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Call `move_sweeps` every second until `stop` is set.

    After an error, it tries again after a growing pause.
    """
    every(LOOK_SECONDS, lambda: move_sweeps(store), stop, "moving sweeps")


def move_sweeps(store: Store) -> None:
    """Stop jobs that cannot become the best of their sweep, and finish sweeps whose jobs have
    ended. The error of a sweep is raised once the others had their turn: a later version may have
    written what this one cannot read.
    """
    sweeps = store.sweeps.unfinished_sweeps()
    jobs = store.sweeps.jobs_of_sweeps([sweep.id for sweep in sweeps]) if sweeps else {}
    failed: Exception | None = None
    for sweep in sweeps:
        try:
            _move(store, sweep, jobs[sweep.id])
        except UnavailableError:
            raise
        except Exception as error:
            error.add_note(f"It is the sweep {sweep.id}.")
            failed = error
    if failed is not None:
        raise failed


def runner_of(job: Job) -> SweepJob:
    """Return a job in the form in which sweeps compare it."""
    progress = SweepJobProgress.read(job.sweep_course)
    return SweepJob(job.id, _standing(job), progress.rungs, progress.best_loss)


def best_job(jobs: Sequence[Job]) -> Job | None:
    """Return the best of a sweep's jobs so far; None: no job that counts has a loss.

    `jobs`: in order of creation.
    """
    best = best_of([runner_of(job) for job in jobs])
    return next((job for job in jobs if best is not None and job.id == best.job_id), None)


def _move(store: Store, sweep: Sweep, jobs: list[Job]) -> None:
    eta = sweep.settings["eta"]
    shares = sweep.settings["rungs"]
    for stop in jobs_to_stop([runner_of(job) for job in jobs], eta, len(shares)) if shares else ():
        if store.sweeps.stop_by_sweep(stop.job_id, stop.text(shares)):
            log.info("job is %s", stop.text(shares), extra={"job_id": stop.job_id})
    if all(job.state in TERMINAL for job in jobs):
        best = best_job(jobs)
        if store.sweeps.finish_sweep(
            sweep, best, _best_text(sweep, best, len(jobs)) if best else ""
        ):
            log.info("sweep %s is over; best: %s", sweep.id, best and best.id)


def _best_text(sweep: Sweep, best: Job, jobs: int) -> str:
    progress = SweepJobProgress.read(best.sweep_course)
    loss = f"validation loss {progress.best_loss:.4f} at step {progress.best_step}"
    return f"Best of the {jobs} jobs of sweep {sweep.id}: {loss}."


def _standing(job: Job) -> Standing:
    match job.state:
        case State.SUCCEEDED:
            return Standing.DONE
        case State.FAILED:
            return Standing.OUT
        case State.CANCELLED:
            return Standing.STOPPED if job.reason is Reason.SWEEP_STOPPED else Standing.OUT
        case _:
            return Standing.STOPPED if job.halt is Halt.SWEEP else Standing.OPEN
