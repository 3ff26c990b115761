from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ft_service.errors import SpecError
from ft_service.jobs.decisions import (
    BACKOFF_SECONDS,
    MAX_FAILURES,
    MOST_PAUSE_SECONDS,
    RECHECK_SECONDS,
    REST_SECONDS,
    SILENCE_LIMIT_SECONDS,
    UNSEEN_SECONDS,
    Action,
    Become,
    Kill,
    Launch,
    Place,
    Signal,
    Validate,
    Wait,
    decide,
    halted,
    launch_failed,
    placed,
    preempted_by,
    signalled,
    validated,
)
from ft_service.jobs.queue_snapshot import LONGEST_WAIT_SECONDS, JobSize, QueuedJob
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import (
    TERMINAL,
    Absent,
    Ended,
    Halt,
    Job,
    Observation,
    Phase,
    Running,
    State,
    Unknown,
)
from ft_service.jobs.user_actions import Verb, request
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Desired, ErrorInfo, ExitReason
from ft_service.spec import StoredSpec

NOW = 1000.0
TOO_SILENT = SILENCE_LIMIT_SECONDS + 1

OBSERVATIONS: dict[str, Observation] = {
    "absent": Absent(),
    "young": Running(),
    "alive": Running(reported=True),
    "silent": Running(reported=True, silent_seconds=TOO_SILENT),
    "unknown": Unknown("another host"),
    "lost": Ended(None),
    "done": Ended(exit_of(ExitReason.SUCCEEDED, "")),
    "stopped": Ended(exit_of(ExitReason.STOPPED, "")),
    "cancelled": Ended(exit_of(ExitReason.CANCELLED, "")),
    "broken": Ended(exit_of(ExitReason.WORKER_ERROR, "")),
    "refused": Ended(exit_of(ExitReason.PERMANENT_ERROR, "")),
}

# Every job that can be (test_the_table_has_every_job_that_can_be), with every observation. Wish:
# `told` if the running attempt knows it, `new` if not yet, `-` where that does not matter. A single
# word applies to all columns.
#   wait, validate, place, launch, signal, kill    the actions of those names
#   training, queued, paused, succeeded, failed    the job becomes this
# again                                          it is queued with one more failure, after a
# back-off
# lost                                           it is queued with one more loss, after a pause, and
# no more failures
# later                                          it stays queued and is looked at again after a
# while
#   over                                           a cancelled job's slots are free
TABLE = """
state/phase         desired wish | absent  young   alive    silent  unknown lost   done      stopped cancelled broken refused
validating_files    run     -    | validate
validating_files    pause   -    | validate
queued              run     -    | place   kill    kill     kill    later   place  place     place   place     place  place
paused              pause   -    | wait    kill    kill     kill    wait    wait   wait      wait    wait      wait   wait
running/launching   run     told | launch  wait    training kill    wait    lost   succeeded queued  queued    again  failed
running/launching   run     new  | launch  signal  signal   signal  wait    lost   succeeded queued  queued    again  failed
running/launching   pause   new  | paused  signal  signal   signal  wait    paused succeeded paused  paused    paused failed
running/training    run     told | launch  wait    wait     kill    wait    lost   succeeded queued  queued    again  failed
running/training    run     new  | launch  signal  signal   signal  wait    lost   succeeded queued  queued    again  failed
running/training    pause   new  | paused  signal  signal   signal  wait    paused succeeded paused  paused    paused failed
running/stopping    run     new  | launch  signal  signal   signal  wait    lost   succeeded queued  queued    again  failed
running/stopping    pause   told | paused  wait    wait     kill    wait    paused succeeded paused  paused    paused failed
running/stopping    pause   new  | paused  signal  signal   signal  wait    paused succeeded paused  paused    paused failed
cancelled/stopping  cancel  new  | over    signal  signal   signal  wait    over   over      over    over      over   over
cancelled/stopping  cancel  told | over    wait    wait     kill    wait    over   over      over    over      over   over
cancelled           cancel  -    | wait
succeeded           run     -    | wait
succeeded           pause   -    | wait
failed              run     -    | wait
failed              pause   -    | wait
"""

Row = tuple[str, str, str]


def table() -> dict[Row, dict[str, str]]:
    head, *lines = TABLE.strip().splitlines()
    assert head.split()[4:] == list(OBSERVATIONS)
    rows = {}
    for line in lines:
        key, _, cells = line.partition("|")
        words = cells.split()
        state, desired, wish = key.split()
        rows[state, desired, wish] = dict(
            zip(OBSERVATIONS, words * len(OBSERVATIONS) if len(words) == 1 else words, strict=True)
        )
    return rows


