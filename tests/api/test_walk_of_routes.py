"""What one project sends to any route is its own affair: every route of the application that takes
a body, hostile bodies, ones that stall, and helpers that die. Nobody meets a bug, the event loop
works on none of it, and others are answered meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx2
import pytest
from fastapi.routing import APIRoute

from api.http import bodies
from api.http.dependencies import MAX_JSON_BYTES
from api.http.sessions import TOKEN_HEADER, token_of
from ft_service.control.checks import file_views
from ft_service.data.examiner import Examiner
from ft_service.serving import worker_tasks
from ft_service.shared_work.places import every_kind
from ft_service.store.records import NewKey
from ft_service.tinker.names import KEY_PREFIX
from tests.support.rest.described import filled, needed, operations, tenant
from tests.support.rest.service import Service, wait_until

LOOP_SECONDS = 0.03
"""Processor time of the loop for a request: receiving it and answering take a fifth of it on a slow
processor.
"""
NUMBERS = (
    '[5e-324, 1e-320, -0.0, -0, 9223372036854775808, 1e308, -1e308, "inf", "nan", 1'
    + "0" * 400
    + "]"
)
WIDE = 60_000
"""Fields and lists of a wide body: worked on in the loop they would take twice LOOP_SECONDS and
more.
"""
BODIES: dict[str, bytes] = {
    "wide lists": b"[" + b"[]," * WIDE + b"[]]",
    "wide numbers": b'{"model": [' + b"1," * (MAX_JSON_BYTES // 4) + b"1]}",
    "deep lists": b"[" * (MAX_JSON_BYTES // 2) + b"]" * (MAX_JSON_BYTES // 2),
    "numbers": f'{{"model": "tiny", "training": {NUMBERS}, "seq_id": {NUMBERS}}}'.encode(),
}
FORMS: dict[str, bytes] = {
    "wide form": b"a=1&" * WIDE,
    "numbers": urlencode({"training.max_steps": NUMBERS}).encode(),
}
"""Of routes of the page."""
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
LEAVES = ("/sign-out", "/v1/fine_tuning/sweeps/{sweep_id}/cancel")
"""They end what the walk goes on with, and take no body."""
ENDS = ("DELETE", "cancel", "archive", "rotate", "complete", "pause", "resume")


@pytest.fixture
def rival(service: Service) -> str:
    """The admin key of a project that behaves badly."""
    service.store.projects.ensure_project("rival", "rival")
    return service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]


def routes(service: Service) -> list[tuple[str, str]]:
    """Method and path of each route of the application that may take a body."""
    found = [
        (method, route.path_format)
        for route in service.app.routes
        if isinstance(route, APIRoute)
        for method in sorted((route.methods or set()) & {"POST", "PUT", "PATCH"})
        if route.path not in LEAVES
    ]
    assert sum(path.startswith("/v1/") for _, path in found) > 30
    assert sum(path.startswith("/api/v1/") for _, path in found) > 15
    assert sum(not path.startswith(("/v1/", "/api/")) for _, path in found) > 15, "the page's"
    return sorted(set(found))


def headers_of(service: Service, key: str) -> dict[str, dict[str, str]]:
    """Headers of the beginning of a path: each of the three wires has its own proof of who asks."""
    with httpx2.Client(trust_env=False, base_url=service.url) as browser:
        answer = browser.post("/sign-in", data={"key": key})
        assert answer.status_code == 303
        [(name, secret)] = answer.cookies.items()
    return {
        "/v1/": {"authorization": f"Bearer {key}", "content-type": JSON},
        "/api/v1/": {"x-api-key": KEY_PREFIX + key, "content-type": JSON},
        "/": {"cookie": f"{name}={secret}", TOKEN_HEADER: token_of(secret), "content-type": FORM},
    }


def of_path(headers: dict[str, dict[str, str]], path: str) -> dict[str, str]:
    return next(own for start, own in headers.items() if path.startswith(start))


def is_told(answer: httpx2.Response) -> bool:
    """Whether an answer is none of a bug: a 503 says that it may be tried later, and why."""
    return answer.status_code < 500 or (
        answer.status_code == 503 and "retry-after" in answer.headers and "error" in answer.text
    )


def loop_clock() -> int:
    web = next(thread for thread in threading.enumerate() if thread.name == "web")
    return time.pthread_getcpuclockid(web.ident or 0)


def test_no_body_is_worked_on_in_the_event_loop(service: Service, rival: str) -> None:
    clock = loop_clock()
    headers = headers_of(service, rival)
    values: dict[str, str] = defaultdict(lambda: "none")
    wrong: list[tuple[Any, ...]] = []
    for method, path in routes(service):
        own = of_path(headers, path)
        for what, body in (FORMS if own["content-type"] == FORM else BODIES).items():
            request = partial(
                service.connections.request, method, service.url + filled(path, values)
            )
            answer, seconds = timed(clock, partial(request, content=body, headers=own))
            if (
                seconds > LOOP_SECONDS
            ):  # what is made once, such as the page's templates, is there the second time
                answer, seconds = timed(clock, partial(request, content=body, headers=own))
            if seconds > LOOP_SECONDS or not is_told(answer):
                wrong.append((method, path, what, answer.status_code, round(seconds, 3)))
    assert wrong == []


def timed(clock: int, request: Callable[[], httpx2.Response]) -> tuple[httpx2.Response, float]:
    """An answer, and the loop's processor time for it in seconds."""
    began = time.clock_gettime(clock)
    answer = request()
    return answer, time.clock_gettime(clock) - began


