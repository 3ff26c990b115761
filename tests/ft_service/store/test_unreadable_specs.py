"""Jobs whose spec this version cannot read do not affect other jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.control.admission import tuned_models
from ft_service.control.tinker.tinker_models import MODEL_KEY, pause_idle
from ft_service.errors import OtherVersionError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.spec import AdapterRef, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import JobChange, Principal
from ft_service.store.sql import Store
from ft_service.tinker.commands import Command, CommandLog, CommandResult
from tests.support.creating import create_job
from tests.support.reconciling import spec_of
from tests.support.records import PROJECT, claim, new_job


@pytest.fixture
def unreadable(store: Store) -> Job:
    """A job as a version left it whose option `lora.gone` is no more."""
    parent = AdapterRef(name="ft:tiny:local::6", job_id="ftjob-6", path="/runs/ftjob-6/adapter")
    spec = StoredSpec.of(spec_of("ftjob-7", tuned_name="ft:tiny:local::7", parent=parent))
    job = create_job(store, new_job(stored_spec=spec, id="ftjob-7"))
    document = job.stored_spec.document
    document = {**document, "lora": {**document["lora"], "gone": True}}
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET spec = :spec"), {"spec": json.dumps(document)})
    return store.jobs.get_job(PROJECT, job.id)


def test_it_is_listed_claimed_and_cancelled(store: Store, unreadable: Job) -> None:
    with pytest.raises(OtherVersionError, match="gone"):
        _ = unreadable.spec
    assert [job.id for job in store.jobs.list_jobs(PROJECT).data] == [unreadable.id]
    assert store.jobs.jobs_by_id([unreadable.id]) == [unreadable]
    claimed = claim(store)
    assert store.leases.apply(claimed, JobChange(job=claimed.job))
    assert store.jobs.request(PROJECT, unreadable.id, Verb.CANCEL).state is State.CANCELLED


def test_what_it_continues_is_kept_until_it_is_over(store: Store, unreadable: Job) -> None:
    create_job(store, new_job())
    assert store.jobs.adapters_to_continue() == [("ftjob-6", "/runs/ftjob-6/adapter")]
    store.jobs.request(PROJECT, unreadable.id, Verb.CANCEL)
    assert store.jobs.adapters_to_continue() == []


def test_it_is_shown_as_far_as_it_is_known(unreadable: Job) -> None:
    assert unreadable.stored_spec.unknown == ["lora.gone"]
    assert unreadable.known_spec == spec_of(
        "ftjob-7", tuned_name="ft:tiny:local::7", parent=unreadable.known_spec.parent
    )


def test_values_that_a_later_version_has_added_are_shown_as_the_default() -> None:
    document = spec_of("ftjob-7").model_dump(mode="json")
    document["precision"]["default"], document["lora"]["later"] = "int3", {"a": 1}
    later = StoredSpec(document)
    assert set(later.unknown) == {"precision.default", "lora.later"}
    assert later.known == spec_of("ftjob-7")


def test_a_reason_that_a_later_version_has_added_hides_no_job(
    store: Store, unreadable: Job
) -> None:
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET reason = 'of_a_later_version'"))
    assert [job.reason for job in store.jobs.list_jobs(PROJECT).data] == [None]


def test_its_model_is_still_found(store: Store, unreadable: Job, tmp_path: Path) -> None:
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET state = 'succeeded', finished_at = 5"))
    found = tuned_models.find_own("ft:tiny:local::7", PROJECT, store)
    assert (found.name, found.base, found.organization) == ("ft:tiny:local::7", "tiny", "local")
    caller = Principal(key_id="key_1", project_id=PROJECT, organization="local", scope="user")
    assert list(tuned_models.list_usable(caller, store, Places(tmp_path))) == [found]


def test_a_model_of_a_client_is_paused_beside_another(store: Store, tmp_path: Path) -> None:
    """Of two idle models neither keeps the other running, whose spec cannot be read."""
    places = Places(tmp_path)
    for number in (7, 8):
        spec = StoredSpec.of(spec_of(f"ftjob-{number}", training_data=None))
        spec = StoredSpec({**spec.document, "lora": {**spec.document["lora"], "gone": True}})
        running = {"state": State.RUNNING, "phase": Phase.TRAINING, "stored_spec": spec}
        request = {"model": "tiny", "metadata": {MODEL_KEY: f"session-{number}:train:0"}}
        create_job(store, new_job(id=f"ftjob-{number}", request=request, **running))
        log = CommandLog(places.run(f"ftjob-{number}"))
        log.put(Command(0, "create_model"))
        log.put_result(0, CommandResult({}))
    pause_idle(store, places, -1.0)
    assert [job.reason for job in store.jobs.list_jobs(PROJECT).data] == [Reason.IDLE, Reason.IDLE]
