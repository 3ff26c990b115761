"""One attempt of a job: keys and documents below `attempts/<n>/` of its run directory (directory.py says who writes which).

Nobody else puts such a key together. An attempt of one node keeps everything in `attempts/<n>/`. Each of several nodes keeps
what is its own in `attempts/<n>/nodes/<k>/`; what all ranks share (start, control, stop, outcome, events) stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ft_service.host.processes import ProcessIdentity
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import (
    Control,
    ErrorInfo,
    Exit,
    ExitReason,
    Launched,
    Outcome,
    OutcomeKind,
    Result,
    Start,
    Stop,
)

ATTEMPTS = "attempts"
"""Folder of all attempts."""
RESULT = "result.json"
MOST_BYTES = 1024**2
"""Of one document of an attempt: they are read again and again while it runs."""
_EXIT = "exit.json"
_LOCK = "supervisor.lock"


@dataclass(frozen=True)
class NodeKeys:
    """Keys of what one node of an attempt keeps for itself."""

    folder: str
    logs: str
    """Folder with the output of the node's processes."""

    @property
    def supervisor(self) -> str:
        return f"{self.folder}/supervisor.json"

    @property
    def exit(self) -> str:
        return f"{self.folder}/{_EXIT}"

    @property
    def lock(self) -> str:
        return f"{self.folder}/{_LOCK}"

    @property
    def rendezvous(self) -> str:
        """Folder for the files by which the ranks of one node meet."""
        return f"{self.folder}/rendezvous"

    @property
    def supervisor_log(self) -> str:
        return f"{self.logs}/supervisor.log"


@dataclass(frozen=True)
class AttemptKeys:
    """Keys of one attempt's files, in whichever storage its run directory is."""

    number: int

    @property
    def folder(self) -> str:
        return f"{ATTEMPTS}/{self.number}"

    @property
    def start(self) -> str:
        return f"{self.folder}/start.json"

    @property
    def control(self) -> str:
        return f"{self.folder}/control.json"

    @property
    def stop(self) -> str:
        return f"{self.folder}/stop.json"

    @property
    def outcome(self) -> str:
        return f"{self.folder}/outcome.json"

    @property
    def exit(self) -> str:
        return f"{self.folder}/{_EXIT}"

    @property
    def launched(self) -> str:
        return f"{self.folder}/launched.json"

    @property
    def events(self) -> str:
        """Folder of the event segments."""
        return f"{self.folder}/events"

    @property
    def logs(self) -> str:
        """Folder with the output of all nodes' processes."""
        return f"{self.folder}/logs"

    def segment(self, seq: int) -> str:
        """An event segment (events.py). `seq`: from 0."""
        return f"{self.events}/{seq:08d}.jsonl"

    def node(self, index: int = 0, nodes: int = 1) -> NodeKeys:
        """Node `index` (from 0) of `nodes`."""
        if nodes == 1:
            return NodeKeys(self.folder, self.logs)
        return NodeKeys(f"{self.folder}/nodes/{index}", f"{self.logs}/node-{index}")


