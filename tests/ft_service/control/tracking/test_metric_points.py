from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.tracking.metric_points import (
    RunError,
    describe,
    exit_code,
    flat,
    next_task,
    point,
    retry_after,
    run_errors,
    tag_name,
)
from ft_service.control.tracking.metric_sender import account_of
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.events import Metrics
from ft_service.settings import Settings
from ft_service.spec import AdapterRef, BaseModelRef, StoredSpec, parse_request
from ft_service.store.records import JobIntegration
from tests.support.reconciling import PROJECT, spec_of

GRADER = {
    "type": "string_check",
    "name": "g",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "the right answer",
}
BASE = BaseModelRef(name="meta-llama/Llama-3.2-1B", path="/secret/models/llama")


def job_of(**changes: Any) -> Job:
    spec = StoredSpec.of(spec_of("ftjob-1", model=BASE))
    request = {"training_file": "file-t", "metadata": {"who": "me"}}
    values: dict[str, Any] = {
        "request": request,
        "stored_spec": spec,
        "state": State.RUNNING,
        "attempt": 1,
    }
    return Job(id="ftjob-1", project_id=PROJECT, created_at=0.0, **{**values, **changes})


def integration_of(number: int = 0, url: str | None = None, **wandb: Any) -> JobIntegration:
    settings = {"type": "wandb", "wandb": {"project": "p", **wandb}}
    return JobIntegration(
        job_id="ftjob-1", number=number, project_id=PROJECT, settings=settings, url=url
    )


def test_a_run_is_named_by_its_job_alone() -> None:
    runs = [describe(integration_of(number), job_of()) for number in (0, 1)]
    assert [run.id for run in runs] == ["ftjob-1", "ftjob-1-1"], "two of one project are two runs"
    assert [run.name for run in runs] == ["ftjob-1", "ftjob-1"]
    assert describe(integration_of(name="mine", entity="team"), job_of(attempt=7)) == replace(
        runs[0], name="mine", entity="team"
    )


@pytest.mark.parametrize(
    ("kind", "place"), [("wandb", "project"), ("mlflow", "experiment"), ("trackio", "project")]
)
def test_a_run_is_of_the_kind_that_is_asked_for(kind: str, place: str) -> None:
    settings = {"type": kind, kind: {place: "tuning", "name": "mine"}}
    run = describe(
        JobIntegration(job_id="ftjob-1", number=0, project_id=PROJECT, settings=settings), job_of()
    )
    assert (run.kind, run.project, run.name, run.entity) == (kind, "tuning", "mine", None)


def test_tags_are_the_users_and_ours_as_far_as_they_fit() -> None:
    found = describe(integration_of(tags=["b", "a", "b"]), job_of()).tags
    assert found == (
        "b",
        "a",
        "ft-service/finetune",
        "ft-service/meta-llama/Llama-3.2-1B",
        "ft-service/ftjob-1",
    )
    long = StoredSpec.of(spec_of("ftjob-1", model=replace_name(BASE, "x" * 60)))
    assert describe(integration_of(), job_of(stored_spec=long)).tags == (
        "ft-service/finetune",
        "ft-service/ftjob-1",
    )


def test_the_runs_of_a_sweep_are_one_group() -> None:
    swept = job_of(sweep_id="ftsweep-1")
    assert describe(integration_of(), swept).group == "ftsweep-1"
    assert describe(integration_of(), job_of()).group is None
    assert describe(integration_of(url="https://there"), swept).group is None, (
        "which somebody may have changed there"
    )


def replace_name(model: BaseModelRef, name: str) -> BaseModelRef:
    return model.model_copy(update={"name": name})


def test_what_somebody_may_have_changed_there_is_said_once() -> None:
    run = describe(integration_of(url="https://there"), job_of())
    assert (run.id, run.name, run.tags, run.config) == ("ftjob-1", None, None, None)


def test_the_configuration_is_the_resolved_one_without_paths() -> None:
    parent = AdapterRef(name="ft:before", job_id="ftjob-0", path="/secret/runs/0")
    spec = StoredSpec.of(spec_of("ftjob-1", model=BASE, parent=parent))
    config = describe(integration_of(), job_of(stored_spec=spec)).config
    assert config is not None
    assert (config["model"], config["base_model"], config["training_file"]) == (
        "ft:before",
        BASE.name,
        "file-t",
    )
    assert (config["lora"]["r"], config["distributed"]["nproc_per_node"]) == (16, 2)
    assert "secret" not in str(config)
    assert "nowhere" not in str(config)


