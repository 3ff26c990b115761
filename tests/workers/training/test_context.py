"""When ranks stop: who was asked, how often the run directory is read, and what is agreed on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Stop
from workers.training import context
from workers.training.context import StopRequest


def request(run: RunDir, rank: int = 0, *, group: Any = None, late: bool = False) -> StopRequest:
    runtime: Any = SimpleNamespace(
        rank=rank,
        run=run,
        start=SimpleNamespace(attempt=2),
        groups=SimpleNamespace(stop=group),
        reads_late=late,
    )
    return StopRequest(runtime)


@pytest.mark.parametrize(
    ("rank", "attempt", "desired", "stop", "requested"),
    [
        (0, 2, Desired.PAUSE, False, True),
        (0, 2, Desired.CANCEL, False, True),
        (0, 2, Desired.RUN, False, False),
        (0, 2, Desired.RUN, True, True),
        (0, 2, None, True, True),
        (0, 2, None, False, False),
        (0, 1, Desired.PAUSE, True, False),
        (1, 2, Desired.PAUSE, True, False),
    ],
)
def test_rank_0_reads_what_the_run_directory_asks_of_its_attempt(
    rank: int, attempt: int, desired: Desired | None, stop: bool, requested: bool, tmp_path: Path
) -> None:
    own = Attempt(RunDir(tmp_path), attempt)
    if desired is not None:
        own.write_control(Control(generation=2, desired=desired))
    if stop:
        own.write_stop(Stop(reason="drain"))
    asked = request(RunDir(tmp_path), rank)
    assert asked.is_requested is asked.agreed() is requested
    asked.request()
    assert asked.is_requested is asked.agreed() is True


def test_the_run_directory_is_read_again_once_its_time_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [50.0]
    monkeypatch.setattr(context.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(context, "POLL_SECONDS", 0.25)
    asked = request(RunDir(tmp_path))
    assert not asked.is_requested
    own = Attempt(RunDir(tmp_path), 2)
    own.write_control(Control(generation=2, desired=Desired.PAUSE))
    now[0] = 50.125
    assert not asked.is_requested
    now[0] = 50.25
    assert asked.is_requested
    own.write_control(Control(generation=3, desired=Desired.RUN))
    now[0] += 0.25
    assert not asked.is_requested, "what was taken back"


@pytest.mark.parametrize(
    ("late", "agreed"), [(False, [False, True, True]), (True, [False, False, True])]
)
def test_ranks_agree_on_what_any_of_them_was_asked_after_this_step_or_the_last(
    late: bool, agreed: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []

    def reduce(flag: Any, op: Any, group: Any, async_op: bool) -> Any:
        assert (op, group, async_op) == (context.dist.ReduceOp.MAX, "hosts", True)
        return SimpleNamespace(wait=lambda: waited.append(flag.item()))

    monkeypatch.setattr(context.dist, "all_reduce", reduce)
    asked = request(RunDir(tmp_path), rank=1, group="hosts", late=late)
    found = [asked.agreed()]
    asked.agree(requested=True)
    asked.agree(requested=False)
    found += [asked.agreed(), asked.agreed()]
    assert (found, waited) == (agreed, [0, 1] if late else [0, 1, 1])
