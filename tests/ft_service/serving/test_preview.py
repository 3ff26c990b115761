"""When the preview's process begins and ends, and what those are told who asked it.

The process itself is played.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.control.tinker.tinker_samples import SampleLoop
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.ids import new_id
from ft_service.jobs.states import Job, State
from ft_service.launcher.local_launcher import host_id
from ft_service.meters import Meters
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.serving import base_turns
from ft_service.serving import preview as preview_module
from ft_service.serving.preview import Preview, PreviewModel
from ft_service.serving.preview_process import PreviewProcess, ProjectFullError, Ticket
from ft_service.serving.token_sampler import TokenSampler
from ft_service.settings import Settings
from ft_service.spec import BaseModelRef, PrecisionOptions, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import JobChange
from ft_service.store.sql import Store, migrate, open_store
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.tinker.sample_calls import parse_sample_request
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import SAMPLE, save_base
from tests.support.creating import create_job
from tests.support.programs.scripted_preview import POISON
from tests.support.reconciling import spec_of
from tests.support.records import PROJECT, new_job, place

PLAYED = [sys.executable, str(Path(__file__).parents[2] / "support/programs/scripted_preview.py")]
NF4 = {"default": "nf4"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path / 'ft.db'}"
    migrate(url)
    opened = open_store(url)
    opened.projects.ensure_project(PROJECT, "local")
    yield opened
    opened.close()


Make = Callable[..., Preview]


@pytest.fixture
def make(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stop = threading.Event()
    threads = []

    def started(**settings: Any) -> Preview:
        preview = Preview(Settings(home=tmp_path, slots=2, **settings), store, command=PLAYED)
        threads.append(threading.Thread(target=preview.run, args=(stop,)))
        threads[-1].start()
        return preview

    yield started
    stop.set()
    for thread in threads:
        thread.join()


class Answer:
    """What is delivered to one request."""

    def __init__(
        self,
        preview: Preview,
        wanted: str = "",
        *,
        base: str = "/a",
        precision: Any = None,
        adapter: Any = None,
        job: Job | None = None,
        beside: bool = False,
        project: str = "",
    ) -> None:
        self._parts: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        order = {"messages": [{"role": "user", "content": wanted}], "adapter": adapter}
        model = PreviewModel(base, precision, job)
        self.ticket = preview.submit(
            model, order, self._parts.put, project_id=project, on_processor=beside
        )

    def part(self, kind: str) -> dict[str, Any]:
        while (part := self._parts.get(timeout=HANG_SECONDS))["kind"] != kind:
            if part["kind"] == "error":
                raise part["error"]
        return part

    def text(self) -> str:
        text = self.part("text")["text"]
        self.part("done")
        return text

    def error(self) -> FtError:
        return self.part("error")["error"]


def succeeded(
    store: Store,
    home: Path,
    tuned: Sequence[float] = (-1.0, -1.0),
    base: Sequence[float] = (-5.0, -5.0),
) -> Job:
    """A job that was trained on the base /a in NF4."""
    job_id = new_id("ftjob-")
    spec = spec_of(
        job_id, model=BaseModelRef(name="a", path="/a"), precision=PrecisionOptions(default="nf4")
    )
    job = create_job(
        store, new_job(id=job_id, state=State.SUCCEEDED, stored_spec=StoredSpec.of(spec))
    )
    run = Places(home).run(job.id)
    run.put("adapter/adapter_config.json", b"{}")
    document = Probes(step=1, probes=[Probe(tokens=[1, 2, 3], tuned=list(tuned), base=list(base))])
    run.put(PROBES, document.model_dump_json().encode())
    return job


def told(store: Store, job: Job) -> list[str]:
    return [
        event.message
        for event in store.jobs.list_events(PROJECT, job.id, limit=50).data
        if "preview" in event.message
    ]


def alive(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_answers_for_a_base_and_its_adapters(make: Make) -> None:
    preview = make()
    assert preview.pid is None
    assert Answer(preview, precision=NF4, adapter="/x").text() == "a nf4 /x"
    pid = preview.pid
    assert Answer(preview, precision=NF4, adapter="/y").text() == "a nf4 /y"
    assert Answer(preview).text() == "a nf4 None", (
        "the base is asked in the formats that it is loaded in"
    )
    assert preview.pid == pid


def test_another_base_or_format_takes_its_place_once_it_rests(make: Make) -> None:
    preview = make()
    hanging = Answer(preview, "hang")
    hanging.part("begun")
    first = preview.pid
    waiting = Answer(preview, base="/b")
    other_format = Answer(preview, precision=NF4)
    assert preview.pid == first
    preview.cancel(hanging.ticket)
    assert waiting.text() == "b bf16 None"
    assert other_format.text() == "a nf4 None"
    assert preview.pid == first, "to start one takes longer than to load a base"


def test_a_base_that_serves_is_not_loaded_again(make: Make) -> None:
    """What the job computed in says nothing here, where processors choose that, and bf16 is how the
    base is stored.
    """
    preview = make()
    assert Answer(preview, "loads").text() == "1"
    trained = {"default": "bf16", "compute": "fp32", "compare_served": "off"}
    assert Answer(preview, "loads", precision=trained, adapter="/x").text() == "1"
    assert Answer(preview, "loads", precision={"fp8_products": "off"}, adapter="/x").text() == "2"


def test_what_a_job_that_succeeds_needs_is_loaded_and_proved_before_anybody_asks(
    make: Make, store: Store, tmp_path: Path
) -> None:
    preview = make()
    assert Answer(preview, "loads").text() == "1"
    pid = preview.pid
    job = succeeded(store, tmp_path)
    preview.preload(job)
    wait_for(lambda: Places(tmp_path).run(job.id).has(preview_module.PREVIEWED))
    (message,) = told(store, job)
    assert message.startswith("In the preview: served, verified: 1 prompts")
    asked = Answer(preview, "loads", precision=NF4, adapter="/x", job=job)
    assert asked.text() == "2"
    assert asked.ticket.order["probes"] == [], "what is proved is not measured again"
    assert preview.pid == pid
    assert len(told(store, job)) == 1


def test_a_verdict_that_could_not_be_told_is_told_after_the_next_request(
    make: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_events = store.jobs.add_events
    failed = threading.Event()

    def away_once(*args: Any) -> None:
        if failed.is_set():
            return add_events(*args)
        failed.set()
        raise UnavailableError("The database is away.")

    monkeypatch.setattr(store.jobs, "add_events", away_once)
    preview = make()
    job = succeeded(store, tmp_path)
    assert Answer(preview, "loads", precision=NF4, adapter="/x", job=job).text() == "1"
    assert failed.wait(HANG_SECONDS)
    asked = Answer(preview, "loads", precision=NF4, adapter="/x", job=job)
    asked.text()
    assert asked.ticket.order["probes"]
    wait_for(lambda: told(store, job) != [])


def test_where_nobody_tries_models_none_is_prepared(
    make: Make, store: Store, tmp_path: Path
) -> None:
    preview = make(preview_idle_seconds=0.2)
    job = succeeded(store, tmp_path)
    preview.preload(job)
    time.sleep(0.5)
    assert preview.pid is None
    Answer(preview, base="/b").text()
    wait_for(lambda: preview.pid is None)
    time.sleep(0.2)
    preview.preload(job)
    time.sleep(0.5)
    assert preview.pid is None


def test_the_preview_comes_back_to_who_tried_models_before_the_job(
    make: Make, store: Store, tmp_path: Path
) -> None:
    preview = make()
    Answer(preview).text()
    first = preview.pid
    wait_for(lambda: preview.release_slots([0, 1]))
    preview.preload(succeeded(store, tmp_path))
    wait_for(lambda: preview.pid is not None)
    assert preview.pid != first
    assert Answer(preview, "loads", precision=NF4, adapter="/x").text() == "1"


def test_another_base_that_is_being_asked_is_left_alone(
    make: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview = make()
    Answer(preview, base="/b").text()
    job = succeeded(store, tmp_path)
    preview.preload(job)
    time.sleep(0.5)
    assert Answer(preview, "loads", base="/b").text() == "1"
    monkeypatch.setattr(preview_module, "REST_SECONDS", 0.0)
    wait_for(lambda: told(store, job) != [])


def test_a_model_that_answers_as_another_is_told_of(
    make: Make, store: Store, tmp_path: Path
) -> None:
    job = succeeded(store, tmp_path, tuned=[-5.0, -5.0], base=[-1.0, -1.0])
    Answer(make(), precision=NF4, adapter="/x", job=job).text()
    wait_for(lambda: told(store, job) != [])
    assert "answers with the base" in told(store, job)[0]


def test_whoever_waits_for_a_base_too_long_is_told(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_module, "BUSY_SECONDS", 0.2)
    preview = make()
    Answer(preview, "hang").part("begun")
    assert Answer(preview, base="/b").error().code == "preview_busy"


def test_bases_have_turns_whatever_is_being_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_turns, "TURN_SECONDS", 0.0)
    preview = make()
    hanging = Answer(preview, "hang", project="b")
    hanging.part("begun")
    assert Answer(preview, "loads", base="/b", project="a").text() == "2"
    assert Answer(preview, "loads", project="b").text() == "3", "its answer goes on"
    assert Answer(preview, "loads", base="/b", project="a").text() == "4"
    assert hanging.ticket.id in (preview._process.tickets if preview._process else {})


def test_once_another_base_is_waited_for_nothing_new_goes_before_it(make: Make) -> None:
    preview = make()
    hanging = Answer(preview, "hang", project="b")
    hanging.part("begun")
    assert preview._process is not None
    preview._process.load_seconds = 0.0  # it is held for longer than it took to load
    other = Answer(preview, "loads", base="/b", project="a")
    new = Answer(preview, "loads", project="b")
    assert [ticket.project_id for ticket in preview._waiting] == ["a", "b"]
    preview.cancel(hanging.ticket)
    assert (other.text(), new.text()) == ("2", "3")


def test_what_ends_the_process_twice_is_asked_no_more(make: Make) -> None:
    preview = make()
    assert Answer(preview, "die").error().code == "preview_busy"
    assert Answer(preview, "die").error().code == "ends_preview"
    with pytest.raises(SpecError) as refused:
        Answer(preview, "die")
    assert refused.value.code == "ends_preview"
    assert Answer(preview, "loads").text() == "1", "the process is a third one, and stays"


def test_what_is_beside_a_request_that_ends_the_process_is_asked_again(make: Make) -> None:
    preview = make()
    for _ in range(2):
        beside = Answer(preview, "hang", project="other")
        beside.part("begun")
        Answer(preview, "die").error()
        assert beside.error().code == "preview_busy"
    again = Answer(preview, "hang", project="other")
    again.part("begun")
    assert again.ticket.is_suspect
    again.ticket.deliver({"kind": "done"})
    assert again.ticket.work not in preview._suspects, "it is done"
    preview.cancel(again.ticket)


def test_what_was_under_way_when_the_host_killed_it_is_never_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_module, "PAUSE_SECONDS", 0.01)
    preview = make()
    for _ in range(4):
        hanging = Answer(preview, "hang")
        hanging.part("begun")
        os.kill(preview.pid or 0, signal.SIGKILL)
        assert hanging.error().code == "preview_busy"
    assert preview._losses.count(preview_module.PAUSED) == 4
    assert Answer(preview).text() == "a bf16 None"


def test_a_stored_request_that_ends_the_process_twice_is_answered_with_an_error(
    make: Make, store: Store
) -> None:
    preview = make()
    stop = threading.Event()
    store.tinker.create_session("s", PROJECT, None, None)
    sampler = TinkerSampler(
        id="s:sample:0", project_id=PROJECT, session_id="s", base=SAMPLE.name, model_path=None
    )
    store.tinker.put_sampler(sampler)
    for number, token in enumerate((POISON, 5)):
        body = {"prompt": {"chunks": [{"tokens": [token]}]}, "sampling_params": {"max_tokens": 1}}
        store.tinker.put_sample(
            TinkerSample(id=f"{number}", project_id=PROJECT, sampler_id=sampler.id, request=body)
        )
    loop = SampleLoop(
        store, preview, Places(Path("/nowhere")), Catalogue([SAMPLE.parent]), Meters()
    )
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: store.tinker.answered(["0", "1"]) == {"0", "1"})
    finally:
        stop.set()
        thread.join()
    poison = store.tinker.get_sample(PROJECT, "0").error
    assert poison is not None
    assert poison["category"] == "user"
    assert store.tinker.get_sample(PROJECT, "1").answer is not None


def test_a_jobs_sampler_is_told_which_request_is_asked_no_more(make: Make) -> None:
    refused: list[str] = []
    sampler = TokenSampler(
        make(), "p", PreviewModel("/a"), lambda: False, lambda error, _: refused.append(error.code)
    )
    requests = [
        parse_sample_request({"prompt": {"chunks": [{"tokens": [token]}]}}) for token in (5, POISON)
    ]
    with pytest.raises(SpecError) as error:
        sampler.sample("/adapter", requests)
    assert error.value.code == "ends_preview"
    assert {*refused} == {"preview_busy"}
    assert [one.tokens for one in sampler.sample("/adapter", requests[:1])] == [[[5]]]


def test_it_is_gone_when_nobody_asks(make: Make) -> None:
    preview = make(preview_idle_seconds=0.2)
    Answer(preview).text()
    wait_for(lambda: preview.pid is None)
    assert Answer(preview).text()


def test_a_killed_one_costs_its_answers_and_the_next_call_answers(make: Make) -> None:
    preview = make()
    hanging = Answer(preview, "hang")
    hanging.part("begun")
    assert preview.pid is not None
    os.kill(preview.pid, signal.SIGKILL)
    error = hanging.error()
    assert isinstance(error, UnavailableError)
    assert error.message == "The preview's process has ended before its answer. Try again."
    assert Answer(preview).text() == "a bf16 None"


def test_a_base_that_cannot_be_loaded_says_why(make: Make) -> None:
    preview = make()
    error = Answer(preview, base="/bad").error()
    assert isinstance(error, SpecError)
    assert (error.message, error.code) == ("no such base", "model_not_served")
    assert Answer(preview, "loads").text() == "2", "it continues with another base"


def test_a_process_that_cannot_be_started_costs_one_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(preview_module, "PreviewProcess", _no_memory)
        preview = make()
        error = Answer(preview).error()
    assert isinstance(error, UnavailableError)
    assert "the service's log says how" in error.message
    assert Answer(preview).text() == "a bf16 None"


def _no_memory(*_: object) -> None:
    raise OSError("Cannot allocate memory")


def test_with_all_slots_taken_it_does_not_start(make: Make, store: Store) -> None:
    place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1], host_id())
    preview = make()
    error = Answer(preview).error()
    assert isinstance(error, UnavailableError)
    assert "Both slots are busy training. Try again later, pause a job (ft pause)" in error.message
    assert error.retry_after is not None
    assert error.retry_after > 1
    assert preview.pid is None


def test_beside_training_the_processor_answers_whoever_asks_for_that(
    make: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_module, "LOOK_SECONDS", 0.0)
    base = str(save_base(tmp_path / "models/tiny"))
    job = place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1], host_id())
    preview = make()
    hanging = Answer(preview, "hang", base=base, precision=NF4, beside=True)
    hanging.part("begun")
    pid = preview.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19, "training comes first"
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    assert preview.release_slots([0, 1]), "it does not hold the slots"
    assert Answer(preview, base=base, precision=NF4, beside=True).text() == "tiny nf4 None"
    assert preview.pid == pid
    preview.cancel(hanging.ticket)
    claimed = store.leases.claim(host=host_id(), owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claimed is not None
    assert claimed.job.id == job.id
    assert store.leases.apply(
        claimed, JobChange(job=replace(claimed.job, state=State.CANCELLED), release_slots=True)
    )
    wait_for(lambda: not alive(pid))
    assert Answer(preview, base=base, precision=NF4, beside=True).text() == "tiny nf4 None"
    assert os.getpriority(os.PRIO_PROCESS, preview.pid or 0) == os.getpriority(
        os.PRIO_PROCESS, 0
    ), "it has a slot of its own"


def test_a_request_that_arrives_while_the_process_is_being_ended_waits_for_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview = make(preview_idle_seconds=0.05)
    ends = threading.Event()
    may_end = threading.Event()
    stock = PreviewProcess.end

    def held(process: PreviewProcess) -> None:
        ends.set()
        may_end.wait(HANG_SECONDS)
        stock(process)

    monkeypatch.setattr(PreviewProcess, "end", held)
    assert Answer(preview).text() == "a bf16 None"
    first = preview.pid
    assert ends.wait(HANG_SECONDS), "it is idle"
    asked = Answer(preview)
    may_end.set()
    assert asked.text() == "a bf16 None"
    assert preview.pid != first or not alive(first)


def test_beside_training_no_base_takes_more_than_half_of_the_free_memory(
    make: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(save_base(tmp_path / "models/tiny"))
    place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1], host_id())
    preview = make()
    monkeypatch.setattr(preview_module, "available_memory", lambda: 100_000)
    error = Answer(preview, base=base, beside=True).error()
    assert isinstance(error, UnavailableError)
    assert "during training it may take 48.83 KiB, half of what is free" in error.message
    assert preview.pid is None


def test_a_job_gets_its_slots(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    stock = PreviewProcess.end

    def held(process: PreviewProcess) -> None:
        may_end.wait(HANG_SECONDS)
        stock(process)

    monkeypatch.setattr(PreviewProcess, "end", held)  # until it is gone, nobody is answered
    monkeypatch.setattr(preview_module, "LEAVE_SECONDS", 0.5)
    preview = make()
    hanging = Answer(preview, "hang")
    hanging.part("begun")
    pid = preview.pid
    assert preview.release_slots([0]), "it is on the other one"
    assert not preview.release_slots([0, 1])
    with pytest.raises(UnavailableError, match="made way for a training job"):
        Answer(preview)
    may_end.set()
    wait_for(lambda: preview.release_slots([0, 1]))
    assert not alive(pid)
    assert "made way" in hanging.error().message


def test_it_ends_with_its_thread(tmp_path: Path, store: Store) -> None:
    preview = Preview(Settings(home=tmp_path, slots=2), store, command=PLAYED)
    stop = threading.Event()
    thread = threading.Thread(target=preview.run, args=(stop,))
    thread.start()
    hanging = Answer(preview, "hang")
    hanging.part("begun")
    pid = preview.pid
    stop.set()
    thread.join(HANG_SECONDS)
    assert not alive(pid)
    assert "is ending" in hanging.error().message
    with pytest.raises(UnavailableError):
        Answer(preview)


def test_a_process_that_reads_nothing_holds_up_neither_those_who_ask_nor_training(
    tmp_path: Path,
) -> None:
    """More than a socket holds waits to be written."""
    process = PreviewProcess(("sleep", "600"), 0, dict(os.environ), 0.0)
    try:
        for _ in range(4):
            process.ask(
                Ticket(
                    None, "/a", {"adapter": None, "text": "x" * 2**20}, lambda _: None, None, "p"
                )
            )
        process.reduce_threads()
    finally:
        process.end()


def test_one_project_does_not_take_all_places(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_module, "MOST_REQUESTS", 4)
    monkeypatch.setattr(preview_module, "MOST_OF_PROJECT", 2)
    preview = make()

    def ask(project: str) -> Ticket:
        order = {"messages": [{"content": "slow"}], "adapter": None}
        return preview.submit(PreviewModel("/a"), order, lambda _: None, project_id=project)

    monkeypatch.setattr(preview, "_load_next", lambda now: None)  # all wait
    tickets = [ask("rival"), ask("rival")]
    with pytest.raises(ProjectFullError, match="2 requests of this project"):
        ask("rival")
    tickets += [ask("default"), ask("third"), ask("second")]
    with pytest.raises(UnavailableError, match="4 requests are") as refused:
        ask("default")
    assert not isinstance(refused.value, ProjectFullError), "it has its share of them"
    tickets.append(ask("fourth"))
    for ticket in tickets:
        preview.cancel(ticket)
