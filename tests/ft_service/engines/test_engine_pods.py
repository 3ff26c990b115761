"""Jobs that share an engine in a cluster: one pod with file systems of its own, moved by a real
reconciler.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.jobs.orphans import find_orphans
from ft_service.control.jobs.reconciler import Reconciler
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.launcher.kubernetes.manifests import object_name
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.spec import AdapterRef
from ft_service.storage.locations import Places
from ft_service.store.engines import EngineRecord
from ft_service.store.sql import Store
from tests.cluster.harness import HarnessCluster, open_cluster
from tests.cluster.kubelet import can_mount
from tests.support.attempts import wait_for
from tests.support.engine_pods import add_pod_job, places_of, pod_launcher, pod_reconciler
from tests.support.pods import LOOK_SECONDS, SECONDS
from tests.support.reconciling import PROJECT, get, messages, new_store
from tests.support.storage import local_s3, new_bucket

JOBS = tuple(f"ftjob-{secrets.token_hex(3)}" for _ in range(3))
"""Other names in each run of the tests: a real cluster remembers Jobs for a while."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr("ft_service.launcher.kubernetes.placement.RETRY_SECONDS", 0.1)
    monkeypatch.setattr("ft_service.engines.tending.TEND_OBJECTS_SECONDS", 0.5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[HarnessCluster]:
    """Whose pods see what they mount and nothing else, where this user may do that."""
    with open_cluster(mounts=can_mount()) as cluster:
        yield cluster


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = new_store(folder)
    yield store
    store.close()


def turn_until(reconciler: Reconciler, what: Any) -> Any:
    @wraps(what)
    def turned() -> Any:
        for _ in range(5):
            reconciler.step()
        return what()

    return wait_for(turned, SECONDS, every=LOOK_SECONDS)


def start_two(reconciler: Reconciler, store: Store, home: Path) -> tuple[str, str]:
    """Two jobs in one engine, the first of which starts it since the second waits too."""
    one, two = JOBS[:2]
    for job_id in (one, two):
        add_pod_job(store, home, job_id)
    validate(reconciler, store, one, two)
    return one, two


def validate(reconciler: Reconciler, store: Store, *job_ids: str) -> None:
    """Have all jobs validated before one is placed."""
    while any(get(store, job_id).state is State.VALIDATING for job_id in job_ids):
        if (claim := reconciler._claim_active()) is not None:
            reconciler._reconcile(*claim)


def are(store: Store, phase: Phase, *job_ids: str) -> bool:
    return all(get(store, job_id).phase is phase for job_id in job_ids)


def have_succeeded(store: Store, *job_ids: str) -> bool:
    states = [get(store, job_id).state for job_id in job_ids]
    assert State.FAILED not in states, [messages(store, job_id) for job_id in job_ids]
    return states == [State.SUCCEEDED] * len(job_ids)


def live(store: Store) -> EngineRecord:
    (engine,) = store.engines.live_engines()
    return engine


def go(home: Path, *job_ids: str) -> None:
    for job_id in job_ids:
        (home / "runs" / job_id / "go").touch()


def test_two_jobs_share_one_pod_that_sees_their_files_alone(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    for key in (
        "credentials",
        "files/file-x",
        "runs/ftjob-other/spec.json",
        "project-runs/other/ftjob-y/spec.json",
    ):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(key)
    reads = "".join(
        f"{name}:event,hold,read=files/file-{name},read=tokens/{name}.how/rows,succeed;"
        for name in JOBS[:2]
    )
    reconciler = pod_reconciler(cluster, store, folder, f"{reads}*:event")
    two = start_two(reconciler, store, folder)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
    engine = live(store)
    assert tuple(seat.id for seat in engine.seats) == tuple(two)
    name = object_name(engine.id, 1)
    job = cluster.get("jobs", name)
    ours = [item["metadata"]["name"] for item in cluster.items("jobs")]
    assert [one for one in ours if one in (name, *(object_name(job_id, 1) for job_id in two))] == [
        name
    ]
    mounts = job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    shown = {
        m["mountPath"]: (m["subPath"], m.get("readOnly", False))
        for m in mounts
        if m["name"] == "data"
    }
    assert shown == {
        f"{folder}/engines/{engine.id}": (f"engines/{engine.id}", False),
        f"{folder}/project-runs/{PROJECT}": (f"project-runs/{PROJECT}", False),
        f"{folder}/models": ("models", True),
        f"{folder}/files": (f"engines/{engine.id}.data/files", True),
        f"{folder}/tokens": (f"engines/{engine.id}.data/tokens", True),
    }
    for job_id in two:
        assert (folder / "runs" / job_id).is_symlink()
        assert Places(folder).run(job_id).root == folder / "project-runs" / PROJECT / job_id
    go(folder, *two)
    turn_until(reconciler, lambda: have_succeeded(store, *two))
    assert [(folder / f"files/file-{job_id}").read_text() for job_id in two] == list(two)
    turn_until(reconciler, lambda: not store.engines.live_engines())
    assert not (folder / f"engines/{engine.id}.data").exists()
    assert not cluster.kubelet.alive()
    reconciler.close()


def test_a_pod_that_its_cluster_takes_away_costs_its_jobs_nothing(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    reconciler = pod_reconciler(cluster, store, folder, "*:checkpoint=2,event,hold,succeed")
    two = start_two(reconciler, store, folder)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
    first = live(store)
    cluster.kubelet.vanish(wait_for(lambda: cluster.pod(object_name(first.id, 1), 0)))
    turn_until(reconciler, lambda: all(get(store, job_id).attempt == 2 for job_id in two))
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
    assert [(job.failures, job.fault_group) for job in (get(store, job_id) for job_id in two)] == [
        (0, None)
    ] * 2
    assert live(store).id != first.id
    go(folder, *two)
    turn_until(reconciler, lambda: have_succeeded(store, *two))
    turn_until(reconciler, lambda: not store.engines.live_engines())
    reconciler.close()


@pytest.mark.slow
def test_pods_that_share_nothing_but_object_storage_share_a_base(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    if not can_mount():
        pytest.skip("pods need mount namespaces to have disks of their own (unshare)")
    sees = "".join(
        f"{name}:see=files/file-{name},see=tokens/{name}.how/rows,checkpoint=2,event,hold,succeed;"
        for name in JOBS
    )
    with local_s3() as environment:
        url = new_bucket()
        places = places_of(folder, url)
        alone: dict[str, Any] = {"volumes": [], "volume_mounts": []}
        env = [{"name": name, "value": value} for name, value in environment.items()]
        reconciler = pod_reconciler(
            cluster, store, folder, f"{sees}*:event", url, env=env, idle_seconds=3.0, **alone
        )
        for job_id in JOBS:
            add_pod_job(store, folder, job_id)
            places.keep(f"file-{job_id}")
            places.share_tokens(job_id)
        validate(reconciler, store, *JOBS)
        turn_until(reconciler, lambda: are(store, Phase.TRAINING, *JOBS))
        first = live(store)
        assert {seat.id for seat in first.seats} == set(JOBS)
        pod = wait_for(lambda: cluster.pod(object_name(first.id, 1), 0))
        disk = cluster.kubelet.disk(pod)
        job = cluster.get("jobs", object_name(first.id, 1))
        mounts = job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        assert {m["mountPath"] for m in mounts} == {"/tmp", "/dev/shm", str(folder)}
        assert not (folder / "project-runs").exists()
        assert not (folder / "engines").exists()
        ends, *two = JOBS
        go(disk, ends)
        turn_until(reconciler, lambda: have_succeeded(store, ends))
        assert places.run(ends).has("metrics.csv")
        wait_for(lambda: not (disk / "runs" / ends).exists())
        assert sorted(path.name for path in (disk / "files").iterdir()) == sorted(
            f"file-{job_id}" for job_id in two
        )
        cluster.kubelet.vanish(pod)
        turn_until(reconciler, lambda: all(get(store, job_id).attempt == 2 for job_id in two))
        turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
        second = live(store)
        assert second.id != first.id
        for job_id in two:
            start = Attempt(places.run(job_id), 2).read_start()
            assert start is not None
            assert (start.checkpoint, start.engine) == (
                "step-2-a1",
                str(folder / "engines" / second.id),
            )
        pod = wait_for(lambda: cluster.pod(object_name(second.id, 1), 0))
        go(cluster.kubelet.disk(pod), *two)
        turn_until(reconciler, lambda: have_succeeded(store, *two))
        assert [get(store, job_id).failures for job_id in two] == [0, 0]
        turn_until(reconciler, lambda: not store.engines.live_engines())
        assert places.engine(second.id).has("attempts/1/exit.json")
        assert places.engine_ids() == {first.id, second.id}
        reconciler.close()


# who parts, and how: test_engine_launcher.py, tests/ft_service/jobs/test_decisions.py
@pytest.mark.slow
def test_a_pod_that_runs_out_of_memory_parts_its_jobs(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    reconciler = pod_reconciler(cluster, store, folder, "*:checkpoint=2,event,hold,succeed")
    two = start_two(reconciler, store, folder)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
    cluster.kubelet.out_of_memory(wait_for(lambda: cluster.pod(object_name(live(store).id, 1), 0)))
    turn_until(
        reconciler, lambda: all(get(store, job_id).reason is Reason.ENGINE_LOST for job_id in two)
    )
    go(folder, *two)
    turn_until(reconciler, lambda: have_succeeded(store, *two))
    for job_id in two:
        job = get(store, job_id)
        assert (job.attempt, job.failures) == (2, 0)
        start = Attempt(Places(folder).run(job_id), 2).read_start()
        assert start is not None
        assert start.engine is None, "alone"
        assert any("ran out of memory" in message for message in messages(store, job_id))
    reconciler.close()


def test_a_service_that_starts_again_finds_its_engine_and_ends_what_is_left_over(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    scripts = "*:event,hold,succeed"
    reconciler = pod_reconciler(cluster, store, folder, scripts, idle_seconds=60.0)
    two = start_two(reconciler, store, folder)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, *two))
    reconciler.close()
    successor = pod_reconciler(cluster, store, folder, scripts, idle_seconds=60.0)
    launcher = pod_launcher(cluster, folder, scripts)
    engine = live(store)
    name = object_name(engine.id, 1)
    assert find_orphans(store, launcher) == []
    go(folder, *two)
    turn_until(successor, lambda: have_succeeded(store, *two))
    store.engines.end_engine(engine.id)  # as a database is that was restored
    (orphan,) = find_orphans(store, launcher)
    assert (orphan.name, orphan.job_id) == (name, engine.id)
    launcher.end_unfinished(orphan.name)
    wait_for(lambda: cluster.nothing_left(name), SECONDS)
    successor.close()


def test_seats_wait_with_their_engine_in_a_queue_and_the_engine_ends_with_them(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    reconciler = pod_reconciler(cluster, store, folder, "*:event,succeed", queue="team")
    two = start_two(reconciler, store, folder)
    turn_until(reconciler, lambda: are(store, Phase.WAITING, *two))
    assert all(
        "the queue team, and this cluster has no Kueue" in (get(store, job_id).pending or "")
        for job_id in two
    )
    name = object_name(live(store).id, 1)
    assert cluster.get("jobs", name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    store.jobs.request(PROJECT, two[0], Verb.PAUSE)
    store.jobs.request(PROJECT, two[1], Verb.CANCEL)
    turn_until(
        reconciler,
        lambda: get(store, two[0]).state is State.PAUSED and get(store, two[1]).phase is None,
    )
    turn_until(reconciler, lambda: not store.engines.live_engines())
    wait_for(lambda: cluster.nothing_left(name), SECONDS)
    reconciler.close()


def test_who_ran_alone_before_moves_and_who_continues_an_adapter_runs_alone(
    cluster: HarnessCluster, folder: Path, store: Store
) -> None:
    reconciler = pod_reconciler(cluster, store, folder, "*:checkpoint=3,event,hold,succeed")
    one, two, third = JOBS
    add_pod_job(store, folder, one)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, one))
    assert not (folder / "runs" / one).is_symlink(), "it has no company"
    store.jobs.request(PROJECT, one, Verb.PAUSE)
    turn_until(reconciler, lambda: get(store, one).state is State.PAUSED)
    adapter = folder / "runs" / one / "adapters/step-3-a1"
    adapter.mkdir(parents=True)
    parent = AdapterRef(name="ft:tiny:local::0", job_id=one, path=str(adapter))
    for job_id, of in ((two, None), (third, parent)):
        add_pod_job(store, folder, job_id, parent=of)
    store.jobs.request(PROJECT, one, Verb.RESUME)
    validate(reconciler, store, two, third)
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, one, two))
    assert {seat.id for seat in live(store).seats} == {one, two}
    assert [
        start.checkpoint for start in (Attempt(Places(folder).run(one), 2).read_start(),) if start
    ] == ["step-3-a1"]
    assert (RunDir(folder / "runs" / one).root / "adapters/step-3-a1").is_dir(), (
        "by the link that is left there"
    )
    go(folder, one, two)
    turn_until(reconciler, lambda: have_succeeded(store, one, two))
    turn_until(reconciler, lambda: are(store, Phase.TRAINING, third))
    start = Attempt(RunDir(folder / "runs" / third), 1).read_start()
    assert start is not None
    assert start.engine is None
    assert not (folder / "runs" / third).is_symlink()
    reconciler.close()


@pytest.fixture(autouse=True)
def nothing_runs_on(cluster: HarnessCluster) -> Iterator[None]:
    """Between two tests, which use the same names."""
    yield
    for item in cluster.items("jobs"):
        cluster.delete_job(item["metadata"]["name"])
    wait_for(lambda: not cluster.items("pods") and not cluster.items("jobs"), SECONDS)
