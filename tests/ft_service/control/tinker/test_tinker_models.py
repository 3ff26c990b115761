"""Models of Tinker's clients: their commands, and when they are paused and go on.

The wire is in tests/api/routes/tinker.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ft_service.control.admission.job_admission import AdmissionContext
from ft_service.control.tinker.tinker_models import (
    MODEL_KEY,
    SESSION_KEY,
    NewModel,
    accept,
    create_model,
    finish_models,
    pause_idle,
    remove_all_expired,
)
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.documents import Desired
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.tinker import saved_weights as saved_weights_module
from ft_service.tinker.bodies import LoraConfig
from ft_service.tinker.commands import COMMANDS, RESULTS, Command, CommandLog, CommandResult
from ft_service.tinker.names import job_id_of, session_of
from ft_service.tinker.saved_weights import (
    SavedWeights,
    WeightsOptions,
    delete_saved,
    sampler_key,
    samplers_of,
    saved_bytes,
    saved_key,
    saved_weights,
    set_options,
    with_options,
)
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, get, new_store, spec_of
from tests.support.records import new_job

MODEL = "session-1:train:0"


@dataclass
class Place:
    """A model that runs, and has carried out three commands."""

    store: Store
    places: Places
    job: Job
    log: CommandLog

    def accept(self) -> None:
        """Give the model its next command, by a request that has read the job while it ran."""
        accept(self.job, Command(3, "optim_step"), self.store, self.places)

    def pause_idle(self) -> None:
        pause_idle(self.store, self.places, -1.0)

    def now(self) -> tuple[Desired, Reason | None]:
        job = get(self.store, self.job.id)
        return job.desired, job.reason


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = new_store(tmp_path)
    places = Places(tmp_path)
    job_id = job_id_of(MODEL)
    request = {"model": "tiny", "metadata": {MODEL_KEY: MODEL, SESSION_KEY: session_of(MODEL)}}
    spec = StoredSpec.of(spec_of(job_id, training_data=None))
    running = {"state": State.RUNNING, "phase": Phase.TRAINING}
    new = new_job(id=job_id, project_id=PROJECT, request=request, stored_spec=spec, **running)
    place = Place(store, places, create_job(store, new), CommandLog(places.run(job_id)))
    for seq, op in enumerate(("create_model", "forward_backward", "optim_step")):
        place.log.put(Command(seq, op))
        place.log.put_result(seq, CommandResult({}))
    yield place
    store.close()


def test_a_session_ends_behind_commands_that_are_gone(place: Place) -> None:
    """Their checkpoint holds the state, and everything else of them is old."""
    place.log.prune(2, results_before=place.log.last_used() + 3600)
    for _ in range(2):
        finish_models(PROJECT, session_of(MODEL), place.store, place.places)
        assert [seq for seq in range(9) if place.log.has(seq)] == [3], (
            "the next that the ranks wait for"
        )
        assert place.log.command(3) == Command(3, "finish")


def test_a_session_ends_where_its_clients_numbers_have_a_gap(place: Place) -> None:
    """Behind it, the model would wait for ever for the request that is missing."""
    place.log.put(Command(3, "forward_backward"))
    place.log.put(Command(5, "optim_step"))
    finish_models(PROJECT, session_of(MODEL), place.store, place.places)
    assert place.log.command(4) == Command(4, "finish")


def test_a_command_resumes_a_model_that_is_paused_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = CommandLog.put

    def put_after_pause(log: CommandLog, command: Command) -> bool:
        place.pause_idle()
        assert place.now() == (Desired.PAUSE, Reason.IDLE)
        return put(log, command)

    monkeypatch.setattr(CommandLog, "put", put_after_pause)
    place.accept()
    assert place.now() == (Desired.RUN, None)


def test_a_repeated_creation_resumes_a_model(place: Place) -> None:
    """As if the service had been killed before it stored the command, and the model been paused
    since it had none.
    """
    for folder in (COMMANDS, RESULTS):
        shutil.rmtree(place.log.run.path(folder))
    place.pause_idle()
    assert place.now() == (Desired.PAUSE, Reason.IDLE)
    context = cast(
        AdmissionContext,
        SimpleNamespace(store=place.store, principal=SimpleNamespace(project_id=PROJECT)),
    )
    create_model(NewModel(MODEL, "tiny", LoraConfig()), context, place.places)
    assert place.log.has_unanswered()
    assert place.now() == (Desired.RUN, None)


@pytest.fixture
def before_pause(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done between the look of `pause_idle` at the commands, and its request."""
    request = place.store.jobs.request
    acts = list[Callable[[], object]]()

    def request_after(*given: Any, **more: Any) -> Job:
        while acts:
            acts.pop(0)()
        return request(*given, **more)

    monkeypatch.setattr(place.store.jobs, "request", request_after)
    return acts


