"""Jobs of several pod profiles, side by side in a cluster: real Jobs and pods, a reconciler for
each profile.
"""

from __future__ import annotations

import threading
from pathlib import Path

from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs.reconciler import ReconcilerOptions
from ft_service.control.jobs.reconcilers import run_all
from ft_service.control.places.capacity import host_of_profile
from ft_service.jobs.states import State
from ft_service.launcher.kubernetes.kubernetes_launcher import KubernetesLauncher
from ft_service.launcher.kubernetes.manifests import Site
from ft_service.spec import DataFileRef, DistributedOptions
from ft_service.storage.locations import Places
from tests.cluster.harness import HarnessCluster
from tests.support.attempts import wait_for
from tests.support.pods import SECONDS, profile_for
from tests.support.reconciling import add_job, get, messages, new_store


def test_each_job_runs_as_pods_of_its_profile(cluster: HarnessCluster, tmp_path: Path) -> None:
    store = new_store(tmp_path)
    stop = threading.Event()
    launchers = []
    for number, name in enumerate(("big", "spot")):
        labels = {"ft-test/profile": name}
        profile = profile_for(
            tmp_path, "event,succeed", node_selector=cluster.node_selector, labels=labels, slots=2
        )
        site = Site(cluster.namespace, tmp_path, stop_grace_seconds=20.0)
        host = host_of_profile("kubernetes", name)
        launchers.append(
            KubernetesLauncher(
                cluster.client(), profile, site, host=host, lists=not number, watch=False
            )
        )
    data = tmp_path / "files/file-1"
    data.parent.mkdir()
    data.touch()
    for name in ("spot", "big"):
        add_job(
            store,
            f"ftjob-{name}",
            host=host_of_profile("kubernetes", name),
            training_data=DataFileRef(name="train.jsonl", path=str(data), sha256="0"),
            distributed=DistributedOptions(nproc_per_node=2, profile=name),
        )
    options = ReconcilerOptions(check=lambda job, examiner, tell: Checked(), idle_seconds=0.2)
    thread = threading.Thread(
        target=run_all, args=(store, launchers, Places(tmp_path), options, stop)
    )
    thread.start()
    try:
        for name in ("big", "spot"):
            wait_for(
                lambda name=name: get(store, f"ftjob-{name}").state is State.SUCCEEDED, SECONDS
            )
            jobs = [
                job
                for job in cluster.items("jobs")
                if job["metadata"]["labels"]["ft-service/job"] == f"ftjob-{name}"
            ]
            assert [job["metadata"]["labels"]["ft-test/profile"] for job in jobs] == [name], (
                messages(store, f"ftjob-{name}")
            )
    finally:
        stop.set()
        thread.join(SECONDS)
    assert [launcher.unfinished() for launcher in launchers] == [[], []]
    store.close()
