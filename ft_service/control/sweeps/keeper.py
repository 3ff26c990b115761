"""Looks after sweeps: has jobs stopped that have no hope, and names the best one at the end.

It keeps nothing of its own: what it decides by is in the store with each job, so that it may stop at any time, and several may
do the same at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Halt, Job, State
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.sql import Store
from ft_service.store.sweeps.records import Sweep
from ft_service.sweeps.course import Course
from ft_service.sweeps.halving import Runner, Standing, best_of, hopeless

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
MAX_REST_SECONDS = 60.0


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Look after sweeps until `stop` is set. What fails is tried again, after a rest that grows."""
    rest = LOOK_SECONDS
    while not stop.is_set():
        try:
            tend(store)
            rest = LOOK_SECONDS
        except Exception:
            rest = min(MAX_REST_SECONDS, 2 * rest)
            log.exception("the sweeps could not be looked after; the next try is in %g seconds", rest)
        stop.wait(rest)


def tend(store: Store) -> None:
    """One look at every sweep that is not over."""
    sweeps = store.unfinished_sweeps()
    jobs = store.jobs_of_sweeps([sweep.id for sweep in sweeps]) if sweeps else {}
    for sweep in sweeps:
        _tend(store, sweep, jobs[sweep.id])


def runner_of(job: Job) -> Runner:
    """A job as its sweep compares it."""
    course = Course.read(job.sweep_course)
    return Runner(job.id, _standing(job), course.rungs, course.best_loss)


def best_job(jobs: Sequence[Job]) -> Job | None:
    """The best of a sweep's jobs, in the order of their creation, so far."""
    best = best_of([runner_of(job) for job in jobs])
    return next((job for job in jobs if best is not None and job.id == best.job_id), None)


def _tend(store: Store, sweep: Sweep, jobs: list[Job]) -> None:
    eta, shares = sweep.settings["eta"], sweep.settings["rungs"]
    for stop in hopeless([runner_of(job) for job in jobs], eta, len(shares)) if shares else ():
        if store.stop_by_sweep(stop.job_id, stop.text(shares)):
            log.info("job is %s", stop.text(shares), extra={"job_id": stop.job_id})
    if all(job.state in TERMINAL for job in jobs):
        best = best_job(jobs)
        if store.finish_sweep(sweep, best, _told(sweep, best, len(jobs)) if best else ""):
            log.info("sweep %s is over; best: %s", sweep.id, best and best.id)


def _told(sweep: Sweep, best: Job, jobs: int) -> str:
    course = Course.read(best.sweep_course)
    return f"Best of the {jobs} jobs of sweep {sweep.id}: validation loss {course.best_loss:.4f} at step {course.best_step}."


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
