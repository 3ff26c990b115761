"""Saving a checkpoint: a snapshot, which is written while training continues.

One checkpoint is written at a time.

Writing runs in a thread of ours rather than in `dcp.async_save`: shards, hashes and the marker are
one piece of work whose outcome the ranks agree on, and all of it is off training's path. Its
collectives have a process group of their own.
"""

from __future__ import annotations

import copy
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from peft import PeftConfig

from ft_service.rundir.checkpoints import checkpoint_name, newest_step
from ft_service.rundir.events import Metrics
from ft_service.rundir.manifest import AdapterSource
from ft_service.rundir.model_card import describe_adapter
from workers.base.rank_objects import Wait
from workers.job.training_state import JobState
from workers.output import checkpoint
from workers.output.checkpoint import Snapshot, Stager
from workers.output.checkpoint_pruning import remove_others
from workers.output.outcome import gathered_adapter, versions, write_adapter
from workers.output.report import Reporter
from workers.ranks.runtime import CheckpointError, ExportError, Runtime, start_thread

WITH_ADAPTERS = "FT_CHECKPOINT_ADAPTERS"
"""Environment variable: not empty: every checkpoint holds its adapter in PEFT's layout too, for a
service without torch.
"""


class Saver:
    """Writer of one attempt's checkpoints. Its methods are called by all ranks together."""

    def __init__(
        self,
        runtime: Runtime,
        reporter: Reporter,
        config: PeftConfig | None = None,
        wait: Wait | None = None,
    ) -> None:
        """`config`: PEFT's, of the adapter in every checkpoint.

        None: checkpoints hold no adapter; it can be made from the shards later. `wait`: what the
        ranks do where they have to wait for a checkpoint; None: nothing.
        """
        self._config = config
        self._wait_meanwhile = wait
        self._runtime = runtime
        self._reporter = reporter
        self._stager = Stager()
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None

    def save(self, job: JobState, metrics: Metrics) -> None:
        """Begin a checkpoint of the job as it is now. `metrics`: of its last step.

        Waits for the previous checkpoint and for the copy. A checkpoint that cannot be written
        becomes a warning: the previous one stands, and training continues.
        """
        started = time.perf_counter()
        self._wait()
        snapshot = self._snapshot(job)
        if not self._runtime.spec.checkpoint.async_save:
            self._write_or_warn(snapshot, metrics, started, None)
            return
        stall = time.perf_counter() - started
        self._begin(partial(self._write_or_warn, snapshot, metrics, started, stall))

    def save_last(self, job: JobState, metrics: Metrics) -> str:
        """Write a checkpoint and return its name.

        Raises CheckpointError, on all ranks, if that fails.
        """
        started = time.perf_counter()
        self._wait()
        written: list[str] = []
        snapshot = self._snapshot(job)
        self._begin(lambda: written.append(self._write(snapshot, metrics, started, None)))
        try:
            self._wait()
            return written[0]
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._what_stands()}.") from error.__cause__

    def _snapshot(self, job: JobState) -> Snapshot:
        snapshot = self._stager.snapshot(job, self._runtime.spec)
        if self._config is None:
            return snapshot
        first = self._runtime.rank == 0
        # Copies: on one rank of processors a gathered matrix is the one that training continues
        # with.
        whole = {name: tensor.clone() for name, tensor in gathered_adapter(job) if first}
        return replace(snapshot, adapter=whole) if first else snapshot

    def _wait(self) -> None:
        """Wait for the checkpoint being written.

        Raises the error of its writing, on this rank alone.
        """
        thread = self._thread
        if thread is not None:
            if self._wait_meanwhile is not None:
                self._wait_meanwhile(lambda: not thread.is_alive())
            thread.join()
            self._thread = None
        if self._crash is not None:
            raise self._crash

    def _begin(self, write: Callable[[], object]) -> None:
        self._thread = start_thread("checkpoint", self._runtime.device, self._in_background, write)

    def _in_background(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # training's thread raises it
            self._crash = error

    def _write_or_warn(
        self, snapshot: Snapshot, metrics: Metrics, started: float, stall: float | None
    ) -> None:
        try:
            self._write(snapshot, metrics, started, stall)
        except CheckpointError as error:
            self._reporter.message(
                f"{error} {self._what_stands()}; training continues and tries again at the next "
                "one.",
                "warn",
            )

    def _what_stands(self) -> str:
        newest = newest_step(self._runtime.run)
        return f"The checkpoint of step {newest} stands" if newest >= 0 else "There is none yet"

    def _write(
        self, snapshot: Snapshot, metrics: Metrics, started: float, stall: float | None
    ) -> str:
        """Write a snapshot. `started`: when training stopped for it; `stall`: for how long, None:
        it still waits.
        """
        runtime = self._runtime
        config = self._config
        export: Callable[[Path], None] | None = (
            partial(self._export, snapshot, metrics, config) if config else None
        )
        attempt = runtime.start.attempt
        group = runtime.groups.save
        name = checkpoint.write(
            snapshot, runtime.run, attempt, group, self._before_complete, export
        )
        seconds = time.perf_counter() - started
        times = {
            "checkpoint_stall_seconds": seconds if stall is None else stall,
            "checkpoint_seconds": seconds,
        }
        self._reporter.checkpoint(name, metrics.model_copy(update=times))
        if runtime.rank == 0:
            remove_others(runtime.run, runtime.spec, runtime.fence)
        return name

    def _before_complete(self) -> None:
        # what was reported is safe before the steps that it is about cannot come again
        self._reporter.flush()
        self._runtime.fence.check()

    def _export(self, snapshot: Snapshot, metrics: Metrics, config: PeftConfig, out: Path) -> None:
        """Write the adapter of a checkpoint that is being written.

        Raises OSError, which ends the checkpoint.
        """
        tensors = snapshot.adapter
        spec = self._runtime.spec
        assert tensors is not None, "rank 0 has gathered them"
        attempt = self._runtime.start.attempt
        step = snapshot.position.step
        try:
            out.mkdir()
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            write_adapter(out, shapes, tensors.items(), copy.deepcopy(config), spec)
        except ExportError as error:
            raise OSError(errno.EIO, str(error), str(out)) from error
        describe_adapter(
            self._runtime.run,
            out,
            AdapterSource(
                attempt=attempt,
                step=step,
                checkpoint=checkpoint_name(step, attempt),
                metrics=metrics,
                versions=versions(),
            ),
        )
