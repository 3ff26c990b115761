"""A job as pods of a cluster (see tests/cluster): two pods that meet by torchrun's rendezvous,
train, lose one, and go on.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.engines.engine_launcher import ClusterEngineLauncher
from ft_service.engines.tending import EngineOptions
from ft_service.jobs.states import Job, State
from ft_service.launcher.kubernetes.manifests import object_name
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.rundir.checkpoints import complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Result, Start
from ft_service.rundir.engine import ENGINES
from ft_service.serving import worker_tasks
from ft_service.spec import (
    BaseModelRef,
    DataFileRef,
    JobContext,
    JobSpec,
    StoredSpec,
    parse_request,
    resolve,
)
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.store.sql import Store
from tests.cluster.harness import HarnessCluster, open_cluster
from tests.cluster.kubelet import TOLERATION, can_mount
from tests.support.creating import create_job
from tests.support.ports import free_port
from tests.support.reconciling import PROJECT, get, messages, new_store
from tests.support.service import eventually
from tests.support.storage import local_s3, new_bucket
from tests.support.training.attempts import adapter, losses, trained

JOB = "ftjob-1"
STEPS = 60
TURN_SECONDS = 0.25
"""Between two turns of the reconciler: without a rest it takes a core from the ranks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[HarnessCluster]:
    """Whose pods see what they mount and nothing else, where this user may do that."""
    with open_cluster(mounts=can_mount()) as cluster:
        yield cluster


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


def add_two_node_job(
    store: Store,
    models: Path,
    data: Path,
    *,
    job_id: str = JOB,
    steps: int = STEPS,
    **changes: Any,
) -> Job:
    body = {
        "model": "tiny",
        "training_file": "file-1",
        "precision": {"default": "nf4"},
        "lora": {"r": 4},
        "training": {
            "max_steps": steps,
            "batch_size": 8,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
        },
        "distributed": {"nnodes": 2, "nproc_per_node": 1},
        "checkpoint": {"save_steps": 4},
        **changes,
    }
    spec = resolve(
        parse_request(body),
        JobContext(
            job_id=job_id,
            organization="local",
            model=BaseModelRef(name="tiny", path=str(models / "tiny")),
            training_data=DataFileRef(name=data.name, path=str(data), sha256=sha256_of(data)),
            validation_data=None,
            seed=1,
            gpus=0,
        ),
    )
    job = Job(
        id=job_id,
        project_id=PROJECT,
        created_at=0.0,
        request=body,
        stored_spec=StoredSpec.of(spec),
        state=State.VALIDATING,
        slots=spec.world_size,
        nodes=spec.distributed.nnodes,
    )
    return create_job(store, job)


