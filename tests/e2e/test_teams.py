"""Many teams while API replicas and reconcilers are killed: `benchmarks/teams.py`, small."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.teams import campaign


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_job_of_every_team_runs_once_whoever_is_killed() -> None:
    """What a busy machine cannot spoil; the program itself wants more."""
    with TemporaryDirectory(
        prefix="ft-teams-"
    ) as folder:  # not below pytest's own, which PostgreSQL's user cannot enter
        figures = campaign(Path(folder), jobs=60, seed=1, figures_hold=False)
    assert figures["jobs"] == 60
    assert figures["run_more_or_less_than_once"] == figures["requests_that_failed"] == 0
    assert sum(figures["blows"].values()) >= 2
