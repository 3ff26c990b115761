"""The preview on this host: a process of its own that answers chat completions, started by the
first one.

    route ──submit──▶ Preview ──lines of JSON──▶ python -m workers.serving      (a thread reads the
    answers: preview_process.py)

It holds one base in one storage format, with any number of adapters, and a slot of this host that
no job holds. Training has priority: when a job starts on that slot, the process has LEAVE_SECONDS
to finish its answers and is then ended. It also ends when it is idle for a while, and with the
server. For another base or other formats the same process loads that instead, since to start a
process takes longer than to load a base. Bases that are waited for have turns, by project
(base_turns.py): answers that are not whole when theirs is over go on in the next one.

A process that is killed from outside is started again after growing pauses. One that ends by itself
did so by what it was answering: what was under way then is asked apart from all else, and refused
if it ends the next one (shared_work/suspects.py).

While training has every slot, a client may ask for an answer on the CPU: by a process of the lowest
priority that takes at most half of the free memory for its base, and half of the rest for answers,
is killed first when memory runs out, and ends after a minute without a request or as soon as a slot
is free.

When a job succeeds while models are being tried, its model is loaded in advance. As on an inference
server, the trainer's log-probabilities prove that the tuned model answers (served_verdict.py); an
event tells the job's user once.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_service.bases.cache_folder import FOLDER, folder_of
from ft_service.bases.safetensors_folder import read_tensors
from ft_service.data.tokens.image_fetch import ALLOW_PRIVATE
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.hardware import (
    available_memory,
    core_count,
    default_slots,
    gpu_count,
    visibility_variable,
    visible_gpus,
)
from ft_service.host.helper_process import HelperFailed
from ft_service.jobs.states import Job
from ft_service.launcher.local_launcher import host_id
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Probe
from ft_service.serving.base_turns import BaseTurns, is_over
from ft_service.serving.preview_process import (
    RETRY_SECONDS,
    Deliver,
    LoadedBase,
    PreviewProcess,
    ProjectFullError,
    Ticket,
    as_part,
    stepped_aside,
)
from ft_service.serving.served_verdict import Verdict, judge, read_probes, report
from ft_service.settings import Settings
from ft_service.shared_work.losses import Losses
from ft_service.shared_work.suspects import BESIDE, Suspects
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.wording import bytes_text

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "workers.serving")
LEAVE_SECONDS = 1.0
"""Time for a process to finish its answers when a job needs its slot."""
BUSY_SECONDS = 30.0
"""How long a request waits for a base while another one is being asked."""
REST_SECONDS = 60.0
"""Idle time of a base after which the model of a succeeded job is loaded in its place."""
MOST_REQUESTS = 256
"""Limit of requests at once, waiting ones included; beyond it, a project that has less than its
share may still ask.
"""
MOST_OF_PROJECT = 64
"""Limit of one project's requests at once."""
POLL_SECONDS = 0.1
PAUSE_SECONDS = 0.5
LONGEST_PAUSE = 60.0
"""Pauses before the process is started again that was killed: twice as long each time, until it has
answered.
"""
LOOK_SECONDS = 2.0
"""Interval at which a process on the CPU looks for a free slot."""
PAUSED = "process"
"""Name of what waits after the process was killed."""
PREVIEWED = "previewed.json"
"""Document in the run directory with the verdict on the preview's answers that the job's user was
told (served_verdict.py).
"""


@dataclass(frozen=True)
class PreviewModel:
    """A base, and the job whose adapter answers."""

    path: str
    """Folder of the base."""
    precision: Mapping[str, Any] | None = None
    """Formats that the adapter was trained on; None: any."""
    job: Job | None = None
    """The job whose outcome the adapter is, if any."""
    name: str = ""
    """Name of the base, by which an inference server knows it."""


