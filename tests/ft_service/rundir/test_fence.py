"""What seals an attempt, and what readers make of what a sealed one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.rundir.checkpoints import came_late, complete_checkpoints, newest_step, set_damaged_aside
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, ExitReason, Start
from ft_service.rundir.fence import Fence, SealedError
from ft_service.supervisor.verdict import exit_of


def begin(run: RunDir, attempt: int, checkpoint: str | None = None) -> Start:
    start = Start(job_id="ftjob-1", attempt=attempt, world_size=1, generation=1, checkpoint=checkpoint)
    run.write(f"attempts/{attempt}/start.json", start)
    return start


def complete(run: RunDir, step: int, attempt: int) -> None:
    marker = CheckpointMarker(step=step, attempt=attempt, world_size=1, files=[])
    run.write(f"checkpoints/step-{step}-a{attempt}/COMPLETE", marker)


@pytest.mark.parametrize("seal", ["attempts/2/exit.json", "attempts/3/start.json", "attempts/3/exit.json"])
def test_an_attempt_is_sealed_by_its_end_and_by_what_comes_after_it(tmp_path: Path, seal: str) -> None:
    run = RunDir(tmp_path)
    begin(run, 1)
    begin(run, 2)
    run.write("attempts/1/exit.json", exit_of(ExitReason.STOPPED, "s"))
    run.write("attempts/2/nodes/0/exit.json", exit_of(ExitReason.WORKER_KILLED, "k"))
    fence = Fence(run, 2)
    fence.check()
    run.put(seal, b"{}")
    assert Fence(run, 1).seal() == "attempts/1/exit.json"
    assert fence.seal() == seal
    with pytest.raises(SealedError, match=f"Attempt 2 is over \\({seal} is there\\)"):
        fence.check()


class Counting(RunDir):
    looks = 0

    def has(self, key: str) -> bool:
        self.looks += 1
        return super().has(key)


def test_a_look_is_good_for_a_while_and_a_seal_for_ever(tmp_path: Path) -> None:
    run = Counting(tmp_path)
    fence = Fence(run, 1)
    for _ in range(100):
        fence.check(max_age=3600)
    assert run.looks == 3, "one look, of three documents"
    run.put("attempts/1/exit.json", b"{}")
    fence.check(max_age=3600)
    assert fence.seal(), "asked anew"
    run.path("attempts/1/exit.json").unlink()
    assert fence.seal(), "what was sealed stays so"


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
def test_a_checkpoint_that_was_not_there_when_a_later_attempt_began_came_late(
    checkpoint: tuple[int, int], begun: dict[int, tuple[int, int]], late: bool
) -> None:
    assert came_late(checkpoint, begun) is late


def test_what_came_late_is_resumed_from_by_nobody(tmp_path: Path) -> None:
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