def cells() -> Iterator[tuple[Row, str, str]]:
    for row, actions in table().items():
        for seen, action in actions.items():
            yield row, seen, action


def new_job(**changes: object) -> Job:
    job = Job(
        id="ftjob-1",
        project_id="p",
        created_at=1.0,
        request={},
        stored_spec=StoredSpec({}),
        state=State.VALIDATING,
        slots=2,
    )
    return replace(job, **changes)


def job_of(row: Row) -> Job:
    state, _, phase = row[0].partition("/")
    return new_job(
        state=State(state),
        phase=Phase(phase) if phase else None,
        desired=Desired(row[1]),
        generation=5,
        signalled=4 if row[2] == "new" else 5,
        attempt=0 if state == "validating_files" else 1,
    )


def row_of(job: Job) -> Row:
    place = f"{job.state}/{job.phase}" if job.phase else str(job.state)
    wish = "-" if job.phase is None else "told" if job.signalled == job.generation else "new"
    return place, str(job.desired), wish


def word_for(action: Action, job: Job) -> str:
    if not isinstance(action, Become):
        return type(action).__name__.lower()
    after = action.job
    if action.release:
        assert after.phase is None
    else:
        assert job.phase == Phase.LAUNCHING or job.state is State.QUEUED
    if after.state is State.CANCELLED:
        return "over"
    if after.phase is Phase.TRAINING:
        return "training"
    if job.state is State.QUEUED:
        assert after.not_before == NOW + RECHECK_SECONDS
        return "later"
    if after.state is State.QUEUED and after.losses:
        assert (after.losses, after.failures, after.not_before) == (1, 0, NOW + BACKOFF_SECONDS)
        return "lost"
    if after.state is State.QUEUED and after.failures:
        return "again"
    return str(after.state)


@pytest.mark.parametrize(("row", "seen", "expected"), list(cells()))
def test_decide(row: Row, seen: str, expected: str) -> None:
    job = job_of(row)
    assert word_for(decide(job, OBSERVATIONS[seen], NOW), job) == expected


def test_the_table_has_every_job_that_can_be() -> None:
    """Let every verb and every observation happen to a job in every order: what comes about are the
    table's rows, no others.
    """
    found: set[Row] = set()
    seen: set[tuple[object, ...]] = set()
    open_jobs = [new_job()]
    while open_jobs:
        job = open_jobs.pop()
        told = job.generation == job.signalled
        mark = (row_of(job), told, job.failures, job.attempt > 0, job.not_before > NOW)
        if mark in seen:
            continue
        seen.add(mark)
        found.add(row_of(job))
        open_jobs.extend(after_verbs(job))
        for observation in OBSERVATIONS.values():
            for now in (NOW, NOW + 100):
                open_jobs.extend(after_action(job, decide(job, observation, now), now))
    assert found == set(table())


def after_verbs(job: Job) -> Iterator[Job]:
    for verb in Verb:
        try:
            yield request(job, verb, NOW)
        except SpecError:
            assert job.state in TERMINAL


def after_action(job: Job, action: Action, now: float) -> list[Job]:
    match action:
        case Validate():
            return [
                validated(job, None, now),
                validated(job, ErrorInfo(code="invalid_training_file", message="bad"), now),
            ]
        case Place():
            return [placed(job, "host")]
        case Launch():
            return [job, launch_failed(job, "no", -1, now).job]
        case Signal():
            return [signalled(job)]
        case Become():
            return [action.job]
        case Wait() | Kill():
            return [job]


@pytest.mark.parametrize(
    "seen", [seen for seen in OBSERVATIONS if seen not in ("young", "alive", "silent")]
)
def test_a_queued_job_waits_for_the_end_of_its_back_off(seen: str) -> None:
    job = new_job(state=State.QUEUED, attempt=1, not_before=NOW + 0.1)
    assert decide(job, OBSERVATIONS[seen], NOW) == Wait()
    assert decide(job, Ended(None), NOW + 0.1) == Place()


def test_a_back_off_that_no_job_is_given_was_set_before_the_clock_went_back() -> None:
    job = new_job(state=State.QUEUED, not_before=NOW + LONGEST_WAIT_SECONDS)
    assert decide(job, Absent(), NOW) == Wait()
    assert decide(replace(job, not_before=job.not_before + 1), Absent(), NOW) == Place()


