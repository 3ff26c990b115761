"""Whether a job, or its project, has cost as much as it may. For the reconciler's thread."""

from __future__ import annotations

from ft_service.control.admission.budget import spent_text
from ft_service.host.loops import Interval
from ft_service.jobs.states import Job, State
from ft_service.money import money_text
from ft_service.rundir.documents import Desired
from ft_service.store.sql import Store

LOOK_SECONDS = 5.0
"""Interval at which the sums of projects are read again."""


class Budgets:
    """The limits of costs of the jobs of one place, and of their projects."""

    def __init__(self, store: Store, look_seconds: float = LOOK_SECONDS) -> None:
        self._store = store
        self._projects: dict[str, str | None] = {}
        """Project → the sentence on its limit, as it was last read."""
        self._next_look = Interval(look_seconds)

    def spent(self, job: Job, now: float) -> str | None:
        """A sentence for the user that a job must stop for its cost; None: it need not.

        `now`: database time. Raises UnavailableError if the database does not answer.
        """
        if job.price is None or job.effective_desired is not Desired.RUN:
            return None
        if job.state not in (State.QUEUED, State.RUNNING):
            return None
        return self._by_job(job, now) or self._by_project(job)

    def _by_job(self, job: Job, now: float) -> str | None:
        if job.max_cost is None:
            return None
        seat = self._store.engines.used(job.engine_id, job.id) if job.engine_id else 0.0
        cost = job.cost_at(now, seat)
        if cost < job.max_cost:
            return None
        currency = job.currency or ""
        limit = money_text(job.max_cost, currency)
        stops = "It stops at a checkpoint" if job.state is State.RUNNING else "It is paused"
        return (
            f"The job has cost {money_text(cost, currency)}, and may cost {limit} (max_cost). "
            f"{stops}; resume it with a higher max_cost."
        )

    def _by_project(self, job: Job) -> str | None:
        if self._next_look.is_due:
            self._projects.clear()
            self._next_look.restart()
        if job.project_id not in self._projects:
            spent = self._store.usage.spent(job.project_id)
            self._projects[job.project_id] = spent_text(spent)
        return self._projects[job.project_id]
