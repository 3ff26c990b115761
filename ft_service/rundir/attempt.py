"""Keys and documents of one attempt, below `attempts/<n>/` of its run directory (directory.py lists
them with their writers).

Only this module spells such a key. An attempt on one node keeps everything in `attempts/<n>/`. Of
several nodes, each keeps its own files in `attempts/<n>/nodes/<k>/`; the documents that all ranks
share (start, control, stop, outcome, events) stay in `attempts/<n>/`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ft_service.host.processes import ProcessIdentity
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import (
    Control,
    Energy,
    ErrorInfo,
    Exit,
    ExitReason,
    GpuLoad,
    Launched,
    Outcome,
    OutcomeKind,
    Result,
    Start,
    Stop,
)
from ft_service.rundir.presence import Presence

ATTEMPTS = "attempts"
"""Folder of all attempts."""
RESULT = "result.json"
MOST_BYTES = 1024**2
"""Largest size of a document of an attempt: these are read often while it runs."""
_EXIT = "exit.json"
_LOCK = "supervisor.lock"
_SEGMENT = re.compile(ATTEMPTS + r"/\d+/events/\d+\.jsonl")


class NodeKeys:
    """Keys of the files of one node of an attempt."""

    def __init__(self, folder: str, logs: str) -> None:
        """`logs`: folder with the output of the node's processes."""
        self.folder = folder
        self.logs = logs
        self.supervisor = f"{folder}/supervisor.json"
        self.exit = f"{folder}/{_EXIT}"
        self.energy = f"{folder}/energy.json"
        self.lock = f"{folder}/{_LOCK}"
        self.rendezvous = f"{folder}/rendezvous"
        self.supervisor_log = f"{logs}/supervisor.log"


