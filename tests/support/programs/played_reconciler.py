"""`ft reconcile` whose attempts are played by another process: `played_reconciler.py HOME SLOTS`,
until it is asked to end.

The launcher leaves an order for each attempt in HOME/orders, and `played_host.py` carries it out.
So a reconciler can be killed while its attempts go on, as supervisors do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import api.server
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import killed_exit
from ft_service.rundir.documents import Control
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from tests.support.fake_launcher import FakeLauncher


class PlayedLauncher(FakeLauncher):
    """A host whose attempts another process plays."""

    def __init__(self, orders: Path, slots: int) -> None:
        super().__init__(slots, host="played")
        self._orders = orders

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        self._order(attempt).touch()

    def observe(self, attempt: Attempt) -> Observation:
        ended = attempt.read_exit()
        if ended is not None:
            return Ended(ended)
        return (
            Running(reported=attempt.has_segment(0)) if self._order(attempt).exists() else Absent()
        )

    def signal(self, attempt: Attempt, control: Control) -> None:
        attempt.write_control(control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        attempt.write_exit(killed_exit(reason))

    def clean(self, attempt: Attempt) -> None:
        self._order(attempt).unlink(missing_ok=True)

    def _order(self, attempt: Attempt) -> Path:
        return self._orders / f"{attempt.job_id}.{attempt.number}"


if __name__ == "__main__":
    launcher = PlayedLauncher(Path(sys.argv[1]) / "orders", int(sys.argv[2]))
    api.server.new_launchers = lambda settings, move_host: [launcher]
    api.server.reconcile_only(Settings())
