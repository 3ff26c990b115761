"""Steps of the quickstart: see quickstart_command.py, which starts it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from openai import DefaultHttpxClient, NotFoundError, OpenAI, OpenAIError
from openai.types.fine_tuning import FineTuningJob
from rich.console import Console

from ft_service.cli.display import Display, display_for
from ft_service.cli.output import print_json_line
from ft_service.cli.quickstart.quickstart_processes import EvaluationProcess, QuickstartServer
from ft_service.cli.quickstart.quickstart_report import (
    LOADING,
    change,
    curve,
    decode_metrics,
    draw_losses,
    new_folder,
    percent,
    side_by_side,
)
from ft_service.client.client import Client
from ft_service.client.connection import Connection
from ft_service.client.progress import clock
from ft_service.errors import FtError
from ft_service.host.home import create_home
from ft_service.host.lifetime import try_lock
from ft_service.installation import SAMPLE_DATA, SAMPLE_MODELS, SAMPLE_SPEC
from ft_service.jobs.states import TERMINAL, State
from ft_service.rundir.events import Metrics
from ft_service.spec_files.spec_file import SpecFile, load_spec_file

HELD_OUT = SAMPLE_DATA / "heldout.jsonl"
FINISHED = frozenset(map(str, TERMINAL))
RESTING = FINISHED | {str(State.PAUSED)}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OPENAI_FIELDS = frozenset({"model", "training_file", "validation_file", "suffix", "seed"})
"""Of the SPEC: arguments of the openai client. Everything else rides in `extra_body`."""

POLL_SECONDS = 0.5
PAUSE_SECONDS = 90.0
"""How long Ctrl-C waits for the checkpoint; the service itself ends an attempt that takes longer
than its grace.
"""
EVENTS_PER_POLL = 100
INTERRUPTED = 130

console = Console(highlight=False, emoji=False)


@dataclass(frozen=True)
class Remembered:
    """`quickstart.json`: the last run's job, and a digest of what it trained on."""

    job_id: str
    inputs: str


@dataclass(frozen=True)
class NextAction:
    action: Literal["start", "resume", "join"]
    text: str


@dataclass(frozen=True)
class Results:
    """What a finished run leaves, as --json prints it."""

    job_id: str
    accuracy_before: float
    """Share of held-out messages that the base turned into the right JSON, 0 to 1."""
    accuracy: float
    adapter: str
    loss_curve: str


def main(home: Path, spec_path: Path = SAMPLE_SPEC, *, called: str, as_json: bool = False) -> int:
    """Train a SPEC on the sample model; the exit code.

    Only for a process's main thread: it catches the signals that end it.

    `called`: what the user typed. `as_json`: print the results as JSON, and everything else on
    stderr. Raises FtError.
    """
    console.stderr = as_json
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    create_home(home)
    lock = try_lock(home / "quickstart.lock")
    if lock is None:
        raise FtError(
            f"Another quickstart is running in {home}; wait for it, or name another folder with "
            "FT_HOME."
        )
    try:
        results = _run(home, spec_path, called)
    except KeyboardInterrupt:
        console.print(f"\nStopped. `{called}` starts again.")
        return INTERRUPTED
    except OpenAIError as error:
        raise FtError(str(error)) from error
    finally:
        os.close(lock)
    if as_json and results is not None:
        print_json_line(asdict(results))
    return INTERRUPTED if results is None else 0


def _run(home: Path, spec_path: Path, called: str) -> Results | None:
    """Train and measure; None: the user has stopped it, and the job is paused."""
    began = time.monotonic()
    spec = load_spec_file(spec_path)
    model = SAMPLE_MODELS / spec.request.model
    memory = home / "quickstart.json"
    with (
        EvaluationProcess(model, HELD_OUT) as before,
        QuickstartServer(home, SAMPLE_MODELS) as server,
    ):
        _line("server", f"{server.connection.base_url}, for this run only")
        with Client(server.connection) as ours:
            _line("page", ours.sign_in_link("/jobs"))
        client = openai_client(server.connection)
        results: Results | None = None
        try:
            job = _follow(client, _begin(client, spec, memory))
            if job.status == State.SUCCEEDED:
                results = _show_results(
                    client, server.connection, job, before, model, home / "quickstart" / job.id
                )
        except KeyboardInterrupt:
            _pause(client, memory, called)
            return None
        except BaseException:
            _pause(client, memory, called)
            raise
    if results is None:
        reason = job.error.message if job.error else f"it is {job.status}."
        raise FtError(f"The job did not succeed: {reason} The server's log: {server.log}")
    console.print()
    _line("time", f"{clock(time.monotonic() - began)}\n")
    console.print(
        LOADING.format(model=_shown(model), adapter=_shown(Path(results.adapter))), soft_wrap=True
    )
    console.print(f"Chat with it:\n\n  {_ft_command(home)} chat {job.id}\n", soft_wrap=True)
    return results


