"""Every helper process that the product starts is killed by SIGKILL again and again: what was asked
of it is done in the end, and each death is the host's and never the input's fault.

The places that start a process are found in the source, so a new one fails here until it is tried.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from ft_service.bases.describing import Descriptions, describe_in_process
from ft_service.bases.description import write_described
from ft_service.control.bases.base_pulls import PullFolder
from ft_service.control.bases.pull_runner import Puller
from ft_service.control.checks.file_checks import FileCheck, FileChecks
from ft_service.control.tracking import metric_sender
from ft_service.control.tracking.metric_points import GIVE_UP_SECONDS
from ft_service.control.tracking.metric_sender import MetricsSender
from ft_service.data import image_process, template_process
from ft_service.data.examiner import Examiner, ExamineRequest
from ft_service.data.image_process import ImageProcess
from ft_service.data.sample_kinds import Picture
from ft_service.data.template_process import TemplateProcess
from ft_service.errors import UnavailableError
from ft_service.graders import python_fence
from ft_service.graders.grades import Score
from ft_service.graders.text_processes import TextProcesses
from ft_service.graders.text_tasks import compare
from ft_service.host.helper_process import Program
from ft_service.jobs.states import Job, State
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExportFormat, read_export
from ft_service.rundir.events import Metrics
from ft_service.serving import exporting
from ft_service.serving.preview import Preview, PreviewModel
from ft_service.serving.worker_tasks import run_worker
from ft_service.settings import Settings
from ft_service.shared_work.losses import Losses
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import JobChange, NewEvent
from ft_service.store.sql import Store
from ft_service.supervisor.object_mirror import Mirror
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import save_base
from tests.support.creating import create_job
from tests.support.describing import small_description, small_document
from tests.support.graders import case
from tests.support.killed_helpers import MOMENTS, Killer, is_done_in_the_end, says
from tests.support.pulled import looked_up
from tests.support.reconciling import PROJECT, add_job, messages, new_store, spec_of
from tests.support.records import new_job

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests/support/programs"
PYTHON = (sys.executable, "-I", "-S")
"""Without what takes long to start."""
HELPER = "ft_service.host.helper_process"
STARTS = (
    "subprocess.",
    "multiprocessing.",
    "asyncio.create_subprocess_",
    "concurrent.futures.ProcessPoolExecutor",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.popen",
    "os.system",
    "pty.",
)
"""What begins a process besides a helper's Program."""
MAY_START = re.compile(
    "helper_process|subprocess|multiprocessing|ProcessPool|import pty|from os import"
    r"|\bos\.(fork|posix_spawn|spawn|popen|system)"
)
"""What a module contains that does: to parse all others takes seconds."""

Ask = Callable[[str], object]
"""Does the work of a moment and fails unless it gets the right answer."""


@contextmanager
def describe(folder: Path) -> Iterator[Ask]:
    base = save_base(folder / "base")
    command = says(write_described(small_document(base)).decode())
    make = partial(describe_in_process, command=command)
    descriptions = {moment: Descriptions(None, None, make) for moment in MOMENTS}

    def ask(moment: str) -> None:
        described = descriptions[moment].describe(base).description()
        assert described.dimensions == small_description().dimensions

    yield ask


@contextmanager
def check_file(folder: Path) -> Iterator[Ask]:
    report = json.dumps({"examples": 1, "faults": [], "faults_total": 0})
    checks = FileChecks(command=says(report))
    with asyncio.Runner() as runner:

        def ask(moment: str) -> None:
            assert runner.run(checks.report("p", FileCheck(moment), folder)).examples == 1

        yield ask


@contextmanager
def examine(_: Path) -> Iterator[Ask]:
    report = {"report": {"examples": 1, "faults": [], "faults_total": 0, "counts": {"tokens": 7}}}
    examiner = Examiner(command=says(json.dumps(report), again=True))

    def ask(moment: str) -> None:
        request = ExamineRequest(
            path="/a", sha256=moment, model_path="/m", tokenizer="t", max_length=10
        )
        assert examiner.examine(request).examples == 1

    try:
        yield ask
    finally:
        examiner.close()