@pytest.mark.parametrize("halt", [None, *Halt])
@pytest.mark.parametrize("desired", [Desired.RUN, Desired.PAUSE])
def test_success_on_the_disk_is_success_whatever_was_asked_of_the_attempt_meanwhile(
    halt: Halt | None, desired: Desired
) -> None:
    asked = new_job(
        state=State.RUNNING,
        phase=Phase.STOPPING,
        attempt=1,
        halt=halt,
        desired=desired,
        generation=2,
    )
    action = decide(asked, Ended(exit_of(ExitReason.SUCCEEDED, "done")), NOW)
    assert isinstance(action, Become)
    assert (action.job.state, action.job.reason) == (State.SUCCEEDED, Reason.SUCCEEDED)


def test_a_cancel_that_was_accepted_is_final_and_one_after_the_result_is_not_accepted() -> None:
    running = new_job(state=State.RUNNING, phase=Phase.TRAINING, attempt=2)
    cancelled = request(running, Verb.CANCEL, NOW, succeeded=1)  # an earlier attempt's is none
    action = decide(cancelled, Ended(exit_of(ExitReason.SUCCEEDED, "done")), NOW)
    assert isinstance(action, Become)
    assert (action.job.state, action.job.phase) == (State.CANCELLED, None)
    with pytest.raises(SpecError, match="already succeeded and cannot be cancelled") as caught:
        request(running, Verb.CANCEL, NOW, succeeded=2)
    assert caught.value.code == "invalid_state"
    assert request(cancelled, Verb.CANCEL, NOW, succeeded=2) == cancelled
    assert request(running, Verb.PAUSE, NOW, succeeded=2).state is State.RUNNING


def test_kill_reasons() -> None:
    running = new_job(state=State.RUNNING, phase=Phase.TRAINING, attempt=1)
    assert decide(running, Running(silent_seconds=TOO_SILENT), NOW) == Kill(Reason.STALLED)
    cancelled = signalled(request(running, Verb.CANCEL, NOW))
    assert decide(cancelled, Running(silent_seconds=TOO_SILENT), NOW) == Kill(Reason.STOP_TIMEOUT)


def test_placed_counts_attempts_and_starts_reading_events_anew() -> None:
    job = new_job(state=State.QUEUED, attempt=3, ingested=17, generation=4, signalled=2)
    after = placed(job, "host-1")
    assert (after.state, after.phase, after.attempt, after.ingested, after.host) == (
        State.RUNNING,
        Phase.LAUNCHING,
        4,
        -1,
        "host-1",
    )
    assert after.signalled == 4


def test_validated_fails_the_job_with_the_files_own_error() -> None:
    error = ErrorInfo(
        code="invalid_training_file",
        message="train.jsonl: line 3: is not JSON.",
        param="training_file",
    )
    after = validated(new_job(), error, NOW)
    assert (after.state, after.reason, after.finished_at) == (
        State.FAILED,
        Reason.INVALID_FILE,
        NOW,
    )
    assert after.error == {"code": error.code, "message": error.message, "param": "training_file"}


def test_validated_job_is_queued_or_paused_as_wished() -> None:
    assert validated(new_job(), None, NOW).state is State.QUEUED
    assert validated(request(new_job(), Verb.PAUSE, NOW), None, NOW).state is State.PAUSED


def test_a_job_that_was_paused_as_idle_stays_so_however_its_attempt_ends() -> None:
    """Its next command resumes it; a job that its user paused waits for its user."""
    for reason, kept in ((Reason.IDLE, Reason.IDLE), (None, Reason.WORKER_KILLED)):
        job = new_job(
            state=State.RUNNING, phase=Phase.STOPPING, desired=Desired.PAUSE, reason=reason
        )
        ended = ended_job(job, "worker_killed").job
        assert (ended.state, ended.reason) == (State.PAUSED, kept)


def ended_job(
    job: Job, exit_reason: str, checkpoint_step: int = -1, error: ErrorInfo | None = None
) -> Become:
    action = decide(job, Ended(exit_of(ExitReason(exit_reason), "", error), checkpoint_step), NOW)
    assert isinstance(action, Become)
    return action