def choose(remembered: Remembered | None, inputs: str, status: str | None) -> NextAction:
    """What to do, given the last run and its job's status (None: there is no such job any more)."""
    if remembered is None:
        return NextAction("start", "a new job")
    if status is None:
        return NextAction("start", "a new one; the last run's is gone")
    if remembered.inputs != inputs:
        return NextAction("start", "a new one, since the data or the spec have changed")
    if status in FINISHED:
        return NextAction("start", f"a new one; the last run's has {_ended(status)}")
    if status == State.PAUSED:
        return NextAction("resume", "the last run's, resumed from its checkpoint")
    return NextAction("join", f"the last run's, still {status}")


def create_arguments(
    body: dict[str, Any], training_file: str, validation_file: str
) -> dict[str, Any]:
    """A SPEC's body as arguments of `client.fine_tuning.jobs.create`."""
    files = {"training_file": training_file, "validation_file": validation_file}
    known = {name: value for name, value in body.items() if name in OPENAI_FIELDS}
    return {
        **known,
        **files,
        "extra_body": {name: value for name, value in body.items() if name not in OPENAI_FIELDS},
    }


def openai_client(connection: Connection) -> OpenAI:
    """OpenAI's client of a server on this host, which no proxy of the environment reaches."""
    http = DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=connection.base_url, api_key=connection.api_key, http_client=http)


def _begin(client: OpenAI, spec: SpecFile, memory: Path) -> FineTuningJob:
    assert spec.validation_file is not None
    files = [spec.training_file.path, spec.validation_file.path]
    inputs = _digest([spec.path, *files])
    remembered = _recall(memory)
    last = _find_job(client, remembered.job_id) if remembered else None
    choice = choose(remembered, inputs, last.status if last else None)
    if last and choice.action != "start":
        job = client.fine_tuning.jobs.resume(last.id) if choice.action == "resume" else last
    else:
        if last and last.status not in FINISHED:
            client.fine_tuning.jobs.cancel(last.id)
        uploaded = [client.files.create(file=path, purpose="fine-tune") for path in files]
        _line("upload", f"{', '.join(path.name for path in files)} ({_chats(files)} chats)")
        with _uninterrupted():  # a job whose id is not stored could not be paused
            job = client.fine_tuning.jobs.create(
                **create_arguments(spec.body, uploaded[0].id, uploaded[1].id)
            )
            memory.write_text(
                json.dumps(asdict(Remembered(job.id, inputs))) + "\n", encoding="utf-8"
            )
    _line("job", f"{job.id} ({choice.text})")
    ranks = spec.request.distributed.nproc_per_node
    weights = spec.request.precision.default.upper()
    _line(
        "",
        f"LoRA of rank {spec.request.lora.r} on a base in {weights}, sharded over {ranks} ranks\n",
    )
    return job


def _follow(client: OpenAI, job: FineTuningJob) -> FineTuningJob:
    seen: str | None = None
    with display_for(console) as display:
        while True:
            job = client.fine_tuning.jobs.retrieve(job.id)
            seen = _show_events(client, job.id, seen, display)
            display.status(_added(job, "phase") or job.status)
            if job.status in FINISHED:
                return job
            time.sleep(POLL_SECONDS)


def _show_events(client: OpenAI, job_id: str, seen: str | None, display: Display) -> str | None:
    fresh = []
    for event in client.fine_tuning.jobs.list_events(job_id, limit=EVENTS_PER_POLL):
        if event.id == seen or (seen is None and len(fresh) == EVENTS_PER_POLL):
            break
        fresh.append(event)
    for event in reversed(fresh):
        if event.type == "metrics":
            display.metrics(Metrics.model_validate(event.data), event.created_at)
        elif event.level != "info":
            display.message(event.level, event.message, event.created_at)
    return fresh[0].id if fresh else seen


