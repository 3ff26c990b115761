from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission.job_admission import AdmissionContext, create_job
from ft_service.errors import ConflictError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.plan.machines import GIB, Machine
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import File, Principal
from ft_service.store.sql import Store, migrate, open_store
from tests.support.bases import LLAMA_8B, save_base
from tests.support.cluster_settings import cluster_settings
from tests.support.describing import at_once

ANN = Principal(key_id="key_a", project_id="p", organization="acme", scope="user")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path / 'ft.db'}"
    migrate(url)
    store = open_store(url)
    store.projects.ensure_project("p", "acme")
    for file_id, purpose in (("file-a", "fine-tune"), ("file-r", "fine-tune-results")):
        file = File(
            id=file_id,
            project_id="p",
            filename="a.jsonl",
            purpose=purpose,
            bytes=1,
            sha256="0" * 64,
            created_at=0.0,
        )
        store.files.add_file(file)
    yield store
    store.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    save_base(folder / "tiny")
    return folder


def admit(
    store: Store,
    models: Path,
    *,
    slots: int | None = None,
    job_id: str | None = None,
    principal: Principal = ANN,
    settings: Settings | None = None,
    **body: Any,
) -> Job:
    return create_job(
        {"model": "tiny", "training_file": "file-a", **body},
        AdmissionContext(
            principal,
            store,
            settings or Settings(home=models.parent, models=[models], slots=slots),
            Catalogue([models], descriptions=at_once()),
        ),
        job_id,
    )


def test_a_seed_is_drawn_and_kept(store: Store, models: Path) -> None:
    drawn = {admit(store, models).spec.seed for _ in range(5)}

    assert len(drawn) == 5
    assert admit(store, models, seed=7).spec.seed == 7


@pytest.mark.parametrize(
    ("gpus", "slots", "ranks"),
    [("", None, 1), ("", 8, 1), ("0,1,2", None, 3), ("0,1,2", 2, 2), ("0", 8, 1)],
)
def test_auto_takes_the_hosts_gpus_as_far_as_its_slots_go(
    store: Store,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    slots: int | None,
    ranks: int,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    job = admit(store, models, slots=slots)

    assert (job.slots, job.spec.world_size) == (ranks, ranks)


def test_what_is_set_aside_is_a_share_of_all_samples_not_of_those_that_are_counted(
    store: Store, models: Path
) -> None:
    file = Places.of(Settings(home=models.parent)).file("file-a")
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "a"}\n' * 60_000)
    auto: Any = {"n_epochs": "auto"}
    assert (
        admit(store, models, hyperparameters=auto, validation_split=0.5).spec.training.n_epochs == 1
    ), "30,000 are left"