def running_job(**changes: object) -> Job:
    return new_job(state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h", **changes)


def test_failures_without_progress_end_the_job() -> None:
    job = running_job()
    delays = []
    for failure in range(1, MAX_FAILURES):
        action = ended_job(job, "worker_error")
        assert (action.message or "").endswith("The job continues from the beginning.")
        assert (action.job.state, action.job.failures) == (State.QUEUED, failure)
        delays.append(action.job.not_before - NOW)
        job = placed(action.job, "h")
    assert delays == [BACKOFF_SECONDS * 2**n for n in range(MAX_FAILURES - 1)]
    last = ended_job(
        job,
        "worker_error",
        error=ErrorInfo(code="training_failed", message="the loss is not a number"),
    )
    assert (last.job.state, last.job.reason) == (State.FAILED, Reason.WORKER_ERROR)
    assert last.job.error is not None
    assert "the loss is not a number" in last.job.error["message"]
    assert f"{MAX_FAILURES} attempts failed" in last.job.error["message"]


def test_a_new_checkpoint_starts_the_count_anew() -> None:
    job = running_job(failures=MAX_FAILURES - 1, failed_at_step=10)
    further = ended_job(job, "worker_error", checkpoint_step=11)
    assert (further.job.state, further.job.failures, further.job.failed_at_step) == (
        State.QUEUED,
        1,
        11,
    )
    assert "from step 11" in (further.message or "")
    assert ended_job(job, "worker_error", checkpoint_step=10).job.state is State.FAILED


def test_progress_is_counted_from_the_furthest_checkpoint_ever() -> None:
    """The newest one was damaged and set aside: to reach its step again is no progress."""
    back = ended_job(running_job(failed_at_step=10), "worker_error", checkpoint_step=4).job
    assert (back.failures, back.failed_at_step) == (1, 10)
    assert ended_job(placed(back, "h"), "worker_error", checkpoint_step=8).job.failures == 2


def error_of(code: str) -> ErrorInfo:
    return ErrorInfo(code=code, message="what happened")


def launched_in_vain(job: Job, checkpoint_step: int) -> Become:
    return launch_failed(job, "no such partition", checkpoint_step, NOW)


def vanished(job: Job, checkpoint_step: int) -> Become:
    action = decide(job, Ended(None, checkpoint_step), NOW)
    assert isinstance(action, Become)
    return action


OUTSIDE: dict[str, Callable[[Job, int], Become]] = {
    "not launched": launched_in_vain,
    "supervisor gone": vanished,
    "launch_failed": lambda job, step: ended_job(job, "launch_failed", step),
    "host_lost": lambda job, step: ended_job(job, "host_lost", step),
    "stop_timeout": lambda job, step: ended_job(job, "stop_timeout", step),
    "engine_lost": lambda job, step: ended_job(job, "engine_lost", step, error_of("out_of_memory")),
    "killed": lambda job, step: ended_job(job, "worker_killed", step, error_of("worker_killed")),
    "pod gone": lambda job, step: ended_job(job, "worker_killed", step, error_of("pod_gone")),
}


@pytest.mark.parametrize("outside", OUTSIDE)
def test_what_host_or_operator_does_is_never_counted_and_is_tried_again_ever_more_rarely(
    outside: str,
) -> None:
    job = running_job(failures=MAX_FAILURES - 1, failed_at_step=4)
    pauses = []
    for loss in range(1, 31):
        action = OUTSIDE[outside](job, 4)
        assert (action.job.state, action.release) == (State.QUEUED, True)
        assert (action.job.failures, action.job.losses) == (MAX_FAILURES - 1, loss)
        assert action.job.pending == action.message, "the job says what it waits for"
        pauses.append(action.job.not_before - NOW)
        job = placed(action.job, "h")
        assert job.pending is None
    assert pauses[:4] == [BACKOFF_SECONDS * 2**n for n in range(4)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_PAUSE_SECONDS < LONGEST_WAIT_SECONDS
    further = OUTSIDE[outside](job, 5).job
    assert (further.failures, further.losses, further.not_before) == (
        0,
        1,
        NOW + BACKOFF_SECONDS,
    ), "it has got on"
    assert ended_job(job, "worker_error", 4).job.state is State.FAILED, (
        "its own failures still count"
    )


@pytest.mark.parametrize(
    "code", ["out_of_memory", "worker_crashed", "deadline_exceeded", "evicted"]
)
def test_a_death_that_the_job_causes_itself_counts(code: str) -> None:
    job = running_job(failures=MAX_FAILURES - 2)
    again = ended_job(job, "worker_killed", error=error_of(code)).job
    assert (again.state, again.failures, again.losses) == (State.QUEUED, MAX_FAILURES - 1, 0)
    last = ended_job(placed(again, "h"), "worker_killed", error=error_of(code)).job
    assert last.state is State.FAILED
    assert last.error is not None
    assert last.error["code"] == code


def test_a_paused_job_whose_attempt_is_lost_waits_for_its_user_alone() -> None:
    paused = ended_job(running_job(desired=Desired.PAUSE), "host_lost").job
    assert (paused.state, paused.pending, paused.losses) == (State.PAUSED, None, 1)
    resumed = request(paused, Verb.RESUME, NOW)
    assert (resumed.state, resumed.not_before, resumed.losses) == (State.QUEUED, 0.0, 0)


def test_a_job_that_was_never_launched_is_not_said_to_run() -> None:
    job = replace(running_job(), phase=Phase.LAUNCHING)
    told = decide(job, replace(AWAY, begun=False), NOW)
    assert isinstance(told, Become)
    assert (told.job.phase, told.release) == (Phase.WAITING, False), "users see it as queued"
    assert "keep running" not in (told.message or "")
    back = decide(told.job, Absent(), NOW)
    assert isinstance(back, Become)
    assert isinstance(decide(back.job, Absent(), NOW), Launch)
    begun = decide(job, AWAY, NOW)
    assert isinstance(begun, Become)
    assert (begun.job.phase, "keep running" in (begun.message or "")) == (Phase.LAUNCHING, True)
    queued = decide(replace(job, state=State.QUEUED, phase=None), AWAY, NOW)
    assert isinstance(queued, Become)
    assert "keep running" not in (queued.message or "")


def test_a_permanent_failure_keeps_the_workers_error() -> None:
    error = ErrorInfo(
        code="invalid_model", message="no config.json", param="model", traceback="…", rank=0
    )
    action = ended_job(running_job(), "permanent_error", error=error)
    assert action.job.error == {
        "code": "invalid_model",
        "message": f"{Reason.PERMANENT_ERROR.text} no config.json",
        "param": "model",
    }
    assert action.job.finished_at == NOW


def test_an_attempt_that_ended_by_itself_knows_every_wish() -> None:
    """The next attempt starts under the newest wish, so nothing is left to tell."""
    job = running_job(desired=Desired.PAUSE, generation=3, signalled=2)
    assert ended_job(job, "stopped").job.signalled == 3


def test_a_job_that_the_cluster_keeps_waiting_says_why_until_it_has_a_place() -> None:
    job = replace(running_job(), phase=Phase.LAUNCHING)
    kept = Running(note="no node has 8 GPUs", admitted=False)
    waiting = decide(job, kept, NOW)
    assert isinstance(waiting, Become)
    assert (waiting.job.state, waiting.job.phase, waiting.job.pending) == (
        State.RUNNING,
        Phase.WAITING,
        "no node has 8 GPUs",
    )
    assert isinstance(decide(waiting.job, kept, NOW), Wait)
    other = decide(waiting.job, Running(note="the quota is used up", admitted=False), NOW)
    assert isinstance(other, Become)
    assert other.job.pending == "the quota is used up"
    assert isinstance(decide(other.job, Absent(), NOW), Launch), "it can be tried again"
    placed_at_last = decide(other.job, Running(), NOW)
    assert isinstance(placed_at_last, Become)
    assert (placed_at_last.job.phase, placed_at_last.job.pending) == (Phase.LAUNCHING, None)
    assert ended_job(other.job, "worker_error").job.pending is None, "it waits for its turn again"


AWAY = Unknown("the cluster cannot be asked: connection refused", seconds=UNSEEN_SECONDS)


@pytest.mark.parametrize("phase", [Phase.LAUNCHING, Phase.WAITING, Phase.TRAINING, Phase.STOPPING])
def test_a_job_whose_place_does_not_answer_says_so_once_and_says_when_it_does(phase: Phase) -> None:
    job = replace(running_job(), phase=phase)
    assert isinstance(decide(job, Unknown(AWAY.why, seconds=UNSEEN_SECONDS - 1), NOW), Wait), (
        "a moment is no news"
    )
    told = decide(job, AWAY, NOW)
    assert isinstance(told, Become)
    assert (told.job, told.level, told.release) == (
        replace(job, pending=told.message),
        "warn",
        False,
    )
    assert (told.message or "").endswith(AWAY.why)
    assert isinstance(
        decide(told.job, Unknown("the cluster cannot be asked: timed out", seconds=60.0), NOW), Wait
    )
    for seen in (Running(reported=True), Absent(), Ended(None)):
        assert decide(told.job, seen, NOW) == Become(
            replace(job, pending=None), message="The job is observed again."
        )


def test_a_remembered_observation_does_not_end_an_outage() -> None:
    told = decide(running_job(), AWAY, NOW)
    assert isinstance(told, Become)
    assert isinstance(decide(told.job, Running(reported=True, fresh=False), NOW), Wait)
    assert isinstance(decide(told.job, Running(reported=True), NOW), Become)


def test_a_queued_job_whose_place_does_not_answer_says_so_once() -> None:
    job = replace(running_job(), state=State.QUEUED, phase=None)
    told = decide(job, AWAY, NOW)
    assert isinstance(told, Become)
    assert (told.job.pending, told.job.not_before) == (told.message, NOW + RECHECK_SECONDS)
    again = decide(told.job, AWAY, NOW + RECHECK_SECONDS)
    assert again == Become(replace(told.job, not_before=NOW + 2 * RECHECK_SECONDS))
    back = decide(told.job, Ended(None), NOW + RECHECK_SECONDS)
    assert isinstance(back, Become)
    assert (back.job.pending, back.message) == (None, "The job is observed again.")
    assert isinstance(decide(back.job, Ended(None), NOW + RECHECK_SECONDS), Place)


def test_an_attempt_that_did_not_get_its_place_is_no_failure_and_is_tried_again_later() -> None:
    job = replace(running_job(), phase=Phase.WAITING, failures=MAX_FAILURES - 1)
    stopped = Ended(
        exit_of(ExitReason.STOPPED, "Only 1 of 2 pods had a place."), delay_seconds=30.0
    )
    action = decide(job, stopped, NOW)
    assert isinstance(action, Become)
    assert action.message == "Only 1 of 2 pods had a place. The next attempt is made in 30 seconds."
    assert (action.job.state, action.job.failures, action.job.not_before) == (
        State.QUEUED,
        MAX_FAILURES - 1,
        NOW + 30,
    )
    assert (action.release, action.level, action.job.pending) == (True, "warn", action.message)
    assert placed(action.job, "h").pending is None
    paused = decide(replace(job, desired=Desired.PAUSE), stopped, NOW)
    assert isinstance(paused, Become)
    assert (paused.job.state, paused.job.pending, paused.message) == (
        State.PAUSED,
        None,
        "Only 1 of 2 pods had a place.",
    )


def test_what_keeps_a_placed_attempt_from_starting_is_in_the_job_until_it_trains() -> None:
    job = replace(running_job(), phase=Phase.LAUNCHING)
    held = decide(job, Running(note="pod p cannot start: ErrImagePull"), NOW)
    assert isinstance(held, Become)
    assert held == Become(replace(job, pending="pod p cannot start: ErrImagePull"))
    assert isinstance(decide(held.job, Running(note="pod p cannot start: ErrImagePull"), NOW), Wait)
    trains = decide(held.job, Running(reported=True), NOW)
    assert trains == Become(replace(job, phase=Phase.TRAINING))


def test_events_of_attempts_that_failed_are_errors() -> None:
    assert ended_job(running_job(), "worker_error").level == "error"
    assert launch_failed(running_job(), "no such program", -1, NOW).level == "error"


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.STOPPING])
def test_an_attempt_that_has_begun_does_not_wait_for_a_place_again(phase: Phase) -> None:
    """Its pods are on their way out."""
    job = replace(running_job(), phase=phase)
    assert (
        decide(job, Running(reported=True, note="the cluster takes it away", admitted=False), NOW)
        == Wait()
    )


