"""The process that reads data files: it computes each result once, ends with its parent, and loses
no job.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ft_service.control.checks.data_checks import LARGE_BYTES, Checked, Checks, check_data
from ft_service.data.data_file import Counts, DataReport, ExamineRequest, ReadProgress
from ft_service.data.examiner import Examiner, ExaminerLost, ReportCache, Tell
from ft_service.data.statistics import DataStatistics, FileStatistics, Lines, Spread
from ft_service.data.tokenizer_files import tokenizer_state
from ft_service.host import processes
from ft_service.jobs.states import Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.spec import DataFileRef
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import (
    PROJECT,
    add_job,
    get,
    messages,
    new_reconciler,
    new_store,
    step_until,
)

LANES = "ft_service.control.checks.check_lanes.Examiner"

ANSWERING = """
import os, sys
calls = open(sys.argv[1], "a")
for line in sys.stdin:
    print(f"{os.getpid()} {line}", file=calls, flush=True, end="")
    print('{"report": {"examples": 1, "faults": [], "faults_total": 0, "counts": {"tokens": 7}}}', flush=True)
"""
READING = """
import os, sys, time
calls = open(sys.argv[1], "a")
go_on = sys.argv[1] + ".go"
for line in sys.stdin:
    print(f"{os.getpid()} {line}", file=calls, flush=True, end="")
    for lines, share in ((1000, 0.25), (3000, 0.75)):
        print('{"progress": {"lines": %d, "share": %f}}' % (lines, share), flush=True)
        while not os.path.exists(go_on):
            time.sleep(0.01)
        os.unlink(go_on)
    print('{"report": {"examples": 1, "faults": [], "faults_total": 0, "counts": {"tokens": 7}}}', flush=True)
"""
SILENT = """
import os, sys
calls = open(sys.argv[1], "a")
for line in sys.stdin:
    print(f"{os.getpid()} {line}", file=calls, flush=True, end="")
"""
DYING = """
import os, sys
calls = open(sys.argv[1], "a")
for line in sys.stdin:
    print(f"{os.getpid()} {line}", file=calls, flush=True, end="")
    sys.exit("out of paper")
"""


class Scripted:
    """A process in the place of the real one, and the requests that reached it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, script: str) -> list[str]:
        path = self._folder / "examine.py"
        path.write_text(script)
        return [sys.executable, str(path), str(self._folder / "calls")]

    def asked(self) -> list[int]:
        """Process ids that were asked, one a request."""
        calls = self._folder / "calls"
        return (
            [int(line.split()[0]) for line in calls.read_text().splitlines()]
            if calls.exists()
            else []
        )

    def first(self) -> int:
        """The one that was asked first, waited for."""
        return wait_for(lambda: self.asked() or None)[0]


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


def request(name: str = "a", max_length: int = 10) -> ExamineRequest:
    return ExamineRequest(
        path=f"/{name}", sha256=name, model_path="/m", tokenizer="t", max_length=max_length
    )


def is_gone(pid: int) -> bool:
    try:
        return not processes.is_alive(processes.of(pid))
    except ProcessLookupError:
        return True


def test_the_process_is_kept_and_the_same_is_asked_for_once(scripted: Scripted) -> None:
    with Examiner(command=scripted.command(ANSWERING)) as examiner:
        for asked in (request(), request(), request(max_length=11), request("b"), request()):
            assert examiner.examine(asked) == DataReport(1, [], 0, Counts(tokens=7))
        assert len(scripted.asked()) == 3
        (pid,) = set(scripted.asked())
    assert is_gone(pid)


def test_what_is_known_is_forgotten_at_last() -> None:
    known = ReportCache(limit=2)
    for name in "abc":
        known.put(request(name), DataReport(1, [], 0))
    assert [known.get(request(name)) is None for name in "abc"] == [True, False, False]


def test_after_a_crash_the_next_file_gets_a_new_process(scripted: Scripted) -> None:
    with Examiner(command=scripted.command(DYING)) as examiner:
        with pytest.raises(ExaminerLost, match="without an answer: out of paper"):
            examiner.examine(request())
        scripted.command(ANSWERING)
        assert examiner.examine(request()).examples == 1


