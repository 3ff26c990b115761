"""What an engine asks a waiting seat ends none of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from ft_service.plan.fitting_settings import CONTEXT
from ft_service.rundir.attempt import Attempt, AttemptKeys
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.attempt_seal import SealedError
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import (
    Control,
    Desired,
    ExitReason,
    Outcome,
    OutcomeKind,
)
from ft_service.rundir.engine import SeatOrder
from ft_service.rundir.events import read_segments
from tests.support.bases import save_base, spec_on
from workers.engine import seat_thread
from workers.engine.lanes import Lane
from workers.engine.seat_thread import (
    SeatDropped,
    SeatState,
    SeatThread,
    _with_whole_samples,
    over_ranks,
)
from workers.output.report import Reporter

UNREADABLE = UnreadableDocumentError("attempts/1/control.json", "it is no JSON")


def waiting(due: Any, fence: Any = None, attempt: Any = None) -> SeatThread:
    """A seat that waits for its client, without its thread."""
    seat = object.__new__(SeatThread)
    seat._due = due
    seat._fence = fence
    seat._attempt = attempt
    return seat


class Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self) -> bool:
        raise self._error

    seal = __call__


@pytest.mark.parametrize(
    "error", [UNREADABLE, OSError(5, "Input/output error"), SealedError("attempt 1")]
)
def test_a_seat_whose_documents_cannot_be_read_is_not_due(error: Exception) -> None:
    assert not waiting(Raising(error)).is_due()
    assert waiting(lambda: True).is_due()


def test_a_seat_whose_control_is_unreadable_is_over_and_one_whose_disk_is_away_is_not(
    folder: RunDir,
) -> None:
    folder.path("attempts/1").mkdir(parents=True)
    folder.path("attempts/1/control.json").write_text("no json")

    class Unsealed:
        def seal(self) -> None:
            return None

    attempt = Attempt(folder, 1)
    assert waiting(None, Unsealed(), attempt).is_over()
    assert not waiting(None, Raising(OSError(5, "Input/output error")), attempt).is_over()


def test_a_seat_that_goes_on_says_so_however_long_its_step_takes(folder: RunDir) -> None:
    """Beside seven others a step may take longer than the service lets an attempt be silent."""

    def train() -> None:
        parent = getcurrent().parent
        assert parent is not None
        parent.switch("a forward")

    seat: Any = waiting(None)
    seat._base = SimpleNamespace(
        model=SimpleNamespace(resume=lambda lane, thread, *given: thread.switch(*given))
    )
    seat._lane, seat._thread, seat._reporter = (
        None,
        greenlet(train),
        Reporter(folder, 1, active=True),
    )
    seat.resume()
    assert seat._waiting == "a forward"
    assert [len(segment.events) for segment in read_segments(folder, 1)] == [0]
    seat._reporter._flushed_at = float("-inf")
    folder.write(AttemptKeys(1).exit, exit_of(ExitReason.CANCELLED, "cancelled"))
    seat.resume()
    assert seat._thread.dead, (
        "that its attempt is over ends the seat at the engine's next look, and nothing else"
    )


def on_thread(folder: RunDir, train: Any, model: Any = None) -> Any:
    """A seat whose thread runs `train`, on an engine's base that lets it go on."""
    given = model or SimpleNamespace(
        resume=lambda lane, thread, *given: thread.switch(*given),
        end=lambda lane, thread, error: thread.throw(error),
    )
    order = SeatOrder(job_id="ftjob-1", attempt=1, run_dir=str(folder.root))
    seat: Any = SeatThread(order, SimpleNamespace(model=given), None, None)  # type: ignore[arg-type]
    seat._thread = greenlet(train)
    return seat


def wait(result: Any = None) -> Any:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(result)


