"""Commands to the ranks of a job whose client runs the training loop, and their results: files of
the run directory.

    commands/<seq>     written once by the service, in any order; the ranks carry them out in the
    order of their numbers results/<seq>      written by rank 0; a client reads it as often as it
    likes

A checkpoint says up to which command it holds the job's state. What came later is carried out again
after a restart, from the same files, and gives the same bits: a command is lost by nobody's end,
and none takes effect twice.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_service.errors import FtError, LimitError
from ft_service.rundir.directory import RunDir, UnreadableDocumentError

COMMANDS = "commands"
RESULTS = "results"
MOST_BYTES = 64 * 1024**2
"""Limit of a command's file, and of a result's."""
MOST_SEQ = 999_999_999
MOST_AHEAD = 1024
"""Limit of a model's commands that have no result yet."""
MOST_AHEAD_BYTES = 256 * 1024**2
"""Limit of their files."""


TEMPERATURE = "temperature"
"""Option of forward_backward: the temperature of its log-probabilities. Left out: 1."""
TARGETS = "targets"
"""Option of distill: target tokens of all such commands of a step, over which its loss is the
mean.
"""


@dataclass(frozen=True)
class Command:
    """One command."""

    seq: int
    """Its number: 0 creates the model, the client counts from 1."""
    op: str
    """create_model, forward_backward, distill, optim_step, save_weights, save_weights_for_sampler,
    load_weights, finish, or refused: one that the service could not accept, which has a number all
    the same.
    """
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: bytes | bytearray = b""
    """forward_backward: the client's message; distill: one of the same form, in which tokens of
    weight 1 are the student's answers.
    """


@dataclass(frozen=True)
class CommandResult:
    """What a command has come to."""

    document: Mapping[str, Any]
    """JSON of the wire; with `error` and `category` if the command failed."""
    body: bytes = b""
    """forward_backward: `ForwardBackwardOutput`."""

    @classmethod
    def failed(cls, error: str, *, by_user: bool = True) -> CommandResult:
        return cls({"error": error, "category": "user" if by_user else "server"})


class CommandLog:
    """The commands and results in a run directory."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def put(self, command: Command) -> bool:
        """Store a command unless its number has one. Returns whether it is new."""
        head = {"op": command.op, "options": dict(command.options)}
        return self.run.put_if_absent(_key(COMMANDS, command.seq), _file(head, command.body))

    def has(self, seq: int) -> bool:
        return self.run.has(_key(COMMANDS, seq))

    def command(self, seq: int) -> Command | None:
        """Raises UnreadableDocumentError for a file that is none."""
        found = self._read(COMMANDS, seq)
        return (
            None
            if found is None
            else Command(seq, str(found[0]["op"]), found[0]["options"], found[1])
        )

    def put_result(self, seq: int, result: CommandResult) -> None:
        self.run.put_if_absent(_key(RESULTS, seq), _file(dict(result.document), result.body))

    def has_result(self, seq: int) -> bool:
        return self.run.has(_key(RESULTS, seq))

    def result(self, seq: int) -> CommandResult | None:
        found = self._read(RESULTS, seq)
        return None if found is None else CommandResult(*found)

    def refuse_ahead(self, seq: int, size: int) -> None:
        """Raise LimitError for a new command if too many wait, unless it is the one that the ranks
        wait for. `size`: bytes.
        """
        if self.has(seq):
            return
        count, held = self._ahead()
        if count < MOST_AHEAD and held + size <= MOST_AHEAD_BYTES:
            return
        awaited = self._newest_result() + 1
        if seq == awaited:
            return
        then = (
            "wait for its result"
            if self.has(awaited)
            else "it is missing, and the others wait for it, so send it"
        )
        text = (
            f"{count:,} commands of {held:,} bytes wait for the model, and {MOST_AHEAD:,} of "
            f"{MOST_AHEAD_BYTES:,} may. The "
            f"next one has the number {awaited}: {then}."
        )
        raise LimitError(text, code="too_many_commands", retry_after=1.0)

    def _ahead(self) -> tuple[int, int]:
        """Number and bytes of the commands without a result."""
        numbers = sorted(self._numbers(COMMANDS))
        ahead = numbers[bisect_left(numbers, True, key=lambda seq: not self.has_result(seq)) :]
        return len(ahead), sum(self.run.size(_key(COMMANDS, seq)) or 0 for seq in ahead)

    def bytes(self) -> int:
        """Bytes of all commands that are kept."""
        return sum(self.run.size(_key(COMMANDS, seq)) or 0 for seq in self._numbers(COMMANDS))

    def _newest_result(self) -> int:
        """-1: there is none."""
        return max(self._numbers(RESULTS), default=-1)

    def first_missing(self) -> int:
        """Number behind the commands that the ranks carry out, one after the other: with a gap in
        the client's numbers, that of the gap, for which they wait.
        """
        seq = self._newest_result() + 1
        while self.has(seq):
            seq += 1
        return seq

    def has_unanswered(self) -> bool:
        """Whether the ranks have something to do: the command behind the newest result.

        One that waits for another before it, which its client may never send, keeps nobody busy.
        """
        return self.has(self._newest_result() + 1)

    def last_used(self) -> float:
        """Time (seconds since the epoch, by the disk's clock) at which a command or a result came
        last; 0: never.
        """
        folders = [self.run.path(folder) for folder in (COMMANDS, RESULTS)]
        return max((folder.stat().st_mtime for folder in folders if folder.is_dir()), default=0.0)

    def prune(self, upto: int, results_before: float) -> None:
        """Remove the commands up to a number, all of which are answered, and those of their results
        that are older than a time. The newest result stays: it says up to which number commands
        were given and carried out.
        """
        for seq in self._numbers(COMMANDS):
            if seq <= upto:
                self.run.path(_key(COMMANDS, seq)).unlink(missing_ok=True)
        for seq in sorted(self._numbers(RESULTS))[:-1]:
            path = self.run.path(_key(RESULTS, seq))
            if seq <= upto and path.stat().st_mtime < results_before:
                path.unlink(missing_ok=True)

    def _numbers(self, folder: str) -> list[int]:
        path = self.run.path(folder)
        if not path.is_dir():
            return []
        with os.scandir(path) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit()]

    def _read(self, folder: str, seq: int) -> tuple[dict[str, Any], bytes] | None:
        key = _key(folder, seq)
        body = self.run.get(key, MOST_BYTES)
        if body is None:
            return None
        head, _, rest = body.partition(b"\n")
        try:
            document = json.loads(head)
        except ValueError:
            raise UnreadableDocumentError(key, "its first line is no JSON") from None
        return document, rest


class CommandTooLargeError(FtError):
    """A command is larger than what is stored of one."""

    code = "command_too_large"


def _key(folder: str, seq: int) -> str:
    return f"{folder}/{seq:09d}"


def _file(head: dict[str, Any], body: bytes | bytearray) -> bytes:
    whole = json.dumps(head).encode() + b"\n" + body
    if len(whole) > MOST_BYTES:
        raise CommandTooLargeError(
            f"A command of {len(whole):,} bytes; at most {MOST_BYTES:,} are possible: send fewer "
            "data."
        )
    return whole