def test_it_can_be_stopped_from_another_thread(scripted: Scripted) -> None:
    with Examiner(command=scripted.command(SILENT)) as examiner:
        threading.Thread(target=lambda: scripted.first() and examiner.stop()).start()
        with pytest.raises(ExaminerLost, match="killed by signal 9"):
            examiner.examine(request())
        (pid,) = scripted.asked()
        assert is_gone(pid)


def test_the_digest_changes_with_the_tokenizer_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_state(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_state(str(tmp_path)) == before
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    assert tokenizer_state(str(tmp_path)) != before


def test_the_real_one_has_no_torch_and_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """Torch is hidden from it, so that it must answer without; its parent is killed in the middle
    of a file.
    """
    code = (
        "import sys; from tests.ft_service.data.test_examiner import examine_endlessly; "
        "examine_endlessly(sys.argv[1])"
    )
    base = Path(__file__).parents[3] / "examples/models/tiny-llama"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(base)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid, samples, told = map(int, parent.stdout.readline().split())
        assert samples > 0, "it has read a file"
        assert told == samples, "it was asked to tell at every line"
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "tokenizers" in maps
        assert "libtorch" not in maps
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: is_gone(pid))


def examine_endlessly(base: str) -> None:
    """In a process of its own: print the process that reads, how many samples it found and how
    often it told of that.
    """
    from ft_service.rundir.directory import sha256_of

    data = Path(base).parents[1] / "data/heldout.jsonl"
    told = list[ReadProgress]()
    with Examiner() as examiner:
        found = examiner.examine(
            ExamineRequest(str(data), sha256_of(data), base, "t", 512, progress_seconds=0.0),
            told.append,
        )
        assert found.counts is not None
        print(examiner.pid, found.counts.samples, len(told), flush=True)
        threading.Event().wait()


# Checks of jobs
# ------------------------------------------------------------------------------


def ask(job: Job, examiner: Examiner, tell: Tell) -> Checked:
    examiner.examine(request(job.id))
    return Checked()


def checks_with(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> Checks:
    monkeypatch.setattr(LANES, lambda known, tokens: Examiner(known, command=command))
    return Checks(ask, lambda: None)


def test_a_process_that_ends_again_and_again_fails_the_job_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store
) -> None:
    checks = checks_with(monkeypatch, scripted.command(DYING))
    job = add_job(store)
    found = wait_for(lambda: checks.result(job))
    checks.close()
    assert found.error is not None
    assert (found.error.code, found.error.param) == ("data_check_failed", None)
    assert "could not be checked" in found.error.message
    assert "out of paper" in found.error.message
    assert len(set(scripted.asked())) == 3


def test_a_process_that_ends_once_costs_the_job_nothing(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store
) -> None:
    checks = checks_with(monkeypatch, scripted.command(SILENT))
    job = add_job(store)
    assert checks.result(job) is None
    pid = scripted.first()
    scripted.command(ANSWERING)
    assert processes.kill(processes.of(pid))
    assert wait_for(lambda: checks.result(job)) == Checked()
    checks.close()


def test_a_dropped_check_ends_at_once_and_the_next_job_is_checked(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store
) -> None:
    checks = checks_with(monkeypatch, scripted.command(SILENT))
    job = add_job(store)
    other = add_job(store, "ftjob-2")
    assert checks.result(job) is None
    pid = scripted.first()
    assert [found.id for found in checks.under_way()] == [job.id]
    scripted.command(ANSWERING)
    checks.drop(job)
    assert is_gone(pid)
    assert wait_for(lambda: checks.result(other)) == Checked()
    assert checks.finished() == [other]
    assert checks.finished() == []
    checks.close()
    assert len(scripted.asked()) == 2, "the dropped one is not tried again"


def test_a_cancelled_job_ends_its_check(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        LANES,
        lambda known, tokens: Examiner(known, command=scripted.command(SILENT)),
    )
    reconciler = new_reconciler(tmp_path, store, FakeLauncher(2), check=ask)
    job = add_job(store)
    reconciler.step()
    pid = scripted.first()
    reconciler.step()
    assert not is_gone(pid)
    store.jobs.request(PROJECT, job.id, Verb.CANCEL)
    wait_for(lambda: reconciler.step() or is_gone(pid))
    assert get(store).state is State.CANCELLED
    reconciler.close()


