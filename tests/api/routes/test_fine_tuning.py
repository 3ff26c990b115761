from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.control.admission import job_admission
from ft_service.ids import new_id
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.serving import worker_tasks
from ft_service.spec import DpoOptions
from ft_service.store.records import NewEvent, NewKey
from tests.support.creating import create_job
from tests.support.records import claim_next
from tests.support.rest.refusals import check_error
from tests.support.rest.service import (
    METRICS,
    TRAINING,
    Service,
    put,
    put_state,
    run_dir,
    wait_until,
)
from tests.support.run_directories import finished_run, flip_a_bit


def test_a_job_of_a_later_version_is_shown_listed_and_cancelled(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    """During an upgrade servers of both versions answer; after going back one, the jobs of the
    later one are still there.
    """
    options = {"model": "tiny", "training_file": training_file, "extra_body": {"lora": {"r": 4}}}
    done = client.fine_tuning.jobs.create(**options)
    put_state(service.store, done.id, State.SUCCEEDED)
    job = client.fine_tuning.jobs.create(**options)
    for job_id in (done.id, job.id):
        later = service.store.jobs.get_job("default", job_id).stored_spec.document
        later["lora"]["later"] = True
        change = "UPDATE jobs SET spec = :spec, reason = 'later' WHERE id = :id"
        service.sql(change, spec=json.dumps(later), id=job_id)
    listed = {
        one.id: (one.model_extra or {})["lora"]["r"] for one in client.fine_tuning.jobs.list().data
    }
    assert listed == {done.id: 4, job.id: 4}
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    tuned = client.fine_tuning.jobs.retrieve(done.id).fine_tuned_model
    assert tuned in [model.id for model in client.models.list()]
    run_dir(service, done.id).path("adapter").mkdir(parents=True)
    service.use(service.settings.model_copy(update={"inference_url": "http://127.0.0.1:9"}))
    refused = []
    for method, path, body in (
        *(("GET", path.format(job_id=done.id), None) for path in _paths_of_a_job(service)),
        ("POST", "/v1/fine_tuning/jobs", {"model": tuned, "training_file": training_file}),
        (
            "POST",
            "/v1/chat/completions",
            {"model": tuned, "messages": [{"role": "user", "content": "a"}]},
        ),
    ):
        answer = service.http(method, path, json=body)
        assert answer.status_code != 500, path
        if answer.status_code == 409:
            assert (answer.json()["error"]["code"], answer.headers["x-should-retry"]) == (
                "made_by_other_version",
                "false",
            )
            assert "does not know its lora.later." in answer.json()["error"]["message"]
            refused.append(path.removeprefix(f"/v1/fine_tuning/jobs/{done.id}"))
    assert refused == [
        "/plan",
        "/samples",
        "/statistics",
        "/v1/fine_tuning/jobs",
        "/v1/chat/completions",
    ]


def test_a_job_that_is_over_is_deleted_with_what_it_has_made(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    done = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    path = f"/v1/fine_tuning/jobs/{done.id}"
    refused = check_error(service.http("DELETE", path), 400)
    assert (refused["code"], refused["param"]) == ("invalid_state", "job_id")
    ended = {"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "attempt": 1, "finished_at": 1e9}
    tuned = str(put(service, done.id, checkpoints=(5,), **ended).tuned_name)
    run_dir(service, done.id).put("adapter/adapter_config.json", b"{}")
    child = client.fine_tuning.jobs.create(model=tuned, training_file=training_file)
    names = [tuned, f"{tuned}:ckpt-step-5"]
    answer = {"id": done.id, "deleted": True, "object": "fine_tuning.job", "deleted_models": names}
    assert service.http("DELETE", path).json() == answer
    assert check_error(service.http("DELETE", path), 404)
    for gone in _paths_of_a_job(service):
        assert check_error(service.http("GET", gone.format(job_id=done.id)), 404)
    assert check_error(service.http("GET", "/v1/fine_tuning/metrics", params={"job": done.id}), 404)
    assert [job.id for job in client.fine_tuning.jobs.list().data] == [child.id]
    assert not {tuned, *names} & {model.id for model in client.models.list()}
    again = service.http(
        "POST", "/v1/fine_tuning/jobs", json={"model": tuned, "training_file": training_file}
    )
    assert check_error(again, 400)["code"] == "model_not_found"
    assert client.files.retrieve(training_file).id == training_file
    assert run_dir(service, done.id).path("adapter/adapter_config.json").exists(), (
        "the other job continues from it"
    )


def _paths_of_a_job(service: Service) -> list[str]:
    paths = service.http("GET", "/openapi.json").json()["paths"]
    return sorted(
        path
        for path, methods in paths.items()
        if "get" in methods and set(re.findall("{.*?}", path)) == {"{job_id}"}
    )


def test_a_new_job_shows_what_was_resolved(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    validation = client.files.create(file=("valid.jsonl", TRAINING), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="gpt-4o-mini-2024-07-18",
        training_file=training_file,
        validation_file=validation.id,
        suffix="mine",
        metadata={"team": "a"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.3}},
        },
        extra_body={
            "lora": {"r": 4},
            "precision": {"default": "nf4"},
            "distributed": {"nproc_per_node": 2},
            "priority": 7,
        },
    )

    assert job.id.startswith("ftjob-")
    assert (job.object, job.status, job.model, job.organization_id) == (
        "fine_tuning.job",
        "validating_files",
        "tiny",
        "local",
    )
    assert (job.training_file, job.validation_file, job.metadata) == (
        training_file,
        validation.id,
        {"team": "a"},
    )
    assert (
        job.error,
        job.fine_tuned_model,
        job.finished_at,
        job.trained_tokens,
        job.result_files,
    ) == (
        None,
        None,
        None,
        None,
        [],
    )
    assert job.estimated_finish is None
    assert isinstance(job.seed, int)
    assert job.hyperparameters.model_dump() == {
        "n_epochs": 2,
        "batch_size": 8,
        "learning_rate_multiplier": 0.3,
    }
    assert job.method is not None
    assert job.method.supervised is not None
    assert job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.n_epochs == 2
    extra = job.model_extra or {}
    assert extra["lora"]["r"] == 4
    assert extra["precision"]["default"] == "nf4"
    assert (
        extra["distributed"]["nproc_per_node"],
        extra["priority"],
        extra["attempt"],
        extra["phase"],
    ) == (2, 7, 0, None)

    stored = service.store.jobs.get_job("default", job.id)
    assert (stored.slots, stored.priority, stored.state) == (2, 7, State.VALIDATING)
    assert stored.stored_spec.document["training_data"] == {
        "name": "train.jsonl",
        "path": str(service.settings.files_dir / training_file),
        "sha256": service.store.files.get_file("default", training_file).sha256,
        "files": [],
    }
    assert stored.spec.seed == job.seed
    assert stored.spec.tuned_name == f"ft:tiny:local:mine:{job.id.removeprefix('ftjob-')}"


def test_a_job_of_preference_pairs_shows_its_method(
    client: openai.OpenAI, training_file: str, service: Service
) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training_file,
        method={
            "type": "dpo",
            "dpo": {"hyperparameters": {"beta": 0.2, "learning_rate_multiplier": 2}},
        },
    )
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert (job.method.type, job.method.supervised, job.method.dpo.hyperparameters.beta) == (
        "dpo",
        None,
        0.2,
    )
    assert job.hyperparameters.model_dump() == {
        "n_epochs": 1,
        "batch_size": 8,
        "learning_rate_multiplier": 2,
    }
    dpo = service.store.jobs.get_job("default", job.id).spec.loss
    assert isinstance(dpo, DpoOptions)
    assert (dpo.beta, dpo.loss_type) == (0.2, "sigmoid")


def test_a_job_of_distillation_shows_its_teacher_and_context(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    options = {"loss_type": "jsd", "beta": 0.25, "n_epochs": 2}
    method: Any = {
        "type": "distillation",
        "distillation": {"with_context": "Be brief.", "hyperparameters": options},
    }
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file, method=method)
    shown: Any = job.method.model_dump() if job.method is not None else {}
    assert (shown["type"], shown["supervised"]) == ("distillation", None)
    section = shown["distillation"]
    assert (section["teacher"], section["with_context"]) == ("tiny", "Be brief.")
    assert section["hyperparameters"]["loss_type"] == "jsd"
    assert section["hyperparameters"]["beta"] == 0.25
    method["distillation"] |= {"teacher": "meta-llama/Llama-3.2-1B", "top_k": 20}
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file, method=method)
    spec = service.store.jobs.get_job("default", job.id).spec
    assert spec.teacher is not None
    assert (spec.teacher.kind, spec.teacher.path in spec.bases_read) == ("base", True)
    shown = job.method.model_dump() if job.method is not None else {}
    section = shown["distillation"]
    assert (section["teacher"], section["top_k"]) == ("meta-llama/Llama-3.2-1B", 20)
    of_student = {"teacher": "meta-llama/Llama-3.2-1B", "answers": "student"}
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training_file,
        method={"type": "distillation", "distillation": of_student},  # pyright: ignore
    )
    assert [own.id for own in service.store.jobs.running_that_sample()] == []
    shown = job.method.model_dump() if job.method is not None else {}
    section = shown["distillation"]
    assert (shown["type"], shown["reinforcement"], section["answers"]) == (
        "distillation",
        None,
        "student",
    )
    values = section["hyperparameters"]
    assert (values["loss_type"], values["num_generations"]) == ("reverse_kl", 1)
    at_server: Any = {
        "type": "distillation",
        "distillation": {**of_student, "teacher_at": "server", "top_k": 20},
    }
    with pytest.raises(openai.BadRequestError, match="FT_TEACHER_URL") as refused:
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file, method=at_server)
    assert refused.value.param == "method.distillation.teacher_at"
    service.use(service.settings.model_copy(update={"teacher_url": "http://127.0.0.1:9/v1"}))
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, method=at_server
    )
    spec = service.store.jobs.get_job("default", job.id).spec
    assert spec.served_teacher is not None
    assert spec.bases_read == (spec.model.path,)
    shown = job.method.model_dump() if job.method is not None else {}
    assert shown["distillation"]["teacher_at"] == "server"
    method["distillation"]["teacher"] = "other"
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file, method=method)
    assert refused.value.param == "method.distillation.teacher"


