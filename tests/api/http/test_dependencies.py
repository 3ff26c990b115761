"""JSON bodies that cannot be read."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest

from api.http import dependencies, threads
from api.http.dependencies import MAX_JSON_BYTES, MOST_CONTAINERS, MOST_TEXTS, parse_json
from ft_service.errors import SpecError
from tests.support.rest.refusals import UNREADABLE, check_error
from tests.support.rest.service import Service


def test_a_body_that_cannot_be_read_is_a_400(service: Service, subtests: pytest.Subtests) -> None:
    for body in UNREADABLE:
        with subtests.test(body=body[:40]):
            check_error(service.http("POST", "/v1/fine_tuning/jobs", content=body), 400)
    assert service.store.jobs.list_jobs("default").data == []


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * 349_000 + b"[]]",
        b"[" + b"{}," * 349_000 + b"{}]",
        b"[" + b'{"a":1},' * 130_000 + b"1]",
        b"[" + b'"",' * 349_000 + b'""]',
        b'["' + b"\\\\" * 3 + b'",' + b"[]," * 300_000 + b"1]",
    ],
    ids=["lists", "objects", "members", "texts", "behind backslashes"],
)
def test_what_is_made_without_a_call_is_limited_in_number(body: bytes) -> None:
    assert len(body) <= MAX_JSON_BYTES
    with pytest.raises(SpecError) as refused:
        parse_json(body)
    assert refused.value.code == "request_too_large"


def test_brackets_and_quotes_within_texts_are_not_counted() -> None:
    text = '[{"' * 200_000 + "\\"
    assert min(text.count("["), text.count('"')) > max(MOST_CONTAINERS, MOST_TEXTS)
    assert parse_json(json.dumps({"content": text}).encode()) == {"content": text}


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 500_000 + b"1]",
        b"[" + b"0.5," * 250_000 + b"1]",
        b"[" + b'{"a":1},' * 19_000 + b"1]",
    ],
    ids=["whole numbers", "numbers", "objects"],
)
def test_a_large_body_lets_others_use_the_interpreter_meanwhile(body: bytes) -> None:
    """Counted in turns of another thread, which gets one whenever the parser calls Python and its
    slice of time is over.
    """
    turns = 0
    done = threading.Event()
    slice_seconds = sys.getswitchinterval()

    def parse() -> None:
        parse_json(body)
        done.set()

    sys.setswitchinterval(1e-4)
    try:
        thread = threading.Thread(target=parse)
        thread.start()
        while not done.is_set():
            turns += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(slice_seconds)
    assert turns >= 10


def test_a_large_body_is_parsed_beside_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a project one at a time, and two in all."""
    seen: list[tuple[str, dict[str, tuple[int, int]]]] = []

    def parsed(body: bytes, *, exact: bool = False) -> object:
        seen.append((threading.current_thread().name, threads.TURNS["parsing"].projects()))
        return parse_json(body, exact=exact)

    monkeypatch.setattr(dependencies, "parse_json", parsed)
    for size in (100, 10_000):
        check_error(service.http("POST", "/v1/fine_tuning/jobs", json={"model": "x" * size}), 400)
    (short, none), (long, one) = seen
    assert "AnyIO" not in short
    assert none == {}
    assert "AnyIO" in long
    assert one == {"default": (0, 1)}