def training(**values: object) -> Job:
    spec = StoredSpec({"seed": 1})
    job = Job(
        id="j",
        project_id="p",
        created_at=0.0,
        request={},
        stored_spec=spec,
        state=State.RUNNING,
        phase=Phase.TRAINING,
    )
    return replace(job, attempt=1, host="h", **values)  # type: ignore[arg-type]


STOPPED = Ended(exit_of(ExitReason.STOPPED, "stopped at a checkpoint"), checkpoint_step=4)


def test_a_job_that_makes_room_stops_at_a_checkpoint_and_is_queued_again_without_a_failure() -> (
    None
):
    head = QueuedJob(id="head", project="q", number=9, slots=1, priority=7)
    job = preempted_by(training(), head)
    assert (job.effective_desired, job.desired, job.halt) == (
        Desired.PAUSE,
        Desired.RUN,
        Halt.PREEMPTED,
    )
    assert "priority 7" in (job.pending or "")
    assert decide(job, Running(reported=True), NOW) == Signal()
    job = signalled(job)
    assert job.phase is Phase.STOPPING
    assert preempted_by(job, head) == job, "once is enough"
    assert decide(job, Running(reported=True), NOW) == Wait()
    action = decide(job, STOPPED, NOW)
    assert isinstance(action, Become)
    assert action.release
    assert (action.job.state, action.job.reason, action.job.halt) == (
        State.QUEUED,
        Reason.PREEMPTED,
        None,
    )
    assert (action.job.failures, action.job.effective_desired) == (0, Desired.RUN)
    assert decide(action.job, Absent(), NOW) == Place()


