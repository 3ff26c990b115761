"""The Slurm launcher on a real Slurm: slurmctld and two slurmd of this machine.

Without Slurm's packages these tests skip.
"""

from __future__ import annotations

import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from ft_service.engines.engine_launcher import ClusterEngineLauncher
from ft_service.engines.tending import EngineOptions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Phase, Running, State, Unknown
from ft_service.jobs.user_actions import Verb
from ft_service.launcher.protocol import LaunchError
from ft_service.launcher.slurm.batch_script import SlurmSite, job_name, notice_seconds
from ft_service.launcher.slurm.slurm_commands import SlurmCommands
from ft_service.launcher.slurm.slurm_launcher import SlurmLauncher
from ft_service.launcher.slurm.slurm_profile import SlurmProfile
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Start
from ft_service.spec import DistributedOptions
from ft_service.storage.locations import Places
from tests.cluster.slurm import SlurmCluster, missing_parts
from tests.support.attempts import wait_for
from tests.support.engines import ENGINE_PROGRAM, add_sharing_job
from tests.support.environment import has_name
from tests.support.reconciling import PROJECT, add_job, get, messages, new_reconciler, new_store
from tests.support.service import Server, submit, upload, wait_until, wait_until_step

pytestmark = pytest.mark.skipif(
    bool(missing_parts()), reason=f"Slurm is not installed ({', '.join(missing_parts())})"
)
SECONDS = 120.0
ROOT = Path(__file__).parents[4]
POD_WORKER = ROOT / "tests/support/programs/pod_worker.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if not has_name():
        pytest.skip("Slurm cannot be run by a user without a name")
    with tempfile.TemporaryDirectory(prefix="ft-slurm-") as folder:  # a socket's path is short
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(autouse=True)
def _found(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))


def profile_for(folder: Path, script: str | None = None, **values: Any) -> dict[str, Any]:
    """`script`: what the ranks play (scripted_worker.py); None: they train."""
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    python = sys.executable
    if script is not None:
        interpreter = folder / "python"
        interpreter.write_text(
            f"#!/bin/bash\nexport JOB_COMPLETION_INDEX=$SLURM_PROCID POD_SCRIPT={script}\n"
            f'exec {sys.executable} {POD_WORKER} "$@"\n'
        )
        interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
        python = str(interpreter)
    return {
        "ranks_per_node": 2,
        "gres": None,
        "python": python,
        "env": env,
        "scratch": str(folder),
        **values,
    }


