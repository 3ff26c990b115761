"""Parent process of torchrun: runs one attempt, once, and writes its exit record.

    python -m ft_service.supervisor RUN_DIR ATTEMPT

It holds `supervisor.lock` while it is alive and writes its identity to `supervisor.json`; a second
supervisor that finds either taken does nothing. It starts torchrun once no rank of an earlier
attempt is alive. It kills torchrun when the user cancels (`control.json`), when a stop takes longer
than the grace, or when the attempt is sealed (attempt_seal.py). It writes `exit.json` last, when
the last rank is gone. SIGTERM and SIGINT ask the ranks to write a checkpoint and exit
(`stop.json`). Its exit code is that of the exit record. Nothing here imports torch.

An attempt on several nodes has a supervisor on each (`--node-rank`), as PID 1 of a pod or below `ft
run`. Each writes the exit record of its node; `attempt_outcome.conclude` makes the attempt's own
from them.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ft_service.host import disk, hardware, processes
from ft_service.host.lifetime import (
    die_with_parent,
    is_locked,
    require_linux,
    try_lock,
    wait_unlocked,
)
from ft_service.rundir.attempt import RESULT, Attempt, AttemptNode, unreadable_exit
from ft_service.rundir.attempt_outcome import (
    AttemptRecords,
    Evidence,
    Forced,
    Starved,
    conclude,
    decide_exit,
    exit_of,
    find_failed_rank,
    without_room,
)
from ft_service.rundir.attempt_seal import SEAL_SECONDS, Fence
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import (
    Desired,
    ErrorInfo,
    Exit,
    ExitReason,
    OutcomeKind,
    Result,
    Start,
    Stop,
)
from ft_service.rundir.failure_origin import nccl_gave_up
from ft_service.supervisor import command_line, torchrun
from ft_service.supervisor.energy_meter import EnergyMeter, counter_of
from ft_service.supervisor.object_mirror import Mirror
from ft_service.supervisor.torchrun import Node
from ft_service.wording import counted

log = logging.getLogger(__name__)

CONTROL_POLL_SECONDS = 0.2
EARLIER_RANKS_SECONDS = 60.0
"""Time that ranks of an earlier attempt have to die; then this attempt fails."""
LEFTOVER_LOG_SECONDS = 60.0
LINGER_SECONDS = 10.0
"""Time for which torchrun may stay after its ranks have written the outcome and ended.

