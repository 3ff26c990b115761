"""What a data file is, before any job and without a base; by processes of which a project has one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.control.checks import file_checks
from ft_service.control.checks.file_checks import FileCheck, FileChecks
from ft_service.errors import LimitError, UnavailableError
from tests.support.rest.service import Service

PAIR = {"input": {"messages": [{"role": "user", "content": "a"}]}}
PAIR |= {f"{kind}_output": [{"role": "assistant", "content": kind}] for kind in ("preferred", "non_preferred")}


def check(service: Service, name: str, body: bytes, **query: str) -> dict[str, Any]:
    file = service.client().files.create(file=(name, body), purpose="fine-tune")
    return service.http("GET", f"/v1/files/{file.id}/check", params=query).json()


def test_a_file_is_judged_as_a_job_would_read_it(service: Service) -> None:
    capitals = b"Prompt,Completion\nhi,there\n"
    found = check(service, "cap.csv", capitals)
    assert (found["object"], found["ok"], found["whole"]) == ("file.check", False, True)
    assert found["message"].startswith("cap.csv: 1 of 1 row cannot be trained on.")
    assert "data: {prompt: Prompt, completion: Completion}" in found["message"]
    found = check(service, "cap.csv", capitals, data='{"prompt": "Prompt", "completion": "Completion"}')
    assert (found["ok"], found["message"], found["records"]) == (
        True,
        "cap.csv: prompt and completion in CSV; 1 row, and it is fine.",
        1,
    )
    found = check(service, "more.csv", b"prompt,completion,id\na,b,1\nc,d,2\n")
    assert found["message"] == "more.csv: prompt and completion in CSV; 2 rows, all of them fine."
    assert found["warnings"] == ["more.csv: 1 column is not of this format, and left out: id."]
    pairs = json.dumps(PAIR).encode()
    assert check(service, "pairs.jsonl", pairs, method="dpo")["ok"]
    assert "method: {type: dpo}" in check(service, "pairs.jsonl", pairs, method="supervised")["message"]
    wrong = check(service, "cap.csv", capitals, data='{"promt": "Prompt"}')["error"]
    assert (wrong["param"], "promt" in wrong["message"]) == ("promt", True)


def test_a_check_is_of_ones_own_files(service: Service, client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    service.store.ensure_project("theirs", "local")
    _, key = service.store.create_key(project_id="theirs", name="k", scope="admin")
    with pytest.raises(openai.NotFoundError):
        service.client(key).get(f"/files/{file.id}/check", cast_to=object)


def test_of_a_file_that_takes_long_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "a"}\n' * 1000)
    report = asyncio.run(FileChecks(seconds=0.0).report("p", FileCheck("digest"), path))
    assert (report.unread, report.faults_total, report.examples) == (True, 0, 1)
    assert (
        report.fine_text("a")
        == "a: plain text (text) in JSON lines; the first 1 line can be trained on. The rest was not read: a job reads it."
    )


def test_a_project_has_one_process_and_few_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_checks, "START_SECONDS", 0.5)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}')
    begun = tmp_path / "begun"
    hang = ("sh", "-c", f"echo >> {begun}; exec sleep 600")
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


def test_a_process_without_an_answer_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="exit status 3"):
        asyncio.run(FileChecks((sys.executable, "-c", "raise SystemExit(3)")).report("p", FileCheck("d"), tmp_path / "a"))
