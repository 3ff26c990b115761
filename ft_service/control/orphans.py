"""Attempts that run in the cluster although this service's database does not know their job.

They are left by the loss of a database, or by going back to an older one, and train on to their end. Nothing ends them by
itself: `ft_orphaned_jobs` counts them, `ft doctor` lists them and `ft doctor --end` ends them.
"""

from __future__ import annotations

from ft_service.launcher.base import ListedAttempt, ListsAttempts
from ft_service.store.sql import Store

COUNT_SECONDS = 300.0
"""How often the reconciler counts them."""


def find_orphans(store: Store, launcher: ListsAttempts) -> list[ListedAttempt]:
    """Return the unfinished attempts whose job has no row. Raises LaunchError if the cluster, UnavailableError if the database
    cannot be asked."""
    found = launcher.unfinished()
    known = {job.id for job in store.jobs_by_id([attempt.job_id for attempt in found])}
    return [attempt for attempt in found if attempt.job_id not in known]