def test_a_check_that_a_service_did_not_finish_is_made_by_the_next(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        LANES,
        lambda known, tokens: Examiner(known, command=scripted.command(SILENT)),
    )
    first = new_reconciler(tmp_path, store, FakeLauncher(2), check=ask)
    add_job(store)
    first.step()
    pid = scripted.first()
    first.close()
    assert is_gone(pid)
    monkeypatch.setattr(
        LANES,
        lambda known, tokens: Examiner(known, command=scripted.command(ANSWERING)),
    )
    second = new_reconciler(tmp_path, store, FakeLauncher(2), check=ask)
    assert get(store).state is State.VALIDATING
    step_until(second, store, State.QUEUED, State.RUNNING)
    second.close()


def test_a_job_whose_check_took_longer_is_looked_at_as_soon_as_it_is_done(
    store: Store, tmp_path: Path
) -> None:
    go_on = threading.Event()
    told = NewEvent(level="warn", message="train.jsonl: 3 samples are cut.")

    def slow(job: Job, examiner: Examiner, tell: Tell) -> Checked:
        go_on.wait(60)
        return Checked(events=(told,))

    reconciler = new_reconciler(tmp_path, store, FakeLauncher(2), check=slow, idle_seconds=3600.0)
    add_job(store)
    assert reconciler.step()
    assert not reconciler.step()
    go_on.set()
    step_until(reconciler, store, State.QUEUED)
    assert messages(store)[1:] == [told.message, "Files validated, moving job to queued state."]
    reconciler.close()


def test_of_a_check_that_takes_long_it_is_told_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, tmp_path: Path
) -> None:
    """From the process that reads to the job's events, each once."""
    path = tmp_path / "a.jsonl"
    go_on = tmp_path / "calls.go"
    path.touch()
    monkeypatch.setattr(
        LANES,
        lambda known, tokens: Examiner(known, command=scripted.command(READING)),
    )
    file = FileStatistics(
        "a.jsonl",
        "line",
        samples=1,
        tokens=7,
        targets=7,
        lengths=Spread(),
        learned=Spread(),
        histogram=(),
    )
    measured = DataStatistics(
        file, None, overlap=Lines(), items=1, steps=3, trained_tokens=21, padding_saved=0.0
    )
    monkeypatch.setattr(Examiner, "measure_job", lambda *_: measured)
    reconciler = new_reconciler(
        tmp_path, store, FakeLauncher(2), check=partial(check_data, places=Places(tmp_path))
    )
    add_job(store, training_data=DataFileRef(name="a.jsonl", path=str(path), sha256="a"))
    told = [
        "Validating training file: 1,000 lines (25 %).",
        "Validating training file: 3,000 lines (75 %).",
    ]
    for known in (1, 2):
        wait_for(lambda: reconciler.step() and messages(store)[1:] == told[:known])  # noqa: B023 - called in its turn
        reconciler.step()
        go_on.touch()
    step_until(reconciler, store, State.QUEUED)
    reconciler.close()
    assert '"progress_seconds":30.0' in (tmp_path / "calls").read_text()
    found = (
        "a.jsonl: 0 samples of 7 tokens, 0 of them the assistant's to learn; the longest "
        "sample has 0 tokens."
    )
    assert messages(store)[1:4] == [*told, found]
    assert messages(store)[-1] == "Files validated, moving job to queued state."


def test_a_large_file_keeps_no_small_one_waiting(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, store: Store, tmp_path: Path
) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGE_BYTES + 1)
    (tmp_path / "small").touch()
    large, small = (
        add_job(
            store,
            f"ftjob-{name}",
            training_data=DataFileRef(name=name, path=str(tmp_path / name), sha256=name),
        )
        for name in ("large", "small")
    )
    checks = checks_with(monkeypatch, scripted.command(SILENT))
    assert checks.result(large) is None
    scripted.first()
    scripted.command(ANSWERING)
    assert wait_for(lambda: checks.result(small)) == Checked()
    assert checks.result(large) is None
    checks.close()
    wait_for(lambda: all(map(is_gone, scripted.asked())))