@pytest.mark.parametrize(
    ("verb", "state", "wish"),
    [(Verb.PAUSE, State.PAUSED, Desired.PAUSE), (Verb.CANCEL, State.CANCELLED, Desired.CANCEL)],
)
def test_what_its_user_wants_comes_before_making_room(
    verb: Verb, state: State, wish: Desired
) -> None:
    job = request(signalled(halted(training(), Halt.PREEMPTED)), verb, NOW)
    assert job.effective_desired is wish
    assert decide(job, Running(reported=True), NOW) == Signal()
    action = decide(signalled(job), STOPPED, NOW)
    assert isinstance(action, Become)
    assert action.job.state is state
    assert action.job.reason is not Reason.PREEMPTED


@pytest.mark.parametrize("phase", [Phase.LAUNCHING, Phase.WAITING, Phase.STOPPING])
def test_only_what_trains_makes_room(phase: Phase) -> None:
    job = training(phase=phase)
    assert (
        preempted_by(job, QueuedJob(id="head", project="q", number=9, slots=1, priority=7)) == job
    )


def test_a_job_out_of_time_stops_at_a_checkpoint_and_has_failed() -> None:
    job = training(max_seconds=100, held_seconds=60.0, taken_at=NOW - 39.0)
    assert decide(job, Running(reported=True), NOW) == Wait()
    action = decide(job, Running(reported=True), NOW + 1)
    assert isinstance(action, Become)
    assert (action.job.halt, action.release) == (Halt.TIME_LIMIT, False)
    job = signalled(action.job)
    assert decide(job, Running(reported=True), NOW + 9) == Wait(), "it is reported once"
    for ended in (STOPPED, Ended(None)):
        over = decide(job, ended, NOW + 9)
        assert isinstance(over, Become)
        assert (over.job.state, over.job.reason, over.release) == (
            State.FAILED,
            Reason.TIME_LIMIT,
            True,
        )
        assert over.job.error is not None
        assert over.job.error["code"] == "time_limit"
    done = decide(job, Ended(exit_of(ExitReason.SUCCEEDED, "")), NOW + 9)
    assert isinstance(done, Become)
    assert done.job.state is State.SUCCEEDED, "success wins"


