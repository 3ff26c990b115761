"""Bases and files that would be read for ever: an error of their line after one attempt, without
effect on other jobs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from ft_service.control.checks import check_lanes
from ft_service.control.checks.data_checks import LARGE_BYTES, Checked, Checks, check_data
from ft_service.data import examiner
from ft_service.data.data_file import DataReport, ExamineRequest
from ft_service.data.examiner import Examiner, ExaminerLost, Tell, check_seconds
from ft_service.data.line_errors import Fault
from ft_service.errors import SpecError
from ft_service.host import processes
from ft_service.jobs.states import Job, State
from ft_service.rundir.directory import sha256_of
from ft_service.spec import BaseModelRef, DataFileRef
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, add_job, get, new_reconciler, new_store, step_until
from tests.support.training.models import save_tokenizer

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set ns = namespace(x='x') %}{% for a in range(99999) %}{% set ns.x = ns.x + ns.x "
    "%}{% endfor %}"
)
MIB = 2**20

AT = """
import os, signal, sys, time
from ft_service.data.current_task import Task, CurrentTask
current_task = CurrentTask(int(sys.argv[2]))
current_task.ready()
calls = open(sys.argv[1], "a")
for line in sys.stdin:
    print(f"{os.getpid()} {line}", file=calls, flush=True, end="")
    if "quick" not in line:
        with current_task.at(TASK):
            DO
    print('{"report": {"examples": 1, "faults": [], "faults_total": 0}}', flush=True)
"""
HANG = "time.sleep(3600)"
SPIN = "while True: pass"


class Scripted:
    """A process in the place of the real one, and the requests that reached it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, task: str, do: str) -> list[str]:
        path = self._folder / "examine.py"
        path.write_text(AT.replace("TASK", task).replace("DO", do))
        return [sys.executable, str(path), str(self._folder / "calls")]

    def asked(self) -> list[int]:
        """Process ids that were asked, one a request."""
        calls = self._folder / "calls"
        return (
            [int(line.split()[0]) for line in calls.read_text().splitlines()]
            if calls.exists()
            else []
        )

    def alive(self) -> int:
        return sum(_is_alive(pid) for pid in set(self.asked()))


def _is_alive(pid: int) -> bool:
    try:
        return processes.is_alive(processes.of(pid)) is True
    except ProcessLookupError:
        return False


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


def base(folder: Path, template: str | None = None) -> BaseModelRef:
    """A base's tokenizer, which may have another chat template."""
    tokenizer = save_tokenizer(folder)
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return BaseModelRef(name=folder.name, path=str(folder))


def data(path: Path, turns: int = 2, lines: int = 1) -> DataFileRef:
    messages = [
        {"role": "assistant" if n % 2 else "user", "content": f"turn {n}"} for n in range(turns)
    ]
    path.write_text((json.dumps({"messages": messages}) + "\n") * lines)
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


# its parts are below: each limit by itself, and the lanes with scripted processes
@pytest.mark.slow
def test_a_good_job_passes_poisoned_ones_which_fail_with_line_and_cause(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path
) -> None:
    """With real processes. The endless one, of another project, comes first and is still at it when
    the others are done.
    """
    monkeypatch.setattr(check_lanes, "SHORT_SECONDS", 1.0)
    monkeypatch.setattr(examiner, "RENDER_SECONDS", 600.0)
    monkeypatch.setattr(examiner, "MEMORY_BYTES", 256 * MIB)
    good = base(tmp_path / "good")
    files = {
        "endless": (base(tmp_path / "endless", ENDLESS), data(tmp_path / "endless.jsonl")),
        "growing": (base(tmp_path / "growing", GROWING), data(tmp_path / "growing.jsonl")),
        "long": (good, data(tmp_path / "long.jsonl", turns=5000)),
        "good": (good, data(tmp_path / "good.jsonl")),
    }
    reconciler = new_reconciler(
        tmp_path, store, FakeLauncher(2), check=partial(check_data, places=Places(tmp_path))
    )
    try:
        model, training_data = files["endless"]
        store.projects.ensure_project("other", "local")
        add_job(store, "endless", model=model, training_data=training_data, project_id="other")
        reconciler.step()
        for name in ("growing", "long", "good"):
            add_job(store, name, model=files[name][0], training_data=files[name][1])
        step_until(reconciler, store, State.QUEUED, State.RUNNING, job_id="good")
        assert get(store, "endless", "other").state is State.VALIDATING
        step_until(reconciler, store, State.QUEUED, State.RUNNING, job_id="long")
        for name, why in (
            ("growing", "needed more than 256 MiB of memory"),
            ("endless again", "took longer than 1 seconds"),
        ):
            if name == "endless again":
                assert get(store, "endless", "other").state is State.VALIDATING
                monkeypatch.setattr(examiner, "RENDER_SECONDS", 1.0)
                add_job(store, name, model=model, training_data=training_data)
            failed = step_until(reconciler, store, State.FAILED, job_id=name)
            assert failed.error is not None
            assert failed.error["code"] == "invalid_training_file"
            head, fault = failed.error["message"].splitlines()
            assert head == f"{name.split()[0]}.jsonl: 1 of 1 line cannot be trained on."
            assert fault == f"line 1: the base's chat template {why}"
    finally:
        reconciler.close()


