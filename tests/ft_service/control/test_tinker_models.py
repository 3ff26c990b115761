"""Models of Tinker's clients: their commands, and when they are paused and go on. The wire is in tests/api/routes/tinker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_service.control.tinker_models import MODEL_KEY, SESSION_KEY, finish_models
from ft_service.jobs.states import Job, State
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.tinker.commands import Command, CommandLog, CommandResult
from ft_service.tinker.names import job_id_of, session_of
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, new_store, spec_of
from tests.support.records import new_job

MODEL = "session-1:train:0"


@dataclass
class Place:
    """A model that runs, and has carried out three commands."""

    store: Store
    places: Places
    job: Job
    log: CommandLog


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store, places, job_id = new_store(tmp_path), Places(tmp_path), job_id_of(MODEL)
    request = {"model": "tiny", "metadata": {MODEL_KEY: MODEL, SESSION_KEY: session_of(MODEL)}}
    spec = StoredSpec.of(spec_of(job_id, training_data=None))
    new = new_job(id=job_id, project_id=PROJECT, request=request, stored_spec=spec, state=State.RUNNING)
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
        assert [seq for seq in range(9) if place.log.has(seq)] == [3], "the next that the ranks wait for"
        assert place.log.command(3) == Command(3, "finish")