def test_a_job_without_time_left_is_not_started_again() -> None:
    job = replace(
        training(), state=State.QUEUED, phase=None, attempt=0, max_seconds=100, held_seconds=100.0
    )
    action = decide(job, Absent(), NOW)
    assert isinstance(action, Become)
    assert action.job.reason is Reason.TIME_LIMIT


def test_a_job_of_any_size_waits_with_the_fewest_ranks_and_runs_with_what_it_got() -> None:
    shapes = (JobSize(2, 4), JobSize(1, 4), JobSize(1, 2))
    waits = training(state=State.QUEUED, phase=None, slots=2, nodes=1, shapes=shapes)
    runs = placed(waits, "cluster", JobSize(2, 4))
    assert (runs.slots, runs.nodes, runs.host) == (8, 2, "cluster")
    ended = decide(replace(runs, phase=Phase.TRAINING, left_seconds=10.0), STOPPED, NOW)
    assert isinstance(ended, Become)
    assert (ended.job.state, ended.job.slots, ended.job.nodes) == (State.QUEUED, 2, 1)
    assert ended.job.left_seconds == 40.0, "a quarter of the ranks takes four times as long"
    seated = placed(waits, "h", engine_id="engine-1")
    assert (seated.slots, seated.nodes) == (2, 1), "the engine holds the slots"
    fixed = placed(replace(waits, shapes=()), "h", JobSize(1, 2))
    assert (fixed.slots, fixed.nodes) == (2, 1)
    assert (
        request(
            replace(waits, state=State.PAUSED, desired=Desired.PAUSE), Verb.RESUME, NOW, 3
        ).shapes
        == ()
    )