def test_the_configuration_has_the_methods_options_without_the_grader() -> None:
    method = {"grader": GRADER, "hyperparameters": {"beta": 0.25, "num_generations": 4}}
    request = parse_request(
        {
            "model": "m",
            "training_file": "f",
            "method": {"type": "reinforcement", "reinforcement": method},
        }
    )
    assert request.method is not None
    spec = StoredSpec.of(
        spec_of("ftjob-1", model=BASE, reinforcement=request.method.reinforcement_options())
    )
    config = describe(integration_of(), job_of(stored_spec=spec)).config
    assert config is not None
    assert (config["reinforcement"]["beta"], config["reinforcement"]["num_generations"]) == (
        0.25,
        4,
    )
    assert "the right answer" not in str(config)


def test_a_point_has_what_was_measured_and_when() -> None:
    metrics = Metrics(step=3, total_steps=9, train_loss=0.5, learning_rate=1e-4, epoch=0.3)
    assert point(metrics, 7.5) == {
        "train_loss": 0.5,
        "learning_rate": 1e-4,
        "epoch": 0.3,
        "_timestamp": 7.5,
    }


@pytest.mark.parametrize(
    ("state", "phase", "wanted"),
    [
        (State.QUEUED, None, "send"),
        (State.RUNNING, Phase.TRAINING, "send"),
        (State.PAUSED, None, "rest"),
        (State.CANCELLED, Phase.STOPPING, "send"),
        (State.CANCELLED, None, "end"),
        (State.SUCCEEDED, None, "end"),
        (State.FAILED, None, "end"),
    ],
)
def test_what_is_to_be_done_follows_the_state(
    state: State, phase: Phase | None, wanted: str
) -> None:
    assert next_task(job_of(state=state, phase=phase)) == wanted


def test_ends_are_told_apart() -> None:
    ends = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
    assert [exit_code(job_of(state=state)) for state in ends] == [0, 1, 255]


def test_users_of_addresses_are_left_out_before_a_message_is_cut_off() -> None:
    with pytest.raises(RunError) as caught, run_errors(None):
        raise OSError(f"{'x' * 280} http://user:pass@word@there:5000/api failed, write to a@b")
    assert str(caught.value) == f"{'x' * 280} http://there:5000/a"


def test_tries_are_further_apart_each_time_and_end_three_days_after_the_job() -> None:
    assert [retry_after(tries, 0.0) for tries in (1, 2, 3, 8, 9, 500)] == [
        5.0,
        10.0,
        20.0,
        640.0,
        900.0,
        900.0,
    ]
    assert retry_after(1, 72 * 3600.0 - 5.0) == 5.0
    assert retry_after(1, 72 * 3600.0 - 4.0) is None


def test_an_empty_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_WANDB_API_KEY", "")
    assert Settings().wandb_api_key is None
    monkeypatch.setenv("FT_WANDB_API_KEY", "a" * 40)
    account = account_of("wandb", Settings(), Path("/ft"))
    assert (account["api_key"], account["base_url"]) == ("a" * 40, "https://api.wandb.ai")
    assert "a" * 40 not in repr(Settings())


def test_the_create_body_names_them() -> None:
    body = {
        "model": "m",
        "training_file": "f",
        "integrations": [{"type": "wandb", "wandb": {"project": "p"}}],
    }
    integrations = parse_request(body).integrations
    assert integrations is not None
    (found,) = integrations
    assert found.model_dump() == {
        "type": "wandb",
        "wandb": {"project": "p", "name": None, "entity": None, "tags": []},
    }


def test_options_become_parameters_by_dotted_name() -> None:
    assert flat({"lora": {"r": 4, "pattern": {}}, "seed": None}) == {"lora.r": "4", "seed": "None"}
    assert flat({"precision": {"overrides": {r"layers\.[01]\.": "nf4"}}}) == {
        "precision.overrides": r'{"layers\\.[01]\\.": "nf4"}'
    }, "a pattern is no name of a parameter"


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("ft-service/meta-llama/Llama-3.2-1B", "ft-service/meta-llama/Llama-3.2-1B"),
        ("a: b", "a: b"),
        ("ablation=3 (é)", "ablation_3 _é_"),
        ("/a", "_a"),
        ("a/../b", "a____b"),
        ("..", "__"),
        ("ft_service.step", "ft_service_step"),
        ("mlflow.user", "mlflow_user"),
    ],
)
def test_any_tag_is_one_that_mlflow_takes_and_none_is_ours(tag: str, name: str) -> None:
    assert tag_name(tag) == name
