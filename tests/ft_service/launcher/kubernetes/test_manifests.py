"""The objects of an attempt: golden files, and the schemas of the Kubernetes versions that are
supported.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from ft_service import __version__
from ft_service.host.environment import child_environment
from ft_service.launcher.kubernetes.manifests import (
    AttemptShape,
    Site,
    describe_manifest,
    grace_periods,
    job_manifest,
    object_name,
    owned_manifests,
)
from ft_service.launcher.kubernetes.profile import PodProfile, load_profiles
from ft_service.launcher.kubernetes.volumes import VisibleFiles
from tests.cluster.versions import KUBERNETES_VERSIONS
from tests.support.pod_security import violations

GOLDEN = Path(__file__).parent / "golden"


JOB = "ftjob-aB3dE5gH7jK9mN1pQ3sT5vX7"


HOME = Path("/var/lib/ft")
ENGINE_ID = "engine-aB3dE5gH7jK9mN1pQ3sT5vX7"
RUN = HOME / "runs" / JOB


LOCAL = {"image": "ft-worker:dev", "gpu_resource": None, "slots": 4, "ranks_per_node": 2}


LOCAL |= {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "ft-data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/var/lib/ft"}],
}


CASES: dict[str, tuple[AttemptShape, dict[str, Any], dict[str, Any]]] = {
    "one-cpu-pod": (
        AttemptShape(
            JOB,
            1,
            1,
            2,
            RUN,
            VisibleFiles((HOME / "models", HOME / "files/file-1", HOME / "runs/ftjob-0/adapter")),
        ),
        {**LOCAL, "termination_grace_seconds": 25},
        {"models": (HOME / "models",)},
    ),
    "engine": (
        AttemptShape(
            ENGINE_ID,
            1,
            1,
            2,
            HOME / "engines" / ENGINE_ID,
            VisibleFiles(
                (HOME / "models",),
                (HOME / "project-runs/proj_1",),
                {
                    HOME / name: HOME / "engines" / f"{ENGINE_ID}.data" / name
                    for name in ("files", "tokens")
                },
            ),
        ),
        {**LOCAL, "queue": "training"},
        {"models": (HOME / "models",)},
    ),
    "two-gpu-nodes": (
        AttemptShape(JOB, 12, 2, 8, RUN),
        {
            "image": "registry.example/ft-worker@sha256:" + "0" * 64,
            "image_pull_secrets": ["registry"],
            "slots": 16,
            "ranks_per_node": 8,
            "requests": {"cpu": "32", "memory": "512Gi", "rdma/ib": 1},
            "limits": {"memory": "512Gi", "rdma/ib": 1},
            "node_selector": {"node.kubernetes.io/instance-type": "gpu-8"},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            ],
            "priority_class": "training",
            "runtime_class": "nvidia",
            "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
            "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
            "volumes": [
                {
                    "name": "models",
                    "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
                }
            ],
            "volume_mounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            "cache_volume": {"hostPath": {"path": "/var/cache/ft", "type": "DirectoryOrCreate"}},
            "shm_size": "16Gi",
            "scratch_size": "50Gi",
            "add_capabilities": ["IPC_LOCK"],
            "active_deadline_seconds": 86400,
            "queue": "training",
            "queue_priority_class": "high",
        },
        {"storage": "s3://bucket/ft", "stop_grace_seconds": 120.0},
    ),
}


def objects_of(case: str) -> list[dict[str, Any]]:
    attempt, profile, site = CASES[case]
    checked = PodProfile.model_validate(profile)
    job = job_manifest(attempt, checked, Site("training", HOME, **site))
    created = {
        **job,
        "metadata": {**job["metadata"], "uid": "7f2c9b8e-0000-0000-0000-000000000000"},
    }
    return [job, *owned_manifests(created, checked)]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    """FT_GOLDEN=1 writes them again."""
    path = GOLDEN / f"{case}.yaml"
    found = yaml.safe_dump_all(objects_of(case), sort_keys=False, width=120)
    if os.environ.get("FT_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def attempt_of(profile: PodProfile, nodes: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Job of an attempt, and the spec of its pods."""
    shape = AttemptShape(JOB, 3, nodes, profile.ranks_per_node, RUN)
    job = job_manifest(shape, profile, Site("training", HOME, "s3://bucket/ft"))
    return job, job["spec"]["template"]["spec"]