Without a network to the other nodes it would wait for them for minutes.
"""
ROOM_POLL_SECONDS = 1.0
"""Pause between attempts to write a record on a full disk."""
_NO_ROOM = ("No space left on device", "Disk quota exceeded")
LOG_FORMAT = "%(asctime)s %(name)s %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.parse(arguments)
    require_linux()
    if options.parent is not None:
        die_with_parent(options.parent, signal.SIGTERM)
    if options.detach and os.fork():
        return 0
    if options.detach:
        os.setsid()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    run = RunDir(options.run_dir)
    node = Node(
        options.node_rank, options.rdzv_endpoint, options.address, options.scratch, options.conclude
    )
    mirror = (
        Mirror(options.mirror, run, options.attempt, options.node_rank) if options.mirror else None
    )
    supervisor = Supervisor(
        run, options.attempt, options.grace, options.command, node=node, mirror=mirror
    )
    signal.signal(signal.SIGTERM, supervisor.ask_to_stop)
    signal.signal(signal.SIGINT, supervisor.ask_to_stop)
    return supervisor.run(options.lock_fd)


class Supervisor:
    """One attempt of a run directory that holds its `start.json`; on several nodes, this node's
    share of it.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        grace_seconds: float,
        command: Sequence[str] | None = None,
        *,
        node: Node | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`command`: what to run instead of torchrun with our workers; RUN_DIR and ATTEMPT are
        appended. `mirror`: keeps the run directory in sync with object storage; None: the run
        directory itself is shared.
        """
        self.run_dir = run
        self.attempt = attempt
        self.documents = Attempt(run, attempt)
        self.grace_seconds = grace_seconds
        self.command = command
        self.node = node or Node()
        self.mirror = mirror
        self.fence = Fence(run, attempt)
        self.stop_signal: int | None = None
        self.forced: Forced | None = None
        self.unreadable: UnreadableDocumentError | None = None
        """Error of a document that the attempt needs."""
        self._reserve: disk.UnnamedReserve | None = None
        self._deadline: float | None = None
        self._ranks_gone_since: float | None = None
        self._memory_kills = hardware.memory_kills()

    def ask_to_stop(self, number: int, frame: object) -> None:
        """Handle a signal: the main loop sees it at its next turn."""
        self.stop_signal = number

    def run(self, lock: int | None = None) -> int:
        """Run the attempt unless it was run before, and return its exit code.

        `lock`: descriptor of the lock if it is already held.

        Raises MirrorError if object storage cannot be read.
        """
        if self.mirror is not None:
            self.mirror.fetch()
        try:
            start = self.documents.read_start()
            unreadable = None
        except UnreadableDocumentError as error:
            start = None
            unreadable = error
        begun = start or Start(
            job_id="", attempt=self.attempt, world_size=1, generation=0, checkpoint=None
        )
        held = lock if lock is not None else try_lock(self.node.lock(self.run_dir, begun))
        if held is None:
            log.info("attempt %d is held by another supervisor; nothing to do", self.attempt)
            return 1
        own = self.node.files(self.run_dir, begun)
        recorded = own.read_exit()
        if recorded is not None:
            log.info("attempt %d has already ended; nothing to do", self.attempt)
            return recorded.code
        if not own.write_supervisor(processes.of(os.getpid())):
            log.info(
                "attempt %d was already run, and its supervisor left no exit record; nothing to do",
                self.attempt,
            )
            return 1
        self._reserve = disk.UnnamedReserve(self.run_dir.path(own.keys.folder))
        return self._end(
            begun, unreadable_exit(unreadable) if unreadable is not None else self._ended(start)
        )

    def _ended(self, start: Start | None) -> Exit:
        if start is None:
            return exit_of(ExitReason.PERMANENT_ERROR, f"{self.documents.keys.start} is missing.")
        try:
            return self._attempt(start)
        except UnreadableDocumentError as error:
            return unreadable_exit(error)

    def _end(self, start: Start, ended: Exit) -> int:
        ended = self._write_exit(self.node.files(self.run_dir, start), ended)
        if start.nodes > 1 and self.node.concludes:
            ended = self._write_exit(self.documents, self._conclude(start))
        if self.mirror is not None:
            self.mirror.finish()
        log.info("attempt %d ended: %s (%s)", self.attempt, ended.reason, ended.message)
        return ended.code

    def _write_exit(self, place: Attempt | AttemptNode, ended: Exit) -> Exit:
        """Write an exit record, waiting for room on a full disk, and return what was written.

        The wait ends once the user cancels, or once the host has asked for a stop and the grace is
        over.
        """
        deadline: float | None = None
        if self._reserve is not None:
            self._reserve.free()
        while True:
            try:
                place.write_exit(ended)
                return ended
            except OSError as error:
                if not disk.is_no_room(error):
                    raise
                if not self.documents.has_outcome():
                    ended = without_room(ended, disk.no_room(self.run_dir.root, error))
                if deadline is None:
                    log.error("attempt %d: its exit record waits for room: %s", self.attempt, error)
            if self.stop_signal is not None and deadline is None:
                deadline = time.monotonic() + self.grace_seconds
            if self._is_cancelled() or (deadline is not None and time.monotonic() >= deadline):
                log.error(
                    "attempt %d: its exit record found no room: %s", self.attempt, ended.message
                )
                return ended
            time.sleep(ROOM_POLL_SECONDS)

    def _is_cancelled(self) -> bool:
        try:
            return self._desired() is Desired.CANCEL
        except UnreadableDocumentError:
            return False

    def _conclude(self, start: Start) -> Exit:
        """Return the attempt's exit record, once the other nodes have written theirs or the grace
        is over.
        """
        deadline = time.monotonic() + self.grace_seconds
        while (
            len(exits := self.documents.read_node_exits(start.nodes)) < start.nodes
            and time.monotonic() < deadline
        ):
            time.sleep(CONTROL_POLL_SECONDS)
        return conclude(
            AttemptRecords(
                start.nodes, exits, self.documents.read_outcome(), self.documents.read_result()
            )
        )

    def _attempt(self, start: Start) -> Exit:
        if start.nodes > 1 and not self.node.endpoint:
            return exit_of(
                ExitReason.PERMANENT_ERROR,
                f"The job runs on {start.nodes} nodes: each needs --node-rank and --rdzv-endpoint.",
            )
        if not wait_unlocked(self.node.ranks_lock(self.run_dir, start), EARLIER_RANKS_SECONDS):
            waited = f"{EARLIER_RANKS_SECONDS:g} seconds"
            return _unstarted(f"Processes of an earlier attempt are still alive after {waited}.")
        # One that cannot be read is replaced by this attempt's.
        result = self.run_dir.readable(RESULT, Result)
        if result is not None:
            return exit_of(
                ExitReason.SUCCEEDED, f"Training had finished in attempt {result.attempt} already."
            )
        if self._desired() is Desired.CANCEL:
            return exit_of(ExitReason.CANCELLED, "The attempt was cancelled before it started.")
        if (seal := self.fence.seal()) is not None:
            return exit_of(
                ExitReason.WORKER_KILLED,
                f"The attempt was over ({seal} is there) before it started here.",
            )
        if self.stop_signal is not None:
            return exit_of(ExitReason.STOPPED, "The attempt was stopped before it started.")
        try:
            process = self._spawn(start)
        except OSError as error:
            unstarted = _unstarted(f"torchrun could not be started: {error}.")
            return (
                without_room(unstarted, disk.no_room(self.run_dir.root, error))
                if disk.is_no_room(error)
                else unstarted
            )
        if self.mirror is not None:
            self.mirror.follow()
        # After the fork, which must not copy a thread.
        meter = EnergyMeter(
            self.node.files(self.run_dir, start),
            counter_of(torchrun.devices(start), process.pid),
        )
        self._watch(process, start)
        meter.close()
        self._wait_for_ranks(self.node.ranks_lock(self.run_dir, start))
        return self._judge(start, process.returncode)

    def _spawn(self, start: Start) -> subprocess.Popen[bytes]:
        logs = self.node.files(self.run_dir, start).logs
        logs.mkdir(parents=True, exist_ok=True)
        command = (
            list(self.command) if self.command else torchrun.command(start, self.run_dir, self.node)
        )
        supervisor = os.getpid()
        with (logs / torchrun.LOG).open("wb") as output:
            process = subprocess.Popen(
                [*command, str(self.run_dir.root), str(self.attempt)],
                cwd=self.run_dir.root,
                env=torchrun.environment(os.environ, start, self.run_dir, self.node),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # This process has one thread, so that running Python between fork and exec is safe.
                preexec_fn=lambda: _become_child(supervisor),
            )
        log.info(
            "attempt %d: %s below process %d",
            self.attempt,
            counted(start.world_size // start.nodes, "rank"),
            process.pid,
        )
        return process

    def _watch(self, process: subprocess.Popen[bytes], start: Start) -> None:
        """Apply what the user and the host ask for, until torchrun has ended."""
        handle = os.pidfd_open(process.pid)
        try:
            while not processes.has_ended(handle, CONTROL_POLL_SECONDS):
                self._enforce(process)
                self._release(process, start)
                if self.mirror is not None:
                    self.mirror.tend()
        finally:
            os.close(handle)
        process.wait()

    def _enforce(self, process: subprocess.Popen[bytes]) -> None:
        try:
            desired = self._desired()
        except UnreadableDocumentError as error:
            self.unreadable = error
            self._kill(process, "unreadable")
            return
        if desired is Desired.CANCEL:
            self._kill(process, "cancelled")
            return
        if self.fence.seal(SEAL_SECONDS) is not None:
            self._kill(process, "sealed")
            return
        if self.stop_signal is not None:
            name = signal.Signals(self.stop_signal).name
            try:
                self.documents.write_stop(Stop(reason=f"the supervisor got {name}"))
            except OSError as error:  # tried again at the next turn
                if not disk.is_no_room(error):
                    raise
        if desired is Desired.RUN and self.stop_signal is None:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = time.monotonic() + self.grace_seconds
        elif time.monotonic() >= self._deadline:
            self._kill(process, "stop_timeout")

    def _release(self, process: subprocess.Popen[bytes], start: Start) -> None:
        """End a torchrun whose ranks have written the outcome and ended."""
        reported = self.documents.has_outcome() or self.documents.read_result() is not None
        if not reported or is_locked(self.node.ranks_lock(self.run_dir, start)):
            self._ranks_gone_since = None
        elif self._ranks_gone_since is None:
            self._ranks_gone_since = time.monotonic()
        elif time.monotonic() >= self._ranks_gone_since + LINGER_SECONDS:
            log.info(
                "attempt %d: its ranks have ended and torchrun still waits; killing it",
                self.attempt,
            )
            os.killpg(process.pid, signal.SIGKILL)

    def _kill(self, process: subprocess.Popen[bytes], why: Forced) -> None:
        """Kill torchrun and its session; the ranks have sessions of their own and follow by their
        parent-death signal.
        """
        if self.forced is None:
            log.info("attempt %d: killing process group %d (%s)", self.attempt, process.pid, why)
            self.forced = why
        os.killpg(process.pid, signal.SIGKILL)

    def _wait_for_ranks(self, lock: Path) -> None:
        """Wait for the last rank, however long it takes: the attempt has not ended before, and no
        other may start.
        """
        while not wait_unlocked(lock, LEFTOVER_LOG_SECONDS):
            log.warning("attempt %d: torchrun is gone and a rank is still alive", self.attempt)

    def _judge(self, start: Start, returncode: int) -> Exit:
        if (
            self.forced is None and self.fence.seal() is not None
        ):  # the ranks have seen it themselves
            self.forced = "sealed"
        logs = self.node.files(self.run_dir, start).logs
        first_rank = self.node.index * (start.world_size // start.nodes)
        failed = find_failed_rank(torchrun.tail(logs / torchrun.LOG, 400), first_rank)
        guilty = failed.local if failed else None
        return decide_exit(
            Evidence(
                outcome=self.documents.read_outcome(),
                result=self.documents.read_result(),
                returncode=returncode,
                unreadable=self.unreadable or self._unreadable_result(),
                room=self._room(torchrun.guilty_tail(logs, guilty)),
                nodes=start.nodes,
                node=self.node.index,
                forced=self.forced,
                failed_rank=failed,
                log_tail=torchrun.guilty_tail(logs, guilty),
                starved=self._starved(start),
                nccl_gave_up=nccl_gave_up(
                    torchrun.guilty_tail(logs, guilty, torchrun.SEARCHED_LINES)
                ),
            )
        )

    def _starved(self, start: Start) -> Starved | None:
        """Return what this node's ranks took of the memory, if the kernel has killed a process for
        want of it meanwhile.
        """
        if hardware.memory_kills() <= self._memory_kills:
            return None
        # Of torchrun and its ranks.
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        limit = hardware.memory_bytes(hardware.own_group())
        return Starved(min(limit, largest * start.world_size // start.nodes), limit)

    def _room(self, log_tail: str) -> str | None:
        """Return the sentence for the user if a rank reports a full disk or hardly anything is
        free; None: the disk has room."""
        reported = any(words in log_tail for words in _NO_ROOM)
        if not reported and disk.free_bytes(self.run_dir.root) >= disk.LEAST_BYTES:
            return None
        return disk.no_room(self.run_dir.root)

    def _unreadable_result(self) -> UnreadableDocumentError | None:
        """Return the error of reading a result that the ranks report; None: it can be read, or they
        report none.
        """
        outcome = self.documents.read_outcome()
        if outcome is None or outcome.kind is not OutcomeKind.SUCCEEDED:
            return None
        try:
            self.run_dir.read(RESULT, Result)
        except UnreadableDocumentError as error:
            return error
        return None

    def _desired(self) -> Desired:
        control = self.documents.read_control()
        return control.desired if control else Desired.RUN


def _unstarted(message: str) -> Exit:
    return exit_of(
        ExitReason.LAUNCH_FAILED,
        message,
        ErrorInfo(code=ExitReason.LAUNCH_FAILED.value, message=message),
    )


def _become_child(supervisor: int) -> None:
    """Tie torchrun to the supervisor, and ignore SIGTERM, which Slurm sends to all processes of a
    step: torchrun must stay alive while its ranks write a checkpoint.
    """
    die_with_parent(supervisor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