def test_a_disk_without_room_is_waited_for_and_uses_up_no_failure() -> None:
    error = ErrorInfo(
        code="disk_full", message="/srv: the disk is full, and 0 bytes are free there. Free some."
    )
    ended = exit_of(ExitReason.DISK_FULL, error.message, error)
    job = replace(running_job(), failures=MAX_FAILURES - 1, failed_at_step=4)
    action = decide(job, Ended(ended, checkpoint_step=4), NOW)
    assert isinstance(action, Become)
    assert (action.job.state, action.release, action.job.failures) == (
        State.QUEUED,
        True,
        MAX_FAILURES - 1,
    )
    assert (action.job.reason, action.job.not_before) == (Reason.DISK_FULL, NOW + REST_SECONDS)
    assert action.message == action.job.pending
    assert action.message is not None
    assert action.message.startswith(
        "Training found no room on the disk. /srv: the disk is full, and 0 bytes are free there."
    )
    assert "continues from step 4 in 120 seconds" in action.message
    assert decide(action.job, Absent(), NOW) == Wait()


def test_a_lost_engine_is_no_failure_and_its_jobs_know_their_half() -> None:
    job = running_job(engine_id="engine-1", failures=1)
    lost = Ended(exit_of(ExitReason.ENGINE_LOST, ""), checkpoint_step=-1, fault_group="engine-1/0")
    action = decide(job, lost, NOW)
    assert isinstance(action, Become)
    assert action.release
    assert (action.job.state, action.job.failures, action.job.fault_group) == (
        State.QUEUED,
        1,
        "engine-1/0",
    )
    assert action.job.not_before == NOW + BACKOFF_SECONDS
    assert "counts as no failure" in (action.message or "")
    again = decide(
        placed(replace(action.job, not_before=0.0), "here"),
        Ended(exit_of(ExitReason.WORKER_ERROR, "")),
        NOW,
    )
    assert isinstance(again, Become)
    assert (again.job.failures, again.job.fault_group) == (2, "engine-1/0"), (
        "of its own ranks, and it stays in its group"
    )


SPENT = "It has cost as much as it may."
QUEUED: dict[str, object] = {"state": State.QUEUED, "phase": None}


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, Running(reported=True)),
        ({"phase": Phase.LAUNCHING}, Running()),
        (QUEUED, Absent()),
    ],
)
def test_a_job_without_money_left_pauses_where_it_takes_slots_or_would_next(
    changes: dict[str, object], seen: Observation
) -> None:
    job = training(**changes)
    action = decide(job, seen, NOW, SPENT)
    assert isinstance(action, Become)
    assert (action.job.desired, action.job.reason) == (Desired.PAUSE, Reason.COST_LIMIT)
    assert (action.message, action.level, action.release) == (SPENT, "warn", False)
    again = decide(action.job, seen, NOW, SPENT)
    assert not isinstance(again, Become) or again.message != SPENT, "it is said once"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"desired": Desired.PAUSE}, Running(reported=True)),
        ({"desired": Desired.CANCEL}, Running(reported=True)),
        ({"halt": Halt.PREEMPTED}, Running(reported=True)),
        ({"generation": 3, "signalled": 2}, Running(reported=True)),
        ({}, Unknown("another host")),
        ({}, Ended(exit_of(ExitReason.SUCCEEDED, ""))),
        ({"state": State.PAUSED, "phase": None, "desired": Desired.PAUSE}, Absent()),
        ({"state": State.VALIDATING, "phase": None}, Absent()),
        ({"state": State.SUCCEEDED, "phase": None}, Absent()),
    ],
)
def test_a_job_that_stops_or_rests_or_is_not_seen_is_not_paused_for_money(
    changes: dict[str, object], seen: Observation
) -> None:
    job = training(**changes)
    assert decide(job, seen, NOW, SPENT) == decide(job, seen, NOW)


def test_a_job_whose_place_does_not_answer_is_not_paused_for_money_until_it_is_seen() -> None:
    unseen = decide(training(), Unknown("no answer", UNSEEN_SECONDS), NOW)
    assert isinstance(unseen, Become)
    seen = Running(reported=True)
    assert decide(unseen.job, seen, NOW, SPENT) == decide(unseen.job, seen, NOW)
