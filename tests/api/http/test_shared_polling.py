"""What many streams follow is polled and read once, and ends with the last of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import openai
import pytest

from ft_service.jobs.states import State
from ft_service.store.records import NewEvent, NewKey
from tests.support.rest.service import Service, put, wait_until
from tests.support.rest.streams import listening, next_event


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.shared_polling.POLL_SECONDS", 0.01)


@pytest.fixture
def job_id(client: openai.OpenAI, training_file: str) -> str:
    return client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id


def test_what_many_follow_is_looked_at_and_read_once(
    service: Service, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = service.store.jobs.events_after

    def counted(of: str, place: int, limit: int) -> Any:
        reads.append(place)
        return read(of, place, limit)

    monkeypatch.setattr(service.store.jobs, "events_after", counted)
    watches = service.app.state.services.watches
    with ExitStack() as stack:
        followers = [stack.enter_context(listening(service, job_id)) for _ in range(12)]
        for lines in followers:
            _ = next_event(lines), next_event(lines)
        assert len(watches._watches) == 1
        del reads[:]
        put(service, job_id, NewEvent(level="info", message="News"))
        assert [next_event(lines)["message"] for lines in followers] == ["News"] * 12
        assert len(reads) == 1
        put(service, job_id, state=State.CANCELLED)
        assert [list(lines) for lines in followers] == [["data: [DONE]"]] * 12
    wait_until(lambda: not watches._watches and not watches._streams)


def test_a_follower_who_goes_takes_its_watch_along(service: Service, job_id: str) -> None:
    watches = service.app.state.services.watches
    with listening(service, job_id) as lines:
        next_event(lines)
        assert len(watches._watches) == 1
    wait_until(lambda: not watches._watches and not watches._streams)


def test_a_key_follows_so_many_at_once_and_another_key_as_many(
    service: Service, job_id: str
) -> None:
    service.use(service.settings.model_copy(update={"max_streams": 2}))
    path = f"/v1/fine_tuning/jobs/{job_id}"
    with listening(service, job_id) as first:
        next_event(first)
        with listening(service, job_id) as second:
            next_event(second)
            for follow in ("events?stream=true", "logs?follow=true"):
                refused = service.http("GET", f"{path}/{follow}")
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    429,
                    "too_many_streams",
                )
                assert "follows 2 streams" in refused.json()["error"]["message"]
                assert refused.headers["x-should-retry"] == "false"
            _, other = service.store.keys.create_key(
                NewKey(project_id="default", name="other", scope="read")
            )
            with listening(service, job_id, authorization=f"Bearer {other}") as third:
                next_event(third)
        wait_until(
            lambda: (
                service.http("GET", f"{path}/events?stream=true&after=ftevent-none").status_code
                == 400
            )
        )
        wait_until(lambda: sum(service.app.state.services.watches._streams.values()) == 1)
        with listening(service, job_id) as again:
            next_event(again)
