"""The preview on this host: a process of its own that answers chat completions, started by the first one.

    route ──submit──▶ Preview ──lines of JSON──▶ python -m workers.serving      (a thread reads the answers: preview_process.py)

It holds one base in one storage format, with any number of adapters, and a slot of this host that no job holds. Training comes
first: when a job is to start on that slot, the process has LEAVE_SECONDS to finish what it is at, and is then ended. It also is
when nothing was asked for a while, and with the server, however that ends. For another base, or other formats, the same process
loads that in place of what it holds: to start one takes longer than to load a base.

While training has every slot, whoever asks for it is answered on the processor beside it: by a process of the lowest priority,
that takes no more than half of the free memory, is the first to go where memory ends, and goes after a minute without a
question, or as soon as a slot is free.

Where a job succeeds while models are tried, what its model needs is loaded before anybody asks. That it is the tuned model that
answers is shown as on an inference server, by the trainer's log-probabilities (verdict.py), and is an event of the job, once.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_service.bases.cache_folder import FOLDER, folder_of
from ft_service.bases.safetensors_folder import read_tensors
from ft_service.errors import FtError, UnavailableError
from ft_service.host.environment import child_environment
from ft_service.host.hardware import available_memory, default_slots, gpu_count, visible_gpus
from ft_service.jobs.states import Job
from ft_service.launcher.local import host_id
from ft_service.plan.quantities import bytes_text
from ft_service.serving import verified
from ft_service.serving.preview_process import RETRY_SECONDS, Deliver, PreviewProcess, Served, Ticket, as_part, stepped_aside
from ft_service.serving.verdict import Verdict, judge
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "workers.serving")
LEAVE_SECONDS = 1.0
"""Between a job's turn and the end of the process that is in its way."""
BUSY_SECONDS = 30.0
"""How long a request waits for a base while another one is being asked."""
REST_SECONDS = 60.0
"""How long nobody must have asked a base before another one, that nobody asks yet, takes its place."""
MOST_REQUESTS = 256
"""Under way or waiting, at once."""
MOST_OF_PROJECT = 64
"""Of these, of one project."""
POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0
"""Between looks whether a slot is free for a process that works beside training."""
PREVIEWED = "previewed.json"
"""In the run directory: what the job's user was told of the preview's answers (verified.py)."""