def test_a_model_is_not_paused_over_a_command_that_comes_meanwhile(
    place: Place, before_pause: list[Callable[[], object]]
) -> None:
    before_pause.append(place.accept)
    place.pause_idle()
    assert before_pause == []
    assert place.log.has_unanswered()
    assert place.now() == (Desired.RUN, None)


def test_a_model_that_its_user_pauses_meanwhile_stays_so(
    place: Place, before_pause: list[Callable[[], object]]
) -> None:
    before_pause += [
        place.accept,
        lambda: place.store.jobs.request(PROJECT, place.job.id, Verb.PAUSE),
    ]
    place.pause_idle()
    assert before_pause == []
    assert place.now() == (Desired.PAUSE, None)


def test_a_model_that_waits_for_its_client_is_paused(place: Place) -> None:
    place.log.put(Command(5, "optim_step"))  # the one before it may never come
    place.pause_idle()
    assert place.now() == (Desired.PAUSE, Reason.IDLE)


def test_a_model_whose_run_directory_was_replaced_keeps_no_other_running(place: Place) -> None:
    """Pods of engines may write to the folder of their project."""
    replaced = create_job(place.store, replace(place.job, id="ftjob-0"))
    run = place.places.run_of_project(PROJECT, replaced.id).root
    run.rename(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))
    found = [replaced, place.job]
    with pytest.MonkeyPatch.context() as order:
        order.setattr(place.store.jobs, "running_with", lambda key: found)
        place.pause_idle()
    assert place.now() == (Desired.PAUSE, Reason.IDLE)
    assert get(place.store, replaced.id).desired is Desired.RUN


def test_weights_whose_time_is_over_go_though_nobody_asks(place: Place) -> None:
    run = place.places.run(place.job.id)
    for name, expires_at in (("over", 1.0), ("later", time.time() + 3600), ("public", None)):
        saved = SavedWeights(
            name=name, checkpoint="step-1-a1", step=1, command=2, created_at=1.0, bytes=6
        )
        run.write(saved_key(name), saved)
        run.put(f"{sampler_key(name)}/adapter_config.json", b"{}")
        for kind in ("weights", "sampler_weights"):
            set_options(run, f"{kind}/{name}", WeightsOptions(public=True, expires_at=expires_at))
    remove_all_expired(run.root.parent, place.places)
    assert samplers_of(run) == [saved.name for saved in saved_weights(run)] == ["later", "public"]
    assert with_options(run) == [
        (kind, name) for kind in ("weights", "sampler_weights") for name in ("later", "public")
    ]


def test_deleted_weights_free_their_bytes_though_the_model_writes_no_more(place: Place) -> None:
    run = place.places.run(place.job.id)
    for step in range(1, 5):
        run.put(f"checkpoints/step-{step}-a1/shard", b"bytes")
        run.put(f"checkpoints/step-{step}-a1/COMPLETE", b"{}")
        for name in ("a", "b") if step == 1 else (f"at-{step}",):
            saved = SavedWeights(
                name=name,
                checkpoint=f"step-{step}-a1",
                step=step,
                command=2,
                created_at=1.0,
                bytes=6,
            )
            run.write(saved_key(name), saved)
    for name in ("a", "at-2", "at-4"):
        delete_saved(run, name)
    assert sorted(path.name for path in run.path("checkpoints").iterdir()) == [
        "step-1-a1",
        "step-3-a1",
        "step-4-a1",
    ], (
        "one that other weights point to stays, and so does the newest, from which the model "
        "would go on"
    )
    delete_saved(run, "b")
    assert not run.path("checkpoints/step-1-a1").exists()


def test_weights_of_a_sampler_may_be_removed_while_they_are_counted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place.places.run(place.job.id)
    run.put(f"{sampler_key('there')}/adapter_config.json", b"{}")
    monkeypatch.setattr(saved_weights_module, "samplers_of", lambda _run: ["gone", "there"])
    assert saved_bytes(run) == 2