def test_more_ranks_than_slots_are_refused_with_both_numbers(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert admit(store, models, distributed={"nproc_per_node": 3}).slots == 3

    with pytest.raises(SpecError, match="nproc_per_node = 4: this host runs at most 3") as caught:
        admit(store, models, distributed={"nproc_per_node": 4})
    assert caught.value.param == "distributed.nproc_per_node"


def test_a_job_is_for_the_host_of_its_pod_profile_and_is_planned_for_its_machine(
    store: Store, models: Path
) -> None:
    profiles = {
        "h100": {"ranks_per_node": 8, "hardware": "H100"},
        "l4": {"hardware": "L4", "priority_classes": {}},
    }
    settings = cluster_settings(models.parent, profiles=profiles)
    first = admit(store, models, settings=settings)
    named = admit(store, models, settings=settings, distributed={"profile": "l4", "nnodes": 2})
    assert [
        (job.host, job.spec.distributed.profile, job.slots, job.nodes) for job in (first, named)
    ] == [
        ("kubernetes/h100", "h100", 8, 1),
        ("kubernetes/l4", "l4", 8, 2),
    ]
    assert store.jobs.get_job("p", named.id).host == "kubernetes/l4"
    room = [job.seat and job.seat.room for job in (first, named)]
    assert [bytes and bytes // 10**9 for bytes in room] == [80, 22], (
        "memory of each machine for an engine's seats"
    )
    with pytest.raises(SpecError, match="Choose from h100, l4"):
        admit(store, models, settings=settings, distributed={"profile": "a100"})
    with pytest.raises(SpecError, match="does not run jobs in a cluster"):
        admit(store, models, distributed={"profile": "h100"})


def test_a_file_of_another_purpose_is_refused(store: Store, models: Path) -> None:
    with pytest.raises(SpecError, match="its purpose is fine-tune-results") as caught:
        admit(store, models, validation_file="file-r")
    assert caught.value.param == "validation_file"
    assert store.jobs.list_jobs("p").data == []


def test_an_id_admits_one_job(store: Store, models: Path) -> None:
    job = admit(store, models, job_id="ftjob-1")

    assert (job.id, job.state) == ("ftjob-1", State.VALIDATING)
    with pytest.raises(ConflictError):
        admit(store, models, job_id="ftjob-1")


def test_the_plan_is_the_jobs_second_event(store: Store, models: Path) -> None:
    job = admit(store, models, lora={"r": 100}, precision={"default": "nf4", "compute": "bf16"})

    told = store.jobs.list_events("p", job.id).data[::-1]
    assert [event.level for event in told] == ["info", "info", "warn"]
    assert told[0].message == f"Created fine-tuning job: {job.id}"
    assert told[1].message.startswith("Plan: at most ")
    assert ", fits this host. This is for samples of " in told[1].message
    assert " Chosen: training.max_length: 128 (" in told[1].message
    assert told[2].message.startswith(
        "lora.r = 100 is more than the matrix of model.layers.0.self_attn.q_proj has (64 x 64)"
    )


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
    assert store.jobs.list_jobs("p").data == []


def test_a_job_that_cannot_fit_is_refused_with_what_would(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base(models / "large", LLAMA_8B)
    monkeypatch.setattr(
        "ft_service.control.places.capacity.this_host", lambda: Machine("small GPU", 12 * GIB)
    )

    with pytest.raises(
        SpecError, match=r"does not fit small GPU.* 11\.28 GiB are usable"
    ) as caught:
        admit(store, models, model="large", precision={"default": "bf16"})
    assert "with precision.default: nf4" in str(caught.value)
    assert caught.value.code == "does_not_fit"
    fitting = admit(store, models, model="large", precision={"default": "nf4"}).spec
    assert (
        fitting.distributed.activation_checkpointing,
        fitting.training.tokens_per_micro_batch,
    ) == ("full", 8192)
    for given in ({"default": "auto"}, {}):
        chosen = admit(store, models, model="large", precision=given).spec
        assert (chosen.precision.default, "precision.default" in chosen.chosen) == ("fp8", True)
    long = admit(
        store, models, model="large", precision={"default": "nf4"}, training={"max_length": 100_000}
    )
    assert store.jobs.list_events("p", long.id).data[0].level == "warn"


def test_a_format_is_not_chosen_for_a_machine_that_is_not_known(
    store: Store, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What results do not depend on is left to the ranks, who see the machine."""
    monkeypatch.setattr(
        "ft_service.control.places.capacity.this_host", lambda: Machine("some GPU", None)
    )
    with pytest.raises(SpecError, match="the memory of some GPU is not known") as caught:
        admit(store, models, precision={"default": "auto"})
    assert caught.value.param == "precision.default"
    spec = admit(store, models).spec
    open_still = (
        spec.distributed.activation_checkpointing,
        spec.distributed.compile,
        spec.training.tokens_per_micro_batch,
    )
    assert (open_still, set(spec.chosen)) == (
        ("auto", "auto", "auto"),
        {"training.max_length"},
    )


def test_a_file_of_another_project_is_as_one_that_there_is_not(store: Store, models: Path) -> None:
    store.projects.ensure_project("q", "other")
    principal = Principal(key_id="key_b", project_id="q", organization="other", scope="user")
    with pytest.raises(SpecError, match="'file-a': this project has no such file") as caught:
        admit(store, models, principal=principal)
    assert (caught.value.param, caught.value.code) == ("training_file", "file_not_found")


def test_the_spec_that_was_admitted_is_the_one_that_is_stored(store: Store, models: Path) -> None:
    job = admit(store, models, precision={"default": "nf4"}, training={"learning_rate": 1}, seed=3)
    stored = store.jobs.get_job(job.project_id, job.id)
    assert stored.spec == job.spec
    assert stored.spec.model_dump() == job.spec.model_dump()
    assert stored.stored_spec.document == job.spec.model_dump(mode="json")
