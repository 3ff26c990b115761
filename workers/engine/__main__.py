"""The main path of a rank of an engine: torchrun starts `python -m workers.engine ENGINE_DIR
ATTEMPT` once per rank.

ENGINE_DIR holds engine.json, and an order in `seats/` for each job that the engine trains
(ft_service/rundir/engine.py). What concerns a job is in the job's own run directory. Exit code 0:
the engine was idle, or was asked to stop; 1: an error.
"""

from __future__ import annotations

import sys

from ft_service.host.lifetime import hold_rank_lock
from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":
    hold_rank_lock(sys.argv[1])
    keep_torchao_out()
    begin_imports()
from ft_service.rundir.directory import RunDir
from workers.engine.engine import main
from workers.ranks.runtime import leave

if __name__ == "__main__":
    end_imports()
    leave(main(RunDir(sys.argv[1]), int(sys.argv[2])))