def test_every_key_of_the_schema_is_there_even_when_empty(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    job = service.http("GET", f"/v1/fine_tuning/jobs/{job_id}").json()

    required = (
        "id object created_at error fine_tuned_model finished_at hyperparameters model "
        "organization_id result_files seed "
        "status trained_tokens training_file validation_file estimated_finish integrations "
        "metadata method"
    )
    assert set(required.split()) <= set(job)


def test_jobs_are_listed_newest_first_paged_and_filtered(
    client: openai.OpenAI, training_file: str
) -> None:
    ids = [
        client.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, metadata={"n": str(n), "all": "y & z"}
        ).id
        for n in range(5)
    ]

    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    assert [
        job.id for job in client.fine_tuning.jobs.list(metadata={"n": "3", "all": "y & z"})
    ] == [ids[3]]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"n": "9"})] == []
    assert len(list(client.fine_tuning.jobs.list(metadata={}))) == 5


def test_jobs_are_listed_by_state_base_and_suffix(
    client: openai.OpenAI, training_file: str
) -> None:
    first, second = (
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file, suffix=s).id
        for s in ("a-1", "b-1")
    )
    client.fine_tuning.jobs.cancel(first)

    def listed(**query: str) -> list[str]:
        return [job.id for job in client.fine_tuning.jobs.list(extra_query=query)]

    assert (listed(suffix="A-"), listed(suffix="-1")) == ([first], [second, first])
    assert listed(status="cancelled", suffix="1") == [first]
    assert (listed(base="tiny"), listed(base="other")) == ([second, first], [])