PROFILES = sorted((Path(__file__).parents[4] / "deploy/kubernetes/profiles").glob("*.yaml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_example_of_a_profile_makes_valid_jobs(path: Path) -> None:
    for name, profile in load_profiles(path).by_name.items():
        job, pod = attempt_of(profile)
        kubernetes_validate.validate(job, KUBERNETES_VERSIONS[-1], strict=True)
        assert profile.env_from or profile.mounts(HOME), name
        assert violations(pod) == [], name


@pytest.mark.parametrize(
    ("gang", "scheduler", "of_job", "of_pods"),
    [
        (
            "volcano",
            "volcano",
            {
                "scheduling.volcano.sh/group-min-member": "2",
                "scheduling.volcano.sh/queue-name": "q",
            },
            {},
        ),
        (
            "kai",
            "kai-scheduler",
            {"kai.scheduler/batch-min-member": "2"},
            {"kai.scheduler/queue": "q"},
        ),
        (
            "coscheduling",
            "scheduler-plugins-scheduler",
            {},
            {"scheduling.x-k8s.io/pod-group": "ft-ab3de5gh7jk9mn1pq3st5vx7-3"},
        ),
    ],
)
def test_a_gang_is_all_pods_of_the_attempt(
    gang: str, scheduler: str, of_job: dict[str, str], of_pods: dict[str, str]
) -> None:
    profile = PodProfile.model_validate(
        {**LOCAL, "gang": gang, "scheduler_queue": "q", "annotations": {"a": "1"}}
    )
    job, pod = attempt_of(profile)
    template = job["spec"]["template"]["metadata"]
    assert pod["schedulerName"] == scheduler
    assert job["metadata"].get("annotations", {}) == of_job
    assert of_pods.items() <= template["labels"].items()
    assert template["annotations"] == {"a": "1", **(of_job if gang == "volcano" else {})}
    groups = [
        item
        for item in owned_manifests({**job, "metadata": {**job["metadata"], "uid": "u"}}, profile)
        if item["kind"] == "PodGroup"
    ]
    assert [(group["metadata"]["name"], group["spec"]) for group in groups] == (
        [(job["metadata"]["name"], {"minMember": 2})] if gang == "coscheduling" else []
    )
    assert (
        attempt_of(PodProfile.model_validate({**LOCAL, "scheduler_name": "mine"}))[1][
            "schedulerName"
        ]
        == "mine"
    )


def test_the_cluster_may_choose_users_and_claims_are_the_workers() -> None:
    own = {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}}
    profile = PodProfile.model_validate(
        {
            **LOCAL,
            "run_as_user": None,
            "run_as_group": None,
            "resource_claims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}],
            "init_containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i", **own}],
            "host_network": True,
        }
    )
    _, pod = attempt_of(profile)
    assert pod["securityContext"].keys() == {
        "runAsNonRoot",
        "fsGroupChangePolicy",
        "seccompProfile",
    }
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    confined, given = (container["securityContext"] for container in pod["initContainers"])
    assert (confined["readOnlyRootFilesystem"], confined["capabilities"]) == (
        True,
        {"drop": ["ALL"]},
    )
    assert (given["readOnlyRootFilesystem"], given["capabilities"]["add"]) == (True, ["NET_ADMIN"])
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gang": "kai", "queue": "q"}, "gang = 'kai' with queue = 'q'"),
        ({"scheduler_queue": "q"}, "only with gang"),
        ({"resource_claims": [{}]}, r"resource_claims\[0\]: Object missing required field `name`"),
        ({"gang": "slurm"}, "gang"),
    ],
)
def test_fields_that_cannot_work_together_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PodProfile.model_validate({**LOCAL, **fields})


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_supported_version_knows_every_field(case: str, version: str) -> None:
    for found in objects_of(case):
        kubernetes_validate.validate(found, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    job = objects_of("one-cpu-pod")[0]
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES_VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    ("longest", "asked", "ranks", "pod"),
    [
        (None, 60.0, 60.0, 90),
        (25, 120.0, 20.0, 25),
        (25, 10.0, 10.0, 25),
        (10, 60.0, 8.0, 10),
        (600, 1000.0, 570.0, 600),
    ],
)
def test_a_pod_ends_within_the_notice_that_its_node_gets(
    longest: int | None, asked: float, ranks: float, pod: int
) -> None:
    profile = PodProfile.model_validate({**LOCAL, "termination_grace_seconds": longest})
    site = Site("training", HOME, stop_grace_seconds=asked)
    assert grace_periods(profile, site) == (ranks, pod)
    spec = job_manifest(AttemptShape(JOB, 1, 1, 1, RUN), profile, site)["spec"]["template"]["spec"]
    words = spec["containers"][0]["args"]
    assert (spec["terminationGracePeriodSeconds"], words[words.index("--grace") + 1]) == (
        pod,
        f"{ranks:g}",
    )


