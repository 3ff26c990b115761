from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from ft_service import logs


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_one_json_object_with_what_it_is_about() -> None:
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    log = logging.getLogger("ft_service.test")
    with logs.about(job_id="ftjob-1"):
        log.info("moved %s", "on\n{}", extra=logs.fields(seconds=0.5))
        log.debug("not shown")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
    log.warning("elsewhere")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert {name: first[name] for name in ("message", "job_id", "seconds", "level", "logger")} == {
        "message": "moved on\n{}",
        "job_id": "ftjob-1",
        "seconds": 0.5,
        "level": "info",
        "logger": "ft_service.test",
    }
    assert first["timestamp"].endswith("Z")
    assert "ValueError: why" in second["exception"]
    assert "job_id" not in third


def test_text_for_people_cannot_move_their_cursor() -> None:
    stream = io.StringIO()
    logs.configure("debug", "text", stream)
    logging.getLogger("ft_service.test").debug("red \x1b[31m and\nnew line")
    assert "\\x1b[31m and\\nnew line" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1
