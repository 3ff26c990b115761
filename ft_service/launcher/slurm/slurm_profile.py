"""Slurm profiles: the operator's settings of batch jobs, in a YAML file named by FT_SLURM_PROFILE.

A job cannot change them. A file may hold several: accounts of projects, partitions, types of GPUs
(ft_service/launcher/profiles.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from ft_service.launcher.profiles import Profiles, read_profiles
from ft_service.spec import Strict

RENDEZVOUS_PORTS = 1000
"""Number of ports from `rendezvous_port` on; the batch job's number selects one."""
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:&|*()\[\]-]*$")]
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(=\S+)?")
_OWN = {
    **dict.fromkeys(
        ("job-name", "comment", "nodes", "ntasks", "ntasks-per-node", "chdir", "output", "error"),
        "the service's",
    ),
    **dict.fromkeys(
        ("signal", "requeue", "no-requeue", "export", "export-file", "parsable", "dependency"),
        "the service's",
    ),
    **dict.fromkeys(
        ("array", "wrap", "wait", "test-only", "input", "open-mode", "get-user-env"),
        "not for such jobs",
    ),
    **dict.fromkeys(
        ("uid", "gid", "clusters", "cluster", "nice", "hold", "begin", "deadline"),
        "not for such jobs",
    ),
    **dict.fromkeys(
        ("partition", "account", "qos", "constraint", "gres", "time", "mem"), "a key of the profile"
    ),
    "cpus-per-task": "a key of the profile (cpus_per_rank)",
}
"""Options of sbatch that `options` must not contain → who sets them."""


class SlurmProfile(Strict):
    """Settings of the batch jobs of attempts."""

    projects: list[str] | None = None
    """Ids of the projects whose jobs may use it; None: all. [] keeps a profile for the jobs that
    have it and gives it to no new one.
    """

    ranks_per_node: Annotated[int, Field(ge=1, le=64)]
    """Largest number of ranks on one node: its GPUs. `nproc_per_node: auto` takes so many."""
    gres: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(:[A-Za-z0-9_.-]+)?$")] | None = "gpu"
    """Generic resource of which an attempt requests one per rank on each node: `gpu`, or
    `gpu:h100`. None: the nodes have no GPUs.
    """
    hardware: str | None = None
    """The nodes' GPUs, as `ft plan --hardware` names them, to refuse jobs that cannot fit.

    None: memory is not checked.
    """
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: str | None = None
    """Time limit of one attempt, as sbatch takes it: minutes, `4:00:00`, `1-12:00:00`.

    Shortly before its end the ranks write a checkpoint, from which the next attempt resumes. None:
    the partition's.
    """
    cpus_per_rank: Annotated[int, Field(ge=1)] | None = None
    memory_per_node: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None
    """Memory of a node, however many ranks an attempt has there, as `--mem` takes it: `200G`. None:
    the partition's.
    """
    memory_per_rank: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None
    """In its place the memory of each rank: with `100G` and nodes of 8 GPUs a job of one GPU takes
    an eighth of a node's 800G.
    """
    options: list[str] = Field(default_factory=list)
    """Further options of sbatch, each written `--name` or `--name=value`, such as
    `--reservation=tuning`.
    """
    python: Annotated[str, Field(pattern=r"^/[^\n\x00]*$")] = sys.executable
    """Python interpreter on the nodes, in an environment with this version of the service and its
    workers. Default: the service's, which must then be on a shared file system.
    """
    env: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
        Annotated[str, Field(pattern=r"^[^\x00]*$")],
    ] = Field(default_factory=dict)
    """Environment variables of supervisors and ranks, such as NCCL_SOCKET_IFNAME.

    Those of the service are not passed on.
    """
    scratch: Annotated[str, Field(pattern=r"^/[^\n\x00]*$")] = "/tmp"
    """Local folder of each node for locks and temporary files; an attempt removes its files
    there.
    """
    rendezvous_port: Annotated[int, Field(ge=1024, le=64_535)] = 20_000
    """Rendezvous port on the first node; the last three digits of the batch job's number are
    added.
    """

    @field_validator("time", mode="before")
    @classmethod
    def _is_time(cls, value: object) -> str | None:
        text = str(value)  # minutes alone are a number
        if value is not None and not _TIME.fullmatch(text):
            raise ValueError(
                "it is not a time limit of sbatch: write minutes, H:MM:SS or D-HH:MM:SS"
            )
        return None if value is None else text

    @model_validator(mode="after")
    def _one_memory(self) -> SlurmProfile:
        if self.memory_per_node is not None and self.memory_per_rank is not None:
            raise ValueError("memory_per_node and memory_per_rank are both set: leave out one")
        return self

    def memory_of(self, ranks: int) -> str | None:
        """Return the memory of a node with so many ranks, as `--mem` takes it; None: the
        partition's.
        """
        each = self.memory_per_rank
        if each is None:
            return self.memory_per_node
        number = each.rstrip("KMGT")
        return f"{ranks * int(number)}{each[len(number) :]}"

    @model_validator(mode="after")
    def _own_options(self) -> SlurmProfile:
        for option in self.options:
            match = _OPTION.fullmatch(option)
            if match is None:
                raise ValueError(f"options: {option!r} is not written as --name or --name=value")
            if match["name"] in _OWN:
                raise ValueError(
                    f"options: --{match['name']} is {_OWN[match['name']]}; leave it out"
                )
        return self

    @property
    def time_seconds(self) -> int | None:
        """`time` in seconds; None: no limit, which is what Slurm takes 0 for."""
        match = _TIME.fullmatch(self.time) if self.time is not None else None
        if match is None:
            return None
        days, first, second, third = (
            int(match[name] or 0) for name in ("days", "first", "second", "third")
        )
        if match["days"] is not None:  # D-HH[:MM[:SS]]
            seconds = days * 86_400 + first * 3600 + second * 60 + third
        elif match["third"] is not None:
            seconds = first * 3600 + second * 60 + third
        else:
            seconds = first * 60 + second
        return seconds or None


def load_slurm_profiles(path: Path) -> Profiles[SlurmProfile]:
    """Read the profiles of a file.

    Raises SpecError that names the file, the profile and the field.
    """
    setting = "FT_SLURM_PROFILE"
    return Profiles(read_profiles(setting, path, SlurmProfile), setting, "kind of batch jobs")
