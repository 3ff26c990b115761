"""Every helper process that the product starts is killed by SIGKILL again and again: what was asked
of it is done in the end, and each death is the host's and never the input's fault.

The places that start a process are found in the source, so a new one fails here until it is tried.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from ft_service.bases.describing import DescribeLaterError, describe_in_process
from ft_service.bases.description import write_described
from ft_service.control.checks.file_checks import FileCheck, FileChecks
from ft_service.control.tracking import metric_sender
from ft_service.control.tracking.metric_sender import MetricsSender
from ft_service.data.examiner import Examiner, ExamineRequest
from ft_service.data.template_process import TemplateProcess
from ft_service.errors import FtError, is_lost
from ft_service.graders import python_fence, text_processes
from ft_service.graders.grades import Score
from ft_service.graders.text_processes import TextProcesses
from ft_service.graders.text_tasks import compare
from ft_service.host import helper_process
from ft_service.host.helper_process import Program
from ft_service.jobs.states import Phase, State
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.events import Metrics
from ft_service.serving import exporting
from ft_service.serving.preview import Preview, PreviewModel
from ft_service.serving.worker_tasks import run_worker
from ft_service.settings import Settings
from ft_service.shared_work import losses
from ft_service.store.records import JobChange, NewEvent
from ft_service.supervisor.object_mirror import Mirror
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import save_base
from tests.support.describing import small_document
from tests.support.graders import case
from tests.support.reconciling import PROJECT, add_job, new_store

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests/support/programs"
PYTHON = (sys.executable, "-I", "-S")
"""Without what takes long to start."""
KILLS = 4
"""More than anything tries in a row while somebody waits."""
STARTS = re.compile(
    r"(?<![.\w])(subprocess\.(?:Popen|run|call|check_\w+)|Popen|Program|os\.(?:fork|posix_spawnp?|spawn\w+)"
    r"|(?:asyncio\.)?create_subprocess_\w+|ProcessPoolExecutor|multiprocessing\.\w+)\("
)
ANSWERS = """
import sys
for line in sys.stdin:
    print(ANSWER, flush=True)
"""


@cache
def _calls() -> dict[str, set[str]]:
    """Modules of the product that start processes, with what they call for it."""
    found = dict[str, set[str]]()
    for package in ("api", "ft_service", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if called := {call[1] for call in STARTS.finditer(text)}:
                found[str(path.relative_to(ROOT))] = called
    return found


def _helpers() -> list[str]:
    """Modules that make a helper's Program: of ft_service.convert, a Program is something else."""
    return sorted(
        name
        for name, called in _calls().items()
        if called & {"Program"} and "helper_process" in (ROOT / name).read_text(encoding="utf-8")
    )


def says(answer: str) -> tuple[str, ...]:
    """A command that prints a line and ends, whatever it is asked."""
    return (*PYTHON, "-c", f"print({answer!r})")


def describe(folder: Path, _: pytest.MonkeyPatch) -> None:
    base = folder.parent / "base"
    document = small_document(base if base.exists() else save_base(base))
    command = says(write_described(document).decode())
    assert describe_in_process(base, command=command).key == document.key


def check_file(folder: Path, _: pytest.MonkeyPatch) -> None:
    path = folder / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    asked = FileCheck(sha256_of(path))
    report = asyncio.run(FileChecks().report("p", asked, path))
    assert (report.examples, report.faults) == (1, [])


def examine(_: Path, __: pytest.MonkeyPatch) -> None:
    report = {"report": {"examples": 1, "faults": [], "faults_total": 0, "counts": {"tokens": 7}}}
    command = (*PYTHON, "-c", ANSWERS.replace("ANSWER", repr(json.dumps(report))))
    request = ExamineRequest(path="/a", sha256="a", model_path="/m", tokenizer="t", max_length=10)
    with Examiner(command=command) as examiner:
        assert examiner.examine(request).examples == 1


def render(_: Path, __: pytest.MonkeyPatch) -> None:
    process = TemplateProcess({"default": "{{ messages[0].content }}!"}, {})
    try:
        told = [
            process.write([{"role": "user", "content": text}], None, date(2026, 3, 2))
            for text in ("a", "b")
        ]
        assert told == ["a!", "b!"]
    finally:
        process.close()


def grade_texts(_: Path, __: pytest.MonkeyPatch) -> None:
    text_processes.TEXT_PROCESSES.close()
    processes = TextProcesses()
    work = [
        (compare("{{sample.output_text}}", "{{item.a}}", "eq"), case("4", {"a": a})) for a in "45"
    ]
    try:
        results = processes.carry_out("p", work)
        assert [(result.value, result.error) for result in results] == [(1.0, None), (0.0, None)]
    finally:
        processes.close()


def grade_python(_: Path, __: pytest.MonkeyPatch) -> None:
    if (why := python_fence.refusal({})) is not None:
        pytest.skip(f"no fence on this host: {why}")
    source = "def grade(sample, item): return float(sample['output_text'])"
    with python_fence.FencedGrader(source, private={}) as grader:
        grader.start()
        scores = [grader.score(case(text).as_json()) for text in ("4", "5")]
        assert scores == [Score(4.0), Score(5.0)]