class Preview:
    """The preview, with at most one process.

    Any thread may submit, cancel and call `release_slots`; `run` belongs to a thread of its own,
    and ends the process when it ends.
    """

    def __init__(self, settings: Settings, store: Store, command: Sequence[str] = WORKER) -> None:
        """`command`: of the process."""
        self._settings = settings
        self._store = store
        self._command = command
        self._places = Places.of(settings)
        self._slots = settings.slots or default_slots()
        self._host, self._gpu = host_id(), gpu_count() > 0
        self._guard = threading.Lock()
        self._changed = threading.Event()
        self._waiting: list[Ticket] = []
        self._turns = BaseTurns[LoadedBase]()
        self._suspects, self._losses = (
            Suspects(),
            Losses("the preview's process", first=PAUSE_SECONDS, longest=LONGEST_PAUSE),
        )
        self._process: PreviewProcess | None = None
        self._expected: Job | None = None
        """The newest succeeded job, whose model is to be loaded in advance."""
        self._proved: set[str] = set()
        """Jobs whose answers are proved."""
        self._used_at: float | None = None
        """Last use of the ended process; None: there was none."""
        self._looked_at = 0.0
        """Last time that a process on the CPU looked for a free slot."""
        self._closed = False

    # For requests

    def submit(
        self,
        model: PreviewModel,
        order: dict[str, Any],
        deliver: Deliver,
        *,
        project_id: str = "",
        on_processor: bool = False,
    ) -> Ticket:
        """Request an answer, whose parts are delivered.

        Raises UnavailableError while training has the slots, or with too many requests;
        ProjectFullError if only the project has too many; SpecError for a request that has ended
        the process.

        `project_id`: of the client. `on_processor`: answer on the CPU while training has the slots.
        """
        path = model.path
        precision = model.precision
        job = model.job
        served = None if precision is None else LoadedBase.of(path, precision, gpu=self._gpu)
        order = order if job is None else {**order, "probes": self._unproved(job)}
        ticket = Ticket(served, path, order, deliver, job, project_id, on_processor)
        if self._suspects:
            self._suspect(ticket)
        with self._guard:
            if self._closed:
                raise stepped_aside("The service is ending.")
            process = self._process
            if process is not None and process.leaving:
                raise stepped_aside("The preview has made way for a training job.")
            tickets = Counter(
                other.project_id
                for other in (*self._waiting, *(process.tickets.values() if process else ()))
            )
            if tickets[project_id] >= MOST_OF_PROJECT:
                raise stepped_aside(
                    f"{MOST_OF_PROJECT} requests of this project are under way.", ProjectFullError
                )
            share = max(1, MOST_REQUESTS // len({*tickets, project_id}))
            if tickets.total() >= MOST_REQUESTS and tickets[project_id] >= share:
                raise stepped_aside(f"{MOST_REQUESTS} requests are under way.")
            if (
                process is not None
                and process.fits(ticket)
                and self._may_join(process, time.monotonic())
            ):
                process.ask(ticket)
            else:
                self._waiting.append(ticket)
        self._changed.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose client has gone."""
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif self._process is not None:
                self._process.drop(ticket)

    # For the reconciler

    def release_slots(self, slots: Collection[int]) -> bool:
        """Return whether the slots, which a job needs, are free.

        If not, the process begins to leave them: ask again.
        """
        with self._guard:
            process = self._process
            if process is None:
                return True
            if process.slot not in slots:
                process.reduce_threads()
                return True
            if process.leaving is None:
                process.leaving = time.monotonic() + LEAVE_SECONDS
        self._changed.set()
        return False

    def preload(self, job: Job) -> None:
        """Load the model of a succeeded job in advance, if models are being tried here and no other
        request is delayed by it."""
        with self._guard:
            self._expected = job
        self._changed.set()

    # For its own thread

    def run(self, stop: threading.Event) -> None:
        """Start and end processes as they are needed, until `stop` is set."""
        try:
            while not stop.is_set():
                try:
                    self._look()
                except (
                    Exception
                ):  # an unreadable disk, a failed start: the next attempt may succeed
                    log.exception("the preview cannot do what it is asked")
                    self._expected = None
                    self._refuse(
                        list(self._waiting),
                        stepped_aside("The preview has failed; the service's log says how."),
                    )
                self._changed.wait(
                    POLL_SECONDS if self._process or self._waiting else 2 * POLL_SECONDS
                )
                self._changed.clear()
        finally:
            with self._guard:
                self._closed = True
                waiting = self._waiting
                self._waiting = []
            for ticket in waiting:
                ticket.deliver(as_part(stepped_aside("The service is ending.")))
            self._end("The service is ending.")

    @property
    def pid(self) -> int | None:
        """Id of the process; None: there is none."""
        process = self._process
        return process.pid if process else None

    def _look(self) -> None:
        process = self._process
        now = time.monotonic()
        if process is not None:
            self._judge(process)
            why = self._why_end(process, now)
            if why is not None:
                self._end(why, by_itself=process.has_ended)
        lost = self._losses.pending(PAUSED) if self._process is None else None
        if lost is None:
            self._load_next(now)
            self._prepare(now)
        late = [ticket for ticket in self._waiting if now - ticket.since > BUSY_SECONDS]
        self._refuse(
            late,
            stepped_aside(
                "The preview is busy with another base." if lost is None else f"{lost[1]}."
            ),
        )

    def _why_end(self, process: PreviewProcess, now: float) -> str | None:
        """Why to end the process, for clients whose answers end with it; empty: nobody asks it.

        None: it stays.
        """
        if process.has_ended:
            return "The preview's process has ended before its answer."
        if process.leaving is not None and (not process.tickets or now >= process.leaving):
            return "The preview has made way for a training job."
        lasts = self._settings.preview_idle_seconds
        if process.slot is None:  # its memory belongs to training
            lasts = min(lasts, REST_SECONDS)
            if not process.tickets and now - self._looked_at > LOOK_SECONDS:
                self._looked_at = now
                if self._store.leases.free_slots(self._host, self._slots):
                    return ""  # whoever asks next is answered there
        idle = not process.tickets and not self._waiting and now - process.used_at > lasts
        return "" if idle else None

    def _load_next(self, now: float) -> None:
        """Load the base whose turn it is, and hand its requests over."""
        with self._guard:
            process = self._process
            wanted = self._wanted(process)
            over = process is None or self._is_over(process, now)
            next_base = (
                self._turns.take([(project, base) for project, base, _ in wanted])
                if wanted and over
                else None
            )
        try:
            if next_base is not None:
                first = next(
                    (
                        ticket
                        for ticket in self._waiting
                        if self._base_of(ticket, process) == next_base
                    ),
                    None,
                )
                process = process or self._started(first)
                self._loads(process, next_base, interrupts=True)
        except FtError as error:
            self._refuse(
                [
                    ticket
                    for ticket in self._tickets()
                    if self._base_of(ticket, process) == next_base
                ],
                error,
            )
            return
        with self._guard:
            if (
                process is None
                or process.leaving is not None
                or not (next_base or self._may_join(process, now))
            ):
                return
            for ticket in [ticket for ticket in self._waiting if process.fits(ticket)]:
                self._waiting.remove(ticket)
                process.ask(ticket)

    def _tickets(self) -> list[Ticket]:
        """All requests that are not answered."""
        with self._guard:
            return [*self._waiting, *(self._process.tickets.values() if self._process else ())]

    def _base_of(self, ticket: Ticket, process: PreviewProcess | None) -> LoadedBase:
        """The base that a request waits for."""
        if (
            ticket.served is None
            and process is not None
            and process.served is not None
            and process.fits(ticket)
        ):
            return process.served
        return ticket.served or LoadedBase.of(ticket.path, {}, gpu=self._gpu)

    def _wanted(self, process: PreviewProcess | None) -> list[tuple[str, LoadedBase, float]]:
        """Projects with the bases that they wait for, but for that which the process holds, and
        since when: the longest wait first.
        """
        held = process.served if process else None
        tickets = [*self._waiting, *(process.tickets.values() if process else ())]
        since: dict[tuple[str, LoadedBase], float] = {}
        for ticket in sorted(tickets, key=lambda ticket: ticket.since):
            base = self._base_of(ticket, process)
            if base != held:
                since.setdefault((ticket.project_id, base), ticket.since)
        return [(project, base, waits) for (project, base), waits in since.items()]

    def _may_join(self, process: PreviewProcess, now: float) -> bool:
        """Whether new requests for the base that the process holds go before what waits for others:
        while it is held for no longer than it took to load.
        """
        held = 0.0 if process.ready_at is None else now - process.ready_at
        return held < process.load_seconds or not self._wanted(process)

    def _is_over(self, process: PreviewProcess, now: float) -> bool:
        """Whether the base that the process holds makes way for one that is waited for."""
        if process.served is None or not process.present():
            return True
        since = min((waits for _, _, waits in self._wanted(process)), default=now)
        at = process.ready_at
        return at is not None and is_over(
            now, waited_since=since, ready_at=at, load_seconds=process.load_seconds
        )

    def _prepare(self, now: float) -> None:
        """Load the model of a succeeded job in advance, if models are being tried here."""
        job = self._expected
        process = self._process
        if job is None or self._waiting:
            return
        used_at = process.used_at if process else self._used_at
        if used_at is None or now - used_at > self._settings.preview_idle_seconds:
            self._expected = None  # models are not being tried here
            return
        spec = job.spec
        served = LoadedBase.of(
            spec.model.path, spec.precision.model_dump(mode="json"), gpu=self._gpu
        )
        others = (
            process is not None
            and process.served is not None
            and process.served.path != served.path
        )
        if others and now - used_at < REST_SECONDS:
            return
        try:
            process = process or self._started()
            if not self._loads(process, served):
                return
            adapter = self._places.run(job.id).plain("adapter")
            probes = self._unproved(job)
        except FtError:  # training has the slots: the next request tries again
            self._expected = None
            return
        with self._guard:
            self._expected = None if self._expected is job else self._expected
            process.expect(job, str(adapter), probes)

    def _loads(
        self, process: PreviewProcess, served: LoadedBase, *, interrupts: bool = False
    ) -> bool:
        """Whether the process holds this base or is loading it.

        `interrupts`: also in place of one that is asked.
        """
        free = self._store.leases.free_slots(self._host, self._slots)
        memory = (
            room_beside(Path(served.path))
            if process.slot is None and process.served != served
            else None
        )
        with self._guard:
            if (
                process.served != served
                and (interrupts or not process.tickets)
                and process.leaving is None
            ):
                process.load(served, self._threads(process, len(free)), memory)
                log.info(
                    "the preview's process %d loads %s, %s",
                    process.pid,
                    served.path,
                    served.precision,
                )
            return process.served == served and process.leaving is None

    def _threads(self, process: PreviewProcess, free: int) -> int:
        """CPU threads of the process: on a host without a GPU, as many of the CPUs as slots are
        free; next to training one, or a quarter of the CPUs if training is on GPUs.
        """
        processors = core_count()
        if process.slot is None:
            return max(1, processors // 4) if self._gpu else 1
        return max(1, processors * max(1, free) // self._slots)

    def _started(self, first: Ticket | None = None) -> PreviewProcess:
        """A new process, for the ticket if there is one.

        Raises UnavailableError if training has the slots and the ticket is not for the CPU.
        """
        free = self._store.leases.free_slots(self._host, self._slots)
        if not free and first is not None and first.on_processor:
            room_beside(Path(first.path))
            process = PreviewProcess(
                self._command, None, self._environment(None), self._used_at or time.monotonic()
            )
            with self._guard:
                self._process = process
            log.info(
                "the preview has started during training: process %d, on the processor", process.pid
            )
            return process
        if not free:
            raise all_train(self._slots)
        slot = free[-1]  # jobs take the lowest slots
        process = PreviewProcess(
            self._command, slot, self._environment(slot), self._used_at or time.monotonic()
        )
        with self._guard:
            self._process = process
        log.info("the preview has started: process %d, slot %d", process.pid, slot)
        if slot not in self._store.leases.free_slots(
            self._host, self._slots
        ):  # a job has taken it without seeing this process
            self._end("Training has taken the slot.")
            raise stepped_aside("Training has taken the slot.")
        return process

    def _environment(self, slot: int | None) -> dict[str, str]:
        cache = folder_of(os.environ, self._settings.home)
        environment = {
            "PYTHONSAFEPATH": "1",
            FOLDER: str(cache) if cache else "",
            ALLOW_PRIVATE: str(int(self._settings.webhook_allow_private)),
        }
        if self._gpu:
            environment[visibility_variable()] = "" if slot is None else visible_gpus()[slot]
        return environment

    def _refuse(self, tickets: list[Ticket], error: FtError) -> None:
        with self._guard:
            under_way = self._process.tickets if self._process else {}
            gone = [
                ticket for ticket in tickets if ticket in self._waiting or ticket.id in under_way
            ]
            self._waiting = [ticket for ticket in self._waiting if ticket not in gone]
            for ticket in gone:
                if self._process is not None:
                    self._process.drop(ticket)
        for ticket in gone:
            ticket.deliver(as_part(error))

    def _end(self, why: str, *, by_itself: bool = False) -> None:
        """End the process, and tell `why` to those whom it was answering; empty: only if there is
        nobody. `by_itself`: it has ended already.
        """
        with self._guard:
            process = self._process
            if process is None or (not why and process.tickets):
                return
            process.ending = True  # until it is gone, requests wait for the next
        process.end()
        with self._guard:
            self._process = None
            self._used_at = process.used_at
            left = list(process.tickets.values())
            present = process.present()
            process.tickets.clear()
        log.info("the preview has ended: process %d", process.pid)
        if by_itself and process.failure is not None:
            self._count(process, process.failure, present)
        for ticket in left:
            refused = bool(self._suspects) and self._suspects.is_refused(ticket.work)
            ticket.deliver(as_part(ends_it() if refused else stepped_aside(why)))

    def _count(
        self, process: PreviewProcess, failure: HelperFailed, present: Collection[Ticket]
    ) -> None:
        """Note the end of a process that nobody has asked for: against what it was answering,
        unless the host is at fault.
        """
        if failure.is_lost:
            if process.has_answered:
                self._losses.forget(PAUSED)
            self._losses.add(PAUSED, failure.message)
            return
        log.error(
            "the preview has ended by itself, beside %d requests: %s", len(present), failure.message
        )
        at = [ticket for ticket in present if ticket.id == process.at]
        if not at:  # it was at all others, or could not load their base
            at = [ticket for ticket in present if process.ready_at is None or not ticket.is_suspect]
        self._suspects.add(ticket.work for ticket in at)
        self._suspects.add(
            (ticket.work for ticket in present if ticket.is_suspect and ticket not in at), BESIDE
        )

    def _suspect(self, ticket: Ticket) -> None:
        """Forget what is known against a request once it is answered.

        Raises SpecError for one that has ended the process.
        """
        work = ticket.work
        deliver = ticket.deliver
        if self._suspects.is_refused(work):
            raise ends_it()
        ticket.is_suspect = work in self._suspects

        def delivered(part: dict[str, Any]) -> None:
            if part["kind"] == "done":
                self._suspects.forget(work)
            deliver(part)

        ticket.deliver = delivered

    # For proof

    def _unproved(self, job: Job) -> list[list[int]]:
        """Tokens of the probes that prove that the job's model answers; empty if that is proved."""
        if job.id in self._proved:
            return []
        run_dir = self._places.run(job.id)
        probes = _of_tokens(run_dir) if not run_dir.has(PREVIEWED) else []
        if not probes:
            self._proved.add(job.id)
        return [probe.tokens for probe in probes]

    def _judge(self, process: PreviewProcess) -> None:
        while process.probed:
            job, logprobs = process.probed.pop(0)
            if process.slot is None and self._gpu:  # the CPU proves nothing about answers on a GPU
                continue
            run_dir = self._places.run(job.id)
            verdict = judge(_of_tokens(run_dir), logprobs)
            log.info("%s in the preview: %s", job.tuned_name, verdict.text)
            try:
                report(
                    run_dir,
                    PREVIEWED,
                    self._store,
                    job,
                    Verdict(verdict.verified, f"in the preview: {verdict.text}"),
                )
            except FtError as error:  # the next request proves it again
                log.warning(
                    "the verdict on job %s in the preview was not reported: %s",
                    job.id,
                    error.message,
                )
            else:
                self._proved.add(job.id)


def _of_tokens(run_dir: RunDir) -> list[Probe]:
    """A job's probes but for those with images, which inference servers are asked."""
    return [probe for probe in read_probes(run_dir) if probe.chat is None]


def ends_it() -> SpecError:
    """Error for a request that must not be asked again."""
    return SpecError(
        "The preview's process has ended by itself while it was answering this request, twice, so "
        "that it is not asked again. "
        "The service's log says how; ask for something else.",
        code="ends_preview",
    )


def all_train(slots: int) -> UnavailableError:
    """Error for a request while training has every slot."""
    which = {1: "The only slot is", 2: "Both slots are"}.get(slots, f"All {slots} slots are")
    return UnavailableError(
        f"{which} busy training. Try again later, pause a job (ft pause), or ask for an answer on "
        "the processor, which is slow "
        "(ft chat --cpu; processor: true).",
        code="preview_busy",
        retry_after=RETRY_SECONDS,
    )


def room_beside(folder: Path) -> int:
    """Memory in bytes that a base may take next to training: half of the free memory.

    Raises UnavailableError if it needs more.
    """
    room = available_memory() // 2
    needed = 2 * sum(math.prod(tensor.shape) for tensor in read_tensors(folder).values())
    if needed > room:
        raise UnavailableError(
            f"processor: the base takes {bytes_text(needed)} of memory, and during training it "
            f"may take {bytes_text(room)}, "
            "half of what is free. Try again when a slot is free, or pause a job.",
            param="processor",
            code="preview_busy",
            retry_after=RETRY_SECONDS,
        )
    return room