def test_bodies_that_stall_cost_others_nothing(
    service: Service, rival: str, training_file: str
) -> None:
    """Bodies for each route stop in the middle: together they want more room than there is for
    all.
    """
    clock = loop_clock()
    asked(service, training_file, clock)  # what is made once is there
    quiet = asked(service, training_file, clock)
    headers = headers_of(service, rival)
    with stalled(service, headers) as count:
        assert count * MAX_JSON_BYTES > bodies.BYTES
        wait_until(lambda: room_of("rival")[0] > 0)
        beside = asked(service, training_file, clock)
    wait_until(lambda: room_of("rival") == (0, 0))
    assert beside < 2 * quiet + 0.05


def asked(service: Service, training_file: str, clock: int) -> float:
    """Processor time of the loop for what another project asks for, all of which is answered as
    ever.
    """
    began = time.clock_gettime(clock)
    # It needs room.
    job = json.dumps({"model": "tiny", "training_file": training_file}) + " " * bodies.FREE_BYTES
    for _ in range(5):
        assert service.http("GET", "/v1/fine_tuning/jobs").status_code == 200
        assert service.http("GET", "/livez").status_code == 200
        assert service.http("POST", "/v1/fine_tuning/plan", content=job).status_code == 200
        assert service.http("POST", "/v1/fine_tuning/jobs", content=job).status_code == 200
    return time.clock_gettime(clock) - began


@contextlib.contextmanager
def stalled(service: Service, headers: dict[str, dict[str, str]]) -> Iterator[int]:
    """Connections whose bodies have stopped arriving, two for each route; yields their number."""
    address = urlsplit(service.url)
    values: dict[str, str] = defaultdict(lambda: "none")
    with contextlib.ExitStack() as stack:
        opened = 2 * routes(service)
        for method, path in opened:
            connection = stack.enter_context(
                socket.create_connection((address.hostname, address.port))
            )
            own = {"host": "x", "content-length": str(MAX_JSON_BYTES), **of_path(headers, path)}
            lines = [
                f"{method} {filled(path, values)} HTTP/1.1",
                *(f"{name}: {value}" for name, value in own.items()),
            ]
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + b"[" + b"1," * 20_000)
        yield len(opened)


def room_of(project_id: str) -> tuple[int, int]:
    """Number of bodies of a project that wait for room, and bytes of those that have it."""
    [room] = [places for places in every_kind() if places.kind.name == "bodies"]
    return room.projects().get(project_id, (0, 0))


def test_the_death_of_a_helper_is_later(
    service: Service, rival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever starts a process for a request answers 503 when the host kills it, and says when to
    ask again.
    """
    theirs = tenant(service, "rival", rival)
    killed = ("sh", "-c", "kill -9 $$")
    monkeypatch.setattr(file_views, "Examiner", partial(Examiner, command=killed))
    of_workers = worker_tasks.run_once
    monkeypatch.setattr(
        worker_tasks, "run_once", lambda program: of_workers(replace(program, command=killed))
    )
    monkeypatch.setattr(worker_tasks, "persist", lambda _, call: call())  # without its pauses
    later = set[str]()
    for method, path in operations(service):
        if any(word in f"{method} {path}" for word in ENDS):
            continue
        sent: dict[str, Any] = (
            {"content": json.dumps({})} if method == "POST" else {"params": needed(path)}
        )
        answer = service.http(method, filled(path, theirs), key=rival, **sent)
        assert is_told(answer), (path, answer.text)
        if answer.status_code == 503:
            later.add(path)
    assert later >= {
        "/v1/files/{file_id}/samples",
        "/v1/files/{file_id}/statistics",
        "/v1/fine_tuning/jobs/{job_id}/checkpoints/{checkpoint_id}/adapter",
        "/v1/fine_tuning/checkpoints/{checkpoint}/adapter",
    }
