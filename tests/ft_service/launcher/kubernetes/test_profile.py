from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from ft_service.errors import SpecError
from ft_service.launcher.kubernetes.manifests import (
    AttemptShape,
    Site,
    job_manifest,
)
from ft_service.launcher.kubernetes.profile import PodProfile, PodProfiles, load_profiles
from tests.cluster.versions import KUBERNETES_VERSIONS

PROFILES = Path(__file__).parents[4] / "deploy/kubernetes"


JOB = "ftjob-aB3dE5gH7jK9mN1pQ3sT5vX7"


HOME = Path("/var/lib/ft")


LOCAL = {"image": "ft-worker:dev", "gpu_resource": None, "slots": 4, "ranks_per_node": 2}


LOCAL |= {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "ft-data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/var/lib/ft"}],
}


def test_a_notice_too_short_to_stop_in_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({**LOCAL, "termination_grace_seconds": 5}))
    with pytest.raises(SpecError, match=r"termination_grace_seconds.*5.*10"):
        load_profiles(path)


@pytest.mark.parametrize(
    "path", sorted(PROFILES.rglob("pod-profile.yaml")), ids=lambda path: path.parent.name
)
def test_every_profile_in_deploy_loads(path: Path) -> None:
    load_profiles(path)


@pytest.mark.parametrize(
    ("priority", "queue_class", "pod_class"),
    [
        (-1, "lowest", None),
        (0, "normal", None),
        (9, "normal", "soon"),
        (10, "high", "soon"),
        (1000, "high", "soon"),
    ],
)
def test_a_jobs_priority_becomes_the_clusters_classes(
    priority: int, queue_class: str, pod_class: str | None
) -> None:
    profile = PodProfile.model_validate(
        {
            **LOCAL,
            "queue": "training",
            "queue_priority_class": "lowest",
            "queue_priority_classes": {0: "normal", 10: "high"},
            "priority_classes": {5: "soon"},
        }
    )
    job = job_manifest(
        AttemptShape(JOB, 1, 1, 1, HOME / "runs" / JOB, priority=priority),
        profile,
        Site("training", HOME),
    )
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == queue_class
    assert job["spec"]["template"]["spec"].get("priorityClassName") == pod_class


SEVERAL: dict[str, Any] = {
    **LOCAL,
    "tolerations": [{"operator": "Exists"}],
    "profiles": {
        "h100": {"ranks_per_node": 8, "hardware": "H100"},
        "spot": {"slots": 32, "termination_grace_seconds": 25, "tolerations": []},
        "research": {"projects": ["proj_1"], "namespace": "ft-research", "queue": "research"},
        "old": {"projects": []},
    },
}


def loaded(folder: Path, content: object) -> PodProfiles:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_profiles(path)


def test_profiles_share_what_stands_beside_them_and_replace_it_whole(tmp_path: Path) -> None:
    profiles = loaded(tmp_path, SEVERAL).by_name
    assert list(profiles) == ["h100", "spot", "research", "old"]
    assert (
        profiles["h100"].slots,
        profiles["h100"].ranks_per_node,
        profiles["h100"].tolerations,
    ) == (
        4,
        8,
        [{"operator": "Exists"}],
    )
    assert (
        profiles["spot"].slots,
        profiles["spot"].ranks_per_node,
        profiles["spot"].tolerations,
    ) == (32, 2, [])
    assert {profile.image for profile in profiles.values()} == {"ft-worker:dev"}


@pytest.mark.parametrize(
    ("name", "project", "chosen"),
    [
        (None, "proj_1", "h100"),
        ("spot", "proj_2", "spot"),
        ("research", "proj_1", "research"),
        ("old", None, "old"),
    ],
)
def test_a_job_gets_the_profile_that_it_names_or_its_projects_first(
    tmp_path: Path, name: str | None, project: str | None, chosen: str
) -> None:
    assert loaded(tmp_path, SEVERAL).choose(name, project) == chosen
    own = {**SEVERAL, "profiles": dict(reversed(SEVERAL["profiles"].items()))}
    assert loaded(tmp_path, own).choose(None, "proj_1") == "research", (
        "its own comes first in this file"
    )
    assert loaded(tmp_path, own).choose(None, "proj_2") == "spot"