class OneAttempt:
    """An attempt of a job of its own, and a launcher."""

    def __init__(
        self, home: Path, script: str, nodes: int = 1, grace: float = 20.0, **values: Any
    ) -> None:
        self.profile = SlurmProfile.model_validate(profile_for(home, script, **values))
        self.site = SlurmSite(home, grace)
        self.job_id = f"ftjob-{home.name}"
        self.run = RunDir(home / "runs" / self.job_id)
        self.handle = Attempt(self.run, 1, job_id=self.job_id)
        start = Start(
            job_id=self.job_id,
            attempt=1,
            world_size=nodes,
            generation=1,
            checkpoint=None,
            nodes=nodes,
        )
        self.handle.write_start(start)
        self.launcher = self.new_launcher()

    def new_launcher(self) -> SlurmLauncher:
        """As a server has it that has just started."""
        return SlurmLauncher(self.profile, self.site)

    def seen(self) -> Observation:
        return self.launcher.observe(self.handle)

    def wait_reported(self) -> None:
        wait_for(
            lambda: isinstance(seen := self.seen(), Running) and seen.reported, SECONDS, every=0.3
        )

    def wait_ended(self) -> Exit | None:
        def ended() -> Ended | None:
            seen = self.seen()
            return seen if isinstance(seen, Ended) else None

        return wait_for(ended, SECONDS, every=0.3).exit

    @property
    def batch_jobs(self) -> list[str]:
        """States of its batch jobs."""
        return [job.state for job in SlurmCommands().jobs() if job.name == job_name(self.job_id, 1)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_attempt_runs_on_each_node_and_ends_as_its_ranks_say(tmp_path: Path, nodes: int) -> None:
    one = OneAttempt(tmp_path, "event,checkpoint=4,succeed", nodes)
    assert isinstance(one.seen(), Absent)
    one.launcher.start(one.handle)
    one.launcher.start(one.handle)
    ended = one.wait_ended()
    assert ended is not None
    assert ended.reason is ExitReason.SUCCEEDED
    assert one.batch_jobs == ["COMPLETED"]
    assert len(one.handle.read_node_exits(nodes)) == nodes
    assert not list(tmp_path.glob("ft-*")), "nothing stays in the scratch folder"


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_pause_and_a_cancel_reach_the_ranks_on_all_nodes(tmp_path: Path, nodes: int) -> None:
    pause = OneAttempt(tmp_path, "event,checkpoint=4,wait", nodes)
    pause.launcher.start(pause.handle)
    pause.wait_reported()
    pause.launcher.signal(pause.handle, Control(generation=2, desired=Desired.PAUSE))
    ended = pause.wait_ended()
    assert ended is not None
    assert (ended.reason, ended.code) == (ExitReason.STOPPED, 75)
    assert pause.batch_jobs == ["FAILED"], "by the supervisors' exit code"

    home = tmp_path / f"cancelled-{nodes}"
    home.mkdir()
    cancel = OneAttempt(home, "event,hang", nodes)
    cancel.launcher.start(cancel.handle)
    cancel.wait_reported()
    cancel.launcher.signal(cancel.handle, Control(generation=2, desired=Desired.CANCEL))
    ended = cancel.wait_ended()
    assert ended is not None
    assert ended.reason is ExitReason.CANCELLED


@pytest.mark.slow
def test_the_time_limit_is_told_in_time_and_the_ranks_stop_at_a_checkpoint(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait", 2, grace=1.0, time="2")
    assert notice_seconds(one.site) == 61
    one.launcher.start(one.handle)
    one.wait_reported()
    ended = one.wait_ended()
    assert ended is not None
    assert (ended.reason, ended.code) == (ExitReason.STOPPED, 75)
    stop = one.handle.read_stop()
    assert stop is not None
    assert stop.reason == "Slurm takes the allocation back"


@pytest.mark.slow
def test_an_attempt_that_an_operator_cancels_is_no_failure(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    store = new_store(tmp_path)
    home = tmp_path
    launcher = SlurmLauncher(
        SlurmProfile.model_validate(profile_for(home, "event,checkpoint=4,wait/succeed")),
        SlurmSite(home),
    )
    reconciler = new_reconciler(home, store, launcher)
    add_job(store, distributed=DistributedOptions(nproc_per_node=2))
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.TRAINING, SECONDS, every=0.1)
    assert cluster.run("scancel", f"--name={job_name('ftjob-1', 1)}").returncode == 0
    wait_for(lambda: reconciler.step() and get(store).state is State.SUCCEEDED, SECONDS, every=0.1)
    job = get(store)
    assert (job.attempt, job.failures) == (2, 0)
    assert any("was cancelled in Slurm. Training has stopped" in text for text in messages(store))
    reconciler.close()
    store.close()


@pytest.mark.slow
def test_a_preempted_attempt_stops_at_a_checkpoint_and_trains_on_later(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    store = new_store(tmp_path)
    profile = profile_for(tmp_path, "event,checkpoint=4,wait/succeed", partition="all")
    reconciler = new_reconciler(
        tmp_path, store, SlurmLauncher(SlurmProfile.model_validate(profile), SlurmSite(tmp_path))
    )
    add_job(store, "ftjob-preempted", distributed=DistributedOptions(nproc_per_node=2, nnodes=2))
    wait_for(
        lambda: reconciler.step() and get(store, "ftjob-preempted").phase is Phase.TRAINING,
        SECONDS,
        every=0.1,
    )
    urgent = (
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    done = cluster.run("sbatch", "--parsable", *urgent)
    assert done.returncode == 0, done.stderr
    wait_for(
        lambda: reconciler.step() and get(store, "ftjob-preempted").state is State.SUCCEEDED,
        SECONDS,
        every=0.1,
    )
    job = get(store, "ftjob-preempted")
    assert (job.attempt, job.failures) == (2, 0)
    ended = Attempt(RunDir(tmp_path / "runs/ftjob-preempted"), 1).read_exit()
    assert ended is not None
    assert (ended.reason, ended.code) == (ExitReason.STOPPED, 75)
    reconciler.close()
    store.close()


@pytest.mark.slow
def test_an_attempt_whose_node_is_lost_is_tried_again(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    store = new_store(tmp_path)
    profile = profile_for(tmp_path, "event,checkpoint=4,hang/succeed")
    reconciler = new_reconciler(
        tmp_path, store, SlurmLauncher(SlurmProfile.model_validate(profile), SlurmSite(tmp_path))
    )
    add_job(store, "ftjob-lost", distributed=DistributedOptions(nproc_per_node=2, nnodes=2))
    wait_for(
        lambda: reconciler.step() and get(store, "ftjob-lost").phase is Phase.TRAINING,
        SECONDS,
        every=0.1,
    )
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    try:
        wait_for(
            lambda: (
                reconciler.step()
                and get(store, "ftjob-lost").attempt == 1
                and get(store, "ftjob-lost").losses == 1
            ),
            SECONDS,
            every=0.1,
        )
        ended = Attempt(RunDir(tmp_path / "runs/ftjob-lost"), 1).read_exit()
        assert ended is not None
        assert (ended.reason, ended.message) == (
            ExitReason.HOST_LOST,
            "A node of the attempt has failed.",
        )
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    wait_for(
        lambda: reconciler.step() and get(store, "ftjob-lost").state is State.SUCCEEDED,
        SECONDS,
        every=0.1,
    )
    assert get(store, "ftjob-lost").attempt == 2
    reconciler.close()
    store.close()


@pytest.mark.slow
def test_an_engine_that_slurm_preempts_costs_its_jobs_nothing(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    store = new_store(tmp_path)
    two = ("ftjob-one", "ftjob-two")
    interpreter = tmp_path / "python"
    play = "*:checkpoint=4,event,hold,succeed"
    interpreter.write_text(
        f'#!/bin/bash\nexec {sys.executable} "$@" --command {sys.executable} {ENGINE_PROGRAM} '
        f"'{play}'\n"
    )
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    profile = SlurmProfile.model_validate(
        profile_for(tmp_path, python=str(interpreter), partition="all")
    )
    launcher = ClusterEngineLauncher(SlurmLauncher(profile, SlurmSite(tmp_path)), Places(tmp_path))
    engines = EngineOptions(most_seats=8, idle_seconds=0.5)
    reconciler = new_reconciler(tmp_path, store, launcher, engines=engines)
    for job_id in two:
        add_sharing_job(store, job_id)
    while any(get(store, job_id).state is State.VALIDATING for job_id in two):
        if (claim := reconciler._claim_active()) is not None:
            reconciler._reconcile(*claim)

    def turn(what: Callable[[], bool]) -> None:
        wait_for(lambda: reconciler.step() and what(), SECONDS, every=0.1)

    turn(lambda: all(get(store, job_id).phase is Phase.TRAINING for job_id in two))
    (engine,) = store.engines.live_engines()
    assert [seat.id for seat in engine.seats] == list(two)
    assert [one.job_id for one in launcher.unfinished()] == [engine.id]
    urgent = (
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    assert cluster.run("sbatch", "--parsable", *urgent).returncode == 0
    turn(lambda: all(get(store, job_id).attempt == 2 for job_id in two))
    (tmp_path / "go").touch()
    turn(lambda: all(get(store, job_id).state is State.SUCCEEDED for job_id in two))
    assert [
        (job.attempt, job.failures, job.fault_group)
        for job in (get(store, job_id) for job_id in two)
    ] == [(2, 0, None)] * 2
    wait_for(
        lambda: (reconciler.step() or True) and not store.engines.live_engines(), SECONDS, every=0.3
    )
    reconciler.close()
    store.close()


def profiled(home: Path, **values: Any) -> SlurmLauncher:
    profile = SlurmProfile.model_validate(profile_for(home, "succeed", **values))
    return SlurmLauncher(profile, SlurmSite(home))


def test_a_job_waits_in_slurms_queue_and_can_be_cancelled_there(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    store = new_store(tmp_path)
    values = {"options": ["--reservation=none-yet"]}
    refused = SlurmLauncher(
        SlurmProfile.model_validate(profile_for(tmp_path, "succeed", **values)), SlurmSite(tmp_path)
    )
    one = OneAttempt(tmp_path, "succeed")
    attempt = one.handle
    assert "eservation" in (refused.refusal() or "")
    assert one.launcher.refusal() is None
    assert "artition" in (profiled(tmp_path, partition="nosuch").refusal() or "")
    assert not one.launcher.unfinished(), "nothing was submitted"
    with pytest.raises(LaunchError, match=r"Slurm refuses the job: .*eservation"):
        refused.start(attempt)
    assert isinstance(refused.observe(attempt), Ended)

    cluster.run("scontrol", "update", "PartitionName=all", "State=DOWN")
    try:
        launcher = SlurmLauncher(
            SlurmProfile.model_validate(profile_for(tmp_path, "succeed")), SlurmSite(tmp_path)
        )
        reconciler = new_reconciler(tmp_path, store, launcher)
        add_job(store)
        wait_for(
            lambda: reconciler.step() and get(store).phase is Phase.WAITING, SECONDS, every=0.1
        )
        assert get(store).pending == "The attempt waits in Slurm's queue: PartitionDown."
        assert [one.job_id for one in launcher.unfinished()] == ["ftjob-1"]
        store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
        wait_for(lambda: reconciler.step() and get(store).phase is None, SECONDS, every=0.1)
    finally:
        cluster.run("scontrol", "update", "PartitionName=all", "State=UP")
    assert get(store).state is State.CANCELLED
    assert launcher.unfinished() == []
    reconciler.close()
    store.close()


@pytest.mark.slow
def test_while_slurmctld_is_away_nothing_is_known_and_nothing_starts_twice(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait")
    one.launcher.start(one.handle)
    one.wait_reported()
    (tmp_path / "second").mkdir()
    two = OneAttempt(tmp_path / "second", "succeed")
    cluster.stop_controller()
    try:
        fresh = one.new_launcher()
        assert isinstance(seen := fresh.observe(one.handle), Unknown), seen
        assert fresh.away_seconds >= 0
        two.launcher.start(two.handle)
        assert isinstance(two.seen(), Unknown)
        assert not two.handle.has_launched()
        assert not two.handle.has_exit(), "it is no failure of the job"
    finally:
        cluster.start_controller()
    wait_for(lambda: isinstance(fresh.observe(one.handle), Running), SECONDS, every=0.5)
    assert isinstance(two.seen(), Absent)
    fresh.start(one.handle)
    assert one.batch_jobs == ["RUNNING"]
    fresh.kill(one.handle, Reason.USER_CANCELLED)
    wait_for(lambda: isinstance(fresh.observe(one.handle), Ended), SECONDS, every=0.5)
    two.launcher.start(two.handle)
    assert two.wait_ended() is not None
    assert two.batch_jobs == ["COMPLETED"]


def test_a_start_that_was_not_heard_of_is_found_by_its_name(tmp_path: Path) -> None:
    """The service ended between sbatch and writing down that the batch job exists."""
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait")
    one.launcher.start(one.handle)
    one.run.path(one.handle.keys.launched).unlink()
    again = one.new_launcher()
    assert isinstance(again.observe(one.handle), Running)
    again.start(one.handle)
    assert len(one.batch_jobs) == 1
    assert one.handle.has_launched()
    again.kill(one.handle, Reason.USER_CANCELLED)
    one.wait_ended()


def test_two_batch_jobs_of_one_attempt_never_run_at_once(tmp_path: Path) -> None:
    """One was submitted although the command had failed: Slurm holds the second back, and its
    supervisor does nothing.
    """
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait")
    one.launcher.start(one.handle)
    one.wait_reported()
    one.run.path(one.handle.keys.launched).unlink()
    hidden = one.new_launcher()
    hidden._jobs = lambda attempt, fresh=False: []  # type: ignore[method-assign]
    hidden.start(one.handle)
    assert sorted(one.batch_jobs) == ["PENDING", "RUNNING"]
    assert isinstance(one.seen(), Running)
    one.launcher.signal(one.handle, Control(generation=2, desired=Desired.PAUSE))
    ended = one.wait_ended()
    assert ended is not None
    assert ended.reason is ExitReason.STOPPED
    first, second = sorted(one.batch_jobs)[::-1]
    assert first == "FAILED"
    assert second in ("FAILED", "CANCELLED"), (
        "it ran and did nothing, or the launcher was first to end it"
    )


@pytest.mark.slow
def test_an_attempt_that_slurm_suspends_has_nothing_to_say_and_goes_on(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait")
    now = [0.0]
    one.launcher = SlurmLauncher(one.profile, one.site, clock=lambda: now[0])
    one.launcher.start(one.handle)
    wait_for(lambda: now.append(now.pop() + 10) or one.handle.has_segment(0), SECONDS, every=0.3)
    launched = one.handle.read_launched()
    assert launched is not None
    assert cluster.run("scontrol", "suspend", launched.uid).returncode == 0
    for _ in range(2):
        now[0] += 3600
        assert one.seen() == Running(
            reported=True,
            note="Slurm has suspended the attempt's batch job, and lets it go on later.",
        )
    assert cluster.run("scontrol", "resume", launched.uid).returncode == 0
    now[0] += 3600
    assert one.seen() == Running(reported=True)
    one.launcher.signal(one.handle, Control(generation=2, desired=Desired.PAUSE))
    wait_for(one.handle.node().has_exit, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["requeue", "requeuehold"])
def test_an_attempt_that_an_operator_puts_back_into_the_queue_has_ended(
    tmp_path: Path, cluster: SlurmCluster, verb: str
) -> None:
    one = OneAttempt(tmp_path, "event,checkpoint=4,wait")
    one.launcher.start(one.handle)
    one.wait_reported()
    launched = one.handle.read_launched()
    assert launched is not None
    assert cluster.run("scontrol", "update", f"JobId={launched.uid}", "Requeue=1").returncode == 0
    assert cluster.run("scontrol", verb, launched.uid).returncode == 0
    ended = one.wait_ended()
    assert ended is not None
    assert ended.reason is ExitReason.STOPPED
    wait_for(lambda: one.batch_jobs == ["CANCELLED"], SECONDS, every=0.3)


@pytest.mark.slow
def test_a_job_waits_while_its_partition_is_drained(tmp_path: Path, cluster: SlurmCluster) -> None:
    """Slurm then refuses to queue it, as it does with too many jobs of a user or account."""
    store = new_store(tmp_path)
    now = [0.0]
    profile = SlurmProfile.model_validate(profile_for(tmp_path, "succeed", partition="all"))
    launcher = SlurmLauncher(profile, SlurmSite(tmp_path), clock=lambda: now[0])
    reconciler = new_reconciler(tmp_path, store, launcher)
    for job_id in ("ftjob-drained", "ftjob-given-up"):
        add_job(store, job_id)
    cluster.run("scontrol", "update", "PartitionName=all", "State=DRAIN")
    refused = "Slurm refuses the job for now: .*Required partition not available"
    try:
        for _ in range(4):
            wait_for(
                lambda: (
                    reconciler.step()
                    and re.match(refused, get(store, "ftjob-drained").pending or "")
                ),
                SECONDS,
                every=0.1,
            )
            now[0] += 100
        store.jobs.request(PROJECT, "ftjob-given-up", Verb.CANCEL)
        wait_for(
            lambda: reconciler.step() and get(store, "ftjob-given-up").state is State.CANCELLED,
            SECONDS,
            every=0.1,
        )
    finally:
        cluster.run("scontrol", "update", "PartitionName=all", "State=UP")

    def succeeded() -> bool:
        now[0] += 10
        return reconciler.step() and get(store, "ftjob-drained").state is State.SUCCEEDED

    wait_for(succeeded, SECONDS, every=0.1)
    job = get(store, "ftjob-drained")
    assert (job.attempt, job.failures) == (1, 0)
    reconciler.close()
    store.close()


@pytest.mark.slow
def test_a_job_waits_while_slurm_has_as_many_jobs_as_it_takes(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    """MaxJobCount; sbatch would sleep for half a minute."""
    text = cluster.conf.read_text()
    store = new_store(tmp_path)
    launcher = SlurmLauncher(
        SlurmProfile.model_validate(profile_for(tmp_path, "succeed")), SlurmSite(tmp_path)
    )
    reconciler = new_reconciler(tmp_path, store, launcher)
    try:
        with_limit(cluster, f"{text}MaxJobCount=1\n")
        add_job(store)
        wait_for(
            lambda: reconciler.step() and (get(store).pending or "").startswith("Slurm refuses"),
            SECONDS,
            every=0.1,
        )
        assert get(store).phase is Phase.WAITING
    finally:
        with_limit(cluster, text)
    wait_for(lambda: reconciler.step() and get(store).state is State.SUCCEEDED, SECONDS, every=0.1)
    # A controller that has just started loses what it gives to nodes that have not called yet.
    assert get(store).failures == 0, messages(store)
    reconciler.close()
    store.close()


def with_limit(cluster: SlurmCluster, text: str) -> None:
    cluster.stop_controller()
    cluster.conf.write_text(text)
    cluster.start_controller()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.training.models import save_chat_base  # torch takes time to import

    save_chat_base((folder := tmp_path_factory.mktemp("models")) / "tiny")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    from tests.support.training.models import save_chats

    save_chats(path := tmp_path / "train.jsonl", 64)
    return path


def slurm_server(
    folder: Path,
    models: Path,
    engine_jobs: int = 0,
    profiles: dict[str, dict[str, Any]] | None = None,
) -> Server:
    """`profiles`: by name, with what differs; None: there is one."""
    profile = folder / "slurm-profile.yaml"
    given = {name: profile_for(folder, **values) for name, values in (profiles or {}).items()}
    written = {"profiles": given} if given else profile_for(folder)
    profile.write_text(yaml.safe_dump(written, sort_keys=False))
    database = f"sqlite:///{folder / 'service.db'}"
    return Server(
        folder,
        models,
        FT_LAUNCHER="slurm",
        FT_SLURM_PROFILE=str(profile),
        FT_DATABASE_URL=database,
        FT_ENGINE_JOBS=str(engine_jobs),
    )


@pytest.mark.slow
def test_two_jobs_share_an_engine_that_is_one_batch_job(
    tmp_path: Path, data: Path, models: Path, cluster: SlurmCluster
) -> None:
    server = slurm_server(tmp_path, models, engine_jobs=4)
    server.start()
    try:
        client = server.client()
        file = upload(client, data)
        body = {
            "model": "tiny",
            "training_file": file,
            "validation_file": file,
            "precision": {"default": "nf4"},
            "lora": {"r": 4},
            "training": {"max_steps": 3, "batch_size": 16, "tokens_per_micro_batch": 256},
            "distributed": {
                "nproc_per_node": 2,
                "replicate": 1,
                "activation_checkpointing": "none",
                "compile": False,
            },
            "sweep": {"training.learning_rate": [1e-3, 2e-3], "halving": False},
        }
        sweep: Any = client.post("/fine_tuning/sweeps", body=body, cast_to=object)
        two = [job["id"] for job in sweep["jobs"]]
        for job_id in two:
            wait_until(client, job_id, "succeeded")
        starts = [Attempt(server.run(job_id), 1).read_start() for job_id in two]
        (engine,) = {start.engine for start in starts if start is not None}
        assert engine is not None
        name = job_name(Path(engine).name, 1)
        ours = [
            (job.name, job.state)
            for job in SlurmCommands().jobs()
            if job.comment == f"ft-service {tmp_path}"
        ]
        assert ours == [(name, "RUNNING")], "one batch job for both; it waits for more"
        cluster.run("scancel", f"--name={name}")

        def engines() -> Any:
            listed: Any = client.get("/engines", cast_to=object)
            return listed["data"]

        wait_for(lambda: not engines(), SECONDS, every=0.3)
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_each_profile_is_a_partition(
    tmp_path: Path, data: Path, models: Path, cluster: SlurmCluster
) -> None:
    server = slurm_server(
        tmp_path, models, profiles={"small": {"partition": "all"}, "fast": {"partition": "urgent"}}
    )
    server.start()
    try:
        client = server.client()
        asked = {"small": None, "fast": {"distributed": {"profile": "fast", "nproc_per_node": 2}}}
        ids = {
            name: submit(client, data, steps=2, extra=extra or {}).id
            for name, extra in asked.items()
        }
        for job_id in ids.values():
            assert wait_until(client, job_id, "succeeded").fine_tuned_model
        listed = cluster.run("squeue", "-h", "-t", "all", "-o", "%j|%P").stdout.splitlines()
        partition = dict(line.split("|") for line in listed)
        assert {name: partition[job_name(job_id, 1)] for name, job_id in ids.items()} == {
            "small": "all",
            "fast": "urgent",
        }
        with pytest.raises(openai.BadRequestError, match=r"profile.*'none'.*small.*fast"):
            submit(client, data, steps=2, extra={"distributed": {"profile": "none"}})
    finally:
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_trains_on_slurm_while_its_server_is_killed(
    tmp_path: Path, nodes: int, data: Path, models: Path
) -> None:
    server = slurm_server(tmp_path, models)
    server.start()
    client = server.client()
    distributed = {"nnodes": nodes, "nproc_per_node": 2 // nodes, "replicate": 1}
    job_id = submit(client, data, steps=12, extra={"distributed": distributed}).id
    wait_until_step(client, job_id, 2)
    server.kill()
    server.start()
    client = server.client()
    job = wait_until(client, job_id, "succeeded")
    assert job.fine_tuned_model
    said = [event.message for event in client.fine_tuning.jobs.list_events(job_id, limit=100)]
    assert not any("Attempt 2" in message for message in said)
    assert [
        state.state for state in SlurmCommands().jobs() if state.name == job_name(job_id, 1)
    ] == ["COMPLETED"]
    assert server.stop() == 0
