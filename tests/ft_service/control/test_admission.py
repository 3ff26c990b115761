from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission import Asked, create, read
from ft_service.errors import ConflictError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.plan.machines import GIB, Machine
from ft_service.settings import Settings
from ft_service.store.records import File, Principal
from ft_service.store.sql import Store, migrate, open_store
from tests.support.bases import LLAMA_8B, save_base

ANN = Principal(key_id="key_a", project_id="p", organization="acme", scope="user")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path / 'ft.db'}"
    migrate(url)
    store = open_store(url)
    store.ensure_project("p", "acme")
    for file_id, purpose in (("file-a", "fine-tune"), ("file-r", "fine-tune-results")):
        file = File(id=file_id, project_id="p", filename="a.jsonl", purpose=purpose, bytes=1, sha256="0" * 64, created_at=0.0)
        store.add_file(file)
    yield store
    store.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    save_base(folder / "tiny")
    return folder


def ask(store: Store, models: Path, *, job_id: str | None = None, principal: Principal = ANN, **body: Any) -> Asked:
    body = {"model": "tiny", "training_file": "file-a", **body}
    return read(body, principal=principal, store=store, settings=Settings(home=models.parent, models=[models]), job_id=job_id)


def admit_all(store: Store, models: Path, asked: list[Asked], *, slots: int | None = None) -> list[Job | Exception]:
    settings = Settings(home=models.parent, models=[models], slots=slots)
    return create(asked, store=store, settings=settings, catalogue=Catalogue([models]))


def admit(store: Store, models: Path, *, slots: int | None = None, job_id: str | None = None, **body: Any) -> Job:
    (outcome,) = admit_all(store, models, [ask(store, models, job_id=job_id, **body)], slots=slots)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_a_seed_is_drawn_and_kept(store: Store, models: Path) -> None:
    drawn = {admit(store, models).spec.seed for _ in range(5)}

    assert len(drawn) == 5
    assert admit(store, models, seed=7).spec.seed == 7