@pytest.mark.parametrize(
    ("name", "project", "says"),
    [
        (
            "a100",
            "proj_1",
            r"distributed.profile = 'a100': this project has no such kind.*Choose from h100, "
            r"spot, research,",
        ),
        ("research", "proj_2", r"Choose from h100, spot, or leave it out"),
        ("old", "proj_1", r"Choose from h100, spot, research"),
    ],
)
def test_a_profile_that_a_project_may_not_use_is_refused_with_those_it_may(
    tmp_path: Path, name: str, project: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        loaded(tmp_path, SEVERAL).choose(name, project)
    assert refused.value.param == "distributed.profile"


def test_a_project_without_any_profile_is_told_whom_to_ask(tmp_path: Path) -> None:
    profiles = loaded(tmp_path, {**LOCAL, "profiles": {"a": {"projects": ["proj_1"]}}})
    with pytest.raises(SpecError, match="The operator has to give it one"):
        profiles.choose(None, "proj_2")


def test_a_file_of_one_profile_has_no_names(tmp_path: Path) -> None:
    assert loaded(tmp_path, LOCAL).choose(None, "proj_1") is None
    with pytest.raises(
        SpecError, match=r"'h100': this project has no such kind of pods. Leave it out"
    ):
        loaded(tmp_path, LOCAL).choose("h100", "proj_1")


@pytest.mark.parametrize(
    ("profiles", "says"),
    [
        ({}, "give each a name"),
        ({"H100": {}}, "give each a name"),
        ([{"name": "a"}], "give each a name"),
        ({"a": {"colour": "red"}}, r"profiles\.a: colour: there is no such option"),
        ({"a": {"slots": 0}}, r"profiles\.a: slots = 0"),
    ],
)
def test_wrong_profiles_are_named(tmp_path: Path, profiles: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        loaded(tmp_path, {**LOCAL, "profiles": profiles})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"tolerations": [{"operator": "Exists"}, {"key": "k", "efect": "NoSchedule"}]},
            r"tolerations\[1\]\.efect: Kubernetes' Toleration has no such field; did you mean "
            r"effect\?",
        ),
        (
            {
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"labelSelector": {"match": {}}}
                        ]
                    }
                }
            },
            r"affinity\.podAffinity\.required\w+\[0\]\.labelSelector\.match: .*matchLabels",
        ),
        (
            {"volumes": [{"name": "a", "emptyDir": {"sizelimit": "1Gi"}}]},
            r"volumes\[0\]\.emptyDir\.sizelimit: .*sizeLimit",
        ),
        ({"cache_volume": {"hostpath": {"path": "/cache"}}}, r"cache_volume\.hostpath: .*hostPath"),
        (
            {"volume_mounts": [{"name": "data", "mountPath": "/x", "colour": 1}]},
            r"volume_mounts\[0\]\.colour: .*it has .*mountPath",
        ),
        ({"topology_spread": [{"maxSkews": 1}]}, r"topology_spread\[0\]\.maxSkews: .*maxSkew"),
        (
            {"init_containers": [{"name": "a", "securityContext": {"runAsUsr": 1}}]},
            r"\[0\]\.securityContext\.runAsUsr: .*runAsUser",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"nam": "s"}}}]},
            r"env\[0\]\.valueFrom\.secretKeyRef\.nam: .*name",
        ),
        ({"env_from": [{"secretRefs": {"name": "s"}}]}, r"env_from\[0\]\.secretRefs: .*secretRef"),
        (
            {"resource_claims": [{"name": "a", "resourceClaim": "s"}]},
            r"resource_claims\[0\]\.resourceClaim: .*resourceClaimName",
        ),
        (
            {"env": [{"name": "A", "value": 1}]},
            r"env\[0\]\.value: Expected `str \| null`, got `int`",
        ),
    ],
)
def test_what_kubernetes_does_not_know_in_an_objects_field_is_refused_by_its_path(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=rf"FT_POD_PROFILE = .*: profiles\.a: .*{says}") as refused:
        loaded(tmp_path, {**LOCAL, "profiles": {"a": given}})
    assert refused.value.param == "FT_POD_PROFILE"


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("1048576Ki", 2**30),
        ("1.5Gi", 3 * 2**29),
        ("500M", 500_000_000),
        ("2e9", 2_000_000_000),
        ("2E", 2 * 10**18),
        ("128974848000m", 128_974_848),
        (".5Gi", 2**29),
        (4096, 4096),
        (2.5e9, 2_500_000_000),
    ],
)
def test_a_pods_memory_is_read_as_kubernetes_reads_it(given: str | float, size: int) -> None:
    profile = PodProfile.model_validate({**LOCAL, "limits": {"memory": given}})
    assert profile.memory_limit == (size, 0)


