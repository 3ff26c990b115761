"""The only rank of an engine, or of a job alone, in which one job kills its process:
`poisoned_rank.py JOB RUN_DIR ATTEMPT`.
"""

from __future__ import annotations

import os
import resource
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
os.environ["FT_INIT_METHOD"] = f"file://{sys.argv[2]}/meeting-{os.getpid()}"

from ft_service.host.lifetime import hold_rank_lock
from ft_service.rundir.directory import RunDir
from ft_service.rundir.engine import ENGINE
from workers import train
from workers.engine import engine
from workers.ranks.runtime import leave
from workers.training.loop import DeviceEvent, StepBegun, Trainer

STEP = 2
"""Steps that the job makes each time before it kills its rank."""


def main(poison: str, run: RunDir, attempt: int) -> int:
    hold_rank_lock(run.root)
    begin = Trainer._begin

    def begin_or_die(self: Trainer, began: DeviceEvent) -> StepBegun:
        if self.runtime.spec.job_id == poison and self.job.step >= STEP:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        return begin(self, began)

    Trainer._begin = begin_or_die
    return (engine.main if run.has(ENGINE) else train.main)(run, attempt)


if __name__ == "__main__":
    leave(main(sys.argv[1], RunDir(sys.argv[2]), int(sys.argv[3])))
