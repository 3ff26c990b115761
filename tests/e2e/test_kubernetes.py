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

from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.jobs.states import Job, State
from ft_service.launcher.kubernetes.manifests import object_name
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.rundir.checkpoints import complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Result, Start
from ft_service.serving import worker_tasks
from ft_service.spec import (
    BaseModelRef,
    DataFileRef,
    JobContext,
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
    store: Store, models: Path, data: Path, *, steps: int = STEPS, **changes: Any
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
            job_id=JOB,
            organization="local",
            model=BaseModelRef(name="tiny", path=str(models / "tiny")),
            training_data=DataFileRef(name=data.name, path=str(data), sha256=sha256_of(data)),
            validation_data=None,
            seed=1,
            gpus=0,
        ),
    )
    job = Job(
        id=JOB,
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
