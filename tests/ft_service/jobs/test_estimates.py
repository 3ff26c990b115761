from __future__ import annotations

import pytest

from ft_service.jobs.estimates import (
    ENOUGH,
    FEW_PACES_SECONDS,
    PACES_SECONDS,
    Effort,
    MeasuredJob,
    Paces,
)


def effort(
    base: str = "tiny",
    slots: int = 2,
    work: float | None = 100.0,
    planned: float | None = None,
    left: float | None = None,
) -> Effort:
    return Effort(base, slots, work, planned, left)


def test_what_finished_jobs_took_corrects_the_plan() -> None:
    """One of three took much longer; the same base comes first."""
    done = [MeasuredJob(effort(planned=10.0), held, held * 2) for held in (14.0, 15.0, 90.0)]
    done += [MeasuredJob(effort("large", planned=10.0), 40.0, 80.0)]
    paces = Paces(done)
    assert paces.expected_seconds(effort(planned=20.0)) == 30.0
    assert paces.expected_seconds(effort("large", planned=20.0)) == 80.0
    assert paces.expected_seconds(effort("other", planned=20.0)) == 20.0 * (15.0 + 40.0) / 20.0
    assert Paces().expected_seconds(effort(planned=20.0)) == 20.0


def test_where_no_plan_knows_the_machine_work_is_compared() -> None:
    paces = Paces([MeasuredJob(effort(slots=2, work=100.0), 5.0, 10.0)])
    assert paces.expected_seconds(effort(slots=1, work=300.0)) == 30.0
    assert paces.expected_seconds(effort(slots=3, work=300.0)) == 10.0
    assert Paces().expected_seconds(effort()) is None
    assert paces.expected_seconds(effort(work=None)) is None


def test_what_a_job_measured_itself_counts_first() -> None:
    assert Paces([MeasuredJob(effort(), 5.0, 10.0)]).expected_seconds(effort(left=7.0)) == 7.0


@pytest.mark.parametrize(
    ("jobs", "seconds"), [(ENOUGH - 1, FEW_PACES_SECONDS), (ENOUGH, PACES_SECONDS)]
)
def test_a_few_jobs_are_read_again_sooner(jobs: int, seconds: float) -> None:
    assert Paces([MeasuredJob(effort(), 5.0, 10.0)] * jobs).good_seconds == seconds