class Preview:
    """At most one process. Any thread may submit, cancel and ask it to make way; `run` belongs to a thread of its own, whose
    end is that of the process.
    """

    def __init__(self, settings: Settings, store: Store, command: Sequence[str] = WORKER) -> None:
        """`command`: what is started, with a descriptor and a process id behind it."""
        self._settings, self._store, self._command = settings, store, command
        self._places = Places.of(settings)
        self._slots = settings.slots or default_slots()
        self._host, self._gpu = host_id(), gpu_count() > 0
        self._guard = threading.Lock()
        self._stirred = threading.Event()
        self._waiting: list[Ticket] = []
        self._process: PreviewProcess | None = None
        self._expected: Job | None = None
        """The newest job whose model nobody has asked yet."""
        self._proved: set[str] = set()
        """Jobs whose answers need no more proof."""
        self._used_at: float | None = None
        """When the process that has ended was last used; None: there was none."""
        self._looked_at = 0.0
        """When it was last asked whether a slot is free for what works beside training."""
        self._closed = False

    # Whoever asks

    def submit(
        self,
        path: str,
        precision: Mapping[str, Any] | None,
        order: dict[str, Any],
        deliver: Deliver,
        job: Job | None = None,
        *,
        project_id: str = "",
        beside: bool = False,
    ) -> Ticket:
        """Ask for an answer; its parts are delivered. Raises UnavailableError while training has the slots, or too many ask.

        `path`: the base's folder. `precision`: the formats that an adapter was trained on; None: whichever the base is in.
        `job`: whose outcome the adapter is. `project_id`: who asks. `beside`: while training has the slots, answer on the
        processor beside it.
        """
        served = None if precision is None else Served.of(path, precision, gpu=self._gpu)
        order = order if job is None else {**order, "probes": self._unproved(job)}
        ticket = Ticket(served, path, order, deliver, job, project_id, beside)
        with self._guard:
            if self._closed:
                raise stepped_aside("The service is ending.")
            process = self._process
            if process is not None and process.leaving:
                raise stepped_aside("The preview has made way for a training job.")
            asked = [*self._waiting, *(process.tickets.values() if process else ())]
            if len(asked) >= MOST_REQUESTS:
                raise stepped_aside(f"{MOST_REQUESTS} requests are under way.")
            if sum(other.project_id == project_id for other in asked) >= MOST_OF_PROJECT:
                raise stepped_aside(f"{MOST_OF_PROJECT} requests of this project are under way.")
            if process is not None and process.fits(ticket):
                process.ask(ticket)
            else:
                self._waiting.append(ticket)
        self._stirred.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more."""
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif self._process is not None:
                self._process.drop(ticket)

    # The reconciler

    def make_way(self, slots: Collection[int]) -> bool:
        """Whether nothing of the preview's is on these slots, which a job is about to use. If something is, it begins to leave:
        ask again.
        """
        with self._guard:
            process = self._process
            if process is None:
                return True
            if process.slot not in slots:
                process.be_modest()
                return True
            if process.leaving is None:
                process.leaving = time.monotonic() + LEAVE_SECONDS
        self._stirred.set()
        return False

    def welcome(self, job: Job) -> None:
        """A job has succeeded. If models are being tried here, what its model needs is loaded as soon as nobody else is
        disturbed by it.
        """
        with self._guard:
            self._expected = job
        self._stirred.set()

    # Its own thread

    def run(self, stop: threading.Event) -> None:
        """Start and end processes as they are needed, until `stop` is set."""
        try:
            while not stop.is_set():
                try:
                    self._look()
                except Exception:  # a disk that cannot be read, a process that cannot be started: the next one may get on
                    log.exception("the preview cannot do what it is asked")
                    self._expected = None
                    self._refuse(list(self._waiting), stepped_aside("The preview has failed; the service's log says how."))
                self._stirred.wait(POLL_SECONDS if self._process or self._waiting else 2 * POLL_SECONDS)
                self._stirred.clear()
        finally:
            with self._guard:
                self._closed = True
                waiting, self._waiting = self._waiting, []
            for ticket in waiting:
                ticket.deliver(as_part(stepped_aside("The service is ending.")))
            self._end("The service is ending.")

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none."""
        process = self._process
        return process.popen.pid if process else None

    def _look(self) -> None:
        process, now = self._process, time.monotonic()
        if process is not None:
            self._judge(process)
            why = self._why_end(process, now)
            if why is not None:
                self._end(why)
        self._load_next()
        self._prepare(now)
        late = [ticket for ticket in self._waiting if now - ticket.since > BUSY_SECONDS]
        self._refuse(late, stepped_aside("The preview is busy with another base."))

    def _why_end(self, process: PreviewProcess, now: float) -> str | None:
        """What to tell those whose answers end with the process. None: it stays."""
        if process.popen.poll() is not None:
            return "The preview's process has ended before its answer: ask again."
        if process.leaving is not None and (not process.tickets or now >= process.leaving):
            return "The preview has made way for a training job."
        lasts = self._settings.preview_idle_seconds
        if process.slot is None:  # what it has of the memory is training's
            lasts = min(lasts, REST_SECONDS)
            if not process.tickets and now - self._looked_at > LOOK_SECONDS:
                self._looked_at = now
                if self._store.free_slots(self._host, self._slots):
                    return "A slot is free: ask again, and the preview answers there."
        idle = not process.tickets and not self._waiting and now - process.used_at > lasts
        return "" if idle else None

    def _load_next(self) -> None:
        """What the one needs who waits for longest, unless others are being answered."""
        with self._guard:
            first = self._waiting[0] if self._waiting else None
        if first is None:
            return
        try:
            process = self._process or self._started(first)
            loaded = self._loads(process, first.served or Served.of(first.path, {}, gpu=self._gpu))
        except FtError as error:
            self._refuse([ticket for ticket in self._waiting if ticket.path == first.path], error)
            return
        with self._guard:
            for ticket in [ticket for ticket in self._waiting if loaded and process.fits(ticket)]:
                self._waiting.remove(ticket)
                process.ask(ticket)

    def _prepare(self, now: float) -> None:
        """Load what the model of a job that has succeeded needs, if models are being tried here."""
        job, process = self._expected, self._process
        if job is None or self._waiting:
            return
        used_at = process.used_at if process else self._used_at
        if used_at is None or now - used_at > self._settings.preview_idle_seconds:
            self._expected = None  # nobody tries models here
            return
        spec = job.spec
        served = Served.of(spec.model.path, spec.precision.model_dump(mode="json"), gpu=self._gpu)
        others = process is not None and process.served is not None and process.served.path != served.path
        if others and now - used_at < REST_SECONDS:
            return
        try:
            process = process or self._started()
            if not self._loads(process, served):
                return
            adapter, probes = self._places.run(job.id).plain("adapter"), self._unproved(job)
        except FtError:  # training has the slots: whoever asks has it tried again
            self._expected = None
            return
        with self._guard:
            self._expected = None if self._expected is job else self._expected
            process.expect(job, str(adapter), probes)

    def _loads(self, process: PreviewProcess, served: Served) -> bool:
        """Whether the process holds this base, or will as soon as it has loaded it."""
        free = self._store.free_slots(self._host, self._slots)
        memory = room_beside(Path(served.path)) if process.slot is None and process.served != served else None
        with self._guard:
            if process.served != served and not process.tickets and process.leaving is None:
                process.load(served, self._threads(process, len(free)), memory)
                log.info("the preview's process %d loads %s, %s", process.popen.pid, served.path, served.precision)
            return process.served == served and process.leaving is None

    def _threads(self, process: PreviewProcess, free: int) -> int:
        """Of the process: on a host without a GPU the processors' share of the slots that no job holds; beside training one,
        or, where training is on GPUs, a quarter of them."""
        processors = os.cpu_count() or 1
        if process.slot is None:
            return max(1, processors // 4) if self._gpu else 1
        return max(1, processors * max(1, free) // self._slots)

    def _started(self, first: Ticket | None = None) -> PreviewProcess:
        """A new process, for the ticket if there is one. Raises UnavailableError if training has the slots, and the ticket is
        not for the processor beside it."""
        free = self._store.free_slots(self._host, self._slots)
        if not free and first is not None and first.beside:
            room_beside(Path(first.path))
            process = PreviewProcess(self._command, None, self._environment(None), self._used_at or time.monotonic())
            with self._guard:
                self._process = process
            log.info("the preview has started beside training: process %d, on the processor", process.popen.pid)
            return process
        if not free:
            raise all_train(self._slots)
        slot = free[-1]  # jobs take the lowest
        process = PreviewProcess(self._command, slot, self._environment(slot), self._used_at or time.monotonic())
        with self._guard:
            self._process = process
        log.info("the preview has started: process %d, slot %d", process.popen.pid, slot)
        if slot not in self._store.free_slots(self._host, self._slots):  # a job has taken it and did not see us
            self._end("Training has taken the slot.")
            raise stepped_aside("Training has taken the slot.")
        return process

    def _environment(self, slot: int | None) -> dict[str, str]:
        environment = child_environment(os.environ, PYTHONSAFEPATH="1")
        cache = folder_of(os.environ, self._settings.home)
        environment[FOLDER] = str(cache) if cache else ""
        if self._gpu:
            environment["CUDA_VISIBLE_DEVICES"] = "" if slot is None else visible_gpus()[slot]
        return environment

    def _refuse(self, tickets: list[Ticket], error: FtError) -> None:
        with self._guard:
            gone = [ticket for ticket in tickets if ticket in self._waiting]
            self._waiting = [ticket for ticket in self._waiting if ticket not in gone]
        for ticket in gone:
            ticket.deliver(as_part(error))

    def _end(self, why: str) -> None:
        with self._guard:
            process = self._process
        if process is None:
            return
        process.end()
        with self._guard:
            self._process, self._used_at = None, process.used_at
            left = list(process.tickets.values())
            process.tickets.clear()
        log.info("the preview has ended: process %d", process.popen.pid)
        for ticket in left:
            ticket.deliver(as_part(stepped_aside(why)))

    # Proof

    def _unproved(self, job: Job) -> list[list[int]]:
        """Tokens by which it is to be shown that the job's model answers; none if it was."""
        if job.id in self._proved:
            return []
        run_dir = self._places.run(job.id)
        probes = verified.read_probes(run_dir) if not run_dir.has(PREVIEWED) else []
        if not probes:
            self._proved.add(job.id)
        return [probe.tokens for probe in probes]

    def _judge(self, process: PreviewProcess) -> None:
        while process.probed:
            job, logprobs = process.probed.pop(0)
            if process.slot is None and self._gpu:  # another kind of machine proves nothing of this one
                continue
            run_dir = self._places.run(job.id)
            verdict = judge(verified.read_probes(run_dir), logprobs)
            log.info("%s in the preview: %s", job.tuned_name, verdict.text)
            try:
                verified.tell(
                    run_dir, PREVIEWED, self._store, job, Verdict(verdict.verified, f"in the preview: {verdict.text}")
                )
            except FtError as error:
                log.warning("what the preview has shown of job %s was not told: %s", job.id, error.message)
            self._proved.add(job.id)


def all_train(slots: int) -> UnavailableError:
    """Why there is no answer while training has every slot, and what to do."""
    which = {1: "The only slot is", 2: "Both slots are"}.get(slots, f"All {slots} slots are")
    return UnavailableError(
        f"{which} busy training. Try again later, pause a job (ft pause), or ask for an answer on the processor, which is slow "
        "(ft chat --cpu; processor: true).",
        code="preview_busy",
        retry_after=RETRY_SECONDS,
    )


def room_beside(folder: Path) -> int:
    """Bytes of memory that a base may take beside training: half of what is free. Raises UnavailableError if it needs more."""
    room = available_memory() // 2
    needed = 2 * sum(math.prod(tensor.shape) for tensor in read_tensors(folder).values())
    if needed > room:
        raise UnavailableError(
            f"processor: the base takes {bytes_text(needed)} of memory, and beside training it may take {bytes_text(room)}, "
            "half of what is free. Try again when a slot is free, or pause a job.",
            param="processor",
            code="preview_busy",
            retry_after=RETRY_SECONDS,
        )
    return room