def _show_results(
    client: OpenAI,
    connection: Connection,
    job: FineTuningJob,
    before: EvaluationProcess,
    model: Path,
    folder: Path,
) -> Results:
    """Fetch the adapter and the metrics into a folder, measure, print."""
    new_folder(folder)
    with Client(connection) as ours:  # OpenAI's client has no call for an adapter
        adapter = ours.download_adapter(job.id, folder / "adapter")
    rows = decode_metrics(client.files.content(job.result_files[0]).read())
    with (
        EvaluationProcess(model, HELD_OUT, adapter) as after,
        console.status("Asking the tuned model what it has not seen"),
    ):
        picture = draw_losses(rows, folder / "loss.png")
        first = before.accuracy()
        last = after.accuracy()
        answers = [
            (message, base, tuned)
            for (message, base), (_, tuned) in zip(before.answers(), after.answers(), strict=True)
        ]
    console.print()
    _line(
        "accuracy",
        f"{percent(first)} → {percent(last)} of {last[1]} held-out messages turned into exactly "
        "the right JSON",
    )
    _line("loss", f"{change(curve(rows, 'train_loss'))}, drawn in {_shown(picture)}")
    _line("adapter", _shown(adapter))
    console.print("\nHeld-out messages, and what the base and the tuned model answer:")
    for line in side_by_side(answers, console.width):
        console.print(line, markup=False, soft_wrap=True)
    return Results(job.id, first[0] / first[1], last[0] / last[1], str(adapter), str(picture))


def _pause(client: OpenAI, memory: Path, called: str) -> None:
    """Pause the job, if there is one that is not over, and wait until it rests."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        remembered = _recall(memory)
        job = _find_job(client, remembered.job_id) if remembered else None
        if job is None or job.status in FINISHED:
            console.print(f"\nStopped; no job is running. `{called}` starts a new one.")
            return
        console.print("\nStopping: the job saves a checkpoint first.")
        job = _wait_for_rest(client, client.fine_tuning.jobs.pause(job.id))
        further = "starts a new one" if job.status in FINISHED else "continues with it"
        console.print(
            f"The job is {job.status}{_at_step(job)}. `{called}` {further}.", soft_wrap=True
        )
    except OpenAIError as error:
        console.print(
            f"The job was not paused ({error}). `{called}` finds it again.", soft_wrap=True
        )


def _wait_for_rest(client: OpenAI, job: FineTuningJob) -> FineTuningJob:
    deadline = time.monotonic() + PAUSE_SECONDS
    while job.status not in RESTING and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        job = client.fine_tuning.jobs.retrieve(job.id)
    return job


def _at_step(job: FineTuningJob) -> str:
    progress = _added(job, "progress")
    return f" at step {progress['step']} of {progress['total_steps']}" if progress else ""


def _added(job: FineTuningJob, name: str) -> Any:
    """A field that this service adds to OpenAI's."""
    return (job.model_extra or {}).get(name)


def _find_job(client: OpenAI, job_id: str) -> FineTuningJob | None:
    try:
        return client.fine_tuning.jobs.retrieve(job_id)
    except NotFoundError:
        return None


def _recall(memory: Path) -> Remembered | None:
    try:
        return Remembered(**json.loads(memory.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _chats(paths: list[Path]) -> str:
    return " + ".join(f"{_count_lines(path):,}" for path in paths)


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _ended(status: str) -> str:
    return {"succeeded": "finished", "failed": "failed"}.get(status, "been cancelled")


def _shown(path: Path) -> str:
    """Relative to where the user is, if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _line(title: str, text: str) -> None:
    console.print(f"  {title:<10}{text}", soft_wrap=True)


def _ft_command(home: Path) -> str:
    """Return how this `ft` is called in this terminal for the same home."""
    own = Path(sys.executable).with_name("ft")
    found = shutil.which("ft")
    name = "ft" if found is not None and Path(found).resolve() == own.resolve() else _shown(own)
    return f"FT_HOME={_shown(home)} {name}" if os.environ.get("FT_HOME") else name


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that come in between take effect afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