def test_ranks_get_the_profiles_variables_and_no_credential_of_the_pod() -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    plain = {"NCCL_DEBUG": "INFO", "MY_PLUGIN": "1", "AWS_ENDPOINT_URL": "http://s3"}
    env = [
        {"name": "AWS_SECRET_ACCESS_KEY", **secret},
        *({"name": key, "value": value} for key, value in plain.items()),
    ]
    profile = PodProfile.model_validate({**LOCAL, "env": env})
    spec = job_manifest(AttemptShape(JOB, 1, 1, 1, RUN), profile, Site("training", HOME))["spec"][
        "template"
    ]["spec"]
    pod = {entry["name"]: entry.get("value", "secret") for entry in spec["containers"][0]["env"]}
    assert {"AWS_SECRET_ACCESS_KEY", *plain} <= set(pod)
    ranks = child_environment(pod)
    assert {"NCCL_DEBUG", "MY_PLUGIN"} == set(ranks) & {"AWS_SECRET_ACCESS_KEY", *plain}


def test_pods_carry_the_common_labels_and_the_operator_names_the_instance() -> None:
    for given, instance in (({}, "ft"), ({"app.kubernetes.io/instance": "blue"}, "blue")):
        profile = PodProfile.model_validate({**LOCAL, "labels": given})
        labels = job_manifest(AttemptShape(JOB, 1, 1, 1, RUN), profile, Site("training", HOME))[
            "spec"
        ]["template"]["metadata"]["labels"]
        common = {
            key.partition("/")[2]: value
            for key, value in labels.items()
            if key.startswith("app.kubernetes.io/")
        }
        assert common == {
            "name": "ft-worker",
            "instance": instance,
            "version": __version__,
            "component": "worker",
            "part-of": "ft-service",
            "managed-by": "ft-service",
        }


def test_names_are_deterministic_and_fit_a_host_name() -> None:
    assert object_name(JOB, 3) == "ft-ab3de5gh7jk9mn1pq3st5vx7-3"
    assert (
        object_name("some other id!", 1)
        == object_name("some other id!", 1)
        != object_name("some other id?", 1)
    )
    assert len(f"{object_name(JOB, 99_999)}-511") <= 63
    assert object_name(ENGINE_ID, 1) == "ft-engine-ab3de5gh7jk9mn1pq3st5vx7-1"


@pytest.mark.parametrize("user", [10001, 5000, None])
def test_any_user_may_enter_what_is_mounted_below_the_home(user: int | None) -> None:
    """In the image the home is its user's alone, and a mount below it cannot be reached by others
    (OpenShift's users).
    """
    image = (Path(__file__).parents[4] / "deploy/containers/worker.Dockerfile").read_text()
    assert "useradd --uid 10001 " in image
    assert "install -d -m 0700 -o ft -g ft /var/lib/ft " in image
    profile = PodProfile.model_validate({**LOCAL, "run_as_user": user})
    site = Site("ft", HOME, models=(HOME / "models",))
    described = describe_manifest("d", HOME / "models/tiny", profile, site, memory=1, seconds=1)[
        "spec"
    ]["template"]["spec"]
    trained = job_manifest(AttemptShape(JOB, 1, 1, 2, RUN), profile, site)["spec"]["template"][
        "spec"
    ]
    for pod in (trained, described):
        below = [
            mount
            for mount in pod["containers"][0]["volumeMounts"]
            if mount["mountPath"].startswith("/var/lib/ft")
        ]
        own = [mount for mount in below if mount["mountPath"] == "/var/lib/ft"]
        assert len(below) > len(own)
        assert own == ([] if user == 10001 else [{"name": "home", "mountPath": "/var/lib/ft"}])
        assert {"name": "home", "emptyDir": {}} in pod["volumes"] or not own


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_job_of_one_gpu_takes_a_share_of_a_node(path: Path) -> None:
    """Of processors, memory and cards, so that as many such jobs fit there as it has GPUs. Where a
    claim gives all GPUs of a node, it takes a node.
    """
    for profile in load_profiles(path).by_name.values():
        one, all_ranks = (
            job_manifest(AttemptShape(JOB, 1, 1, ranks, RUN), profile, Site("training", HOME))[
                "spec"
            ]["template"]["spec"]["containers"][0]["resources"]
            for ranks in (1, profile.ranks_per_node)
        )
        if profile.resource_claims:
            assert one == all_ranks
            continue
        ranks = profile.ranks_per_node
        assert one["limits"]["nvidia.com/gpu"] == 1
        assert all_ranks["limits"]["nvidia.com/gpu"] == ranks
        for name, quantity in profile.requests_per_rank.items():
            assert all_ranks["requests"][name] == quantity.replace(
                quantity.rstrip("GMik"), str(ranks * int(quantity.rstrip("GMik")))
            )
        assert {"cpu", "memory"} <= one["requests"].keys()


def test_without_policies_the_launcher_makes_none() -> None:
    profile = PodProfile.model_validate({**LOCAL, "network_policy": False})
    job, _ = attempt_of(profile)
    owner = {**job, "metadata": {**job["metadata"], "uid": "u"}}
    assert [item["kind"] for item in owned_manifests(owner, profile)] == ["Service"]
