from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.launcher.slurm import slurm_commands
from ft_service.launcher.slurm.slurm_commands import (
    SlurmAwayError,
    SlurmCommands,
    SlurmJob,
    SlurmPostponedError,
    SlurmRefusedError,
    missing_commands,
    read_queue,
)

LIMIT = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a command that is a line of shell."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    return make


def test_what_squeue_prints_is_read() -> None:
    line = "17|PENDING|ft-ftjob-1-2|2026-01-01T00:00:00|Priority|ft-service /srv/a|b"
    expected = SlurmJob(
        17, "PENDING", "ft-ftjob-1-2", "2026-01-01T00:00:00", "Priority", "ft-service /srv/a|b"
    )
    assert read_queue(f"{line}\n") == [expected]
    assert read_queue("") == []
    with pytest.raises(SlurmAwayError, match="squeue printed"):
        read_queue("Slurm is resting\n")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            SlurmAwayError,
        ),
        (
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            SlurmAwayError,
        ),
        ("sbatch: error: Munge encode failed: Unable to access munge socket", SlurmAwayError),
        (
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            SlurmRefusedError,
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not "
            "available",
            SlurmRefusedError,
        ),
        (f"sbatch: error: AssocMaxSubmitJobLimit {LIMIT}", SlurmPostponedError),
        (f"sbatch: error: AssocGrpSubmitJobsLimit {LIMIT}", SlurmPostponedError),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit {LIMIT}", SlurmPostponedError),
        (f"sbatch: error: QOSMaxCpuPerJobLimit {LIMIT}", SlurmRefusedError),
        (
            "sbatch: error: Batch job submission failed: Required partition not available "
            "(inactive or drain)",
            SlurmPostponedError,
        ),
    ],
)
def test_a_cluster_that_is_away_is_told_from_one_that_refuses(
    program, said: str, error: type[Exception]
) -> None:
    program("sbatch", f'echo "{said}" >&2; exit 1')
    with pytest.raises(error) as raised:
        SlurmCommands().submit([], "")
    assert raised.type is error
    assert str(raised.value) == said.removeprefix("sbatch: error: ").replace(" sbatch: error:", ":")


def test_the_number_of_a_batch_job_is_read_and_its_script_given(program, tmp_path: Path) -> None:
    program(
        "sbatch",
        f"cat > {tmp_path}/script; printf '%s\\n' \"$@\" > {tmp_path}/words; echo '12;cluster'",
    )
    assert SlurmCommands().submit(["--comment=a b'$(x)"], "#!/bin/bash\n") == 12
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "words").read_text() == "--comment=a b'$(x)\n"
    program("sbatch", "echo done")
    with pytest.raises(SlurmAwayError, match="sbatch printed 'done'"):
        SlurmCommands().submit([], "")


def test_a_command_that_does_not_end_is_ended(program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "SECONDS", 0.2)
    program("squeue", "exec sleep 60")
    with pytest.raises(SlurmAwayError, match="squeue did not end within"):
        SlurmCommands().jobs()


def test_a_command_that_would_sleep_is_ended_and_says_why(program) -> None:
    """sbatch where Slurm has as many jobs as it takes; each job that starts would keep all others
    waiting.
    """
    program(
        "sbatch",
        "echo 'sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying' >&2; "
        "exec sleep 3600",
    )
    with pytest.raises(SlurmPostponedError, match=r"^Slurm temporarily unable to accept job$"):
        SlurmCommands().submit([], "")


def test_the_services_secrets_stay_with_it(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", "postgresql://u:hunter2@db/ft")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    program("squeue", f"env > {tmp_path}/env")
    SlurmCommands().jobs()
    seen = (tmp_path / "env").read_text()
    assert "SLURM_CONF=/etc/other.conf" in seen
    assert "hunter2" not in seen
    assert "SBATCH" not in seen


def test_without_accounting_nobody_knows_how_a_forgotten_job_ended(program) -> None:
    program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert SlurmCommands().ended_state(5) is None
    program("sacct", "echo 'CANCELLED by 0'")
    assert SlurmCommands().ended_state(5) == "CANCELLED"


def test_commands_that_are_not_there_are_named(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program("squeue", "")
    assert missing_commands() == ["sbatch", "scancel", "srun"]