@contextmanager
def render(_: Path) -> Iterator[Ask]:
    process = TemplateProcess({"default": ""}, {})
    rendering = replace(
        template_process.RENDERING, command=says(json.dumps({"text": "a!"}), again=True)
    )

    def ask(_: str) -> None:
        for _again in range(2):
            told = process.write([{"role": "user", "content": "a"}], None, date(2026, 3, 2))
            assert told == "a!"

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(template_process, "RENDERING", rendering)
            yield ask
    finally:
        process.close()


@contextmanager
def look(folder: Path) -> Iterator[Ask]:
    process = ImageProcess(str(folder))
    seen = {"key": "a", "text": "<image>", "inputs": {}}
    reply = json.dumps({"image_token": "<image>", "pictures": [seen]})

    def ask(_: str) -> None:
        for _again in range(2):
            (told,) = process.look([Picture.of(b"a")], ["messages"]).pictures
            assert told.text == "<image>"

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_process, "WORKER", says(reply, again=True))
            yield ask
    finally:
        process.close()


@contextmanager
def grade_texts(_: Path) -> Iterator[Ask]:
    processes = TextProcesses()
    task = compare("{{sample.output_text}}", "{{item.a}}", "eq")

    def ask(_: str) -> None:
        results = processes.carry_out("p", [(task, case("4", {"a": a})) for a in "45"])
        assert [(result.value, result.error) for result in results] == [(1.0, None), (0.0, None)]

    try:
        yield ask
    finally:
        processes.close()


@contextmanager
def grade_python(_: Path) -> Iterator[Ask]:
    if (why := python_fence.refusal({})) is not None:
        pytest.skip(f"no fence on this host: {why}")
    source = "def grade(sample, item): return float(sample['output_text'])"
    with python_fence.FencedGrader(source, private={}) as grader:

        def ask(_: str) -> None:
            scores = [grader.score(case(text).as_json()) for text in ("4", "5")]
            assert scores == [Score(4.0), Score(5.0)]

        yield ask


def prove_fence(_: str) -> None:
    """Whether there is a fence is found out again, since a death must not be what is known of it."""
    python_fence._prove.cache_clear()
    assert python_fence.refusal({}) is None


@contextmanager
def track(folder: Path) -> Iterator[Ask]:
    tracker = folder / "tracker"
    tracker.mkdir()
    store = new_store(folder)
    settings = Settings(home=folder, wandb_api_key=SecretStr("se-cret"))
    sender = MetricsSender(settings, store, (*PYTHON, str(PROGRAMS / "tracker.py"), str(tracker)))

    def ask(moment: str) -> None:
        job = _over_for_long(store, f"ftjob-{moment}")

        def is_sent() -> bool:
            with store.writing() as connection:
                connection.exec_driver_sql("UPDATE integrations SET next_try_at = 0")
            sender.look()
            with store.writing() as connection:
                found = connection.exec_driver_sql(
                    "SELECT finished_at FROM integrations WHERE job_id = ?", (job.id,)
                )
                return found.scalar_one() is not None

        wait_for(is_sent, every=0.05)
        run = json.loads((tracker / f"{job.id}.json").read_text())
        assert run["steps"] == [1]
        assert run["ends"][-1] == 0
        warned = [
            told for told in messages(store, job.id) if "W&B" in told and "W&B run" not in told
        ]
        assert len(warned) == 1
        assert "W&B gets the job's metrics later: tracker.py was killed" in warned[0]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metric_sender, "TURN_SECONDS", 0.02)
            yield ask
    finally:
        sender.stop()
        store.close()


