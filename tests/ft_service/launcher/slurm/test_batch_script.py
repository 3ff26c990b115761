from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_service.launcher.slurm.batch_script import (
    SlurmSite,
    attempt_of,
    batch_script,
    job_name,
    sbatch_arguments,
)
from ft_service.launcher.slurm.slurm_profile import SlurmProfile
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from tests.support.attempts import wait_for

EVIL = "a b'$(touch owned)\"`touch owned`;touch owned\n--wrap=x"


def start_of(nodes: int = 1, each: int = 2, job_id: str = "ftjob-x") -> Start:
    return Start(
        job_id=job_id,
        attempt=3,
        world_size=nodes * each,
        generation=1,
        checkpoint=None,
        nodes=nodes,
    )


def test_the_arguments_of_sbatch() -> None:
    profile = SlurmProfile.model_validate(
        {
            "ranks_per_node": 8,
            "gres": "gpu:h100",
            "partition": "a,b",
            "account": "ml",
            "qos": "high",
            "constraint": "ib&nvme",
            "time": "1-00:00:00",
            "cpus_per_rank": 6,
            "memory_per_node": "200G",
            "options": ["--reservation=tuning", "--exclusive"],
        }
    )
    run = Path("/srv/ft%/runs/ftjob-x")
    found = sbatch_arguments(
        start_of(nodes=2, each=4), run, profile, SlurmSite(Path("/srv/ft%"), 30.5)
    )
    assert found == [
        "--parsable",
        "--job-name=ft-ftjob-x-3",
        "--comment=ft-service /srv/ft%",
        "--dependency=singleton",
        "--no-requeue",
        "--export=NONE",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--signal=B:TERM@91",
        "--chdir=/srv/ft%/runs/ftjob-x",
        "--output=/srv/ft%%/runs/ftjob-x/attempts/3/logs/slurm.log",
        "--partition=a,b",
        "--account=ml",
        "--qos=high",
        "--constraint=ib&nvme",
        "--time=1-00:00:00",
        "--mem=200G",
        "--gres=gpu:h100:4",
        "--cpus-per-task=24",
        "--reservation=tuning",
        "--exclusive",
    ]


def test_an_engine_is_a_batch_job_in_its_own_directory(tmp_path: Path) -> None:
    start = start_of(job_id="engine-Ab1").model_copy(update={"attempt": 1})
    run = tmp_path / "engines/engine-Ab1"
    profile = SlurmProfile(ranks_per_node=8)
    site = SlurmSite(tmp_path)
    found = sbatch_arguments(start, run, profile, site)
    assert {
        f"--chdir={run}",
        f"--output={run}/attempts/1/logs/slurm.log",
        "--gres=gpu:2",
        "--nodes=1",
    } < set(found)
    assert "--job-name=ft-engine-Ab1-1" in found
    assert attempt_of("ft-engine-Ab1-1") == ("engine-Ab1", 1)
    script = batch_script(start, run, profile, site)
    assert f"{run} 1 " in script
    assert f"{run}/attempts/1/stop.json" in script
    assert "runs" not in script


def test_the_name_of_a_batch_job_tells_its_attempt() -> None:
    assert attempt_of(job_name("ftjob-a-1", 12)) == ("ftjob-a-1", 12)
    assert attempt_of("ft-x") is attempt_of("other-ftjob-1") is attempt_of("ft-ftjob-1-x") is None


def fake_srun(folder: Path, body: str) -> dict[str, str]:
    """An environment whose srun runs its task on this host, as `body` says."""
    (folder / "bin").mkdir()
    srun = folder / "bin/srun"
    srun.write_text(f"#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n{body}\n")
    srun.chmod(0o755)
    return {**os.environ, "SLURM_JOB_ID": "41234", "SLURM_PROCID": "0"}


def script_for(folder: Path, start: Start, python: str, **values: object) -> str:
    profile = {"ranks_per_node": 8, "python": python, "scratch": str(folder / "scratch"), **values}
    site = SlurmSite(folder / "home's $HOME")
    script = batch_script(
        start, site.home / "runs" / start.job_id, SlurmProfile.model_validate(profile), site
    )
    return script.replace(
        "/usr/local/bin:/usr/bin:/bin", f"{folder}/bin:/usr/local/bin:/usr/bin:/bin"
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_starts_the_supervisor_with_every_value_quoted(
    tmp_path: Path, nodes: int
) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "it's python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$MINE" "$HOME" "$@" > {seen}\nexit 75\n')
    python.chmod(0o755)
    script = script_for(tmp_path, start_of(nodes), str(python), env={"MINE": EVIL})
    done = subprocess.run(
        ["bash"],
        input=script,
        env=fake_srun(tmp_path, 'exec "$@"'),
        cwd=tmp_path,
        text=True,
        check=False,
    )
    assert done.returncode == 75, "the supervisor's"
    assert not (tmp_path / "owned").exists()
    said = seen.read_text()
    assert said.startswith(f"{EVIL}\n{tmp_path}/scratch/ft-41234-0\n")
    words = said.removeprefix(f"{EVIL}\n").splitlines()
    assert words[1:6] == [
        "-P",
        "-m",
        "ft_service.supervisor",
        f"{tmp_path}/home's $HOME/runs/ftjob-x",
        "3",
    ]
    assert words[words.index("--node-rank") + 1] == "0"
    assert words[words.index("--scratch") + 1] == f"{tmp_path}/scratch/ft-41234-0"
    assert ("--rdzv-endpoint" in words) == (nodes == 2)
    if nodes == 2:
        assert words[words.index("--rdzv-endpoint") + 1].endswith(":20234")
    assert not any((tmp_path / "scratch").iterdir())


def test_a_notice_of_slurm_is_written_where_the_ranks_see_it_and_the_script_waits_for_them(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "home's $HOME/runs/ftjob-x")
    attempt = Attempt(run, 3)
    attempt.write_start(start_of())
    environment = fake_srun(tmp_path, f"until [ -e {tmp_path}/over ]; do sleep 0.05; done; exit 75")
    script = script_for(tmp_path, start_of(), sys.executable)
    process = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        wait_for(
            lambda: (
                subprocess.run(
                    ["pgrep", "-P", str(process.pid)], capture_output=True, check=False
                ).stdout
                or None
            )
        )
        process.send_signal(signal.SIGTERM)
        wait_for(attempt.read_stop)
        process.send_signal(signal.SIGTERM)
        assert process.poll() is None
        (tmp_path / "over").touch()
        assert process.wait(30) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    stop = attempt.read_stop()
    assert stop is not None
    assert stop.reason == "Slurm takes the allocation back"


@pytest.mark.parametrize(("each", "memory"), [(1, "--mem=50G"), (8, "--mem=400G")])
def test_memory_and_processors_follow_the_ranks_of_a_node(each: int, memory: str) -> None:
    profile = SlurmProfile(ranks_per_node=8, cpus_per_rank=6, memory_per_rank="50G")
    found = sbatch_arguments(
        start_of(nodes=2, each=each), Path("/run"), profile, SlurmSite(Path("/srv/ft"))
    )
    assert {memory, f"--cpus-per-task={6 * each}"} <= set(found)
