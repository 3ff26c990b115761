"""Samples of files and jobs as the model sees them, over the wire."""

from __future__ import annotations

import httpx2

from tests.support.rest.service import Service

LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(3))


def get(service: Service, path: str, **query: object) -> httpx2.Response:
    return service.http("GET", path, params=query)


def test_samples_of_a_file_and_of_a_job(service: Service) -> None:
    file = service.client().files.create(file=("a.jsonl", LINES), purpose="fine-tune")
    answer = get(service, f"/v1/files/{file.id}/samples", model="tiny", limit=2).json()
    assert (answer["has_more"], answer["format"], answer["word"]) == (True, "plain text (text) in JSON lines", "line")
    first, second = answer["data"]
    assert first["tokens"] == [
        {"id": first["tokens"][0]["id"], "text": "0", "role": "learned"},
        {"id": 2, "text": "<|im_end|>", "role": "learned"},
    ]
    assert (second["line"], second["learned"], second["total"], second["cut_at"], second["error"]) == (2, 1, 2, None, None)
    job = service.client().fine_tuning.jobs.create(model="tiny", training_file=file.id)
    of_job = get(service, f"/v1/fine_tuning/jobs/{job.id}/samples", after=1).json()
    assert [sample["line"] for sample in of_job["data"]] == [2, 3]
    assert of_job["data"][0] == second
    assert get(service, f"/v1/fine_tuning/jobs/{job.id}/samples", file="validation").status_code == 404
    assert get(service, f"/v1/files/{file.id}/samples", model="gone").json()["error"]["param"] == "model"
    wrong = get(service, f"/v1/files/{file.id}/samples", model="tiny", chat_template="chatmi").json()["error"]
    assert wrong["param"] == "chat_template"
    assert "there are chatml, llama-3" in wrong["message"]


def test_statistics_of_a_file_and_of_a_job(service: Service) -> None:
    client = service.client()
    lines = b"".join(b'{"text": "%d"}\n' % (number % 30) for number in range(32))
    file, other = (client.files.create(file=(f"{name}.jsonl", lines), purpose="fine-tune") for name in "ab")
    asked = {"model": "tiny", "validation_split": 0.25, "seed": 7, "batch_size": 4}
    found = get(service, f"/v1/files/{file.id}/statistics", **asked).json()
    assert (found["training"]["samples"], found["validation"]["samples"]) == (24, 8)
    assert (found["items"], found["steps"]) == (1, 3), "short documents share one row, a batch in each epoch"
    assert found["training"]["duplicates"]["count"] + found["validation"]["duplicates"]["count"] == 2
    assert found["overlap"] == {"count": 0, "first": []}
    assert "with the very tokens of one further up" in found["warnings"][0]
    options = {"training": {"batch_size": 4}, "validation_split": 0.25}
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, seed=7, extra_body=options)
    of_job = get(service, f"/v1/fine_tuning/jobs/{job.id}/statistics").json()
    assert of_job["flops"] > 0
    assert {**of_job, "flops": None, "seconds": None} == found
    assert service.http("GET", f"/v1/fine_tuning/jobs/{job.id}").json()["validation_split"] == 0.25
    refused = get(service, f"/v1/files/{file.id}/statistics", **asked, validation_file=other.id).json()["error"]
    assert refused["param"] == "validation_split"
