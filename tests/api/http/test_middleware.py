"""A request in the log."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest

from tests.support.attempts import wait_for
from tests.support.rest.service import Service


def test_a_request_is_one_line_of_the_log_with_its_id_and_job(
    service: Service, client: openai.OpenAI, training_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ft_service.api")
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    caplog.clear()
    answer = service.http("GET", f"/v1/fine_tuning/jobs/{job_id}/events?after=secret")
    # The line is written behind the answer, which the client may have read before.
    (record,) = wait_for(lambda: [r for r in caplog.records if r.name == "ft_service.api"])
    fields: dict[str, Any] = record.__dict__["ft"]
    assert record.levelno == logging.INFO
    assert fields["job_id"] == job_id
    assert 0 <= int(answer.headers["openai-processing-ms"]) <= fields["seconds"] * 1000 + 1
    assert fields["status"] == answer.status_code
    assert fields["route"] == "/v1/fine_tuning/jobs/{job_id}/events"
    assert fields["project_id"] == "default"
    assert service.key not in json.dumps(fields) + record.getMessage()
    assert "secret" not in json.dumps(fields) + record.getMessage()
    caplog.clear()
    for path in (job_id, f"{job_id}/events"):
        service.http("GET", f"/v1/fine_tuning/jobs/{path}")
    levels = [r.levelno for r in caplog.records if r.name == "ft_service.api"]
    assert levels == [logging.DEBUG] * 2, "a client that watches a job asks every second"
