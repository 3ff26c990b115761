"""Attempts that run in the cluster although this service's database does not know their job.

They remain after the loss of a database, or after a restore of an older one, and train to their
end. Nothing ends them automatically: `ft_orphaned_jobs` counts them, `ft doctor` lists them and `ft
doctor --end` ends them.
"""

from __future__ import annotations

from ft_service.launcher.protocol import ListedAttempt, ListsAttempts
from ft_service.store.sql import Store

COUNT_SECONDS = 300.0
"""Interval at which the reconciler counts them."""


def find_orphans(store: Store, launcher: ListsAttempts) -> list[ListedAttempt]:
    """Return the unfinished attempts whose job has no row, and the unfinished engines that have
    none or have ended by it.

    Raises LaunchError if the cluster does not answer, UnavailableError if the database does not.
    """
    unfinished = launcher.unfinished()
    known = store.jobs.known_jobs([attempt.job_id for attempt in unfinished])
    known |= {engine.id for engine in store.engines.live_engines()}
    return [attempt for attempt in unfinished if attempt.job_id not in known]