def track(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metric_sender, "TURN_SECONDS", 0.02)
    patch.setattr(metric_sender, "installed", lambda _: True)
    tracker = folder / "tracker"
    tracker.mkdir()
    store = new_store(folder)
    settings = Settings(home=folder, wandb_api_key=SecretStr("se-cret"))
    command = (*PYTHON, str(PROGRAMS / "tracker.py"), str(tracker))
    sender = MetricsSender(settings, store, command)
    integrations = [{"type": "wandb", "wandb": {"project": "p"}}]
    job = add_job(store, request={"training_file": "f", "integrations": integrations})
    claim = store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    step = NewEvent(
        level="info", message="s", metrics=Metrics(step=1, total_steps=9), source=(1, 0)
    )
    training = replace(claim.job, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    assert store.leases.apply(claim, JobChange(job=training, events=[step]))

    def is_there() -> bool:
        with store.writing() as connection:
            connection.exec_driver_sql("UPDATE integrations SET next_try_at = 0")
        sender.look()
        path = tracker / f"{job.id}.json"
        return path.exists() and '"steps": [1]' in path.read_text()

    try:
        wait_for(is_there)
        assert store.jobs.get_job(PROJECT, job.id).state is State.RUNNING
    finally:
        sender.stop()
        store.close()


def talk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    stop = threading.Event()
    store = new_store(folder)
    command = [sys.executable, str(PROGRAMS / "scripted_preview.py")]
    played = Preview(Settings(home=folder, slots=2), store, command=command)
    thread = threading.Thread(target=played.run, args=(stop,))
    thread.start()
    parts: list[dict[str, Any]] = []
    over = threading.Event()

    def deliver(part: dict[str, Any]) -> None:
        parts.append(part)
        if part["kind"] in ("done", "error"):
            over.set()

    try:
        order = {"messages": [{"role": "user", "content": ""}], "adapter": None}
        played.submit(PreviewModel("/a", None, None), order, deliver, project_id="p")
        assert over.wait(HANG_SECONDS)
        if parts[-1]["kind"] == "error":
            raise parts[-1]["error"]
        assert any(part.get("text") == "a None None" for part in parts)
    finally:
        stop.set()
        thread.join()
        store.close()


def export(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exporting, "WORKER", says('{"exact": 3}'))
    out = folder / "exports/gguf"
    assert exporting.by_process(folder, out, ExportFormat.GGUF, lambda: False) == {"exact": 3}


def work(folder: Path, _: pytest.MonkeyPatch) -> None:
    program = folder / "program"
    program.write_text("#!/bin/sh\necho '{}'\n")
    program.chmod(0o700)
    assert run_worker("workers.tasks.merge", [], python=str(program)) == {}


def mirror(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mirror, "_program", lambda *_: Program(command=says("{}")))
    Mirror("memory://", RunDir(folder), 1, 0).fetch()


def read_back(folder: Path, patch: pytest.MonkeyPatch) -> None:
    from workers.output import outcome

    checker = folder / "reread.py"
    checker.write_text("print('[]')")
    patch.setattr(outcome.reread_adapter, "__file__", str(checker))
    outcome._check_in_fresh_process(folder, {})


RUNS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "ft_service/bases/describing.py": describe,
    "ft_service/control/checks/file_checks.py": check_file,
    "ft_service/control/tracking/metric_sender.py": track,
    "ft_service/data/examiner.py": examine,
    "ft_service/data/template_process.py": render,
    "ft_service/graders/python_fence.py": grade_python,
    "ft_service/graders/text_processes.py": grade_texts,
    "ft_service/serving/exporting.py": export,
    "ft_service/serving/preview_process.py": talk,
    "ft_service/serving/worker_tasks.py": work,
    "ft_service/supervisor/object_mirror.py": mirror,
    "workers/output/outcome.py": read_back,
}
"""What needs the process of a module, and fails unless it gets the right answer."""

NO_HELPERS = {
    "ft_service/host/helper_process.py": "what starts all helpers",
    "ft_service/cli/quickstart/quickstart_processes.py": "the server itself",
    "ft_service/client/suite.py": "a program of the user's own machine",
    "ft_service/host/hardware.py": "GPUs are counted without its answer",
    "ft_service/launcher/local_launcher.py": "a supervisor: launcher/test_local_launcher.py",
    "ft_service/launcher/slurm/slurm_commands.py": "Slurm's commands: launcher/slurm",
    "ft_service/local/run.py": "a supervisor: local/test_run.py",
    "ft_service/store/migrations/revise.py": "a tool of developers",
    "ft_service/supervisor/supervisor.py": "torchrun: supervisor/test_supervisor.py",
}
"""Other modules that start processes."""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(losses, "pause_seconds", lambda *_, **__: 0.0)
    yield
    text_processes.TEXT_PROCESSES.close()


def test_every_place_that_starts_a_process_is_known() -> None:
    assert set(_helpers()) == set(RUNS)
    others = {name for name, called in _calls().items() if called - {"Program"}}
    assert others == set(NO_HELPERS)


@pytest.mark.parametrize("how", ["start", "middle", "end"])
@pytest.mark.parametrize("module", _helpers())
def test_what_is_killed_again_and_again_is_done_in_the_end_and_nothing_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, how: str
) -> None:
    strike = (*PYTHON, str(PROGRAMS / "strike.py"), str(tmp_path), how, str(KILLS))
    popen = helper_process._popen
    monkeypatch.setattr(
        helper_process,
        "_popen",
        lambda program: popen(replace(program, command=(*strike, *program.command))),
    )
    for turn in range(KILLS + 1):
        folder = tmp_path / str(turn)
        folder.mkdir()
        try:
            RUNS[module](folder, monkeypatch)
            break
        except (FtError, DescribeLaterError) as error:
            if not (is_lost(error) or isinstance(error, DescribeLaterError)):
                pytest.fail(f"what was asked is said to be at fault: {error!r}")
    else:
        pytest.fail("it was never done")
    # What has said all of its answer before it died was not asked again.
    assert how == "end" or (tmp_path / "starts").stat().st_size == KILLS + 1