def test_a_job_is_called_what_its_users_say_and_found_by_it(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, suffix="run-7", metadata={"team": "a"}
    )
    address = f"/fine_tuning/jobs/{job.id}"

    def called(body: dict[str, Any]) -> tuple[Any, Any]:
        view = client.post(address, cast_to=dict[str, Any], body=body)
        assert (view["suffix"], view["metadata"]) == ("run-7", {"team": "a"})
        return view["name"], view["note"]

    assert called({"name": "Refunds, cleaned", "note": "half the data"}) == (
        "Refunds, cleaned",
        "half the data",
    )
    assert called({"note": None}) == ("Refunds, cleaned", None), "what is left out stays"
    for part in ("CLEANED", "run-"):
        found = client.fine_tuning.jobs.list(extra_query={"suffix": part})
        assert [one.id for one in found] == [job.id]
    kept = client.get(f"{address}/request", cast_to=dict[str, Any])
    assert "name" not in kept, "the request stays as it came, by which a repeated one is known"
    stored = service.store.jobs.get_job("default", job.id)
    assert (stored.name, stored.version) == ("Refunds, cleaned", 1), "no reconciler is in its way"
    for body, param in (({"name": ""}, "name"), ({"note": "x" * 2001}, "note"), ({"n": 1}, "n")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.post(address, cast_to=object, body=body)
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.post("/fine_tuning/jobs/ftjob-other", cast_to=object, body={"name": "x"})
    entries = service.http("GET", "/v1/organization/audit_logs").json()["data"]
    assert [entry["type"] for entry in entries].count("job.named") == 2


def test_jobs_without_metadata_can_be_asked_for(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    def create(**more: Any) -> str:
        return client.fine_tuning.jobs.create(model="tiny", training_file=training_file, **more).id

    none = create()
    null = create(metadata=None)
    empty = create(metadata={})
    some = create(metadata={"metadata": "null"})

    for without in ("null", ""):  # the client for JavaScript writes null as ""
        assert [
            job.id
            for job in client.fine_tuning.jobs.list(extra_query={"metadata": without}, limit=1)
        ] == [null, none]
    assert [job.id for job in client.fine_tuning.jobs.list()] == [some, empty, null, none]


def test_a_paused_job_goes_on_with_another_number_of_ranks(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    jobs = client.fine_tuning.jobs
    job_id = jobs.create(model="tiny", training_file=training_file).id

    def resume(ranks: int) -> str:
        return jobs.resume(job_id, extra_body={"distributed": {"nproc_per_node": ranks}}).status

    with pytest.raises(openai.BadRequestError, match="only a paused job can continue"):
        resume(2)
    jobs.pause(job_id)
    put_state(service.store, job_id, State.PAUSED)
    with pytest.raises(
        openai.BadRequestError, match="this host runs at most 4 ranks at once"
    ) as refused:
        resume(5)
    assert refused.value.param == "distributed.nproc_per_node"
    with pytest.raises(openai.BadRequestError, match=r"distributed\.nproc_per_node = 0"):
        resume(0)
    for body, says in (
        (b"[]", "must be an object, not an empty list"),
        (b'{"ranks": 3}', "ranks: there is no such option"),
        (b"{", "JSON"),
    ):
        answer = service.http("POST", f"/v1/fine_tuning/jobs/{job_id}/resume", content=body)
        assert says in check_error(answer, 400)["message"], "whatever the client says that it sends"
    assert resume(3) == "queued"
    claim = claim_next(service.store, host="h", host_slots=4)
    assert claim is not None
    assert claim.job.slots == 3


def test_verbs_answer_the_new_state_and_their_events(
    client: openai.OpenAI, training_file: str
) -> None:
    jobs = client.fine_tuning.jobs
    job_id = jobs.create(model="tiny", training_file=training_file).id

    assert jobs.pause(job_id).status == "validating_files"
    assert jobs.resume(job_id).status == "validating_files"
    cancelled = jobs.cancel(job_id)

    assert (cancelled.status, cancelled.finished_at is not None) == ("cancelled", True)
    assert jobs.cancel(job_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cannot be resumed") as caught:
        jobs.resume(job_id)
    assert caught.value.code == "invalid_state"
    events = list(jobs.list_events(job_id, limit=2))
    assert jobs.list_events(job_id, limit=1000).data == events, "as many at once as scripts ask for"
    told = [event.message for event in events][::-1]
    assert told.pop(1).startswith("Plan: ")
    assert told == [
        f"Created fine-tuning job: {job_id}",
        "Pause requested.",
        "Resume requested.",
        "Cancel requested.",
    ]
    assert {(event.object, event.level, event.type, event.data) for event in events} == {
        ("fine_tuning.job.event", "info", "message", None)
    }


def test_a_running_job_shows_progress_and_when_it_may_end(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    event = NewEvent(level="info", message="Step 5/20", metrics=METRICS)
    before = service.store.now()  # the remaining time counts from the step, not from the question
    put(service, job_id, event, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    job = client.fine_tuning.jobs.retrieve(job_id)

    assert (job.status, job.trained_tokens) == ("running", None)
    assert job.estimated_finish is not None
    assert before + 30 - 1 <= job.estimated_finish <= service.store.now() + 30
    extra = job.model_extra or {}
    assert (extra["phase"], extra["attempt"]) == ("training", 1)
    assert extra["progress"]["step"] == 5
    assert extra["progress"]["total_steps"] == 20
    assert extra["progress"]["tokens_per_second"] == 200.0
    newest = client.fine_tuning.jobs.list_events(job_id).data[0]
    assert (newest.type, newest.message) == ("metrics", "Step 5/20")
    assert isinstance(newest.data, dict)
    assert newest.data["train_loss"] == 1.25


def test_a_job_shows_its_suffix_its_last_validation_and_its_place_in_the_queue(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    def create(**more: Any) -> str:
        return client.fine_tuning.jobs.create(model="tiny", training_file=training_file, **more).id

    first = create()
    second = create()
    for job_id in (first, second):
        put_state(service.store, job_id, State.QUEUED)
    running = create(suffix="mine", validation_file=training_file)
    newer = METRICS.model_copy(update={"step": 6, "valid_loss": None})
    events = [NewEvent(level="info", message="a step", metrics=known) for known in (METRICS, newer)]
    put(service, running, *events, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    job = client.fine_tuning.jobs.retrieve(running).model_extra or {}
    assert (job["progress"]["step"], job["progress"]["valid_loss"], job["queue"]) == (6, 1.5, None)

    shown = {job.id: job.model_extra or {} for job in client.fine_tuning.jobs.list()}
    assert [shown[job_id]["queue"]["position"] for job_id in (first, second)] == [1, 2]
    assert [shown[job_id]["suffix"] for job_id in (running, first)] == ["mine", None]
    assert (client.fine_tuning.jobs.retrieve(second).model_extra or {})["queue"]["position"] == 2


def test_a_job_that_succeeded_names_its_outcome(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, suffix="s"
    ).id
    put(
        service,
        job_id,
        checkpoints=(5, 10),
        state=State.SUCCEEDED,
        reason=Reason.SUCCEEDED,
        attempt=1,
        finished_at=1e9,
        trained_tokens=800,
        result_file="file-x",
    )
    name = f"ft:tiny:local:s:{job_id.removeprefix('ftjob-')}"

    job = client.fine_tuning.jobs.retrieve(job_id)
    assert (job.status, job.fine_tuned_model, job.finished_at) == ("succeeded", name, 1_000_000_000)
    assert (job.trained_tokens, job.result_files) == (800, ["file-x"])

    points = list(client.fine_tuning.jobs.checkpoints.list(job_id, limit=1))
    assert [point.step_number for point in points] == [10, 5]
    assert points[1].fine_tuned_model_checkpoint == f"{name}:ckpt-step-5"
    assert (points[1].fine_tuning_job_id, points[1].id.startswith("ftckpt_")) == (job_id, True)
    assert points[1].metrics.model_dump(exclude_none=True) == {
        "step": 5,
        "train_loss": 1.25,
        "valid_loss": 1.5,
        "valid_mean_token_accuracy": 0.5,
        "full_valid_loss": 1.5,
        "full_valid_mean_token_accuracy": 0.5,
    }
    body = service.http("GET", f"/v1/fine_tuning/jobs/{job_id}/checkpoints?limit=1").json()
    assert (body["has_more"], body["first_id"], body["last_id"]) == (
        True,
        points[0].id,
        points[0].id,
    )

    ids = [model.id for model in client.models.list()]
    assert ids == ["meta-llama/Llama-3.2-1B", "tiny", "gpt-4o-mini-2024-07-18", name]
    assert client.models.retrieve(name).owned_by == "local"
    assert client.models.retrieve(f"{name}:ckpt-step-5").id == f"{name}:ckpt-step-5"
    with pytest.raises(openai.NotFoundError, match=f"ft download {job_id}") as caught:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_served"
    assert (
        f"--enable-lora --max-lora-rank 16 --lora-modules '{name}={job_id}'" in caught.value.message
    )
    for missing in (
        f"{name}:ckpt-step-6",
        f"{name}:ckpt-step-",
        f"{name}x",
        f"ft:other:local:s:{job_id[6:]}",
    ):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(missing)


def test_a_failed_job_has_openais_error_object(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    error = {
        "code": "invalid_training_file",
        "message": "train.jsonl: line 3: is not JSON.",
        "param": "training_file",
    }
    put(
        service,
        job_id,
        state=State.FAILED,
        reason=Reason.INVALID_FILE,
        error=error,
        finished_at=1e9,
    )

    job = client.fine_tuning.jobs.retrieve(job_id)

    assert job.status == "failed"
    assert job.error is not None
    assert job.error.model_dump() == error


def test_the_adapter_is_a_tar_archive_once_the_job_has_succeeded(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    path = f"/v1/fine_tuning/jobs/{job_id}/adapter"
    early = service.http("GET", path)
    assert (early.status_code, early.json()["error"]["code"]) == (404, "no_adapter")
    assert "validating_files" in early.json()["error"]["message"]

    weights = bytes(range(256)) * 10_001
    run = run_dir(service, job_id)
    run.put("adapter/adapter_model.safetensors", weights)
    run.put("adapter/adapter_config.json", b"{}")
    (run.root / "adapter" / "link").symlink_to("/etc/passwd")
    assert service.http("GET", path).status_code == 404
    put(service, job_id, state=State.SUCCEEDED, attempt=1)
    answer = service.http("GET", path)

    assert answer.headers["content-type"] == "application/x-tar"
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == [
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
        ]
        member = archive.extractfile("adapter/adapter_model.safetensors")
        assert member is not None
        assert member.read() == weights


def test_a_damaged_adapter_is_not_given_away(
    service: Service, client: openai.OpenAI, training_file: str, tmp_path: Path
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(service, job_id, state=State.SUCCEEDED, attempt=1)
    adapter = run_dir(service, job_id).path("adapter")
    shutil.copytree(finished_run(tmp_path / "finished").path("adapter"), adapter)
    path = f"/v1/fine_tuning/jobs/{job_id}/adapter"
    assert service.http("GET", path).status_code == 200
    flip_a_bit(adapter / "adapter_model.safetensors")
    for _ in range(2):
        refused = service.http("GET", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_damaged")
        assert (
            "adapter_model.safetensors has other contents than when it was written"
            in refused.json()["error"]["message"]
        )


def test_a_checkpoint_s_adapter_is_made_once_when_it_is_asked_for(
    service: Service, client: openai.OpenAI, training_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    run = run_dir(service, job_id)
    made: list[str] = []

    def make(module: str, arguments: list[str]) -> None:
        assert arguments == [str(run.root), "step-2-a1", str(run.path("adapters/step-2-a1"))]
        made.append(module)
        waiting.wait(5)
        run.put("adapters/new/adapter_config.json", b"{}")
        run.path("adapters/new").rename(run.path("adapters/step-2-a1"))

    waiting = threading.Event()
    monkeypatch.setattr(worker_tasks, "run_worker", make)
    put(service, job_id, state=State.RUNNING, attempt=1, checkpoints=(2,))
    point = client.fine_tuning.jobs.checkpoints.list(job_id).data[0]
    model = point.fine_tuned_model_checkpoint
    paths = [
        f"jobs/{job_id}/checkpoints/{point.id}",
        f"checkpoints/{point.id}",
        f"checkpoints/{model}",
        f"checkpoints/{model}",
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(service.http, "GET", f"/v1/fine_tuning/{path}/adapter") for path in paths
        ]
        wait_until(lambda: bool(made))
        waiting.set()
        for answer in answers:
            with tarfile.open(fileobj=io.BytesIO(answer.result().content)) as archive:
                assert archive.getnames() == ["adapter/adapter_config.json"]
    assert made == ["workers.tasks.consolidate"], "of all who ask at once, one makes it"
    for path in (f"jobs/{job_id}/checkpoints/ftckpt_x", "checkpoints/ftckpt_x"):
        other = service.http("GET", f"/v1/fine_tuning/{path}/adapter")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "no_checkpoint")
    unfinished = service.http(
        "GET", f"/v1/fine_tuning/checkpoints/{model.partition(':ckpt')[0]}/adapter"
    )
    assert unfinished.status_code == 404


def test_a_checkpoint_that_is_gone_is_no_longer_listed(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    job = put(
        service,
        job_id,
        state=State.SUCCEEDED,
        finished_at=1e9,
        attempt=1,
        checkpoints=tuple(range(1, 8)),
    )
    run = run_dir(service, job_id)
    name = job.spec.tuned_name

    def listed() -> list[int]:
        return [
            point.step_number for point in client.fine_tuning.jobs.checkpoints.list(job_id, limit=2)
        ]

    assert listed() == [7, 6, 5, 4, 3, 2, 1]
    cursor = client.fine_tuning.jobs.checkpoints.list(job_id, limit=1).data[0].id
    for step in (1, 3, 4, 5, 7):
        run.path(f"checkpoints/step-{step}-a1/COMPLETE").unlink()
    run.put("adapters/step-1-a1/adapter_config.json", b"{}")
    run.put("adapters/step-4-a1.lock", b"")
    assert listed() == [6, 2, 1], "the adapter of step 1 was made before"
    after = client.fine_tuning.jobs.checkpoints.list(job_id, after=cursor)
    assert [point.step_number for point in after] == [6, 2, 1], "from one that is gone since"
    client.models.delete(f"{name}:ckpt-step-2")
    assert listed() == [6, 1]


def test_logs_are_the_last_lines_of_an_attempt(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    path = f"/v1/fine_tuning/jobs/{job_id}/logs"
    early = service.http("GET", path)
    assert (early.status_code, early.json()["error"]["code"]) == (404, "no_logs")

    run = run_dir(service, job_id)
    run.put("attempts/1/logs/supervisor.log", b"first\n")
    run.put(
        "attempts/2/logs/torchrun.log",
        "".join(f"line {n} \N{SNOWMAN}\n" for n in range(300)).encode() + b"\xff",
    )
    put(service, job_id, state=State.RUNNING, attempt=2)

    newest = service.http("GET", f"{path}?lines=2")
    assert newest.headers["content-type"].startswith("text/plain")
    assert newest.text == "==> torchrun.log <==\nline 299 \N{SNOWMAN}\n\N{REPLACEMENT CHARACTER}"
    assert service.http("GET", f"{path}?attempt=1").text == "==> supervisor.log <==\nfirst\n"
    assert service.http("GET", f"{path}?attempt=3").status_code == 404


def test_a_create_that_the_client_repeats_is_one_job(service: Service, training_file: str) -> None:
    def create(retry: int, **more: Any) -> str:
        body = {"model": "tiny", "training_file": training_file, **more}
        headers = {"x-stainless-retry-count": str(retry)}
        return service.http("POST", "/v1/fine_tuning/jobs", json=body, headers=headers).json()["id"]

    first = create(0)
    second = create(0)

    assert first != second
    assert create(1) == second
    assert create(2, suffix="other") not in (first, second)
    assert len(service.store.jobs.list_jobs("default").data) == 3


def test_an_idempotency_key_stands_for_one_job(service: Service, training_file: str) -> None:
    def create(key: str, **more: Any) -> Any:
        body = {"model": "tiny", "training_file": training_file, **more}
        return service.http(
            "POST", "/v1/fine_tuning/jobs", json=body, headers={"idempotency-key": key}
        ).json()

    first = create("a")

    assert create("a")["id"] == first["id"]
    assert create("b")["id"] != first["id"]
    assert create("a", suffix="other")["error"]["code"] == "idempotency_key_reused"
    assert create("k" * 256)["error"]["param"] == "Idempotency-Key"
    assert len(service.store.jobs.list_jobs("default").data) == 2
    with ThreadPoolExecutor(8) as pool:
        assert len({job["id"] for job in pool.map(create, ["c"] * 8)}) == 1
    assert len(service.store.jobs.list_jobs("default").data) == 3


def test_a_tuned_model_answers_for_its_project_only(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    service.store.projects.ensure_project("other", "rival")
    _, key = service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(service, job_id, state=State.SUCCEEDED, attempt=1)
    name = client.fine_tuning.jobs.retrieve(job_id).fine_tuned_model
    assert name is not None
    other = service.client(key)
    assert list(other.files.list()) == []
    assert list(other.fine_tuning.jobs.list()) == []
    assert [model.id for model in other.models.list()] == [
        "meta-llama/Llama-3.2-1B",
        "tiny",
        "gpt-4o-mini-2024-07-18",
    ]
    for ask in (
        lambda: other.files.retrieve(training_file),
        lambda: other.files.content(training_file),
        lambda: other.files.delete(training_file),
        lambda: other.fine_tuning.jobs.retrieve(job_id),
        lambda: other.fine_tuning.jobs.cancel(job_id),
        lambda: other.fine_tuning.jobs.pause(job_id),
        lambda: other.fine_tuning.jobs.resume(job_id),
        lambda: other.fine_tuning.jobs.list_events(job_id),
        lambda: other.fine_tuning.jobs.checkpoints.list(job_id),
        lambda: other.models.retrieve(name),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError) as caught:
        other.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    assert caught.value.param == "training_file"
    for path in ("adapter", "logs"):
        assert (
            service.http("GET", f"/v1/fine_tuning/jobs/{job_id}/{path}", key=key).status_code == 404
        )


def test_250_jobs_are_each_seen_once_while_more_are_made(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    template = service.store.jobs.get_job(
        "default",
        client.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, metadata={"many": "yes"}
        ).id,
    )
    ids = [
        template.id,
        *(create_job(service.store, replace(template, id=new_id("ftjob-"))).id for _ in range(249)),
    ]

    seen: list[str] = []
    for job in client.fine_tuning.jobs.list():
        seen.append(job.id)
        if len(seen) % 100 == 0:
            client.fine_tuning.jobs.create(model="tiny", training_file=training_file)

    assert seen == ids[::-1]
    assert [
        job.id for job in client.fine_tuning.jobs.list(limit=100, metadata={"many": "yes"})
    ] == ids[::-1]


def test_a_job_that_its_cluster_keeps_waiting_is_shown_as_queued(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(
        service,
        job_id,
        state=State.RUNNING,
        phase=Phase.WAITING,
        pending="no node has 8 GPUs",
        attempt=1,
        host="k",
    )
    job: Any = client.fine_tuning.jobs.retrieve(job_id)
    assert (job.status, job.pending_reason) == ("queued", "no node has 8 GPUs")


@pytest.mark.parametrize(
    ("state", "phase", "shown"),
    [
        (State.QUEUED, None, True),
        (State.RUNNING, Phase.LAUNCHING, True),
        (State.RUNNING, Phase.TRAINING, True),
        (State.CANCELLED, Phase.STOPPING, False),
        (State.SUCCEEDED, None, False),
    ],
)
def test_what_keeps_a_job_is_shown_as_long_as_it_is_to_run(
    service: Service,
    client: openai.OpenAI,
    training_file: str,
    state: State,
    phase: Phase | None,
    shown: bool,
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(
        service,
        job_id,
        state=state,
        phase=phase,
        pending="The job cannot be observed now",
        attempt=1,
        host="k",
    )
    job: Any = client.fine_tuning.jobs.retrieve(job_id)
    assert job.pending_reason == ("The job cannot be observed now" if shown else None)


def test_a_plan_counts_records_and_not_lines(service: Service, client: openai.OpenAI) -> None:
    table = b"prompt,completion\n" + b'ask,"an answer\nof two lines"\n' * 10
    file_id = client.files.create(file=("table.csv", table), purpose="fine-tune").id
    body = {"model": "tiny", "training_file": file_id, "training": {"batch_size": 2, "n_epochs": 1}}
    time = service.http("POST", "/v1/fine_tuning/plan", json=body).json()["time"]
    assert (time["examples"], time["steps"]) == (10, 5)
    time = service.http(
        "POST", "/v1/fine_tuning/plan", json={**body, "validation_split": 0.4}
    ).json()["time"]
    assert (time["examples"], time["steps"]) == (6, 3)


def test_a_plan_sets_the_tokens_of_the_validation_split_aside_with_its_samples(
    service: Service, client: openai.OpenAI
) -> None:
    file_id = client.files.create(file=("train.jsonl", TRAINING * 4), purpose="fine-tune").id
    body = {"model": "tiny", "training_file": file_id}
    whole, rest = (
        service.http("POST", "/v1/fine_tuning/plan", json=body | split).json()["likely"]["batches"][
            "length"
        ]
        for split in ({}, {"validation_split": 0.5})
    )
    assert rest == whole


def test_a_plan_of_reinforcement_learning_counts_the_answers(
    service: Service, client: openai.OpenAI
) -> None:
    prompt = b'{"messages": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}\n'
    file_id = client.files.create(file=("prompts.jsonl", prompt * 10), purpose="fine-tune").id
    grader = {
        "type": "string_check",
        "name": "x",
        "operation": "eq",
        "input": "{{sample.output_text}}",
        "reference": "4",
    }
    method = {"grader": grader, "hyperparameters": {"batch_size": 5, "max_completion_length": 40}}
    body = {
        "model": "tiny",
        "training_file": file_id,
        "method": {"type": "reinforcement", "reinforcement": method},
    }
    plan = service.http("POST", "/v1/fine_tuning/plan", json=body).json()
    assert plan["likely"]["batches"]["length"] == len(prompt) // 5 + 40
    assert plan["time"]["steps"] == 2


@pytest.mark.parametrize(("packing", "rows"), [(True, 10), (False, 50)])
def test_a_plan_counts_the_rows_that_texts_fill(
    service: Service, client: openai.OpenAI, packing: bool, rows: int
) -> None:
    long = b'{"text": "%s"}\n' % (b"word " * 598)
    short = b'{"text": "%s"}\n' % (b"word " * 9)
    training = {"max_length": 64, "batch_size": 1, "n_epochs": 1, "packing": packing}

    def planned(texts: bytes) -> int:
        file_id = client.files.create(file=("texts.jsonl", texts), purpose="fine-tune").id
        body = {"model": "tiny", "training_file": file_id, "training": training}
        return service.http("POST", "/v1/fine_tuning/plan", json=body).json()["time"]["examples"]

    assert planned(long) == 10, "windows of one long text"
    assert planned(short * 50) == rows


def test_a_large_body_holds_up_neither_the_small_ones_nor_anything_else(
    service: Service, client: openai.OpenAI, training_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold hundreds of patterns, to be read and to be matched with a base."""
    reading = threading.Event()
    matching = threading.Event()
    released = threading.Event()
    read = job_admission.read
    new_job = job_admission.new_job

    def slow_read(body: Any, *known: Any) -> Any:
        if "lora" in body:
            reading.set()
            assert released.wait(60)
        return read(body, *known)

    def slow_new_job(parsed: job_admission.ParsedJob, *known: Any) -> Any:
        if "precision" in parsed.body:
            matching.set()
            assert released.wait(60)
        return new_job(parsed, *known)

    monkeypatch.setattr(job_admission, "read", slow_read)
    monkeypatch.setattr(job_admission, "new_job", slow_new_job)
    body: dict[str, Any] = {"model": "tiny", "training_file": training_file}
    patterns = {f"[ab]{number}": 8 for number in range(200)}
    with ThreadPoolExecutor(2) as pool:
        large = [
            pool.submit(service.http, "POST", "/v1/fine_tuning/jobs", json=body | more)
            for more in (
                {"lora": {"rank_pattern": patterns}},
                {"precision": {"overrides": dict.fromkeys(patterns, "nf4")}},
            )
        ]
        try:
            assert reading.wait(60)
            assert matching.wait(60)
            assert client.fine_tuning.jobs.create(**body).status == "validating_files"
            assert len(client.fine_tuning.jobs.list().data) == 1
            assert not any(answer.done() for answer in large)
        finally:
            released.set()
        assert [answer.result().json()["error"]["code"] for answer in large] == [
            "invalid_value",
            "invalid_value",
        ]


def test_accuracies_in_tasks_are_kept_with_the_job(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    path = f"/v1/fine_tuning/jobs/{job.id}/suites"
    facts = {
        "questions": 20,
        "base": {"accuracy": 0.5, "error": 0.1},
        "tuned": {"accuracy": 0.75, "error": None},
    }
    early = service.http("POST", path, json={"tasks": {"facts": facts}})
    assert check_error(early, 404)["param"] == "job_id"
    put_state(service.store, job.id, State.SUCCEEDED)
    assert service.http("POST", path, json={"tasks": {"facts": facts}}).json()["suites"] == {
        "facts": facts
    }
    newer = {**facts, "tuned": {"accuracy": 0.25, "error": 0.1}}
    service.http("POST", path, json={"tasks": {"facts": newer, "mine": facts}})
    assert service.http("GET", path.removesuffix("/suites")).json()["suites"] == {
        "facts": newer,
        "mine": facts,
    }
    for wrong, param in (
        ({"tasks": {"facts": {**facts, "tuned": {"accuracy": 1.5}}}}, "tasks.facts.tuned.accuracy"),
        ({"tasks": {"../x": facts}}, None),
        ({"tasks": {f"task{i}": facts for i in range(64)}}, "tasks"),
        ({"task": {}}, None),
    ):
        refused = check_error(service.http("POST", path, json=wrong), 400)
        assert param is None or refused["param"] == param
    assert (client.fine_tuning.jobs.retrieve(job.id).model_extra or {})["suites"] == {
        "facts": newer,
        "mine": facts,
    }
