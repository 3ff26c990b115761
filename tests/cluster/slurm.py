"""A Slurm cluster of a test run's own: munged, slurmctld and two slurmd of this machine, with their
own ports and folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ft_service.launcher.slurm.slurm_commands import missing_commands
from tests.support.attempts import wait_for
from tests.support.ports import free_port

NODES = 2
SECONDS = 60.0
DAEMONS = ("munged", "slurmctld", "slurmd")
_SYSTEM = "/usr/sbin"
CONF = """\
ClusterName=ft-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=20
MessageTimeout=3
MinJobAge=300
SlurmdTimeout=300
"""


def missing_parts() -> list[str]:
    """What of Slurm is not installed here."""
    return [*missing_commands(), *(name for name in DAEMONS if _daemon(name) is None)]


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM}")


class SlurmCluster:
    """Runs until `close`. Commands find it by SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", *(f"spool-n{number}" for number in range(1, NODES + 1))):
            (folder / name).mkdir(parents=True)
        self.conf = folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        host = socket.gethostname().partition(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        nodes = "".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 "
            "State=UNKNOWN\n"
            for number in range(1, NODES + 1)
        )
        text = CONF.format(folder=folder, host=host, user=user, controller=free_port())
        self.conf.write_text(
            f"{text}{nodes}"
            "PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES PriorityTier=1 "
            "GraceTime=60\n"
            "PartitionName=urgent Nodes=ALL State=UP OverSubscribe=YES PriorityTier=9 "
            "PreemptMode=OFF\n"
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def start(self) -> None:
        folder = self.folder
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        socket_file = folder / "munge.socket"
        self._begin(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={socket_file}",
            *files,
        )
        wait_for(socket_file.exists, SECONDS)
        self.start_controller()
        for number in range(1, NODES + 1):
            self._begin("slurmd", "-D", "-N", f"n{number}", "-f", str(self.conf), name=f"n{number}")
        wait_for(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(NODES),
            SECONDS,
        )

    def start_controller(self) -> None:
        self._begin("slurmctld", "-D", "-f", str(self.conf))
        wait_for(lambda: self.run("squeue", "-h").returncode == 0, SECONDS)

    def stop_controller(self) -> None:
        self._end("slurmctld")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def close(self) -> None:
        """End every job, and then the daemons."""
        if "slurmctld" in self._processes:
            self.run("scancel", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
            self.run("scancel", "--signal=KILL", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
            wait_for(lambda: not self.run("squeue", "-h").stdout.strip(), SECONDS)
        for name in reversed([*self._processes]):
            self._end(name)

    def _begin(self, program: str, *arguments: str, name: str | None = None) -> None:
        path = _daemon(program)
        assert path is not None, f"{program} is not installed"
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        with (self.folder / f"{name or program}.out").open("ab") as output:
            words: Sequence[str] = [path, *arguments]
            self._processes[name or program] = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