class AttemptKeys:
    """Keys of the files of one attempt, in any storage."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.folder = folder = f"{ATTEMPTS}/{number}"
        self.start = f"{folder}/start.json"
        self.control = f"{folder}/control.json"
        self.stop = f"{folder}/stop.json"
        self.presence = f"{folder}/presence.json"
        self.outcome = f"{folder}/outcome.json"
        self.exit = f"{folder}/{_EXIT}"
        self.launched = f"{folder}/launched.json"
        self.events = f"{folder}/events"
        self.logs = f"{folder}/logs"

    def segment(self, seq: int) -> str:
        """Return the key of an event segment (events.py). `seq`: from 0."""
        return f"{self.events}/{seq:08d}.jsonl"

    def node(self, index: int = 0, nodes: int = 1) -> NodeKeys:
        """Return the keys of node `index` (from 0) of `nodes`."""
        if nodes == 1:
            return NodeKeys(self.folder, self.logs)
        return NodeKeys(f"{self.folder}/nodes/{index}", f"{self.logs}/node-{index}")


def is_segment(key: str) -> bool:
    """Return whether it is the key of an event segment, of whichever attempt."""
    return _SEGMENT.fullmatch(key) is not None


class _ExitRecord:
    """Exit record of an attempt, or of one of its nodes."""

    def __init__(self, run: RunDir, exit_key: str) -> None:
        self.run = run
        self._exit_key = exit_key

    def read_exit(self) -> Exit | None:
        """Return the record; `unreadable_exit` for one that cannot be read; None: there is none."""
        try:
            return self.run.read(self._exit_key, Exit, MOST_BYTES)
        except UnreadableDocumentError as error:
            return unreadable_exit(error)

    def write_exit(self, ended: Exit) -> bool:
        return self.run.write_if_absent(self._exit_key, ended)

    def has_exit(self) -> bool:
        return self.run.has(self._exit_key)


class Attempt(_ExitRecord):
    """Documents of one attempt. Readers return None for a document that does not exist.

    Readers raise UnreadableDocumentError, except those of documents that say how the attempt ended:
    an unreadable one counts as an end of its own, so that every attempt has an end. A writer that
    returns bool writes only if the document does not exist; True means that this call wrote it.
    """

    def __init__(self, run: RunDir, number: int, *, job_id: str | None = None) -> None:
        """`number`: from 1. `job_id`: None: read from start.json."""
        self.keys = AttemptKeys(number)
        super().__init__(run, self.keys.exit)
        self.number = number
        self._job_id = job_id

    def __str__(self) -> str:
        return f"{self._job_id or self.run.root}, attempt {self.number}"

    @property
    def job_id(self) -> str:
        """Id of the job. Raises FileNotFoundError if it was not passed and there is no
        start.json.
        """
        if self._job_id is None:
            start = self.read_start()
            if start is None:
                raise FileNotFoundError(f"{self.run.root} holds no {self.keys.start}")
            self._job_id = start.job_id
        return self._job_id

    def node(self, index: int = 0, nodes: int = 1) -> AttemptNode:
        """Return the files of node `index` (from 0) of `nodes`."""
        return AttemptNode(self.run, self.keys.node(index, nodes))

    def read_start(self) -> Start | None:
        return self.run.read(self.keys.start, Start, MOST_BYTES)

    def readable_start(self) -> Start | None:
        """Read start.json; None also if it is unreadable."""
        return self.run.readable(self.keys.start, Start, MOST_BYTES)

    def has_start(self) -> bool:
        return self.run.has(self.keys.start)

    def write_start(self, start: Start) -> bool:
        return self.run.write_if_absent(self.keys.start, start)

    def settle_start(self, start: Start) -> None:
        """Write start.json, unless an equal one exists; its generation and checkpoint may differ.

        A different one, which a worker of an earlier attempt may have put there in advance, is
        replaced. Only for an attempt without running processes.
        """
        if self.write_start(start):
            return
        existing = self.readable_start()
        variable = {"generation": start.generation, "checkpoint": start.checkpoint}
        if existing is None or existing.model_copy(update=variable) != start:
            self.run.write(self.keys.start, start)

    def read_control(self) -> Control | None:
        return self.run.read(self.keys.control, Control, MOST_BYTES)

    def readable_control(self) -> Control | None:
        """Return the document; None also if it cannot be read."""
        return self.run.readable(self.keys.control, Control, MOST_BYTES)

    def write_control(self, control: Control) -> None:
        """Write control.json, replacing an earlier one."""
        self.run.write(self.keys.control, control)

    def read_stop(self) -> Stop | None:
        return self.run.read(self.keys.stop, Stop, MOST_BYTES)

    def write_stop(self, stop: Stop) -> bool:
        return self.run.write_if_absent(self.keys.stop, stop)

    def read_presence(self) -> Presence | None:
        return self.run.read(self.keys.presence, Presence, MOST_BYTES)

    def write_presence(self, presence: Presence) -> None:
        """Write presence.json, replacing an earlier one."""
        self.run.write(self.keys.presence, presence)

    def read_outcome(self) -> Outcome | None:
        """Read the ranks' outcome; an unreadable one counts as a failure whose error names the
        file.
        """
        try:
            return self.run.read(self.keys.outcome, Outcome, MOST_BYTES)
        except UnreadableDocumentError as error:
            return Outcome(kind=OutcomeKind.FAILED, error=_info(error))

    def write_outcome(self, outcome: Outcome) -> bool:
        return self.run.write_if_absent(self.keys.outcome, outcome)

    def has_outcome(self) -> bool:
        return self.run.has(self.keys.outcome)

    def read_node_exits(self, nodes: int) -> dict[int, Exit]:
        """Return the exit records that exist, by node. `nodes`: the attempt's number of nodes."""
        exits = {index: self.node(index, nodes).read_exit() for index in range(nodes)}
        return {index: ended for index, ended in exits.items() if ended is not None}

    def joules(self, nodes: int) -> float | None:
        """Energy that the attempt has taken so far, of all nodes that have measured it.

        None: none has. `nodes`: the attempt's number of nodes.
        """
        found = [self._energy(index, nodes) for index in range(nodes)]
        measured = [one.joules for one in found if one is not None]
        return sum(measured) if measured else None

    def gpu_loads(self, nodes: int) -> list[GpuLoad]:
        """What the GPUs of the attempt's first node did, oldest first.

        `nodes`: the attempt's number of nodes.
        """
        found = self._energy(0, nodes)
        return [] if found is None else found.loads

    def _energy(self, index: int, nodes: int) -> Energy | None:
        return self.run.readable(self.keys.node(index, nodes).energy, Energy, MOST_BYTES)

    def read_result(self) -> Result | None:
        """Read result.json if this attempt wrote it.

        None also if it is unreadable: then its attempt is unknown.
        """
        result = self.run.readable(RESULT, Result, MOST_BYTES)
        return result if result is not None and result.attempt == self.number else None

    def write_launched(self, launched: Launched) -> bool:
        return self.run.write_if_absent(self.keys.launched, launched)

    def read_launched(self) -> Launched | None:
        """Read launched.json; None also if it is unreadable."""
        return self.run.readable(self.keys.launched, Launched, MOST_BYTES)

    def has_launched(self) -> bool:
        return self.run.has(self.keys.launched)

    def has_segment(self, seq: int) -> bool:
        """Return whether an event segment exists, without reading it."""
        return self.run.has(self.keys.segment(seq))

    def locks(self) -> list[Path]:
        """Return the supervisors' locks of all nodes, as far as they are in the run directory."""
        return list(self.run.path(self.keys.folder).rglob(_LOCK))

    def find_logs(self) -> Path | None:
        """Return the folder of the logs if it is in the run directory itself (RunDir.plain)."""
        return self.run.plain(self.keys.logs)


class AttemptNode(_ExitRecord):
    """Files of one node of an attempt. Readers and writers behave as those of Attempt."""

    def __init__(self, run: RunDir, keys: NodeKeys) -> None:
        super().__init__(run, keys.exit)
        self.keys = keys

    def write_energy(self, energy: Energy) -> None:
        """Write energy.json, replacing an earlier one."""
        self.run.write(self.keys.energy, energy)

    @property
    def lock(self) -> Path:
        """Lock that the supervisor holds while it is alive."""
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
        """Folder for the rendezvous files of a single node's ranks."""
        return self.run.path(self.keys.rendezvous)

    def read_supervisor(self) -> ProcessIdentity | None:
        return self.run.read(self.keys.supervisor, ProcessIdentity, MOST_BYTES)

    def write_supervisor(self, supervisor: ProcessIdentity) -> bool:
        return self.run.write_if_absent(self.keys.supervisor, supervisor)

    def has_supervisor(self) -> bool:
        return self.run.has(self.keys.supervisor)


def unreadable_exit(error: UnreadableDocumentError) -> Exit:
    """Return the exit record of an attempt with an unreadable document: it is lost, and may be
    retried.
    """
    return Exit(code=1, reason=ExitReason.UNREADABLE, message=error.message, error=_info(error))


def _info(error: UnreadableDocumentError) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=error.message)


def last_attempt(run: RunDir) -> int:
    """Return the highest attempt number with a start.json; 0: none."""
    started = (key.split("/") for key in run.list(ATTEMPTS) if key.endswith("/start.json"))
    return max(
        (int(parts[1]) for parts in started if len(parts) == 3 and parts[1].isdigit()), default=0
    )