def _over_for_long(store: Store, job_id: str) -> Job:
    """A job with a step to send, whose end is so long ago that a tracker would not be tried again."""
    integrations = [{"type": "wandb", "wandb": {"project": "p"}}]
    request = {"training_file": "f", "integrations": integrations}
    spec = StoredSpec.of(spec_of(job_id))
    values = {"id": job_id, "project_id": PROJECT, "request": request, "stored_spec": spec}
    job = create_job(store, new_job(**values))
    claim = store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    step = NewEvent(
        level="info", message="s", metrics=Metrics(step=1, total_steps=1), source=(1, 0)
    )
    ended_at = store.now() - GIVE_UP_SECONDS - 1.0
    ended = replace(claim.job, state=State.SUCCEEDED, attempt=1, finished_at=ended_at)
    assert store.leases.apply(claim, JobChange(job=ended, events=[step]))
    return job


@contextmanager
def talk(folder: Path) -> Iterator[Ask]:
    stop = threading.Event()
    store = new_store(folder)
    command = (*PYTHON, str(PROGRAMS / "scripted_preview.py"))
    preview = Preview(Settings(home=folder, slots=2), store, command=command)
    thread = threading.Thread(target=preview.run, args=(stop,))
    thread.start()

    def ask(_: str) -> None:
        parts: list[dict[str, Any]] = []
        over = threading.Event()

        def deliver(part: dict[str, Any]) -> None:
            parts.append(part)
            if part["kind"] in ("done", "error"):
                over.set()

        order = {"messages": [{"role": "user", "content": "say a"}], "adapter": None}
        preview.submit(PreviewModel("/a", None, None), order, deliver, project_id="p")
        assert over.wait(HANG_SECONDS)
        if parts[-1]["kind"] == "error":
            raise parts[-1]["error"]
        assert [part["text"] for part in parts if part["kind"] == "text"] == ["a"]

    try:
        yield ask
    finally:
        stop.set()
        thread.join()
        store.close()


@contextmanager
def export(folder: Path) -> Iterator[Ask]:
    store = new_store(folder)
    settings = Settings(home=folder)
    places = Places.of(settings)
    job = add_job(store)
    run = places.run(job.id)
    run.put("adapter/adapter_config.json", b"{}")
    lost = Losses("an export")

    def ask(_: str) -> None:
        exporting.ask(job, ExportFormat.GGUF, settings, places)
        exporting.make_all(settings, store, threading.Event(), lost=lost)
        made = read_export(run, ExportFormat.GGUF)
        assert made is not None
        if made.status == "queued":
            raise UnavailableError(str(made.error))
        assert (made.status, made.report) == ("succeeded", {"exact": 3})
        exporting.remove(job, ExportFormat.GGUF, settings, places)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporting, "WORKER", says('{"exact": 3}'))
            yield ask
    finally:
        store.close()


@contextmanager
def work(folder: Path) -> Iterator[Ask]:
    program = folder / "program"
    program.write_text("#!/bin/sh\necho '{}'\n")
    program.chmod(0o700)

    def ask(_: str) -> None:
        assert run_worker("workers.tasks.merge", [], python=str(program)) == {}

    yield ask


@contextmanager
def mirror(folder: Path) -> Iterator[Ask]:
    fetching = Mirror("memory://", RunDir(folder), 1, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mirror, "_program", lambda *_: Program(command=says("{}")))
        yield lambda _: fetching.fetch()


@contextmanager
def pull(folder: Path) -> Iterator[Ask]:
    """One whose process was killed is stopped; somebody lets it go on."""
    pulls = PullFolder(folder / "models")
    asked = pulls.add("org/tiny", None, look=True, anyway=False)
    asked = looked_up(pulls.models, asked.id)
    make = lambda base, stop: small_document(base)  # noqa: E731
    puller = Puller(pulls, Descriptions(None, None, make), command=says("{}"))

    def ask(_: str) -> None:
        now = pulls.find(asked.id)
        if now.state == "done":
            assert pulls.change(now, ["done"], state="found")
        pulls.go_on(asked.id)
        puller.fetch_all(lambda: False)
        ended = pulls.find(asked.id)
        if ended.state == "stopped":
            raise UnavailableError(str(ended.error))
        assert ended.state == "done", ended

    yield ask


