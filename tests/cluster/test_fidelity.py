"""What the launcher relies on in Kubernetes, asked of our own cluster, or of the one that
KUBECONFIG names: they must agree.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import plane
from tests.cluster.harness import HarnessCluster, open_cluster
from tests.cluster.jobs import SECONDS, Jobs
from tests.support.attempts import wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[HarnessCluster]:
    with open_cluster() as cluster:
        yield cluster


@pytest.fixture
def jobs(cluster: HarnessCluster) -> Jobs:
    return Jobs(cluster)


def test_a_name_is_taken_once_and_an_old_version_cannot_be_written(jobs: Jobs) -> None:
    name = jobs.create("sleep 60", suspend=True)
    again = jobs.post("true", name)
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyExists")
    job = jobs.cluster.get("jobs", name)
    jobs.cluster.patch_job(name, {"metadata": {"labels": {"changed": "yes"}}})
    stale = jobs.cluster.http.put(f"{jobs.folder}/{name}", json=job)
    assert (stale.status_code, stale.json()["reason"]) == (409, "Conflict")


def test_a_suspended_job_has_no_pods_until_it_is_resumed(jobs: Jobs) -> None:
    name = jobs.create("true", suspend=True)
    jobs.wait_for(name, "Suspended")
    assert jobs.pods(name) == []
    jobs.cluster.patch_job(name, {"spec": {"suspend": False}})
    jobs.wait_for(name, "Complete")
    assert "SuccessCriteriaMet" in jobs.conditions(name)


def test_pods_are_named_and_labelled_by_their_index(jobs: Jobs) -> None:
    name = jobs.create("sleep 60")
    wait_for(lambda: all(jobs.cluster.pod(name, index) for index in range(2)), SECONDS)
    for pod in jobs.pods(name):
        index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        assert pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == index
        assert pod["spec"]["hostname"] == f"{name}-{index}"


def test_an_exit_code_of_the_policy_ends_all_pods_and_names_its_rule(jobs: Jobs) -> None:
    name = jobs.create('[ "$INDEX" = 0 ] && exit 64; exec sleep 60')
    failed = jobs.wait_for(name, "Failed")
    assert failed["reason"] == "PodFailurePolicy"
    assert "failed with exit code 64 matching FailJob rule at index 0" in failed["message"]
    assert "FailureTarget" in jobs.conditions(name)
    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in jobs.pods(name)), (
        "it ends when its pods have"
    )


def test_any_other_failure_ends_it_too(jobs: Jobs) -> None:
    name = jobs.create('[ "$INDEX" = 0 ] && exit 1; exec sleep 60')
    assert jobs.wait_for(name, "Failed")["reason"] == "BackoffLimitExceeded"


def test_an_evicted_pod_is_marked(jobs: Jobs) -> None:
    name = jobs.create("exec sleep 60")
    pod = wait_for(lambda: jobs.cluster.pod(name, 1), SECONDS)
    jobs.cluster.evict(pod)

    def marked() -> bool:
        conditions = [c for p in jobs.pods(name) for c in p["status"].get("conditions", [])]
        return any(
            c["type"] == "DisruptionTarget" and c["reason"] == "EvictionByEvictionAPI"
            for c in conditions
        )

    assert marked() or jobs.wait_for(name, "Failed")
    jobs.wait_for(name, "Failed")


def test_pods_that_are_refused_are_told_at_their_job(jobs: Jobs, cluster: HarnessCluster) -> None:
    with cluster.quota_used_up():
        name = jobs.create("true", completions=1, parallelism=1)

        def told() -> dict[str, Any] | None:
            return next(
                (e for e in cluster.items("events") if e["involvedObject"]["name"] == name), None
            )

        event = wait_for(told, SECONDS)
        assert (event["type"], event["reason"], event["involvedObject"]["kind"]) == (
            "Warning",
            "FailedCreate",
            "Job",
        )
        assert event["message"].startswith("Error creating: pods ")
        assert jobs.pods(name) == []


def test_pods_that_have_ended_use_up_no_quota(jobs: Jobs, cluster: HarnessCluster) -> None:
    jobs.wait_for(jobs.create("true"), "Complete")
    running = sum(
        pod["status"]["phase"] not in ("Succeeded", "Failed") for pod in cluster.items("pods")
    )
    with cluster.quota_used_up(room=running + 1):
        jobs.wait_for(jobs.create("true", completions=1, parallelism=1), "Complete")


def test_a_pod_stays_until_its_node_and_its_job_have_let_it_go(
    jobs: Jobs, cluster: HarnessCluster
) -> None:
    """Deleted, and deleted by force: while its node says nothing it counts as alive, for the Job
    and for us.
    """
    name = jobs.create("exec sleep 60")
    pod = wait_for(lambda: cluster.pod(name, 0), SECONDS)
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}"
    cluster.kubelet.frozen = True
    try:
        cluster.http.delete(path).raise_for_status()
        cluster.http.delete(path, params={"gracePeriodSeconds": "0"}).raise_for_status()
        there = cluster.http.get(path).raise_for_status().json()
        assert (there["metadata"]["finalizers"], there["status"]["phase"]) == (
            ["batch.kubernetes.io/job-tracking"],
            "Running",
        )
        assert "Failed" not in jobs.conditions(name)
    finally:
        cluster.kubelet.frozen = False
    jobs.wait_for(name, "Failed")
    wait_for(lambda: cluster.http.get(path).status_code == 404, SECONDS)


def test_a_status_is_written_in_its_own_place(jobs: Jobs, cluster: HarnessCluster) -> None:
    """By a patch: labels are taken at both places, the status at one, the spec at the other."""
    name = jobs.create("exec sleep 60", completions=1, parallelism=1)
    pod = wait_for(lambda: cluster.pod(name, 0), SECONDS)
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}"
    kind = {"Content-Type": "application/merge-patch+json"}
    cluster.http.patch(path, json={"status": {"phase": "Failed"}}, headers=kind)
    assert cluster.http.get(path).json()["status"]["phase"] == "Running"
    body = {"metadata": {"labels": {"changed": "yes"}}, "spec": {"activeDeadlineSeconds": 5}}
    cluster.http.patch(f"{path}/status", json=body, headers=kind).raise_for_status()
    there = cluster.http.get(path).json()
    assert there["metadata"]["labels"]["changed"] == "yes"
    assert "activeDeadlineSeconds" not in there["spec"]


def test_replacing_a_whole_object_keeps_what_has_its_own_place(
    jobs: Jobs, cluster: HarnessCluster
) -> None:
    name = jobs.create("true", suspend=True)
    jobs.wait_for(name, "Suspended")
    path = f"{jobs.folder}/{name}"

    def put(path: str, **changes: Any) -> None:
        def done() -> bool:  # the Job's controller may write in between
            job = cluster.get("jobs", name)
            return cluster.http.put(path, json={**job, **changes}).is_success

        wait_for(done, SECONDS)

    put(path, status={"ready": 7})
    assert cluster.get("jobs", name)["status"].get("ready") != 7
    put(f"{path}/status", spec={**cluster.get("jobs", name)["spec"], "suspend": False})
    assert cluster.get("jobs", name)["spec"]["suspend"] is True


def test_what_is_created_has_no_status_yet(cluster: HarnessCluster) -> None:
    worker = {"name": "worker", "image": "x:1", "command": ["true"]}
    pod = {
        "metadata": {"name": f"p-{secrets.token_hex(3)}"},
        "spec": {"containers": [worker], "nodeSelector": {"none": "such"}},
    }
    pod["spec"] |= {"serviceAccountName": "ft-worker"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        **pod,
        "status": {"phase": "Succeeded", "reason": "Invented"},
    }
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    made = cluster.http.post(path, json=body).raise_for_status().json()
    assert (made["status"]["phase"], "reason" in made["status"]) == ("Pending", False)
    cluster.http.delete(f"{path}/{pod['metadata']['name']}").raise_for_status()


def test_nothing_foreign_is_placed_on_the_tests_node(cluster: HarnessCluster) -> None:
    """A shared cluster has pods that tolerate nothing and choose no node."""
    worker = {"name": "worker", "image": "x:1", "command": ["true"]}
    name = f"p-{secrets.token_hex(3)}"
    spec = {
        "containers": [worker],
        "serviceAccountName": "ft-worker",
        "nodeSelector": cluster.node_selector,
    }
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.http.post(path, json=body).raise_for_status()
    try:
        pod = wait_for(
            lambda: found if plane.conditions(found := cluster.get("pods", name)) else None
        )
        assert not pod["spec"].get("nodeName")
    finally:
        cluster.http.delete(f"{path}/{name}").raise_for_status()


def test_what_a_job_owns_goes_with_it(jobs: Jobs) -> None:
    name = jobs.create("exec sleep 60")
    wait_for(lambda: jobs.cluster.pod(name, 0), SECONDS)
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": name,
        "uid": jobs.cluster.get("jobs", name)["metadata"]["uid"],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [owner]},
    }
    spec = {"clusterIP": "None", "selector": {"a": "b"}}
    jobs.cluster.http.post(
        f"/api/v1/namespaces/{jobs.cluster.namespace}/services", json={**service, "spec": spec}
    ).raise_for_status()
    jobs.cluster.http.delete(
        f"{jobs.folder}/{name}", params={"propagationPolicy": "Background"}
    ).raise_for_status()
    wait_for(lambda: jobs.cluster.nothing_left(name), SECONDS)