def request(model: BaseModelRef, file: DataFileRef, **limits: Any) -> ExamineRequest:
    return ExamineRequest(file.path, file.sha256, model.path, "t", 512, **limits)


def test_after_a_few_samples_beyond_a_limit_the_file_is_given_up(tmp_path: Path) -> None:
    model = base(tmp_path / "endless", ENDLESS)
    file = data(tmp_path / "a.jsonl", lines=500)
    with Examiner() as reading:
        report = reading.examine(request(model, file, render_seconds=0.2))
        again = reading.pid
        assert (
            reading.examine(request(base(tmp_path / "good"), data(tmp_path / "b.jsonl"))).counts
            is not None
        )
        assert reading.pid == again, "the process continues"
    error = report.error("training_file", "a.jsonl")
    assert error is not None
    slow = "3 lines (1, 2, 3): the base's chat template took longer than 0.2 seconds"
    assert (
        error.message
        == f"a.jsonl: 3 lines cannot be trained on, and the rest was not read.\n{slow}"
    )


def test_a_tokenizer_that_grows_without_bound_is_told_with_the_lines(tmp_path: Path) -> None:
    """It does so in Rust, which ends the process."""
    model = base(tmp_path / "growing")
    file = data(tmp_path / "a.jsonl", lines=3)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.path)
    tokenizer._tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("t", "t" * 64)] * 8)
    tokenizer.save_pretrained(model.path)
    with Examiner() as reading:
        report = reading.examine(request(model, file, memory_bytes=256 * MIB))
    reason = "the base's tokenizer needed more than 256 MiB of memory"
    assert report == DataReport(
        0, [Fault(1, "", reason, last_line=3, over_limit=True)], 1, unread=True
    )


def test_a_process_that_is_stuck_is_killed_and_what_it_was_at_is_told(scripted: Scripted) -> None:
    with Examiner(
        command=scripted.command("Task.ENCODING, 3, 9", SPIN), stuck_seconds=0.2
    ) as reading:
        (fault,) = reading.examine(ExamineRequest("/a", "a", "/m", "t", 10)).faults
        assert (
            str(fault)
            == "lines 3 to 9: the base's tokenizer took longer than 0.2 seconds of a processor"
        )
        assert scripted.alive() == 0
        scripted.command("Task.LOADING", SPIN)
        with pytest.raises(
            SpecError, match=r"tokenizer cannot be loaded: that took longer than 0\.2 seconds"
        ):
            reading.examine(ExamineRequest("/b", "b", "/m", "t", 10))


def test_a_file_that_takes_more_processor_time_than_its_size_allows_is_told_what_to_change(
    scripted: Scripted,
) -> None:
    """Though the process is never at one line for too long.

    The report is not kept: another host may be faster.
    """
    asked = ExamineRequest("/a", "a", "/m", "t", 10, cpu_seconds=0.3)
    with Examiner(command=scripted.command("Task.RENDERING, 3, 3", SPIN)) as reading:
        report = reading.examine(asked)
        error = report.error("training_file", "a.jsonl")
        assert error is not None
        assert (error.code, error.param) == ("invalid_training_file", "training_file")
        assert (
            "takes more than 0 seconds of a processor, the limit for its size: use a chat template"
            in error.message
        )
        assert not report.is_lasting
        with pytest.raises(SpecError) as refused:
            reading.show(asked)
        assert refused.value.code == "takes_too_long"
        scripted.command("Task.RENDERING, 3, 3", "pass")
        assert reading.examine(asked).examples == 1


@pytest.mark.parametrize(("size", "seconds"), [(0, 600), (400 * 1024, 606.25), (512 * MIB, 8792)])
def test_the_limit_of_processor_time_grows_with_the_file(
    tmp_path: Path, size: int, seconds: float
) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(size)
    assert (
        check_seconds(tmp_path / "a", DataFileRef(name="a", path="/elsewhere", sha256=""))
        == seconds
    )