@dataclass(frozen=True)
class Row:
    """How the helper of a place is tried."""

    opened: Callable[[Path], AbstractContextManager[Ask]]
    lines: int = 1
    """Which line of its output is the answer: after a greeting, the second."""


ROWS = {
    "ft_service/bases/describing.py:describe_in_process": Row(describe),
    "ft_service/control/checks/file_checks.py:_made": Row(check_file),
    "ft_service/control/bases/pull_runner.py:_ask": Row(pull),
    "ft_service/control/tracking/metric_sender.py:_program": Row(track, lines=2),
    "ft_service/data/examiner.py:start": Row(examine),
    "ft_service/data/image_process.py:_made_program": Row(look),
    "ft_service/data/template_process.py:": Row(render),
    "ft_service/graders/python_fence.py:_started": Row(grade_python, lines=2),
    "ft_service/graders/text_processes.py:": Row(grade_texts, lines=2),
    "ft_service/serving/exporting.py:by_process": Row(export),
    "ft_service/serving/preview_process.py:__init__": Row(talk, lines=3),
    "ft_service/serving/worker_tasks.py:run_worker": Row(work),
    "ft_service/supervisor/object_mirror.py:_program": Row(mirror),
}
"""The function that makes a helper's Program, if any, and how its helper is tried."""
ELSEWHERE = {
    "workers/output/outcome.py:_check_in_fresh_process": "tests/workers/output/test_outcome.py",
    "workers/tasks/export.py:_by_torchao": "tests/workers/tasks/test_round_by_torchao.py",
}
"""Tried where torch is loaded anyway."""
NO_HELPERS = {
    "ft_service/cli/quickstart/quickstart_processes.py": "the server itself",
    "ft_service/client/suite.py": "a program of the user's own machine",
    "ft_service/host/hardware.py": "GPUs are counted without its answer",
    "ft_service/host/helper_process.py": "what starts all helpers",
    "ft_service/launcher/local_launcher.py": "a supervisor: launcher/test_local_launcher.py",
    "ft_service/launcher/slurm/slurm_commands.py": "Slurm's commands: launcher/slurm",
    "ft_service/local/run.py": "a supervisor: local/test_run.py",
    "ft_service/store/migrations/revise.py": "a tool of developers",
    "ft_service/supervisor/supervisor.py": "torchrun: supervisor/test_supervisor.py",
    "ft_service/version.py": "git: without it no commit is said: test_version.py",
}
"""Modules that start other processes."""


def called(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The innermost function around each call, and what is called, by its full name as far as the
    module imports it.
    """
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                first, *rest = ast.unparse(child.func).split(".")
                yield function, ".".join([names.get(first, first), *rest])
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, child.name if is_function else function)

    return walk(tree, "")


@cache
def starts() -> tuple[set[str], set[str]]:
    """The places that make a helper's Program, and the modules that start processes otherwise."""
    helpers, others = set[str](), set[str]()
    for package in ("api", "ft_service", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            text = path.read_text(encoding="utf-8")
            for function, name in called(ast.parse(text if MAY_START.search(text) else "")):
                if name == f"{HELPER}.Program":
                    helpers.add(f"{place}:{function}")
                elif name.startswith(STARTS):
                    others.add(place)
    return helpers, others


def test_every_place_that_starts_a_process_is_known() -> None:
    helpers, others = starts()
    assert helpers == {*ROWS, *ELSEWHERE}
    assert others == set(NO_HELPERS)
    for place, tried in ELSEWHERE.items():
        assert place.partition(":")[2] in (ROOT / tried).read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ROWS)
def test_what_is_killed_again_and_again_is_done_in_the_end_and_nothing_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    row = ROWS[place]
    with row.opened(tmp_path) as ask:
        is_done_in_the_end(Killer(tmp_path, monkeypatch, row.lines), ask)


def test_a_fence_whose_proof_is_killed_is_proved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := python_fence.refusal({})) is not None:
        pytest.skip(f"no fence on this host: {why}")
    is_done_in_the_end(Killer(tmp_path, monkeypatch), prove_fence)
