from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ft_service.supervisor.command_line import (
    DEFAULT_GRACE_SECONDS,
    SupervisorOptions,
    parse,
    program,
)

WORKER = ["python", "worker.py", "--grace", "7"]


def test_the_module_is_called_as_ever() -> None:
    """Images and running services of other versions call it so."""
    assert program() == [sys.executable, "-P", "-m", "ft_service.supervisor"]
    assert program(["nice", "python3"]) == ["nice", "python3", "-P", "-m", "ft_service.supervisor"]


def test_what_is_written_is_read() -> None:
    options = SupervisorOptions(
        grace_seconds=2.5,
        detach=True,
        parent=17,
        node_rank=0,
        scratch="/tmp",
        rdzv_endpoint="host:29500",
        address="10.0.0.1",
        conclude=True,
        mirror="s3://bucket/ft",
        worker_command=WORKER,
    )
    read = vars(parse(options.arguments("/runs/ftjob-1", 4, lock_fd=0)))
    assert read.pop("run_dir") == Path("/runs/ftjob-1")
    assert read.pop("scratch") == Path("/tmp")
    assert read == {
        "attempt": 4,
        "grace": 2.5,
        "detach": True,
        "lock_fd": 0,
        "parent": 17,
        "node_rank": 0,
        "rdzv_endpoint": "host:29500",
        "address": "10.0.0.1",
        "conclude": True,
        "mirror": "s3://bucket/ft",
        "command": WORKER,
    }


def test_what_is_not_said_is_left_to_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_STOP_GRACE_SECONDS", raising=False)
    assert SupervisorOptions(grace_seconds=60.0).arguments("/runs/a", 1) == [
        "/runs/a",
        "1",
        "--grace",
        "60",
    ]
    assert (
        parse(SupervisorOptions(grace_seconds=1234567.25).arguments("/runs/a", 1)).grace
        == 1234567.25
    )
    given = SupervisorOptions(grace_seconds=DEFAULT_GRACE_SECONDS).arguments("/runs/a", 1)
    assert parse(given) == parse(["/runs/a", "1"])


def test_an_attempt_is_required() -> None:
    with pytest.raises(SystemExit):
        parse(["/runs/a"])