def profile_for(
    cluster: HarnessCluster, home: Path, env: dict[str, str] | None = None, **changes: Any
) -> PodProfile:
    env = {
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    return PodProfile.model_validate(
        {
            "image": "worker:test",
            "command": [sys.executable],
            "slots": 2,
            "ranks_per_node": 1,
            "gpu_resource": None,
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "volumes": [{"name": "data", "hostPath": {"path": str(home)}}],
            "volume_mounts": [{"name": "data", "mountPath": str(home)}],
            "node_selector": cluster.node_selector,
            "tolerations": [TOLERATION],
            "rendezvous_port": free_port(),
            **changes,
        }
    )


def run_to_its_end(reconciler: Reconciler, store: Store) -> Job:
    def done() -> Job | None:
        reconciler.step()
        job = get(store, JOB)
        return job if job.state in (State.SUCCEEDED, State.FAILED) else None

    job = eventually(done, every=TURN_SECONDS)
    assert job.state is State.SUCCEEDED, "\n".join(messages(store, JOB))
    return job


@pytest.mark.slow
def test_an_evicted_job_of_two_pods_resumes_and_succeeds(
    cluster: HarnessCluster,
    store: Store,
    models: Path,
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    launcher = cluster.launcher(profile_for(cluster, tmp_path), tmp_path)
    reconciler = Reconciler(store, launcher, Places(tmp_path), ReconcilerOptions(idle_seconds=0.1))
    request.addfinalizer(reconciler.close)
    stored = tmp_path / "files/file-1"
    stored.parent.mkdir()
    shutil.copyfile(data, stored)
    add_two_node_job(store, models, stored)
    run = RunDir(tmp_path / "runs" / JOB)

    def checkpointed() -> bool:
        reconciler.step()
        assert get(store, JOB).attempt < 2, "\n".join(messages(store, JOB))
        return bool(complete_checkpoints(run))

    eventually(checkpointed, every=TURN_SECONDS)
    cluster.evict(eventually(lambda: cluster.pod(object_name(JOB, 1), 1)))

    job = run_to_its_end(reconciler, store)
    told = messages(store, JOB)
    assert (job.attempt, job.failures) == (2, 0), "an eviction is no failure"
    assert any("is taken away (EvictionByEvictionAPI)" in message for message in told)
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint is not None
    assert (start.nodes, start.world_size) == (2, 2)
    steps = [
        event.metrics.step
        for event in store.jobs.list_events(PROJECT, JOB, limit=100).data
        if event.metrics
    ]
    assert sorted(steps) == list(range(1, STEPS + 1)), (
        "every step once: the first attempt stopped by agreement"
    )
    result = run.read("result.json", Result)
    assert result is not None
    assert result.attempt == 2
    assert run.path("adapter/adapter_model.safetensors").is_file()
    eventually(lambda: not cluster.kubelet.alive())


@pytest.mark.slow
def test_pods_that_share_nothing_but_object_storage(
    store: Store,
    models: Path,
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pod has a disk of its own, at the path that the service has: both fetch, train together,
    and bring their shards.
    """
    if not can_mount():
        pytest.skip(
            "pods need mount namespaces to have disks of their own, which this user may not make "
            "(unshare)"
        )
    home = tmp_path / "service"
    with local_s3() as environment, open_cluster(mounts=True) as cluster:
        url = new_bucket()
        places = Places(home, ObjectStore(url))
        places.files_dir.mkdir(parents=True)
        stored = Path(shutil.copyfile(data, places.files_dir / "file-1"))
        places.keep("file-1")
        launcher = cluster.launcher(
            profile_for(cluster, home, environment, volumes=[], volume_mounts=[]), home, storage=url
        )
        reconciler = Reconciler(store, launcher, places, ReconcilerOptions(idle_seconds=0.1))
        request.addfinalizer(reconciler.close)
        add_two_node_job(
            store, models, stored, steps=8, checkpoint={"save_steps": 4, "save_total_limit": 1}
        )
        job = run_to_its_end(reconciler, store)
        assert (job.attempt, job.trained_tokens is not None) == (1, True)
        assert job.result_file is not None
        assert places.file(job.result_file).read_bytes().startswith(b"step,")
        steps = [
            event.metrics.step
            for event in store.jobs.list_events(PROJECT, JOB, limit=100).data
            if event.metrics
        ]
        assert sorted(steps) == list(range(1, 9))
        run = places.run(JOB)
        assert newest_checkpoint(run) == "step-8-a1"
        assert complete_checkpoints(run) == ["step-8-a1"], "the older one was removed there too"
        assert run.path("adapter/adapter_model.safetensors").is_file()
        assert [point.name for point in store.jobs.list_checkpoints(PROJECT, JOB).data] == [
            "step-8-a1",
            "step-4-a1",
        ]
        monkeypatch.setattr(worker_tasks, "run_worker", None)  # the service has no torch there
        adapter = worker_tasks.make_checkpoint_adapter(
            places.whole_run(JOB, "step-8-a1"), "step-8-a1"
        )
        assert sha256_of(adapter / "adapter_model.safetensors") == sha256_of(
            run.path("adapter/adapter_model.safetensors")
        )
        assert run.list("attempts/1/logs/node-1"), "the logs of both nodes are there"


@pytest.mark.slow
def test_jobs_share_a_pod_with_a_disk_of_its_own_and_end_as_if_each_had_been_alone(
    store: Store,
    models: Path,
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not can_mount():
        pytest.skip("pods need mount namespaces to have disks of their own (unshare)")
    home = tmp_path / "service"
    options: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "training": {
            "max_steps": 8,
            "batch_size": 8,
            "per_device_train_batch_size": 4,
            "tokens_per_micro_batch": 256,
            "learning_rate": 1e-3,
        },
        "distributed": {
            "nproc_per_node": 1,
            "replicate": 1,
            "activation_checkpointing": "none",
            "compile": False,
        },
    }
    two = ("ftjob-1", "ftjob-2")
    with local_s3() as environment, open_cluster(mounts=True) as cluster:
        url = new_bucket()
        places = Places(home, ObjectStore(url))
        places.files_dir.mkdir(parents=True)
        stored = Path(shutil.copyfile(data, places.files_dir / "file-1"))
        places.keep("file-1")
        profile = profile_for(cluster, home, environment, volumes=[], volume_mounts=[], slots=1)
        launcher = ClusterEngineLauncher(cluster.launcher(profile, home, storage=url), places)
        engines = EngineOptions(most_seats=4, idle_seconds=20.0)
        reconciler = Reconciler(
            store, launcher, places, ReconcilerOptions(idle_seconds=0.1, engines=engines)
        )
        request.addfinalizer(reconciler.close)
        for rank, job_id in zip((2, 4), two, strict=True):
            lora = {"r": rank, "lora_dropout": 0.1}
            add_two_node_job(store, models, stored, job_id=job_id, lora=lora, **options)
        while any(get(store, job_id).state is State.VALIDATING for job_id in two):
            if (claim := reconciler._claim_active()) is not None:
                reconciler._reconcile(*claim)

        def done() -> bool:
            reconciler.step()
            states = [get(store, job_id).state for job_id in two]
            assert State.FAILED not in states, [messages(store, job_id) for job_id in two]
            return states == [State.SUCCEEDED] * 2

        eventually(done, every=TURN_SECONDS)
        starts = [places.run(job_id).read("attempts/1/start.json", Start) for job_id in two]
        held = {start.engine for start in starts if start is not None}
        assert len(held) == 1, "one engine for both"
        assert Path(held.pop() or "").parent == home / ENGINES
        for job_id in two:
            run = places.run(job_id)
            assert complete_checkpoints(run) == ["step-4-a1", "step-8-a1"]
            spec = run.read("spec.json", JobSpec)
            assert spec is not None
            alone = trained(spec, tmp_path / "alone" / job_id, 1)
            assert losses(run) == losses(alone)
            whole = adapter(alone)
            assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(run).items())
