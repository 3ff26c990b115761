"""What a tenant sends is not worked on in the event loop, which serves all of them: for every route of the description and of
Tinker's wire, counted in the processor time of the loop's thread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from tests.support.rest.described import filled, operations
from tests.support.rest.service import Service

MOST_SECONDS = 0.03
"""Processor time of the loop for a request: receiving it and answering take a fifth of it on a slow processor."""
HOSTILE: dict[str, bytes] = {
    "lists": b"[" + b"[]," * 60_000 + b"[]]",
    "whole numbers": b'{"model": [' + b"1," * 60_000 + b"1]}",
}


def test_no_body_is_worked_on_in_the_event_loop(service: Service) -> None:
    web = next(thread for thread in threading.enumerate() if thread.name == "web")
    clock = time.pthread_getcpuclockid(web.ident or 0)
    values: dict[str, str] = defaultdict(lambda: "none")
    routes = {(method, filled(path, values)) for method, path in operations(service) if method in ("POST", "PUT", "PATCH")}
    routes |= {("POST", f"/api/v1/{name}") for name in ("create_model", "asample", "optim_step", "retrieve_future")}
    assert len(routes) > 30
    over: list[tuple[Any, ...]] = []
    for method, path in sorted(routes):
        for what, body in HOSTILE.items():
            began = time.clock_gettime(clock)
            status = service.http(method, path, content=body, headers={"content-type": "application/json"}).status_code
            seconds = time.clock_gettime(clock) - began
            assert status < 500 or status == 503, (path, what)
            if seconds > MOST_SECONDS:
                over.append((path, what, status, round(seconds, 3)))
    assert over == []
