"""Slurm's command-line programs: the only module that runs them.

`squeue` and `sacct` are asked for columns (`--format`) instead of JSON: JSON needs a plugin that is
not built everywhere, and its state field has changed between versions (a word, a list of words).
The columns have been the same since Slurm 2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_service.host.environment import child_environment

SECONDS = 30.0
"""Limit on the time of one command."""
LOOK_SECONDS = 0.5
"""Pause between looks at what a command that has not ended has said."""
_FORMAT = "%A|%T|%j|%V|%r|%k"
_AWAY = (
    *(
        "Unable to contact slurm controller",
        "Socket timed out",
        "Connection refused",
        "Connection timed out",
        "slurmctld",
    ),
    *(
        "Resource temporarily unavailable",
        "Zero Bytes were transmitted",
        "Transport endpoint is not connected",
    ),
    *("Unexpected message received", "Invalid authentication credential", "munge"),
    *(
        "try again",
        "Message receive failure",
        "Communication connection failure",
        "Insufficient permission to connect",
    ),
)
"""Parts of messages about Slurm itself rather than about a job."""
_FOR_NOW = re.compile(r"\b(?:Assoc|QOS)\w*Submit\w*Limit\b|Required partition not available")
"""Messages of sbatch about what passes by itself or by an operator: too many batch jobs at once
(MaxSubmitJobs, GrpSubmitJobs), a partition that is drained or inactive.
"""
_SLEEPS = "Slurm temporarily unable to accept job"
"""Beginning of what sbatch says where Slurm has as many jobs as it takes (MaxJobCount).

It then tries again for two minutes.
"""
_PREFIX = re.compile(r"(^| )s[a-z]+: error: ")


class SlurmAwayError(Exception):
    """The cluster did not answer, or the result of the request is unknown."""


class SlurmRefusedError(Exception):
    """The cluster rejects the request; the message says why."""


class SlurmPostponedError(SlurmRefusedError):
    """The cluster rejects the request for now, whatever it is about."""


@dataclass(frozen=True)
class SlurmJob:
    """Batch job of this service."""

    number: int
    state: str
    name: str
    submitted_at: str
    """Local time on the cluster's clock."""
    reason: str
    """Slurm's reason why the job waits; "None": it does not wait."""
    comment: str


def missing_commands() -> list[str]:
    """Return the programs that are not installed here."""
    return [name for name in ("sbatch", "squeue", "scancel", "srun") if shutil.which(name) is None]


class SlurmCommands:
    """Slurm's programs, run as this process's user. Every call raises SlurmAwayError."""

    def __init__(self) -> None:
        self._user = str(os.geteuid())  # which Slurm takes too: a container's user may have no name

    def jobs(self) -> list[SlurmJob]:
        """Return all batch jobs of the user that Slurm knows, including those that ended within its
        MinJobAge.
        """
        return read_queue(
            self._run(
                "squeue",
                "--noheader",
                "--states=all",
                f"--user={self._user}",
                f"--format={_FORMAT}",
            )
        )

    def submit(self, arguments: Sequence[str], script: str) -> int:
        """Submit a batch job and return its number.

        Raises SlurmRefusedError, or its subclass SlurmPostponedError.
        """
        output = self._run("sbatch", *arguments, script=script).strip()
        number = output.partition(";")[0]
        if not number.isdigit():
            raise SlurmAwayError(f"sbatch printed {output[:200]!r}")
        return int(number)

    def refusal(self, arguments: Sequence[str], script: str) -> str | None:
        """Return why Slurm would refuse a batch job, which is not submitted; None: it would not, or
        says nothing now.
        """
        try:
            self._run("sbatch", "--test-only", *arguments, script=script)
        except SlurmRefusedError as error:
            return None if isinstance(error, SlurmPostponedError) else str(error)
        except SlurmAwayError:
            return None
        return None

    def cancel(self, name: str) -> None:
        """Cancel every batch job of that name, if there is one."""
        try:
            self._run("scancel", f"--user={self._user}", f"--name={name}")
        except SlurmRefusedError as error:
            raise SlurmAwayError(str(error)) from error

    def ended_state(self, number: int) -> str | None:
        """Return the state of a batch job that is no longer in Slurm's queue; None: unknown, for
        example without accounting.
        """
        try:
            output = self._run(
                "sacct",
                "--noheader",
                "--allocations",
                "--parsable2",
                f"--jobs={number}",
                "--format=State",
            )
        except (SlurmAwayError, SlurmRefusedError):
            return None
        return next(iter(output.split()), None)

    @staticmethod
    def _run(*command: str, script: str = "") -> str:
        environment = child_environment(os.environ, "SLURM_CONF", "SLURM_CONF_SERVER", LC_ALL="C")
        try:
            done = _finished(command, script, environment)
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"{command[0]} did not end within {SECONDS:g} seconds") from error
        except OSError as error:
            raise SlurmAwayError(f"{command[0]} could not be run: {error.strerror}") from error
        if done.returncode == 0:
            return done.stdout
        message = (
            " ".join(done.stderr.split())[-400:]
            or f"{command[0]} ended with code {done.returncode}"
        )
        message = _PREFIX.sub(lambda match: match[1] and ": ", message)
        if done.returncode < 0 or any(words in message for words in _AWAY):
            raise SlurmAwayError(message)
        raise (SlurmPostponedError if _FOR_NOW.search(message) else SlurmRefusedError)(message)


def _finished(
    command: Sequence[str], script: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises SlurmPostponedError once it says that it sleeps, since nothing else is looked after
    meanwhile; subprocess.TimeoutExpired after SECONDS.
    """
    deadline = time.monotonic() + SECONDS
    given = script
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(given, timeout=min(LOOK_SECONDS, SECONDS))
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                except subprocess.TimeoutExpired as late:
                    if _SLEEPS.encode() in (late.stderr or b""):
                        raise SlurmPostponedError(_SLEEPS) from None
                    if time.monotonic() >= deadline:
                        raise
                    given = None
        except BaseException:
            process.kill()
            raise


def read_queue(text: str) -> list[SlurmJob]:
    """Parse the output of squeue. Raises SlurmAwayError for anything else."""
    jobs = []
    for line in text.splitlines():
        columns = line.strip().split("|", 5)
        if len(columns) < 6 or not columns[0].isdigit():
            raise SlurmAwayError(f"squeue printed {line[:200]!r}")
        jobs.append(SlurmJob(int(columns[0]), *columns[1:]))
    return jobs
