"""Events as they happen."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJobEvent

from api.transfer import log_tail
from ft_service.errors import UnavailableError
from ft_service.jobs.states import Phase, State
from ft_service.store.records import NewEvent
from tests.support.rest.service import METRICS, Service, put, run_dir
from tests.support.rest.streams import listening, next_event

TRAINING: dict[str, Any] = {
    "state": State.RUNNING,
    "phase": Phase.TRAINING,
    "attempt": 1,
    "host": "h",
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.shared_polling.POLL_SECONDS", 0.01)


@pytest.fixture
def job_id(client: openai.OpenAI, training_file: str) -> str:
    return client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id


def test_events_arrive_as_they_happen_and_the_stream_ends_with_the_job(
    service: Service, job_id: str
) -> None:
    with listening(service, job_id) as lines:
        assert next_event(lines)["message"] == f"Created fine-tuning job: {job_id}"
        assert next_event(lines)["message"].startswith("Plan: ")
        put(service, job_id, NewEvent(level="info", message="Step", metrics=METRICS), **TRAINING)
        event = next_event(lines)
        assert (event["object"], event["type"], event["data"]["step"]) == (
            "fine_tuning.job.event",
            "metrics",
            5,
        )
        put(service, job_id, state=State.CANCELLED, phase=Phase.STOPPING)
        put(service, job_id, NewEvent(level="info", message="Stopped."), phase=None)
        assert next_event(lines)["message"] == "Stopped."
        assert list(lines) == ["data: [DONE]"]


def test_openais_client_reads_the_stream(
    service: Service, client: openai.OpenAI, job_id: str
) -> None:
    client.fine_tuning.jobs.cancel(job_id)
    stream = client.get(
        f"/fine_tuning/jobs/{job_id}/events",
        options={"params": {"stream": "true"}},
        cast_to=FineTuningJobEvent,
        stream=True,
        stream_cls=openai.Stream[FineTuningJobEvent],
    )
    created, plan, cancelled = [event.message for event in stream]
    assert (created, cancelled) == (f"Created fine-tuning job: {job_id}", "Cancel requested.")
    assert plan.startswith("Plan: ")


def test_a_stream_goes_on_where_another_has_ended(
    service: Service, client: openai.OpenAI, job_id: str
) -> None:
    put(service, job_id, *(NewEvent(level="info", message=str(n)) for n in range(250)))
    client.fine_tuning.jobs.cancel(job_id)
    with listening(service, job_id) as lines:
        seen = [next_event(lines) for _ in range(120)]  # the first two are of the creation
    wanted = [*map(str, range(118, 250)), "Cancel requested."]
    for query, headers in (
        ("", {"last-event-id": seen[-1]["id"]}),
        (f"&after={seen[-1]['id']}", {}),
    ):
        with listening(service, job_id, query, **headers) as lines:
            assert [next_event(lines)["message"] for _ in wanted] == wanted
            assert list(lines) == ["data: [DONE]"]


def test_a_silent_stream_says_that_it_lives(
    service: Service, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.transfer.event_stream.KEEP_ALIVE_SECONDS", 0.01)
    with listening(service, job_id) as lines:
        _ = next_event(lines), next_event(lines)
        assert [next(lines) for _ in range(2)] == [": the job continues"] * 2


def test_what_cannot_be_streamed_is_refused_before_anything_is_sent(
    service: Service, job_id: str
) -> None:
    assert (
        service.http("GET", "/v1/fine_tuning/jobs/ftjob-none/events?stream=true").status_code == 404
    )
    answer = service.http(
        "GET", f"/v1/fine_tuning/jobs/{job_id}/events?stream=true&after=ftevent-none"
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


def test_a_database_that_goes_away_ends_the_stream_without_done(
    service: Service, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise UnavailableError("The database is away.")

    with listening(service, job_id) as lines:
        _ = next_event(lines), next_event(lines)
        monkeypatch.setattr(service.store.jobs, "get_job", away)
        assert list(lines) == []


def test_logs_are_followed_by_rank_over_attempts_until_the_job_ends(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    run = run_dir(service, job_id)
    of_rank = "attempts/{}/logs/x/attempt_0/{}/stdout.log"
    run.put(of_rank.format(1, 0), b"old\nfirst\n")
    run.put(of_rank.format(1, 1), b"another rank\n")
    put(service, job_id, state=State.RUNNING, phase=Phase.TRAINING, attempt=1)
    path = f"{service.url}/v1/fine_tuning/jobs/{job_id}/logs"
    asked = {
        "params": {"follow": True, "rank": 0, "lines": 1},
        "headers": {"authorization": f"Bearer {service.key}"},
    }
    with service.connections.stream("GET", path, **asked) as answer:
        found = map(json.loads, answer.iter_lines())
        assert next(found) == {"attempt": 1, "source": "rank 0 stdout", "line": "first"}
        with run.path(of_rank.format(1, 0)).open("ab") as file:
            file.write("se\N{SNOWMAN}ond\nunen".encode())
        assert next(found)["line"] == "se\N{SNOWMAN}ond"
        run.put(of_rank.format(2, 0), b"again\nonce more")
        put(service, job_id, attempt=2)
        assert [next(found)["line"] for _ in range(2)] == ["unen", "again"]
        put(service, job_id, state=State.SUCCEEDED, phase=None)
        assert list(found) == [{"attempt": 2, "source": "rank 0 stdout", "line": "once more"}]
    refused = service.http("GET", f"/v1/fine_tuning/jobs/{job_id}/logs?follow=true&attempt=1")
    assert refused.json()["error"]["param"] == "attempt"


def test_followers_of_logs_read_a_line_once_and_who_comes_late_reads_what_is_there(
    service: Service, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = log_tail.read_lines

    def counted(file: log_tail.LogFile, place: int, last: bool) -> Any:
        reads.append(place)
        return read(file, place, last)

    monkeypatch.setattr(log_tail, "read_lines", counted)
    log = run_dir(service, job_id).path("attempts/1/logs/x/attempt_0/0/stdout.log")
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    put(service, job_id, **TRAINING)
    url = f"{service.url}/v1/fine_tuning/jobs/{job_id}/logs"
    asked = {
        "params": {"follow": True, "lines": 1},
        "headers": {"authorization": f"Bearer {service.key}"},
    }
    with ExitStack() as stack:
        answers = [
            stack.enter_context(service.connections.stream("GET", url, **asked)).iter_lines()
            for _ in range(6)
        ]
        assert [json.loads(next(lines))["line"] for lines in answers] == ["two"] * 6
        del reads[:]
        with log.open("a") as file:
            file.write("three\n")
        assert [json.loads(next(lines))["line"] for lines in answers] == ["three"] * 6
        assert reads == [8]
        late = stack.enter_context(
            service.connections.stream(
                "GET", url, **{**asked, "params": {"follow": True, "lines": 2}}
            )
        ).iter_lines()
        assert [json.loads(next(late))["line"] for _ in range(2)] == ["two", "three"]
        put(service, job_id, state=State.SUCCEEDED, phase=None)
        assert [list(lines) for lines in (*answers, late)] == [[]] * 7
