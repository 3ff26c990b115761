"""A disk that takes no more writes: reading continues, and whatever fails says why."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import event

from tests.support.rest.service import TRAINING, Service, stored

READ = (
    *(
        "/v1/fine_tuning/jobs",
        "/v1/files",
        "/v1/models",
        "/v1/fine_tuning/jobs/{job}",
        "/v1/fine_tuning/jobs/{job}/events",
    ),
    *("/v1/files/{file}/content", "/v1/webhook_endpoints", "/v1/organization/projects", "/metrics"),
)


def make_read_only(service: Service) -> None:
    """The database as it is on a file system that has become read-only, and keys that were last
    used long ago.
    """
    service.sql("UPDATE keys SET last_used_at = last_used_at - 1000")
    event.listen(
        service.store._engine,
        "connect",
        lambda connection, _: connection.execute("PRAGMA query_only = ON"),
    )
    service.store._engine.dispose()


def test_all_that_is_read_can_be_read_and_what_cannot_be_written_says_why(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    make_read_only(service)
    for path in READ:
        answer = service.http("GET", path.format(job=job, file=training_file))
        assert answer.status_code == 200, (path, answer.text)
    assert service.http("GET", "/jobs", headers={"accept": "text/html"}).status_code == 303, (
        "to the sign-in"
    )
    with pytest.raises(openai.InternalServerError, match="is read-only") as caught:
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    assert (caught.value.status_code, caught.value.code) == (503, "disk_read_only")
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_readyz_tells_and_livez_does_not(service: Service) -> None:
    assert service.http("GET", "/readyz").status_code == 200
    make_read_only(service)
    service.store._last_write = None
    answer = service.http("GET", "/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "disk_read_only")
    assert service.http("GET", "/livez").status_code == 200


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EROFS, "disk_read_only"), (errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full")],
)
@pytest.mark.parametrize("call", ["tempfile.mkstemp", "pathlib.Path.rename"])
def test_an_upload_says_what_is_wrong_with_the_disk_at_whichever_step(
    service: Service,
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    code: str,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(call, fails)
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.create(file=("a.jsonl", TRAINING * 1000), purpose="fine-tune")
    assert (caught.value.status_code, caught.value.code) == (503, code)
    assert caught.value.response.headers["x-should-retry"] == "false"
    monkeypatch.undo()
    assert stored(service) == []


def test_another_fault_of_the_file_system_stays_an_internal_one(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    assert (caught.value.status_code, caught.value.code) == (500, "internal_error")