def test_numbers_of_yaml_are_quantities_as_in_a_pods_manifest() -> None:
    profile = PodProfile.model_validate({**LOCAL, "requests": {"cpu": 0.5, "rdma/ib": 1}})
    assert profile.requests == {"cpu": "0.5", "rdma/ib": "1"}
    for wrong in (True, float("nan"), float("inf"), -0.5):
        with pytest.raises(ValidationError):
            PodProfile.model_validate({**LOCAL, "requests": {"cpu": wrong}})


@pytest.mark.parametrize("given", ["4ki", "4K", "4gi", "4mi", "4 Gi", "Gi", "4GiB", "-1", "."])
def test_what_is_no_quantity_of_kubernetes_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(SpecError, match=r"shm_size = .*must match"):
        loaded(tmp_path, {**LOCAL, "shm_size": given})


def test_priorities_may_be_texts_as_helm_makes_them() -> None:
    """Keys of Helm's values are texts, whatever they were in the file."""
    given = {
        "queue_priority_classes": {"0": "normal", "-5": "low"},
        "priority_classes": {"10": "p"},
    }
    profile = PodProfile.model_validate({**LOCAL, "queue": "training", **given})
    assert profile.queue_priority_classes == {0: "normal", -5: "low"}
    assert (profile.class_of(9), profile.class_of(10)) == (None, "p")
    for wrong in ({"0.5": "p"}, {"high": "p"}, {0: "p", "0": "q"}):
        with pytest.raises(ValidationError, match="priority_classes"):
            PodProfile.model_validate({**LOCAL, "priority_classes": wrong})


@pytest.mark.parametrize(
    ("shared", "each", "ranks", "found"),
    [
        (None, "12", 8, "96"),
        (None, "128Gi", 1, "128Gi"),
        ("16Gi", "128Gi", 8, "1040Gi"),
        ("2", "500m", 3, "3500m"),
        ("1Gi", "500M", 1, "1573741824"),
        (None, "0.5", 3, "1.5"),
        (None, 4, 8, "32"),
    ],
)
def test_a_pod_takes_what_its_ranks_take(
    shared: str | None, each: str | int, ranks: int, found: str
) -> None:
    given = {} if shared is None else {"requests": {"it": shared}}
    profile = PodProfile.model_validate({**LOCAL, **given, "requests_per_rank": {"it": each}})
    assert profile.resources(ranks)["requests"] == {"it": found}


def test_ranks_get_their_gpus_by_one_field() -> None:
    with pytest.raises(ValidationError, match=r"limits_per_rank.*gpu_resource"):
        PodProfile.model_validate(
            {**LOCAL, "gpu_resource": "nvidia.com/gpu", "limits_per_rank": {"nvidia.com/gpu": 1}}
        )
