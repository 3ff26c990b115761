"""Real servers that train by reinforcement learning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import read_record, recorded_steps
from ft_service.rundir.directory import RunDir
from ft_service.spec import JobSpec
from ft_service.tinker.commands import CommandLog
from tests.support.ports import free_port
from tests.support.service import Server, eventually
from tests.support.training.models import save_chat_base


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    save_chat_base(folder / "models" / "tiny")
    (folder / "home").mkdir()
    server = Server(
        folder / "home",
        folder / "models",
        slots=2,
        FT_WEBHOOK_ALLOW_PRIVATE="1",
        FT_PORT=str(free_port()),  # the same after a kill
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def records_are_whole(run: RunDir, steps: int) -> None:
    """Every step has one record, and its commands one result each, whose numbers follow each
    other.
    """
    assert recorded_steps(run) == list(range(1, steps + 2))
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    schedule = RolloutSchedule.of(spec, 8, 3)
    following = len(first_commands(spec.job_id))
    for step in recorded_steps(run):
        record = read_record(run, step)
        assert record is not None
        assert record.head.first_seq == following
        commands = commands_of(record, spec, schedule)
        assert all(CommandLog(run).has_result(command.seq) for command in commands[:-1])
        following = commands[-1].seq + 1


def samplers(server: Server) -> list[int]:
    """Processes of the preview that this server has started."""

    def found() -> list[int] | None:
        own = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if (
                "workers.serving" in words
                and parent == server.pid
                and int(entry.name) != os.getpid()
            ):
                own.append(int(entry.name))
        return own or None

    return eventually(found)
