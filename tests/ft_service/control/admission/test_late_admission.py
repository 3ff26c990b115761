"""Jobs on bases that are described later: they wait in validating_files, and are planned or refused
there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions, Make
from ft_service.control.admission.job_admission import AdmissionContext, LateAdmission, create_job
from ft_service.control.bases import describe_bases
from ft_service.control.bases.base_facts import base_facts
from ft_service.control.checks import data_checks
from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.errors import SpecError
from ft_service.jobs.states import Job, State
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import File, Principal
from ft_service.store.sql import Store
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import save_base
from tests.support.describing import at_once, described_here, oddly
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, get, messages, new_store

ANN = Principal(key_id="key_a", project_id=PROJECT, organization="acme", scope="user")


@pytest.fixture(autouse=True)
def whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files are fine, whatever is in them."""
    monkeypatch.setattr(data_checks, "_check_files", lambda *_: Checked())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


class Service:
    """A store and a reconciler, whose bases are described by `make`."""

    def __init__(self, home: Path, make: Make | None) -> None:
        self.settings = Settings(home=home, models=[home / "models"], slots=4)
        self.store: Store = new_store(home)
        self.make = make
        self.folder = home / "models"
        file = File(
            id="file-a",
            project_id=PROJECT,
            filename="a.jsonl",
            purpose="fine-tune",
            bytes=4000,
            sha256="0" * 64,
            created_at=0.0,
        )
        self.store.files.add_file(file)
        (home / "files").mkdir()
        (home / "files" / "file-a").write_text("\n" * 4000)
        self.start()

    def start(self) -> None:
        self.descriptions = Descriptions(
            Places.of(self.settings).descriptions(), "tests", self.make
        )
        admission = LateAdmission(self.store, self.settings, self.descriptions)
        self.launcher = FakeLauncher(slots=4)
        places = Places.of(self.settings)
        self.reconciler = Reconciler(
            self.store,
            self.launcher,
            places,
            ReconcilerOptions(admission=admission, idle_seconds=0.0),
        )

    def end(self) -> None:
        self.descriptions.close()
        self.reconciler.close()

    def create(self, model: str, descriptions: Descriptions | None = None, **body: Any) -> Job:
        body = {
            "model": model,
            "training_file": "file-a",
            "distributed": {"nproc_per_node": 1},
            **body,
        }
        catalogue = Catalogue([self.folder], descriptions=descriptions or self.descriptions)
        return create_job(body, AdmissionContext(ANN, self.store, self.settings, catalogue))

    def step_until(self, job: Job, *states: State) -> Job:
        def there() -> Job | None:
            self.reconciler.step()
            now = get(self.store, job.id)
            return now if now.state in states else None

        return wait_for(there)


Open = Callable[[Make | None], Service]


@pytest.fixture
def open_service(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def opened(make: Make | None) -> Service:
            service = Service(tmp_path, make)
            stack.callback(service.store.close)
            stack.callback(lambda: service.end())
            return service

        yield opened
    wait_for(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "describing"]
    )


