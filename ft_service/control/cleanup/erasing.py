"""Erasure: what deleted jobs and projects have left, and records older than the operator's age
limits (FT_KEEP_JOBS_DAYS, FT_KEEP_EVENTS_DAYS).

Jobs and projects are hidden when they are deleted (store/erasure.py). Here, one after the other,
their files go and then their rows, so that whatever was interrupted, at any moment, is done the
next time.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator

from ft_service.control.cleanup.pruning import DAY_SECONDS, PAGE
from ft_service.errors import ConflictError, SpecError
from ft_service.host.loops import log_errors
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.project_runs import project_folder
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

KEEP_NAMES_SECONDS = 7 * DAY_SECONDS
"""How long the names of erased jobs' models are kept, so that an inference server that was away
unloads them.
"""


def erase(settings: Settings, store: Store, places: Places) -> Iterator[None]:
    """Erase what is to go, and yield after each small transaction or directory, so that the caller
    lets others have their turn and may stop at any time. What cannot be removed now is logged and
    left. Raises UnavailableError.
    """
    for project_id in store.erasure.projects_to_erase():
        with log_errors(f"erasing the project {project_id}"):
            yield from _erase_project(project_id, settings, store, places)
    yield from _erase_jobs(store, places)
    if settings.keep_jobs_days is not None:
        while store.erasure.hide_old_jobs(settings.keep_jobs_days * DAY_SECONDS):
            yield
    if settings.keep_events_days is not None:
        while store.erasure.trim_events(settings.keep_events_days * DAY_SECONDS):
            yield
    store.erasure.forget_models(KEEP_NAMES_SECONDS)


def _erase_project(
    project_id: str, settings: Settings, store: Store, places: Places
) -> Iterator[None]:
    """End a project's jobs and hide them, and remove all else that it has.

    What its files and jobs leave goes as that of others does: the project is done once all of it is
    gone.
    """
    for job_id in store.erasure.unfinished_jobs_of(project_id):
        with contextlib.suppress(
            SpecError, ConflictError
        ):  # it has just ended, or keeps changing: the next time
            store.jobs.request(project_id, job_id, Verb.CANCEL)
        yield
    while store.erasure.hide_jobs_of(project_id):
        yield
    for engine_id in store.erasure.ended_engines_of(project_id):
        with log_errors(f"removing the directory of {engine_id}"):
            places.remove_engine(engine_id)
            store.erasure.forget_engine(engine_id)
        yield
    while store.erasure.erase_project(project_id):
        yield
    if project_id not in store.erasure.projects_to_erase():
        shutil.rmtree(project_folder(settings.home, project_id), ignore_errors=True)
        log.info("the project %s is erased", project_id)


def _erase_jobs(store: Store, places: Places) -> Iterator[None]:
    """Remove deleted jobs, but for those whose adapters unfinished jobs continue from."""
    after = 0
    while page := store.erasure.deleted_jobs(after, PAGE):
        after = page[-1].position
        needed = {job_id for job_id, _ in store.jobs.adapters_to_continue()}
        for job in page:
            with log_errors(f"erasing the job {job.id}"):
                if job.id in needed:
                    continue
                places.remove_run(job.id)
                yield
                while store.erasure.erase_job(job):
                    yield
                log.info("a deleted job is erased", extra={"job_id": job.id})
                yield