def test_a_process_that_the_host_gives_no_processor_is_lost_and_no_line_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted
) -> None:
    monkeypatch.setattr(examiner, "LOST_SECONDS", 0.2)
    with Examiner(
        command=scripted.command("Task.ENCODING, 3, 9", HANG), stuck_seconds=60.0
    ) as reading:
        with pytest.raises(ExaminerLost, match="no processor") as lost:
            reading.examine(ExamineRequest("/a", "a", "/m", "t", 10))
        assert (lost.value.is_lost, lost.value.retry_after) == (True, 10)


def ask(job: Job, reading: Examiner, tell: Tell) -> Checked:
    report = reading.examine(ExamineRequest("/a", job.id, "/m", "t", 10))
    return Checked(report.error("training_file", "a.jsonl"))


def checks_with(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> Checks:
    monkeypatch.setattr(
        check_lanes, "Examiner", lambda known, tokens: Examiner(known, command=command)
    )
    return Checks(ask, lambda: None)


@pytest.mark.parametrize("sent", ["SIGSEGV", "SIGABRT"])
def test_a_process_that_crashes_at_a_line_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, sent: str
) -> None:
    crash = f"os.kill(os.getpid(), signal.{sent})"
    checks = checks_with(monkeypatch, scripted.command("Task.ENCODING, 7, 7", crash))
    job = add_job(store)
    found = wait_for(lambda: checks.result(job))
    checks.close()
    assert found.error is not None
    head, fault = found.error.message.splitlines()
    assert head == "a.jsonl: 1 line cannot be trained on, and the rest was not read."
    assert fault.startswith(
        "line 7: the base's tokenizer crashed the process that reads data files (signal"
    )
    assert len(scripted.asked()) == 1


def test_what_is_killed_from_outside_at_a_line_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store
) -> None:
    command = scripted.command("Task.ENCODING, 7, 7", "os.kill(os.getpid(), signal.SIGKILL)")
    checks = checks_with(monkeypatch, command)
    job = add_job(store)
    found = wait_for(lambda: checks.result(job))
    checks.close()
    assert found.error is None
    assert "killed by signal 9" in str(found.waits)
    assert len(scripted.asked()) == 3


def test_who_waits_for_a_lane_is_told_so_until_its_check_begins(
    store: Store, tmp_path: Path
) -> None:
    """Two long checks of one project, and one of another, which goes past the second."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGE_BYTES + 1)
    begun = list[str]()
    go = {name: threading.Event() for name in ("a1", "a2", "b1")}

    def check(job: Job, reading: Examiner, tell: Tell) -> Checked:
        begun.append(job.id)
        go[job.id].wait(60)
        return Checked()

    reconciler = new_reconciler(tmp_path, store, FakeLauncher(4), check=check)
    large = DataFileRef(name="large", path=str(tmp_path / "large"), sha256="l")
    store.projects.ensure_project("other", "local")
    for name in go:
        add_job(store, name, training_data=large, project_id="other" if name == "b1" else PROJECT)
    wait_for(lambda: reconciler.step() is not None and len(begun) == 2)

    def pending(name: str) -> str | None:
        reconciler.step()
        return get(store, name, "other" if name == "b1" else PROJECT).pending

    assert sorted(begun) == ["a1", "b1"]
    wait_for(lambda: str(pending("a2")).startswith("The check of its files waits for its turn"))
    wait_for(lambda: pending("a1") is None and pending("b1") is None)
    go["a1"].set()
    wait_for(lambda: pending("a2") is None and "a2" in begun)
    for each in go.values():
        each.set()
    for name in ("a2", "a1"):
        step_until(reconciler, store, State.QUEUED, State.RUNNING, job_id=name)
    reconciler.close()


def test_what_takes_long_steps_aside_in_few_processes_and_all_get_their_turn(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_lanes, "SHORT_SECONDS", 0.2)
    file = data(tmp_path / "a.jsonl")
    checks = checks_with(monkeypatch, scripted.command("Task.RENDERING, 1, 1", HANG))
    hanging = [add_job(store, f"hang-{number}", training_data=file) for number in range(4)]
    quick = add_job(store, "quick", training_data=file)
    assert [checks.result(job) for job in hanging] == [None] * 4

    def result_of_quick() -> Checked | None:
        """The quick one is not demoted, however long the machine takes."""
        if quick.id not in {job.id for job in checks.under_way()}:
            checks.demote_slow()
        return checks.result(quick)

    assert wait_for(result_of_quick) == Checked()
    assert scripted.alive() <= 1 + check_lanes.LONG_LANES
    dropped: set[str] = set()

    def all_had_their_turn() -> bool:
        """Each that is under way is cancelled, and makes room for the next."""
        checks.demote_slow()
        for job in checks.under_way():
            checks.drop(job)
            dropped.add(job.id)
        return dropped == {job.id for job in hanging}

    wait_for(all_had_their_turn)
    checks.close()
    wait_for(lambda: scripted.alive() == 0)
