from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from ft_service.jobs.reasons import OF_PAUSES, Reason
from ft_service.jobs.states import Phase, State
from ft_service.jobs.user_actions import Verb, request
from ft_service.rundir.documents import Desired
from tests.support.records import new_job

NOW = 1000.0

REQUESTS = """
state/phase        desired | cancel               pause             resume
validating_files   run     | cancelled            validating_files  same
validating_files   pause   | cancelled            same              validating_files
queued             run     | cancelled            paused            same
paused             pause   | cancelled            same              queued
running/training   run     | cancelled/stopping   running/training  same
running/stopping   pause   | cancelled/stopping   same              running/stopping
cancelled          cancel  | same                 error             error
succeeded          run     | error                error             error
failed             run     | error                error             error
"""


@pytest.mark.parametrize("line", REQUESTS.strip().splitlines()[1:])
@pytest.mark.parametrize(
    ("column", "verb"), list(enumerate([Verb.CANCEL, Verb.PAUSE, Verb.RESUME]))
)
def test_request(line: str, column: int, verb: Verb) -> None:
    key, _, cells = line.partition("|")
    expected = cells.split()[column]
    place, desired = key.split()
    state, _, phase = place.partition("/")
    phase = Phase(phase) if phase else None
    job = new_job(
        state=State(state), phase=phase, desired=Desired(desired), generation=5, signalled=5
    )
    if expected == "error":
        with pytest.raises(SpecError, match=job.id) as caught:
            request(job, verb, NOW)
        assert caught.value.code == "invalid_state"
        return
    after = request(job, verb, NOW)
    if expected == "same":
        assert after == job
        return
    assert (f"{after.state}/{after.phase}" if after.phase else str(after.state)) == expected
    assert after.generation == job.generation + 1
    assert after.signalled == job.signalled
    assert after.finished_at == (NOW if verb is Verb.CANCEL else None)
    assert (after.reason is Reason.USER_CANCELLED) == (verb is Verb.CANCEL)


def test_resume_forgives_earlier_failures() -> None:
    job = new_job(state=State.PAUSED, desired=Desired.PAUSE, failures=2, not_before=NOW + 60)
    after = request(job, Verb.RESUME, NOW)
    assert (after.failures, after.not_before) == (0, 0.0)


def test_only_a_paused_job_goes_on_with_another_number_of_ranks() -> None:
    paused = new_job(state=State.PAUSED, desired=Desired.PAUSE, slots=2)
    assert request(paused, Verb.RESUME, NOW, 3).slots == 3
    assert request(paused, Verb.RESUME, NOW).slots == 2
    for state in (State.QUEUED, State.RUNNING):
        with pytest.raises(SpecError, match="only a paused job") as refused:
            request(new_job(state=state, desired=Desired.PAUSE), Verb.RESUME, NOW, 3)
        assert refused.value.param == "distributed.nproc_per_node"
    going_on = request(paused, Verb.RESUME, NOW, 3)
    assert request(going_on, Verb.RESUME, NOW, 3) == going_on, (
        "the client did not see the first answer"
    )
    with pytest.raises(SpecError, match="only a paused job"):
        request(going_on, Verb.RESUME, NOW, 2)


@pytest.mark.parametrize("reason", sorted(OF_PAUSES))
def test_the_service_pauses_a_job_for_its_own_reason_until_a_request(reason: Reason) -> None:
    running = new_job(state=State.RUNNING, phase=Phase.TRAINING)
    idle = request(running, Verb.PAUSE, NOW, reason=reason)
    assert (idle.desired, idle.reason) == (Desired.PAUSE, reason)
    assert request(idle, Verb.RESUME, NOW).reason is None
    by_user = request(idle, Verb.PAUSE, NOW)
    assert (by_user.desired, by_user.reason) == (Desired.PAUSE, None), (
        "from now on its user wants it paused"
    )


@pytest.mark.parametrize(("cost", "is_refused"), [(4.99, False), (5.0, True), (5.01, True)])
def test_a_job_that_has_cost_what_it_may_does_not_go_on(cost: float, is_refused: bool) -> None:
    job = new_job(state=State.PAUSED, desired=Desired.PAUSE, max_cost=5.0, cost=cost)
    if not is_refused:
        assert request(job, Verb.RESUME, NOW).state is State.QUEUED
        return
    with pytest.raises(SpecError) as refused:
        request(job, Verb.RESUME, NOW)
    assert (refused.value.param, refused.value.code) == ("max_cost", "cost_limit")