class Attempt:
    """One attempt's documents. Readers return None for a document that is not there.

    Readers raise UnreadableDocumentError, but for those that tell how the attempt ended: of them an unreadable one is an end of
    its own, so that no attempt is without one. A writer that returns bool writes only if nothing is there, and True means that
    this call wrote it.
    """

    def __init__(self, run: RunDir, number: int, *, job_id: str | None = None) -> None:
        """`number`: from 1. `job_id`: the job's; None: it is in start.json."""
        self.run = run
        self.number = number
        self.keys = AttemptKeys(number)
        self._job_id = job_id

    def __str__(self) -> str:
        return f"{self._job_id or self.run.root}, attempt {self.number}"

    @property
    def job_id(self) -> str:
        """The job's id. Raises FileNotFoundError if this handle was not given it and there is no start.json."""
        if self._job_id is None:
            start = self.read_start()
            if start is None:
                raise FileNotFoundError(f"{self.run.root} holds no {self.keys.start}")
            self._job_id = start.job_id
        return self._job_id

    def node(self, index: int = 0, nodes: int = 1) -> AttemptNode:
        """Node `index` (from 0) of `nodes`."""
        return AttemptNode(self.run, self.keys.node(index, nodes))

    def read_start(self) -> Start | None:
        return self.run.read(self.keys.start, Start, MOST_BYTES)

    def readable_start(self) -> Start | None:
        """As `read_start`, but None too where it cannot be read."""
        return self.run.readable(self.keys.start, Start, MOST_BYTES)

    def has_start(self) -> bool:
        return self.run.has(self.keys.start)

    def write_start(self, start: Start) -> bool:
        return self.run.write_if_absent(self.keys.start, start)

    def settle_start(self, start: Start) -> None:
        """Write start.json, unless it is there and says the same, but for what may have changed since (generation, checkpoint).

        What somebody else has put there in advance, such as a worker of an earlier attempt, is replaced. Only for an attempt of
        which nothing runs.
        """
        if self.write_start(start):
            return
        there = self.readable_start()
        passing = {"generation": start.generation, "checkpoint": start.checkpoint}
        if there is None or there.model_copy(update=passing) != start:
            self.run.write(self.keys.start, start)

    def read_control(self) -> Control | None:
        return self.run.read(self.keys.control, Control, MOST_BYTES)

    def write_control(self, control: Control) -> None:
        """Write or replace."""
        self.run.write(self.keys.control, control)

    def read_stop(self) -> Stop | None:
        return self.run.read(self.keys.stop, Stop, MOST_BYTES)

    def write_stop(self, stop: Stop) -> bool:
        return self.run.write_if_absent(self.keys.stop, stop)

    def read_outcome(self) -> Outcome | None:
        """What the ranks say. Of an outcome that cannot be read: that they failed, by an error that names the file."""
        try:
            return self.run.read(self.keys.outcome, Outcome, MOST_BYTES)
        except UnreadableDocumentError as error:
            return Outcome(kind=OutcomeKind.FAILED, error=_info(error))

    def write_outcome(self, outcome: Outcome) -> bool:
        return self.run.write_if_absent(self.keys.outcome, outcome)

    def has_outcome(self) -> bool:
        return self.run.has(self.keys.outcome)

    def read_exit(self) -> Exit | None:
        """The exit record of the whole attempt; of one that cannot be read: `unreadable_exit`."""
        return _read_exit(self.run, self.keys.exit)

    def write_exit(self, ended: Exit) -> bool:
        return self.run.write_if_absent(self.keys.exit, ended)

    def has_exit(self) -> bool:
        return self.run.has(self.keys.exit)

    def read_node_exits(self, nodes: int) -> dict[int, Exit]:
        """The exit records that are there, by node. `nodes`: how many the attempt has."""
        exits = {index: self.node(index, nodes).read_exit() for index in range(nodes)}
        return {index: ended for index, ended in exits.items() if ended is not None}

    def read_result(self) -> Result | None:
        """result.json, if this attempt has written it. None too where it cannot be read: then nobody knows whose it is."""
        result = self.run.readable(RESULT, Result, MOST_BYTES)
        return result if result is not None and result.attempt == self.number else None

    def write_launched(self, launched: Launched) -> bool:
        return self.run.write_if_absent(self.keys.launched, launched)

    def has_launched(self) -> bool:
        return self.run.has(self.keys.launched)

    def has_segment(self, seq: int) -> bool:
        """Whether an event segment was written. Its contents are not fetched."""
        return self.run.has(self.keys.segment(seq))

    def locks(self) -> list[Path]:
        """The supervisors' locks of all nodes that lie in the run directory."""
        return list(self.run.path(self.keys.folder).rglob(_LOCK))

    def find_logs(self) -> Path | None:
        """Folder of the logs if it is in the run directory itself (RunDir.plain)."""
        return self.run.plain(self.keys.logs)


class AttemptNode:
    """What one node of an attempt keeps for itself. Readers and writers as those of Attempt."""

    def __init__(self, run: RunDir, keys: NodeKeys) -> None:
        self.run = run
        self.keys = keys

    @property
    def lock(self) -> Path:
        """Held by the supervisor as long as it lives."""
        return self.run.path(self.keys.lock)

    @property
    def logs(self) -> Path:
        """Folder with the output of the node's processes."""
        return self.run.path(self.keys.logs)

    @property
    def supervisor_log(self) -> Path:
        return self.run.path(self.keys.supervisor_log)

    @property
    def rendezvous(self) -> Path:
        """Folder for the files by which the ranks of one node meet."""
        return self.run.path(self.keys.rendezvous)

    def read_supervisor(self) -> ProcessIdentity | None:
        return self.run.read(self.keys.supervisor, ProcessIdentity, MOST_BYTES)

    def write_supervisor(self, supervisor: ProcessIdentity) -> bool:
        return self.run.write_if_absent(self.keys.supervisor, supervisor)

    def has_supervisor(self) -> bool:
        return self.run.has(self.keys.supervisor)

    def read_exit(self) -> Exit | None:
        """The node's exit record; of one that cannot be read: `unreadable_exit`."""
        return _read_exit(self.run, self.keys.exit)

    def write_exit(self, ended: Exit) -> bool:
        return self.run.write_if_absent(self.keys.exit, ended)

    def has_exit(self) -> bool:
        return self.run.has(self.keys.exit)


def unreadable_exit(error: UnreadableDocumentError) -> Exit:
    """The end of an attempt of which a document cannot be read: it is lost, and may be tried again."""
    return Exit(code=1, reason=ExitReason.UNREADABLE, message=error.message, error=_info(error))


def _read_exit(run: RunDir, key: str) -> Exit | None:
    try:
        return run.read(key, Exit, MOST_BYTES)
    except UnreadableDocumentError as error:
        return unreadable_exit(error)


def _info(error: UnreadableDocumentError) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=error.message)


def last_attempt(run: RunDir) -> int:
    """The highest attempt number that was started in this directory; 0: none."""
    started = (key.split("/") for key in run.list(ATTEMPTS) if key.endswith("/start.json"))
    return max((int(parts[1]) for parts in started if len(parts) == 3 and parts[1].isdigit()), default=0)
