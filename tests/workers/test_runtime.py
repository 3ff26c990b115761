"""How a rank reports what stopped it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ft_service.rundir import Outcome, RunDir
from tests.ranks import run_on_ranks
from workers.runtime import report_failure

OUTCOME = "attempts/1/outcome.json"


def all_reduce_without_rank_1(rank: int, world: int, root: str) -> None:
    run = RunDir(root)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        deadline = time.monotonic() + 60
        while run.read(OUTCOME, Outcome) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        report_failure(run, 1, error)


def test_a_stuck_collective_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    run_on_ranks(all_reduce_without_rank_1, 2, str(tmp_path))
    outcome = RunDir(tmp_path).read(OUTCOME, Outcome)
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.permanent, outcome.error.code) == (False, "collective_timeout")
    assert "A rank is stuck" in outcome.error.message
    assert "all_reduce" in (outcome.error.traceback or "")
