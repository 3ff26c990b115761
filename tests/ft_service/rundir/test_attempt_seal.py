"""What seals an attempt, and what readers make of what a sealed one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExitReason, Start


def begin(run: RunDir, attempt: int, checkpoint: str | None = None) -> Start:
    start = Start(
        job_id="ftjob-1", attempt=attempt, world_size=1, generation=1, checkpoint=checkpoint
    )
    run.write(f"attempts/{attempt}/start.json", start)
    return start


@pytest.mark.parametrize(
    "seal", ["attempts/2/exit.json", "attempts/3/start.json", "attempts/3/exit.json"]
)
def test_an_attempt_is_sealed_by_its_end_and_by_what_comes_after_it(
    tmp_path: Path, seal: str
) -> None:
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
    with pytest.raises(SealedError, match=f"Attempt 2 is over \\({seal} exists\\)"):
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
    assert fence.seal(), "asked again"
    run.path("attempts/1/exit.json").unlink()
    assert fence.seal(), "what was sealed stays so"
