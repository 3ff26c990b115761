"""The entry of a rank: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` once per rank.

All its input and output is in the run directory. Exit code 0: the attempt ended as `outcome.json`
says; 1: an error, which is there as well.
"""

from __future__ import annotations

import signal
import sys

from ft_service.host.lifetime import hold_rank_lock
from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":
    hold_rank_lock(sys.argv[1])
    keep_torchao_out()
    begin_imports()
import torch.distributed as dist

from ft_service.rundir.attempt_seal import Fence
from ft_service.rundir.directory import RunDir
from workers.attempt.attempt import run_attempt
from workers.attempt.prepared_model import prepare_alone
from workers.ranks.runtime import enter, leave, read_spec, report_failure, surroundings, watch_seal
from workers.training.context import StopRequest


def main(run: RunDir, attempt: int) -> int:
    """Run one attempt on this rank and return the process's exit code."""
    try:
        fence = Fence(run, attempt)
        watch_seal(fence)  # first: a rank may wait for the others for ever
        runtime = surroundings(run, attempt, enter(read_spec(run)), fence)
        stop = StopRequest(runtime)
        signal.signal(signal.SIGTERM, stop.request)
        run_attempt(runtime, stop, prepare_alone)
        dist.barrier()
    except BaseException as error:  # every error is reported to the user
        report_failure(run, attempt, error)
        return 1
    return 0


if __name__ == "__main__":
    end_imports()
    leave(main(RunDir(sys.argv[1]), int(sys.argv[2])))
