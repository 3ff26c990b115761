"""Arguments of sbatch and the batch script of an attempt, of a job or of an engine. Pure.

Every value of a job, a path or a profile is quoted for the shell. The script runs on the first node
of an allocation, and starts a supervisor on each node with srun. Before the time limit Slurm sends
SIGTERM to the script alone (`--signal=B:TERM`). The script then writes `stop.json`, and the ranks
agree to stop. srun must not get the signal: it would kill what it has started.

The service's environment does not reach the job (`--export=NONE`); that of its user's login does.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from ft_service.launcher.slurm.slurm_profile import RENDEZVOUS_PORTS, SlurmProfile
from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.documents import Start, Stop
from ft_service.supervisor import command_line

NOTICE_SECONDS = 60
"""Seconds between the end of the ranks' grace and Slurm's limit: Slurm's signal can be a minute
late, and writing files takes time.
"""
PREFIX = "ft-"
_TASK = """\
trap told=1 TERM
scratch=$1/ft-$SLURM_JOB_ID-$SLURM_PROCID
shift
mkdir -p -m 700 "$scratch"
export HOME=$scratch TMPDIR=$scratch
"$@" --node-rank "$SLURM_PROCID" --scratch "$scratch" &
while told= && wait "$!"; code=$?; [ "$told" ]; do :; done
rm -rf "$scratch"
exit "$code"
"""
"""Script that srun runs on each node; its arguments are the scratch folder and the supervisor's
command. SIGTERM, with which Slurm ends a step, goes to all of its processes; this shell outlives
the supervisor, which stops at a checkpoint.
"""


@dataclass(frozen=True)
class SlurmSite:
    """Paths and times of the service, as its batch jobs see them."""

    home: Path
    """FT_HOME, at the same path on every node."""
    stop_grace_seconds: float = 60.0

    @property
    def comment(self) -> str:
        """Comment of this installation's batch jobs, which differs between installations."""
        return f"ft-service {self.home}"


def job_name(job_id: str, attempt: int) -> str:
    """Return the name of an attempt's batch job."""
    return f"{PREFIX}{job_id}-{attempt}"


def attempt_of(name: str) -> tuple[str, int] | None:
    """Return (job, attempt) of a batch job's name; None: it is not one of this service."""
    job_id, _, attempt = name.removeprefix(PREFIX).rpartition("-")
    return (
        (job_id, int(attempt)) if name.startswith(PREFIX) and job_id and attempt.isdigit() else None
    )


def notice_seconds(site: SlurmSite) -> int:
    """Return the seconds before its time limit at which a batch job is signalled."""
    return math.ceil(site.stop_grace_seconds) + NOTICE_SECONDS


def sbatch_arguments(start: Start, run: Path, profile: SlurmProfile, site: SlurmSite) -> list[str]:
    """Return the arguments of sbatch, which reads the script from stdin.

    Slurm must not restart a job, nor run two of one name at a time. `run`: run directory of the
    job, or directory of the engine.
    """
    ranks = start.world_size // start.nodes
    given = {
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "time": profile.time,
        "mem": profile.memory_of(ranks),
        "gres": f"{profile.gres}:{ranks}" if profile.gres else None,
        "cpus-per-task": profile.cpus_per_rank and profile.cpus_per_rank * ranks,
    }
    return [
        "--parsable",
        f"--job-name={job_name(start.job_id, start.attempt)}",
        f"--comment={site.comment}",
        "--dependency=singleton",
        "--no-requeue",
        "--export=NONE",
        f"--nodes={start.nodes}",
        f"--ntasks={start.nodes}",
        "--ntasks-per-node=1",
        f"--signal=B:TERM@{notice_seconds(site)}",
        f"--chdir={run}",
        f"--output={_literal(run / AttemptKeys(start.attempt).logs / 'slurm.log')}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *profile.options,
    ]


def batch_script(start: Start, run: Path, profile: SlurmProfile, site: SlurmSite) -> str:
    """`run`: as for `sbatch_arguments`."""
    keys = AttemptKeys(start.attempt)
    several = start.nodes > 1
    arguments = command_line.SupervisorOptions(grace_seconds=site.stop_grace_seconds).arguments(
        run, start.attempt
    )
    supervisor = [*command_line.program([profile.python]), *arguments]
    # The service may have no torch to convert checkpoints' shards to adapters.
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "FT_CHECKPOINT_ADAPTERS": "1",
        **profile.env,
        "FT_HOME": str(site.home),
    }
    stop = json.dumps(Stop(reason="Slurm takes the allocation back").model_dump(mode="json"))
    endpoint = (
        f'--rdzv-endpoint "$(hostname):$(({profile.rendezvous_port} + SLURM_JOB_ID % '
        f'{RENDEZVOUS_PORTS}))"'
    )
    srun = (
        f"srun --export=ALL --nodes={start.nodes} --ntasks={start.nodes} --ntasks-per-node=1 "
        "--kill-on-bad-exit=0 --wait=0"
    )
    task = shlex.join(["bash", "-c", _TASK, "ft-node", profile.scratch, *supervisor])
    stop_file = shlex.quote(str(run / keys.stop))
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            # A signal ends `wait`, with its own exit code.
            f"stop() {{ told=1; printf %s {shlex.quote(stop)} > {stop_file}.$$ && mv -n "
            f"{stop_file}.$$ {stop_file}; }}",
            "trap stop TERM",
            f"{srun} {task}{f' {endpoint}' if several else ''} &",
            'while told= && wait "$!"; code=$?; [ "$told" ]; do :; done',
            'exit "$code"',
            "",
        ]
    )


def _literal(path: Path) -> str:
    """Escape a path so that sbatch replaces nothing in it."""
    return str(path).replace("%", "%%")
