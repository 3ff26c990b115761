"""The parts that one attempt's training shares, and the request to stop it after the same step on
all ranks.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from peft import PeftModel

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import Desired
from workers.base.rank_objects import Wait
from workers.data.micro_batches import MicroBatchLimits
from workers.output.report import Reporter
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import Gradients

POLL_SECONDS = 0.2
"""Seconds between two reads of the run directory by rank 0."""


class StopRequest:
    """A request to stop: by the user (`control.json`), by the supervisor (`stop.json`), or by a
    signal to any rank.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._signalled = False
        self._read_at = float("-inf")
        self._requested = False
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    @property
    def is_requested(self) -> bool:
        """Whether this rank was asked, or the run directory asks, which rank 0 reads."""
        return self._signalled or (self._runtime.rank == 0 and self._requested_by_file())

    def agreed(self) -> bool:
        """Return whether to stop now: the same on all ranks, which call this together after every
        step.

        Where steps are read late, this returns what was agreed on after the previous step: the
        hosts agree while the GPUs work.
        """
        requested = self.is_requested
        if self._runtime.groups.stop is None:
            return requested
        previous = self._pending
        self._pending = self._reduce(requested, self._runtime.groups.stop)
        reduced = previous if self._runtime.reads_late else self._pending
        if reduced is None:
            return False
        flag, work = reduced
        work.wait()
        return bool(flag.item())

    def agree(self, *, requested: bool) -> None:
        """Take what all ranks have asked each other meanwhile, who call this together."""
        self._signalled = self._signalled or requested

    @staticmethod
    def _reduce(requested: bool, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        flag = torch.tensor([requested], dtype=torch.uint8)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        return flag, work

    def request(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Request it on this rank; a signal handler too."""
        self._signalled = True

    def _requested_by_file(self) -> bool:
        if time.monotonic() - self._read_at >= POLL_SECONDS:
            self._read_at = time.monotonic()
            attempt = Attempt(self._runtime.run, self._runtime.start.attempt)
            # An error would end this rank alone, and the others wait for it. What cannot be read
            # now is read again; a document that never can be ends the attempt from outside
            # (supervisor, engine).
            with suppress(OSError, UnreadableDocumentError):
                control = attempt.read_control()
                stop = attempt.read_stop()
                self._requested = stop is not None or (
                    control is not None and control.desired is not Desired.RUN
                )
        return self._requested


@dataclass(frozen=True)
class TrainingContext:
    """What the parts of one attempt's training share."""

    runtime: Runtime
    model: PeftModel
    """Sharded and loaded."""
    limits: MicroBatchLimits
    reporter: Reporter
    stop: StopRequest
    gradients: Gradients
    wait: Wait | None = None
    """How the job waits without keeping others waiting; None: it has its ranks to itself."""
