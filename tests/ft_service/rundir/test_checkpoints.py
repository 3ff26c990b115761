from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.checkpoints import (
    complete_checkpoints,
    is_late,
    newest_step,
    set_damaged_aside,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, ExitReason, Start


@pytest.mark.parametrize(
    ("checkpoint", "begun", "late"),
    [
        ((5, 1), {}, False),
        ((5, 1), {2: (5, 1)}, False),
        ((4, 1), {2: (5, 1)}, False),
        ((6, 1), {2: (5, 1)}, True),
        ((6, 2), {2: (5, 1)}, False),
        ((1, 1), {2: (-1, 0)}, True),
        ((6, 1), {2: (6, 1), 3: (6, 1)}, False),
        ((7, 2), {2: (5, 1), 3: (7, 2)}, False),
        ((7, 2), {2: (5, 1), 3: (6, 2)}, True),
        ((6, 1), {3: (6, 2)}, False),
    ],
)
def test_a_checkpoint_that_was_not_there_when_a_later_attempt_began_is_late(
    checkpoint: tuple[int, int], begun: dict[int, tuple[int, int]], late: bool
) -> None:
    assert is_late(checkpoint, begun) is late


def begin(run: RunDir, attempt: int, checkpoint: str | None = None) -> Start:
    start = Start(
        job_id="ftjob-1", attempt=attempt, world_size=1, generation=1, checkpoint=checkpoint
    )
    run.write(f"attempts/{attempt}/start.json", start)
    return start


def complete(run: RunDir, step: int, attempt: int) -> None:
    marker = CheckpointMarker(step=step, attempt=attempt, world_size=1, files=[])
    run.write(f"checkpoints/step-{step}-a{attempt}/COMPLETE", marker)


def test_what_is_late_is_resumed_from_by_nobody(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    begin(run, 1)
    complete(run, 5, 1)
    run.write("attempts/2/exit.json", exit_of(ExitReason.CANCELLED, "before it began"))
    begin(run, 3, "step-5-a1")
    complete(run, 10, 1)
    assert complete_checkpoints(run) == ["step-5-a1"]
    assert newest_step(run) == 5
    complete(run, 7, 3)
    assert complete_checkpoints(run) == ["step-5-a1", "step-7-a3"]


def test_an_old_attempt_sets_nothing_of_a_later_one_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    complete(run, 5, 1)
    second = begin(run, 2, "step-5-a1")
    for step, attempt in ((8, 1), (9, 3)):
        run.put(f"checkpoints/step-{step}-a{attempt}/COMPLETE", b"torn")
    assert list(set_damaged_aside(run, second)) == ["step-8-a1"]
