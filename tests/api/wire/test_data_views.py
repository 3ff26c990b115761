"""Data files over the wire: their check before any job, samples and statistics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from ft_service.cli.root_command import app
from ft_service.control.checks import file_checks
from ft_service.control.checks.file_checks import FileCheck, FileChecks
from ft_service.errors import LimitError, UnavailableError
from ft_service.store.records import NewKey
from tests.support.rest.service import Service

PAIR = {"input": {"messages": [{"role": "user", "content": "a"}]}}
PAIR |= {
    f"{kind}_output": [{"role": "assistant", "content": kind}]
    for kind in ("preferred", "non_preferred")
}


def check(service: Service, name: str, body: bytes, **query: str) -> dict[str, Any]:
    file = service.client().files.create(file=(name, body), purpose="fine-tune")
    return service.http("GET", f"/v1/files/{file.id}/check", params=query).json()


def test_a_file_is_judged_as_a_job_would_read_it(service: Service) -> None:
    capitals = b"Prompt,Completion\nhi,there\n"
    found = check(service, "cap.csv", capitals)
    assert (found["object"], found["ok"], found["whole"]) == ("file.check", False, True)
    assert found["message"].startswith("cap.csv: 1 of 1 row cannot be trained on.")
    assert "data: {prompt: Prompt, completion: Completion}" in found["message"]
    found = check(
        service, "cap.csv", capitals, data='{"prompt": "Prompt", "completion": "Completion"}'
    )
    assert (found["ok"], found["message"], found["records"]) == (
        True,
        "cap.csv: prompt and completion in CSV; 1 row, and it is fine.",
        1,
    )
    found = check(service, "more.csv", b"prompt,completion,id\na,b,1\nc,d,2\n")
    assert found["message"] == "more.csv: prompt and completion in CSV; 2 rows, all of them fine."
    left_out, as_text = found["warnings"]
    assert left_out == "more.csv: 1 column is not of this format, and left out: id."
    assert "data: {instruction: prompt, output: completion}" in as_text
    pairs = json.dumps(PAIR).encode()
    assert check(service, "pairs.jsonl", pairs, method="dpo")["ok"]
    assert (
        "method: {type: dpo}"
        in check(service, "pairs.jsonl", pairs, method="supervised")["message"]
    )
    wrong = check(service, "cap.csv", capitals, data='{"promt": "Prompt"}')["error"]
    assert (wrong["param"], "promt" in wrong["message"]) == ("promt", True)


def test_copies_and_empty_answers_are_told_as_ft_data_check_does(
    service: Service, tmp_path: Path
) -> None:
    chats = [
        [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]
        for answer in ("4", "4", " ", "5")
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    copies, empty = check(service, path.name, path.read_bytes())["warnings"]
    assert copies.startswith("a.jsonl: 1 sample (line 2) with the same tokens as an earlier one")
    assert empty.startswith("a.jsonl: 1 sample (line 3) with an answer of at most 1 token.")
    printed = CliRunner().invoke(app, ["data", "check", str(path), "--json"], standalone_mode=False)
    assert json.loads(printed.output)["warnings"] == [copies, empty]


def test_secrets_are_told_by_line_and_kind_where_that_is_asked(service: Service) -> None:
    held = b'{"text": "hello"}\n{"text": "write to ann@harbour.org"}\n'
    assert check(service, "a.jsonl", held)["warnings"] == []
    (told,) = check(service, "a.jsonl", held, sensitive="true")["warnings"]
    assert told.startswith("a.jsonl: 1 sample (line 2) with an e-mail address")
    assert "harbour" not in told


def test_a_check_is_of_ones_own_files(service: Service, client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    service.store.projects.ensure_project("theirs", "local")
    _, key = service.store.keys.create_key(NewKey(project_id="theirs", name="k", scope="admin"))
    with pytest.raises(openai.NotFoundError):
        service.client(key).get(f"/files/{file.id}/check", cast_to=object)


def test_of_a_file_that_takes_long_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "a"}\n' * 1000)
    report = asyncio.run(FileChecks(seconds=0.0).report("p", FileCheck("digest"), path))
    assert (report.unread, report.faults_total, report.examples) == (True, 0, 1)
    assert (
        report.fine_text("a")
        == "a: plain text (text) in JSON lines; the first 1 line can be trained on. The rest was "
        "not read: a job reads it."
    )


def test_a_project_has_one_process_and_few_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_checks, "START_SECONDS", 1)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}')
    begun = tmp_path / "begun"
    hang = ("sh", "-c", f"echo >> {begun}; while :; do :; done")
    monkeypatch.setattr(file_checks, "WAITING", 1)

    async def ask() -> list[Any]:
        checks = FileChecks(hang, seconds=0.0)
        asked = [("loud", "1"), ("loud", "2"), ("loud", "3"), ("loud", "4"), ("quiet", "5")]
        reports = (checks.report(project, FileCheck(digest), path) for project, digest in asked)
        return await asyncio.gather(*reports, return_exceptions=True)

    first, second, third, fourth, quiet = asyncio.run(ask())
    for report in (first, second, quiet):
        assert "takes longer" in str(report.faults[0])
    assert isinstance(third, LimitError), "one is at work, and one waits"
    assert isinstance(fourth, LimitError)
    assert len(begun.read_text()) <= 3


@pytest.mark.parametrize(
    ("does", "status"),
    [("exit 3", "3"), ("kill -9 $$", "-9"), ("exec sleep 600", "-9")],
)
def test_a_process_without_an_answer_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, status: str
) -> None:
    """Whether it ends, is killed, or gets no processor in time."""
    if "sleep" in does:
        monkeypatch.setattr(file_checks, "LOST_SECONDS", 0.5)
    with pytest.raises(UnavailableError, match=f"exit status {status}") as caught:
        asyncio.run(FileChecks(("sh", "-c", does)).report("p", FileCheck("d"), tmp_path / "a"))
    assert caught.value.retry_after == 10


LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(3))


def get(service: Service, path: str, **query: object) -> httpx2.Response:
    return service.http("GET", path, params=query)


@pytest.mark.usefixtures("examined_by_one_process")
def test_samples_of_a_file_and_of_a_job(service: Service) -> None:
    file = service.client().files.create(file=("a.jsonl", LINES), purpose="fine-tune")
    answer = get(service, f"/v1/files/{file.id}/samples", model="tiny", limit=2).json()
    assert (answer["has_more"], answer["format"], answer["word"]) == (
        True,
        "plain text (text) in JSON lines",
        "line",
    )
    first, second = answer["data"]
    assert first["tokens"] == [
        {"id": first["tokens"][0]["id"], "text": "0", "role": "learned"},
        {"id": 2, "text": "<|im_end|>", "role": "learned"},
    ]
    assert (
        second["line"],
        second["learned"],
        second["total"],
        second["cut_at"],
        second["error"],
    ) == (2, 1, 2, None, None)
    job = service.client().fine_tuning.jobs.create(model="tiny", training_file=file.id)
    of_job = get(service, f"/v1/fine_tuning/jobs/{job.id}/samples", after=1).json()
    assert [sample["line"] for sample in of_job["data"]] == [2, 3]
    assert of_job["data"][0] == second
    assert (
        get(service, f"/v1/fine_tuning/jobs/{job.id}/samples", file="validation").status_code == 404
    )
    assert (
        get(service, f"/v1/files/{file.id}/samples", model="gone").json()["error"]["param"]
        == "model"
    )
    wrong = get(
        service, f"/v1/files/{file.id}/samples", model="tiny", chat_template="chatmi"
    ).json()["error"]
    assert wrong["param"] == "chat_template"
    assert "there are chatml, llama-3" in wrong["message"]


@pytest.mark.usefixtures("examined_by_one_process")
def test_statistics_of_a_file_and_of_a_job(service: Service) -> None:
    client = service.client()
    lines = b"".join(b'{"text": "%d"}\n' % (number % 30) for number in range(32))
    file, other = (
        client.files.create(file=(f"{name}.jsonl", lines), purpose="fine-tune") for name in "ab"
    )
    asked = {"model": "tiny", "validation_split": 0.25, "seed": 7, "batch_size": 4}
    found = get(service, f"/v1/files/{file.id}/statistics", **asked).json()
    assert (found["training"]["samples"], found["validation"]["samples"]) == (24, 8)
    assert (found["items"], found["steps"]) == (1, 3), (
        "short documents share one row, a batch in each epoch"
    )
    assert (
        found["training"]["duplicates"]["count"] + found["validation"]["duplicates"]["count"] == 2
    )
    assert found["overlap"] == {"count": 0, "first": []}
    assert "with the same tokens as an earlier one" in found["warnings"][0]
    options = {"training": {"batch_size": 4}, "validation_split": 0.25}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, seed=7, extra_body=options
    )
    of_job = get(service, f"/v1/fine_tuning/jobs/{job.id}/statistics").json()
    assert of_job["flops"] > 0
    assert {**of_job, "flops": None, "seconds": None} == found
    assert service.http("GET", f"/v1/fine_tuning/jobs/{job.id}").json()["validation_split"] == 0.25
    refused = get(
        service, f"/v1/files/{file.id}/statistics", **asked, validation_file=other.id
    ).json()["error"]
    assert refused["param"] == "validation_split"


STORY = "the harbour master counted seven grey boats before the fog came in and hid them all"


def completions(*pairs: tuple[str, str]) -> bytes:
    lines = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.usefixtures("examined_by_one_process")
def test_a_jobs_records_are_compared_with_each_other_and_with_what_it_is_measured_by(
    service: Service,
) -> None:
    client = service.client()
    other = STORY.replace("seven", "nine")
    body = completions(
        (f"Tell me a long story of boats: {STORY}", f"{STORY}, {STORY}."),
        (f"tell me a long story of boats: {STORY}", f"{STORY}, {STORY}."),
        ("Which town has the oldest lighthouse of all?", "Freeport."),
        (f"So {other}", "Indeed."),
    )
    training = client.files.create(file=("train.jsonl", body), purpose="fine-tune").id
    held_out = completions((f"Once {other}", "Why?"))
    validation = client.files.create(file=("held.jsonl", held_out), purpose="fine-tune").id
    asked = [{"prompt": "Which town has the oldest lighthouse of all?"}]
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training,
        validation_file=validation,
        extra_body={"evaluation": {"prompts": asked}},
    )
    found = get(service, f"/v1/fine_tuning/jobs/{job.id}/statistics").json()
    assert found["comparison"] == {
        "near_copies": {"count": 1, "first": [2]},
        "overlaps": {
            "evaluation.prompts": {"count": 1, "first": [3]},
            "held.jsonl": {"count": 1, "first": [4]},
        },
        "compared": None,
    }
    for named in ("(line 2) nearly the same", "(line 3) with what evaluation.prompts asks"):
        assert any(named in warning for warning in found["warnings"]), named
    (warning,) = [one for one in check(service, "a.jsonl", body)["warnings"] if "nearly" in one]
    assert "a.jsonl: 1 sample (line 2) nearly the same" in warning