def test_a_seat_is_where_its_thread_is(folder: RunDir) -> None:
    """At a forward with gradients or without, at its client, or at its end."""
    given: list[Any] = []
    ids = {"input_ids": torch.zeros(2, 3)}

    def train() -> None:
        given.append(wait(("call", ((), ids))))
        seat._wait_for_client(lambda: True)

    seat = on_thread(folder, train)
    assert (seat.used, seat.waited, seat.priority, seat.size) == (0, 0, 0, None)
    assert (seat.tokens, seat.call) == (0, None)
    seat.resume()
    for grad, state in ((True, SeatState.TRAINS), (False, SeatState.ANSWERS)):
        seat._lane = Lane({}, {"grad": grad})
        assert seat.state is state
    assert seat.tokens == 6
    assert seat.call == ("call", (seat._lane, ((), ids)))
    seat.resume("result")
    assert given == ["result"]
    assert (seat.state, seat.tokens, seat.call) == (SeatState.WAITS, 0, None)
    assert seat.is_due()
    seat.resume()
    assert (seat.state, seat.is_due(), seat.call) == (SeatState.ENDED, False, None)
    seat._failed = True
    assert seat.state is SeatState.FAILED
    seat.drop()
    assert sorted(SeatState) == [0, 1, 2, 3, 4]


def test_a_seat_that_is_dropped_ends_where_it_waits(folder: RunDir) -> None:
    ended: list[str] = []

    def train() -> None:
        try:
            wait(("call", ((), {"input_ids": torch.zeros(1)})))
        except SeatDropped:
            ended.append("dropped")

    seat = on_thread(folder, train)
    seat.resume()
    seat.drop()
    assert (ended, seat.state, seat.call) == (["dropped"], SeatState.ENDED, None)


def test_a_request_to_stop_reaches_a_seat_that_has_begun_or_will(folder: RunDir) -> None:
    seat = on_thread(folder, lambda: None)
    seat.request_stop()
    assert seat._stops
    requested: list[bool] = []
    seat._stop = SimpleNamespace(request=lambda: requested.append(True))
    seat.request_stop()
    assert requested == [True]


@pytest.mark.parametrize(
    ("desired", "outcome", "reason"),
    [
        (None, None, ExitReason.WORKER_ERROR),
        (None, OutcomeKind.STOPPED, ExitReason.STOPPED),
        (Desired.PAUSE, OutcomeKind.STOPPED, ExitReason.STOPPED),
        (Desired.CANCEL, None, ExitReason.CANCELLED),
        (Desired.CANCEL, OutcomeKind.STOPPED, ExitReason.CANCELLED),
    ],
)
def test_the_record_of_a_seat_says_how_it_ended(
    folder: RunDir, desired: Desired | None, outcome: OutcomeKind | None, reason: ExitReason
) -> None:
    seat = on_thread(folder, lambda: None)
    attempt = Attempt(folder, 1)
    assert not seat.is_over()
    if desired is not None:
        attempt.write_control(Control(generation=2, desired=desired))
    if outcome is not None:
        attempt.write_outcome(Outcome(kind=outcome))
    assert seat.is_over() is (desired is Desired.CANCEL)
    seat.conclude()
    ended = attempt.read_exit()
    assert ended is not None
    assert ended.reason is reason
    assert seat.is_over()


def test_a_failure_that_the_disk_did_not_take_is_one_of_the_disk(folder: RunDir) -> None:
    seat = on_thread(folder, lambda: None)
    seat._room = "There is no room."
    seat.conclude()
    ended = Attempt(folder, 1).read_exit()
    assert ended is not None
    assert (ended.reason, ended.message) == (ExitReason.DISK_FULL, "There is no room.")


def test_what_ranks_tell_each_other_goes_through_their_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_gather(everyone: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        assert group == "of the engine"
        for rank, theirs in enumerate(everyone):
            theirs.copy_(mine + 10 * rank)

    sizes = {"of the engine": 3}
    monkeypatch.setattr(seat_thread.dist, "get_world_size", lambda group: sizes[group])
    monkeypatch.setattr(seat_thread.dist, "all_gather", all_gather)
    found = over_ranks([1, 2**40], "of the engine")  # type: ignore[arg-type]
    assert found == [[1, 2**40], [11, 2**40 + 10], [21, 2**40 + 20]]


def test_a_job_in_an_engine_has_whole_samples_and_its_other_choices(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "base"), 2, distributed={"context_parallel": 2})
    spec = spec.model_copy(update={"chosen": {CONTEXT: "why", "distributed.replicate": "other"}})
    whole = _with_whole_samples(spec)
    assert whole.distributed.context_parallel == 1
    assert whole.chosen == {"distributed.replicate": "other"}


@pytest.fixture
def folder(tmp_path: Any) -> RunDir:
    return RunDir(tmp_path)
