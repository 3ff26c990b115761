"""Jobs that tests put into a store, past the checks that users' jobs go through."""

from __future__ import annotations

from collections.abc import Sequence

from ft_service.jobs.states import Job
from ft_service.store.records import NewEvent, NewJob
from ft_service.store.sql import Store


def create_job(store: Store, job: Job, told: Sequence[NewEvent] = ()) -> Job:
    """The job as it was stored."""
    (created,) = store.jobs.create_jobs([NewJob(job, told)])
    return created