@pytest.mark.parametrize(
    ("gpus", "slots", "ranks"), [("", None, 1), ("", 8, 1), ("0,1,2", None, 3), ("0,1,2", 2, 2), ("0", 8, 1)]
)
def test_auto_takes_the_hosts_gpus_as_far_as_its_slots_go(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, slots: int | None, ranks: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    job = admit(store, models, slots=slots)

    assert (job.slots, job.spec.world_size) == (ranks, ranks)


def test_more_ranks_than_slots_are_refused_with_both_numbers(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert admit(store, models, distributed={"nproc_per_node": 3}).slots == 3

    with pytest.raises(SpecError, match="nproc_per_node = 4: this host runs at most 3") as caught:
        admit(store, models, distributed={"nproc_per_node": 4})
    assert caught.value.param == "distributed.nproc_per_node"


def test_a_file_of_another_purpose_is_refused(store: Store, models: Path) -> None:
    with pytest.raises(SpecError, match="its purpose is fine-tune-results") as caught:
        admit(store, models, validation_file="file-r")
    assert caught.value.param == "validation_file"
    assert store.list_jobs("p").data == []


def test_an_id_admits_one_job(store: Store, models: Path) -> None:
    job = admit(store, models, job_id="ftjob-1")

    assert (job.id, job.state) == ("ftjob-1", State.VALIDATING)
    with pytest.raises(ConflictError):
        admit(store, models, job_id="ftjob-1")


def test_the_plan_is_the_jobs_second_event(store: Store, models: Path) -> None:
    job = admit(store, models, lora={"r": 100}, precision={"default": "nf4"})

    told = store.list_events("p", job.id).data[::-1]
    assert [event.level for event in told] == ["info", "info", "warn"]
    assert told[0].message == f"Created fine-tuning job: {job.id}"
    assert told[1].message.startswith("Plan: at most ")
    assert ", fits this host. Chosen: training.max_length: 128 (" in told[1].message
    assert told[2].message.startswith("lora.r = 100 is more than the matrix of model.layers.0.self_attn.q_proj has (64 x 64)")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"precision": {"overrides": {"transformer.*": "nf4"}}}, "precision.overrides"),
        ({"lora": {"target_modules": ["query"]}}, "lora.target_modules"),
    ],
)
def test_what_matches_nothing_in_the_base_is_refused_at_the_door(
    store: Store, models: Path, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(SpecError, match="matches no linear layer") as caught:
        admit(store, models, **body)
    assert caught.value.param == param
    assert store.list_jobs("p").data == []


def test_a_job_that_cannot_fit_is_refused_with_what_would(store: Store, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(models / "large", LLAMA_8B)
    monkeypatch.setattr("ft_service.control.admission.this_host", lambda: Machine("small GPU", 12 * GIB))

    with pytest.raises(SpecError, match=r"does not fit small GPU.* 11\.28 GiB are usable") as caught:
        admit(store, models, model="large")
    assert "with precision.default: nf4" in str(caught.value)
    assert caught.value.code == "does_not_fit"
    fitting = admit(store, models, model="large", precision={"default": "nf4"}).spec
    assert (fitting.distributed.activation_checkpointing, fitting.training.tokens_per_micro_batch) == ("full", 8192)
    chosen = admit(store, models, model="large", precision={"default": "auto"}).spec
    assert (chosen.precision.default, "precision.default" in chosen.chosen) == ("fp8", True)
    long = admit(store, models, model="large", precision={"default": "nf4"}, training={"max_length": 100_000})
    assert store.list_events("p", long.id).data[0].level == "warn"


def test_a_format_is_not_chosen_for_a_machine_that_is_not_known(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What results do not depend on is left to the ranks, who see the machine."""
    monkeypatch.setattr("ft_service.control.admission.this_host", lambda: Machine("some GPU", None))
    with pytest.raises(SpecError, match="the memory of some GPU is not known") as caught:
        admit(store, models, precision={"default": "auto"})
    assert caught.value.param == "precision.default"
    spec = admit(store, models).spec
    open_still = (spec.distributed.activation_checkpointing, spec.distributed.compile, spec.training.tokens_per_micro_batch)
    assert (open_still, set(spec.chosen)) == (
        ("auto", "auto", "auto"),
        {"training.max_length"},
    )


def test_of_jobs_admitted_together_each_has_its_own_outcome(store: Store, models: Path) -> None:
    taken = admit(store, models)
    bodies: list[dict[str, Any]] = [
        {"seed": 1},
        {"training_file": "file-b"},
        {"job_id": taken.id},
        {"lora": {"target_modules": ["query"]}},
        {"seed": 2, "metadata": {"team": "b"}},
        {"principal": Principal(key_id="key_b", project_id="q", organization="other", scope="user")},
    ]
    outcomes = admit_all(store, models, [ask(store, models, **body) for body in bodies])

    first, no_file, no_id, no_layer, last, of_another_project = outcomes
    assert isinstance(no_id, ConflictError)
    refused = [outcome.param for outcome in (no_file, no_layer, of_another_project) if isinstance(outcome, SpecError)]
    assert refused == ["training_file", "lora.target_modules", "training_file"]
    created = [outcome for outcome in (first, last) if isinstance(outcome, Job)]
    assert [job.id for job in store.list_jobs("p").data] == [*(job.id for job in reversed(created)), taken.id]
    assert [job.id for job in store.list_jobs("p", metadata={"team": "b"}).data] == [created[1].id]
    assert all(store.list_events("p", job.id).data for job in created)


def test_the_spec_that_was_admitted_is_the_one_that_is_stored(store: Store, models: Path) -> None:
    job = admit(store, models, precision={"default": "nf4"}, training={"learning_rate": 1}, seed=3)
    stored = store.get_job(job.project_id, job.id)
    assert stored.spec == job.spec
    assert stored.spec.model_dump() == job.spec.model_dump()
    assert stored.stored_spec.document == job.spec.model_dump(mode="json")