class Held:
    """Describes as workers.describe does, once it may."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, folder: Path, stop: Callable[[], bool]) -> Any:
        while not self.go.wait(0.02) and not stop():
            pass
        return described_here(folder)


def test_a_job_waits_for_its_base_and_is_planned_as_admission_would_have(
    open_service: Open,
) -> None:
    make = Held()
    service = open_service(make)
    save_base(service.folder / "tiny")
    known = service.create("tiny", at_once())
    job = service.create("tiny")
    assert (job.state, job.work) == (State.VALIDATING, None)
    assert known.work
    for _ in range(20):
        service.reconciler.step()
    waiting = get(service.store, job.id)
    assert (waiting.state, waiting.pending) == (
        State.VALIDATING,
        "Its base tiny is being described.",
    )
    make.go.set()

    planned = service.step_until(job, State.QUEUED, State.RUNNING)

    assert (planned.work, planned.planned_seconds, planned.shapes) == (
        known.work,
        known.planned_seconds,
        known.shapes,
    )
    chosen = {
        name: getattr(known.spec, name)
        for name in ("precision", "training", "distributed", "chosen")
    }
    assert {name: getattr(planned.spec, name) for name in chosen} == chosen
    assert planned.pending is None
    told = messages(service.store, job.id)
    earlier = messages(service.store, known.id)
    assert told[1].startswith("The base tiny is not described yet.")
    assert [message for message in earlier if "per rank" in message] == [
        message for message in told if "per rank" in message
    ]


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({"lora": {"target_modules": ["no_such_module"]}}, {}),
        ({"lora": {"target_parameters": ["no.such.parameter"]}}, {}),
        ({"precision": {"overrides": {"no_such_pattern": "nf4"}}}, {}),
        ({}, {"num_attention_heads": 5}),
    ],
    ids=["modules", "parameters", "patterns", "base"],
)
def test_what_admission_refuses_is_refused_later_with_the_same_words(
    open_service: Open, body: dict[str, Any], changes: dict[str, Any]
) -> None:
    service = open_service(lambda folder, stop: described_here(folder))
    save_base(service.folder / "tiny", **changes)
    with pytest.raises(SpecError) as refused:
        service.create("tiny", at_once(), **body)

    failed = service.step_until(service.create("tiny", **body), State.FAILED)

    assert failed.error is not None
    assert (failed.error["message"], failed.error["param"], failed.error["code"]) == (
        service.settings.without_paths(refused.value.message),  # the API leaves them out too
        refused.value.param,
        refused.value.code,
    )
    with pytest.raises(SpecError, match=r".") as again:
        service.create("tiny", **body)
    assert again.value.message == refused.value.message, "the base is described now"


# how each of them ends: tests/ft_service/bases/test_describing.py
@pytest.mark.parametrize(
    "test",
    [
        "hang",
        "crash",
        pytest.param("eat", marks=pytest.mark.slow),
        pytest.param("garbage", marks=pytest.mark.slow),
    ],
)
def test_a_job_on_a_hostile_folder_costs_no_other_job(
    open_service: Open, tmp_path: Path, test: str
) -> None:
    # A process that hangs is ended after the other job has begun, however long that takes.
    enough = threading.Event()
    service = open_service(
        lambda folder, stop: oddly(HANG_SECONDS)(folder, lambda: stop() or enough.is_set())
    )
    log = tmp_path / "log"
    save_base(service.folder / "hostile", test=test, log=str(log))
    save_base(service.folder / "good", log=str(log))
    bad = service.create("hostile")
    wait_for(lambda: service.reconciler.step() is not None and log.exists())
    good = service.create("good")

    assert service.step_until(good, State.RUNNING).state is State.RUNNING
    if test == "hang":  # who ended it is not the base, so the job waits and says for what
        assert get(service.store, bad.id).state is State.VALIDATING
        enough.set()
        wait_for(
            lambda: (
                service.reconciler.step()
                or "killed by signal 9" in str(get(service.store, bad.id).pending)
            )
        )
        assert get(service.store, bad.id).state is State.VALIDATING
        assert service.create("hostile").state is State.VALIDATING, "it is no refusal"
        return
    failed = service.step_until(bad, State.FAILED)
    assert failed.error is not None
    assert "hostile cannot be described, so it cannot be tuned here" in failed.error["message"]
    with pytest.raises(SpecError, match="cannot be described"):
        service.create("hostile")


def test_a_killed_description_fails_no_waiting_job_of_any_project(
    open_service: Open, tmp_path: Path
) -> None:
    """Nine jobs of three projects wait for a base whose process is killed each time, until it is
    not.
    """
    service = open_service(oddly())
    go = tmp_path / "go"
    log = tmp_path / "log"
    service.descriptions = Descriptions(
        Places(tmp_path).descriptions(), "tests", oddly(), lost_seconds=0.2
    )
    service.reconciler.close()
    admission = LateAdmission(service.store, service.settings, service.descriptions)
    places = Places.of(service.settings)
    service.reconciler = Reconciler(
        service.store,
        FakeLauncher(slots=4),
        places,
        ReconcilerOptions(admission=admission, idle_seconds=0.0),
    )
    save_base(service.folder / "tiny", test="killed", go=str(go), log=str(log))
    jobs: list[Job] = []
    for project in (PROJECT, "b", "c"):
        if project != PROJECT:
            service.store.projects.ensure_project(project, "acme")
            shared = service.store.files.get_file(PROJECT, "file-a")
            service.store.files.add_file(replace(shared, id=f"file-{project}", project_id=project))
            (tmp_path / "files" / f"file-{project}").write_text("\n" * 4000)
        context = AdmissionContext(
            replace(ANN, project_id=project),
            service.store,
            service.settings,
            Catalogue([service.folder], None, service.descriptions),
        )
        body = {
            "model": "tiny",
            "training_file": "file-a" if project == PROJECT else f"file-{project}",
        }
        jobs += [
            create_job({**body, "seed": seed, "distributed": {"nproc_per_node": 1}}, context)
            for seed in range(3)
        ]

    def states() -> set[State]:
        service.reconciler.step()
        return {service.store.jobs.get_job(job.project_id, job.id).state for job in jobs}

    wait_for(lambda: states() and log.exists() and len(log.read_text().splitlines()) >= 3)
    assert states() == {State.VALIDATING}
    told = [service.store.jobs.get_job(job.project_id, job.id).pending for job in jobs]
    assert all(
        "killed by signal 9" in str(pending) or "being described" in str(pending)
        for pending in told
    ), told
    go.touch()
    wait_for(lambda: states() <= {State.QUEUED, State.RUNNING})


def test_a_service_that_ends_while_it_describes_goes_on_when_it_is_started(
    open_service: Open, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    go = tmp_path / "go"
    service = open_service(oddly())
    save_base(service.folder / "slow", test="slow", log=str(log), go=str(go))
    job = service.create("slow")
    wait_for(lambda: service.reconciler.step() is not None and log.exists())
    service.end()
    pid = int(log.read_text().split()[1])
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert get(service.store, job.id).state is State.VALIDATING
    service.start()
    go.touch()

    assert service.step_until(job, State.QUEUED, State.RUNNING).work is not None


def test_a_server_describes_all_its_bases_and_those_that_come_later(
    open_service: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe_bases, "WATCH_SECONDS", 0.1)
    service = open_service(lambda folder, stop: described_here(folder))
    for number in range(20):
        save_base(service.folder / f"base-{number}", rope_theta=float(number + 1))
    hostile = save_base(service.folder / "hostile", num_attention_heads=5)
    (pickled := service.folder / "pickled").mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").touch()
    stop = threading.Event()
    arguments = (service.settings, service.store, Meters(), stop)
    thread = threading.Thread(
        target=describe_bases.watch_models,
        args=arguments,
        kwargs={"descriptions": service.descriptions},
    )
    thread.start()
    try:
        for number in range(20):
            wait_for(
                lambda number=number: service.descriptions.known(service.folder / f"base-{number}")
            )
        later = save_base(service.folder / "later", rope_theta=99.0)
        assert base_facts(later, wait_for(lambda: service.descriptions.known(later))).trainable
        facts = base_facts(hostile, wait_for(lambda: service.descriptions.known(hostile)))
        assert (facts.described, facts.trainable) == (True, False)
        assert "num_attention_heads" in str(facts.why_not) or facts.why_not
    finally:
        stop.set()
        thread.join()
    assert service.descriptions.known(pickled) is None
    assert "pickled" in str(base_facts(pickled, None).why_not)
