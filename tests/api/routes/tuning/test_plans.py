"""Whether a job would be taken is asked before its files are uploaded; refused jobs leave none, and
none is uploaded twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.client.client import Client
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.rest.service import LINE, TRAINING, Service, put, run_dir, stored

CHECK = "/v1/fine_tuning/check"
ANNOUNCED = {"training_file": {"filename": "train.jsonl", "bytes": 300}}


def checked(service: Service, job: dict[str, Any], files: Any = ANNOUNCED) -> Any:
    return service.http("POST", CHECK, json={"job": job, "files": files}).json()


def test_what_creation_refuses_is_refused_before_the_files_are_there(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    assert checked(service, {"model": "tiny"}) == {
        "object": "fine_tuning.check",
        "accepted": True,
        "jobs": 1,
    }
    sweep = {"model": "tiny", "validation_split": 0.5, "sweep": {"lora.r": [4, 8, 16]}}
    assert checked(service, sweep)["jobs"] == 3
    for body in (
        {"model": "huge"},
        {"model": "tiny", "lora": {"target_modules": ["q_prj"]}},
        {"model": "tiny", "distributed": {"nproc_per_node": 9}},
        {"model": "tiny", "validation_file": "file-gone"},
        {"modle": "tiny"},
    ):
        there = service.http(
            "POST", "/v1/fine_tuning/jobs", json={**body, "training_file": training_file}
        ).json()
        assert checked(service, body) == there
        assert there["error"]["code"]
    assert client.fine_tuning.jobs.list().data == []
    assert len(client.files.list().data) == 1


def test_limits_of_files_and_of_the_queue_count_before_the_upload(service: Service) -> None:
    service.store.projects.update_project("default", limits={"max_bytes": 500, "max_queued": 2})

    def refused(files: Any, job: dict[str, Any] | None = None) -> Any:
        return checked(service, job or {"model": "tiny"}, files)["error"]

    too_large = {
        "training_file": {"filename": "a.jsonl", "bytes": service.settings.max_file_bytes + 1}
    }
    assert refused(too_large)["code"] == "file_too_large"
    assert (
        refused({"training_file": {"filename": "a.txt", "bytes": 1}})["param"]
        == "files.training_file.filename"
    )
    assert (
        "given twice" in refused(ANNOUNCED, {"model": "tiny", "training_file": "file-1"})["message"]
    )
    assert "files.prompts" in refused({"prompts": {"filename": "a.jsonl", "bytes": 1}})["message"]
    both = {
        param: {"filename": "a.jsonl", "bytes": 300}
        for param in ("training_file", "validation_file")
    }
    assert refused(both)["code"] == "storage_limit"
    assert (
        refused(
            ANNOUNCED, {"model": "tiny", "validation_split": 0.5, "sweep": {"lora.r": [4, 8, 16]}}
        )["code"]
        == "queue_limit"
    )


def test_files_are_found_by_their_contents_and_only_those_of_the_project(
    service: Service, client: openai.OpenAI
) -> None:
    first = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune").id
    client.files.create(file=("b.jsonl", TRAINING + LINE.encode()), purpose="fine-tune")
    digest = hashlib.sha256(TRAINING).hexdigest()
    found = service.http("GET", f"/v1/files?sha256={digest}").json()["data"]
    assert [file["id"] for file in found] == [first]
    assert service.http("GET", "/v1/files?sha256=none").status_code == 400
    other = service.store.projects.create_project(name="other", organization="local")
    _, key = service.store.keys.create_key(
        NewKey(project_id=other.id, name="theirs", scope="admin")
    )
    assert service.http("GET", f"/v1/files?sha256={digest}", key=key).json()["data"] == []


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text(LINE * 3)
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\ntraining_file: data.jsonl\nsuffix: mine\n")
    return path


def test_a_refused_submit_leaves_no_file_and_contents_are_uploaded_once(
    service: Service, client: openai.OpenAI, ft: Callable[..., str], spec: Path
) -> None:
    assert "lora.target_modules" in ft(
        "submit", str(spec), "--set", "lora.target_modules=[q_prj]", code=64
    )
    assert stored(service) == []
    ft("submit", str(spec))
    [file] = client.files.list().data
    assert file.filename == "data.jsonl"
    copy = spec.with_name("copy.jsonl")
    copy.write_bytes(spec.with_name("data.jsonl").read_bytes())
    said = ft("submit", str(spec), "--set", "training_file=copy.jsonl", "--suffix", "other")
    assert (
        f"copy.jsonl is on the server already ({file.id} and called data.jsonl): it is not "
        "uploaded again." in said
    )
    assert len(client.files.list().data) == 1
    assert {job.training_file for job in client.fine_tuning.jobs.list()} == {file.id}


def test_files_go_again_if_the_job_is_refused_after_all(
    service: Service,
    client: openai.OpenAI,
    ft: Callable[..., str],
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Client, "check_job", lambda *_: 1)  # what was free then is taken now
    ft("submit", str(spec), "--set", "lora.target_modules=[q_prj]", code=64)
    assert client.files.list().data == []
    assert stored(service) == []
    kept = client.files.create(file=("data.jsonl", TRAINING), purpose="fine-tune").id
    ft("submit", str(spec), "--set", "lora.target_modules=[q_prj]", code=64)
    assert [file.id for file in client.files.list().data] == [kept], "it was there before"


def test_a_job_goes_on_from_a_tuned_model_by_any_word_that_names_its_job(
    service: Service, client: openai.OpenAI, ft: Callable[..., str], spec: Path
) -> None:
    ft("submit", str(spec))
    job = client.fine_tuning.jobs.list().data[0]
    assert "has no tuned model: wait until" in ft("submit", str(spec), "--model", "mine", code=64)
    put(service, job.id, state=State.SUCCEEDED, reason=Reason.SUCCEEDED, attempt=1)
    run_dir(service, job.id).path("adapter").mkdir(parents=True)
    tuned = service.http("GET", f"/v1/fine_tuning/jobs/{job.id}").json()["fine_tuned_model"]
    for word in ("last", "mine", job.id[:12], tuned):
        ft("submit", str(spec), "--model", word, "--suffix", "next")
        assert client.fine_tuning.jobs.list().data[0].model == tuned
    said = ft("submit", str(spec), "--model", "huge", code=64)
    assert "There are: " in said
    assert "Jobs with tuned models: mine." in said


def test_a_data_file_is_submitted_without_a_spec(
    ft: Callable[..., str], client: openai.OpenAI, spec: Path
) -> None:
    data = spec.with_name("data.jsonl")
    assert "--model M" in ft("submit", str(data), code=64)
    ft(
        "submit",
        str(data),
        "--model",
        "tiny",
        "--suffix",
        "bare",
        "--set",
        "lora.r=4",
        "--set",
        "training.n_epochs=1",
    )
    [job] = client.fine_tuning.jobs.list()
    shown: Any = job.model_dump()
    assert (shown["suffix"], shown["lora"]["r"], shown["training"]["n_epochs"]) == ("bare", 4, 1)
