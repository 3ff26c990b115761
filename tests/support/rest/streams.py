"""Streams of a job's events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.rest.service import Service


@contextmanager
def listening(
    service: Service, job_id: str, query: str = "", **headers: str
) -> Iterator[Iterator[str]]:
    """The lines of a stream that are not empty."""
    url = f"{service.url}/v1/fine_tuning/jobs/{job_id}/events?stream=true{query}"
    headers = {"authorization": f"Bearer {service.key}", **headers}
    with service.connections.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (line for line in answer.iter_lines() if line)


def next_event(lines: Iterator[str]) -> dict[str, Any]:
    identity = next(lines)
    data = next(lines)
    event = json.loads(data.removeprefix("data: "))
    assert identity == f"id: {event['id']}"
    return event
