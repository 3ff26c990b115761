"""`model: ft:…`: a job that continues from a tuned model, or from a checkpoint of one."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ft_service.control.checks.data_checks import check_data
from ft_service.data.examiner import Examiner, ExaminerLost
from ft_service.errors import NotFoundError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.serving import worker_tasks
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey
from tests.support.rest.service import Service, put, run_dir

OPTIONS: dict[str, Any] = {"lora": {"r": 4, "lora_alpha": 8}, "precision": {"default": "nf4"}}


@pytest.fixture
def parent(service: Service, client: openai.OpenAI, training_file: str) -> str:
    """Name of a tuned model whose adapter, and a checkpoint of step 5, are there."""
    job_id = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body=OPTIONS
    ).id
    done: dict[str, Any] = {
        "state": State.SUCCEEDED,
        "reason": Reason.SUCCEEDED,
        "attempt": 1,
        "finished_at": 1e9,
    }
    job = put(service, job_id, checkpoints=(5, 9), **done)
    run = run_dir(service, job_id)
    run.put("adapter/adapter_config.json", b"{}")
    run.path("checkpoints/step-9-a1/COMPLETE").unlink()
    return job.spec.tuned_name


def spec_of(service: Service, job_id: str) -> JobSpec:
    return service.store.jobs.get_job("default", job_id).spec


def test_shape_and_precision_are_the_parents(
    service: Service, client: openai.OpenAI, parent: str, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(
        model=parent, training_file=training_file, extra_body={"training": {"n_epochs": 5}}
    )
    assert job.model == parent
    spec = spec_of(service, job.id)
    assert spec.parent is not None
    assert spec.parent.path == str(run_dir(service, spec.parent.job_id).path("adapter"))
    assert (spec.model.name, spec.lora.r, spec.lora.lora_alpha) == ("tiny", 4, 8)
    assert (spec.precision.default, spec.training.n_epochs) == ("nf4", 5)
    assert spec.tuned_name.startswith("ft:tiny:local::")

    extra = {"lora": {"r": 4}, "precision": {"default": "bf16"}}
    other = client.fine_tuning.jobs.create(
        model=parent, training_file=training_file, extra_body=extra
    )
    assert spec_of(service, other.id).precision.default == "bf16"
    with pytest.raises(openai.BadRequestError, match=r"lora\.r = 8: ft:tiny.* has 4") as caught:
        client.fine_tuning.jobs.create(
            model=parent, training_file=training_file, extra_body={"lora": {"r": 8}}
        )
    assert caught.value.param == "lora.r"


def test_a_checkpoints_adapter_is_made_while_the_files_are_read(
    service: Service,
    client: openai.OpenAI,
    parent: str,
    training_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{parent}:ckpt-step-5"
    job = service.store.jobs.get_job(
        "default", client.fine_tuning.jobs.create(model=name, training_file=training_file).id
    )
    ref = spec_of(service, job.id).parent
    assert ref is not None
    run = run_dir(service, ref.job_id)

    def broken(module: str, arguments: list[str]) -> None:
        raise NotFoundError("Checkpoint step-5-a1 is damaged.")

    monkeypatch.setattr(worker_tasks, "run_worker", broken)
    examiner = Examiner(command=["/bin/false"])
    error = check_data(job, examiner, print, Places(service.settings.home)).error
    assert error is not None
    assert (error.param, error.code) == ("model", "model_not_found")
    assert "damaged" in error.message

    def make(module: str, arguments: list[str]) -> None:
        assert arguments == [str(run.root), "step-5-a1", ref.path]
        run.put("adapters/step-5-a1/adapter_config.json", b"{}")

    monkeypatch.setattr(worker_tasks, "run_worker", make)
    with pytest.raises(ExaminerLost):  # the next thing to look at are the files
        check_data(job, examiner, print, Places(service.settings.home))
    monkeypatch.setattr(worker_tasks, "run_worker", broken)
    with pytest.raises(ExaminerLost):  # it was kept
        check_data(job, examiner, print, Places(service.settings.home))
    examiner.close()


@pytest.mark.parametrize(
    "name",
    ["ft:tiny:local::nothing", "{parent}:ckpt-step-7", "{parent}:ckpt-step-9", "{parent}:x", "ft:"],
)
def test_what_is_not_there_is_a_400(
    service: Service, client: openai.OpenAI, parent: str, training_file: str, name: str
) -> None:
    """Step 9 was reached, and its checkpoint has been removed since."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(
            model=name.format(parent=parent), training_file=training_file
        )
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_another_projects_model_needs_its_permission(
    service: Service, client: openai.OpenAI, parent: str
) -> None:
    service.store.projects.ensure_project("other", "local")
    _, key = service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))
    other = service.client(key)
    file_id = other.files.create(file=("a.jsonl", b'{"messages": []}\n'), purpose="fine-tune").id
    with pytest.raises(openai.BadRequestError):
        other.fine_tuning.jobs.create(model=parent, training_file=file_id)
    client.fine_tuning.checkpoints.permissions.create(parent, project_ids=["other"])
    assert (
        other.fine_tuning.jobs.create(model=parent, training_file=file_id).fine_tuned_model is None
    )
    client.models.delete(parent)
    with pytest.raises(openai.BadRequestError):
        other.fine_tuning.jobs.create(model=parent, training_file=file_id)
