"""What Helm itself makes of the chart: the objects that kustomize makes of the overlays, and clear
refusals of wrong values.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ft_service.launcher.kubernetes.profile import load_profiles
from ft_service.settings import Settings
from tests.cluster.versions import KUBERNETES_VERSIONS
from tests.support import helm
from tests.support.kustomize import KUBERNETES, NOT_KUBERNETES, OVERLAYS, Object, kustomize
from tests.support.pod_security import pods_in, violations

pytestmark = pytest.mark.docs
VALUES = helm.ROOT / "deploy/helm/values"
DIGEST = "sha256:" + "0123456789abcdef" * 4
EVERYTHING = {
    "api": {"replicas": 2},
    "coscheduling": True,
    "monitoring": True,
    "ingress": {"host": "ft.example.com"},
    "externalSecrets": {"store": {"kind": "ClusterSecretStore", "name": "secrets"}},
    "backup": {"schedule": "17 2 * * *"},
}
"""Values → the overlay gpu with every component."""
CASES: dict[str, dict[str, Any]] = {
    **{name: yaml.safe_load((VALUES / f"{name}.yaml").read_text()) for name in OVERLAYS},
    "default": {},
    "everything": yaml.safe_load((VALUES / "gpu.yaml").read_text()) | EVERYTHING,
    "digests": {
        "images": {
            "api": {"digest": DIGEST},
            "worker": {"repository": "reg.example/w", "digest": DIGEST},
        }
    },
    "numbers": {
        "config": {
            "FT_MAX_UPLOAD_BYTES": 17179869184,
            "FT_PREEMPT_AFTER_MINUTES": 0.5,
            "FT_METRICS_OPEN": True,
        },
        "persistence": {"home": {"size": "104857600Ki"}, "models": {"size": "5e11"}},
    },
    "files": {
        "config": {"FT_MODEL_ALIASES": "/etc/ft-files/aliases.yaml"},
        "extraVolumes": [{"name": "files", "configMap": {"name": "your-files"}}],
        "extraVolumeMounts": [{"name": "files", "mountPath": "/etc/ft-files", "readOnly": True}],
    },
    "own spread": {"api": {"replicas": 2, "podFields": {"topologySpreadConstraints": []}}},
    "openshift": {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "backup": {"schedule": "17 2 * * *"},
    },
    "research": {
        "workerNamespaces": ["ft-research"],
        "kueue": {"clusterQueue": "training"},
        "podProfile": {
            "queue": "ft-training",
            "queue_priority_classes": {"0": "normal", "10": "high"},
            "priority_classes": {"5": "soon"},
        },
    },
    "no policies": {"networkPolicies": False},
    "cloud": {
        "storage": "gs://b/ft",
        "api": {"replicas": 2},
        "config": {"FT_KEEP_RUNS_DAYS": 30, "FT_KEEP_FILES_DAYS": 90},
        "podProfile": {
            "queue": "ft-training",
            "queue_priority_classes": {"0": "normal", "10": "high"},
            "node_selector": {"cloud.google.com/gke-spot": "true"},
        },
        "kueue": {"clusterQueue": "training", "localQueue": "ft-training"},
    },
    "infiniband": {
        "podProfile": yaml.safe_load((KUBERNETES / "profiles/infiniband.yaml").read_text())
    },
    "own": {
        "imagePullSecrets": [{"name": "registry"}],
        "images": {"postgres": "reg.example/postgres:17"},
        "postgres": True,
        "backup": {"schedule": "17 2 * * *"},
        "api": {"podAnnotations": {"prometheus.io/scrape": "false", "mine": "1"}},
        "reconciler": {"podFields": {"terminationGracePeriodSeconds": 90}},
        "workerEgress": [{"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}],
        "monitoring": True,
        "metricsSecret": "ft-metrics",
        "config": {"FT_METRICS_OPEN": "false", "HTTPS_PROXY": "http://proxy:3128"},
        "ingress": {
            "host": "ft.example.com",
            "tlsSecret": "",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "2100m"},
        },
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "mine", "namespace": "{{ .Release.Namespace }}"},
            }
        ],
        "podProfile": {
            "requests_per_rank": {"cpu": 8, "memory": "64Gi"},
            "profiles": {"big": None, "small": {"slots": 1}},
        },
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tag as digest": ({"images": {"api": {"digest": "0.2.0"}}}, "digest"),
    "a size of no unit": ({"persistence": {"home": {"size": "100ki"}}}, "persistence/home/size"),
    "volumes beside the chart's": (
        {"api": {"podFields": {"volumes": [{"name": "files"}]}}},
        "podFields/volumes",
    ),
    "no such value": ({"apis": {}}, "apis"),
    "a queue that no job names": (
        {"kueue": {"clusterQueue": "training"}},
        "podProfile.queue must be kueue.localQueue",
    ),
    "no such field of a pod profile": ({"podProfile": {"slotz": 3}}, "slotz"),
    "no such field of one of several": (
        {"podProfile": {"profiles": {"big": {"slotz": 3}}}},
        "slotz",
    ),
    "a priority that is none": (
        {"podProfile": {"priority_classes": {"high": "p"}}},
        "priority_classes",
    ),
    "no such setting": ({"config": {"FT_ENGINE_JOB": 8}}, "FT_ENGINE_JOB"),
    "a secret in a ConfigMap": ({"config": {"FT_WANDB_API_KEY": "k"}}, "FT_WANDB_API_KEY"),
    "a password in a ConfigMap": (
        {"config": {"FT_DATABASE_URL": "postgresql://u:p@h/n"}},
        "FT_DATABASE_URL",
    ),
    "metrics that nobody may read": (
        {"monitoring": True, "config": {"FT_METRICS_OPEN": False}},
        "metricsSecret",
    ),
    "secrets of images twice": (
        {"api": {"podFields": {"imagePullSecrets": []}}},
        "podFields/imagePullSecrets",
    ),
    "two reconcilers": ({"reconciler": {"replicas": 2}}, "replicas"),
}


@pytest.fixture(scope="module")
def charts() -> dict[str, dict[str, Any]]:
    return helm.render({**CASES, **{name: values for name, (values, _) in REFUSED.items()}})


@pytest.fixture(scope="module")
def everything_of_kustomize(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and with it kustomize")
    folder = tmp_path_factory.mktemp("all")
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    overlay = folder / "kubernetes/overlays/all"
    overlay.mkdir()
    components = [
        f"../../components/{path.name}" for path in sorted((KUBERNETES / "components").iterdir())
    ]
    kustomization = {"resources": ["../gpu"], "components": components, "namespace": "ft"}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return kustomize(overlay)


def alike(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    """Objects by kind, namespace and name, without what says only who rendered them: the digest
    that kustomize appends to names of ConfigMaps, Helm's annotation in its place, and the name of
    the tool.
    """
    text = re.sub(
        r"\b(ft-(?:config|pod-profile))-[0-9a-z]{10}\b", r"\1", yaml.safe_dump_all(objects)
    )
    text = re.sub(r"(app\.kubernetes\.io/managed-by:) (?:kustomize|Helm)\b", r"\1 tool", text)
    found = {}
    for item in yaml.safe_load_all(text):
        item.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {}).pop(
            "checksum/config", None
        )
        if item["kind"] == "PersistentVolumeClaim":
            item["metadata"].pop("annotations", None)
        if "pod-profile.yaml" in item.get("data", {}):
            item["data"]["pod-profile.yaml"] = yaml.safe_load(item["data"]["pod-profile.yaml"])
        key = item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]
        assert key not in found, f"{key} twice"
        found[key] = item
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_is_the_overlay(charts: dict[str, dict[str, Any]], overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and with it kustomize")
    assert alike(charts[overlay]["objects"]) == alike(kustomize(KUBERNETES / "overlays" / overlay))


def test_the_chart_has_every_component(
    charts: dict[str, dict[str, Any]], everything_of_kustomize: list[Object]
) -> None:
    assert alike(charts["everything"]["objects"]) == alike(everything_of_kustomize)


def test_a_further_namespace_of_workers_is_the_projects_folder(
    charts: dict[str, dict[str, Any]],
) -> None:
    """But for the queue, whose name is the project's, and for labels."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and with it kustomize")

    def in_research(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
        found = {
            key: item
            for key, item in alike(objects).items()
            if key[1] == "ft-research" and key[0] != "LocalQueue"
        }
        for item in found.values():
            item["metadata"].pop("labels", None)
        return found

    assert in_research(charts["research"]["objects"]) == in_research(
        kustomize(KUBERNETES / "project")
    )


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing(charts: dict[str, dict[str, Any]], case: str) -> None:
    assert charts[case]["lint"] == []


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS[::2])
@pytest.mark.parametrize(
    "case", ["everything", "openshift", "research", "own", "no policies", "cloud", "infiniband"]
)
def test_what_no_overlay_has_fits_the_oldest_and_the_newest_version(
    charts: dict[str, dict[str, Any]], case: str, version: str
) -> None:
    for item in charts[case]["objects"]:
        if not item["apiVersion"].startswith(NOT_KUBERNETES):
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted(charts: dict[str, dict[str, Any]], case: str) -> None:
    """By the strictest of the Pod Security Standards, and with a root file system that it cannot
    write.
    """
    pods = dict(pods_in(charts[case]["objects"]))
    databases = (case in ("local", "own")) + (case in ("everything", "openshift", "own"))
    assert len(pods) == 2 + databases
    for name, pod in pods.items():
        assert violations(pod) == [], name
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name


@pytest.mark.parametrize("case", CASES)
def test_every_binding_names_the_namespace_of_its_account(
    charts: dict[str, dict[str, Any]], case: str
) -> None:
    """An API server refuses a ServiceAccount without one."""
    bindings = [item for item in charts[case]["objects"] if item["kind"] == "RoleBinding"]
    assert bindings
    assert {subject["namespace"] for item in bindings for subject in item["subjects"]} == {"ft"}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused_by_name(charts: dict[str, dict[str, Any]], case: str) -> None:
    assert REFUSED[case][1] in charts[case]["error"]


def deployment(objects: list[Object], name: str) -> Object:
    return next(
        o["spec"]["template"]["spec"]
        for o in objects
        if (o["kind"], o["metadata"]["name"]) == ("Deployment", name)
    )


def profile_of(objects: list[Object]) -> Object:
    return yaml.safe_load(
        next(
            o["data"]["pod-profile.yaml"]
            for o in objects
            if o["metadata"]["name"] == "ft-pod-profile"
        )
    )


def test_images_by_digest(charts: dict[str, dict[str, Any]]) -> None:
    objects = charts["digests"]["objects"]
    for name in ("ft-api", "ft-reconciler"):
        pod = deployment(objects, name)
        assert {c["image"] for c in pod["containers"] + pod["initContainers"]} == {
            f"ft-api@{DIGEST}"
        }
    assert profile_of(objects)["image"] == f"reg.example/w@{DIGEST}"


def test_with_object_storage_the_api_has_several_pods_and_data_has_ages(
    charts: dict[str, dict[str, Any]],
) -> None:
    objects = charts["cloud"]["objects"]
    assert named(objects, "Deployment")["ft-api"]["spec"]["replicas"] == 2
    assert "ft-api" in named(objects, "PodDisruptionBudget")
    config = named(objects, "ConfigMap")["ft-config"]["data"]
    assert (config["FT_STORAGE"], config["FT_KEEP_RUNS_DAYS"]) == ("gs://b/ft", "30")
    for name in ("ft-api", "ft-reconciler"):
        home = next(v for v in deployment(objects, name)["volumes"] if v["name"] == "home")
        assert "emptyDir" in home, "no disk is shared"


def test_claims_outlive_the_release(charts: dict[str, dict[str, Any]]) -> None:
    """And a value that leaves them out, such as `storage`: Helm would delete them with their
    data.
    """
    claims = [
        o["metadata"]
        for o in charts["everything"]["objects"]
        if o["kind"] == "PersistentVolumeClaim"
    ]
    assert {claim["name"] for claim in claims} == {"ft-home", "ft-models", "ft-backup"}
    assert all(claim["annotations"] == {"helm.sh/resource-policy": "keep"} for claim in claims)


def test_numbers_reach_the_service_as_they_are_written(charts: dict[str, dict[str, Any]]) -> None:
    config = next(
        o["data"] for o in charts["numbers"]["objects"] if o["metadata"]["name"] == "ft-config"
    )
    written = {name: config[name] for name in CASES["numbers"]["config"]}
    assert written == {
        "FT_MAX_UPLOAD_BYTES": "17179869184",
        "FT_PREEMPT_AFTER_MINUTES": "0.5",
        "FT_METRICS_OPEN": "true",
    }
    assert config["FT_METRICS_PORT"] == "9090"


def test_files_that_settings_name_are_mounted_where_they_are_read(
    charts: dict[str, dict[str, Any]],
) -> None:
    for name in ("ft-api", "ft-reconciler"):
        pod = deployment(charts["files"]["objects"], name)
        assert CASES["files"]["extraVolumes"][0] in pod["volumes"]
        assert CASES["files"]["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
        plain = deployment(charts["default"]["objects"], name)
        assert len(pod["volumes"]) == len(plain["volumes"]) + 1


def test_every_secret_that_the_values_say_is_read_from_a_file_is(
    charts: dict[str, dict[str, Any]],
) -> None:
    named = set(re.findall(r"\bFT_[A-Z_]+_FILE\b", (helm.CHART / "values.yaml").read_text()))
    assert named == {"FT_DATABASE_URL_FILE", "FT_OIDC_CLIENT_SECRET_FILE"}
    assert named <= {f"FT_{name.upper()}" for name in Settings.model_fields}


def test_constraints_of_the_operator_replace_the_charts(charts: dict[str, dict[str, Any]]) -> None:
    assert deployment(charts["own spread"]["objects"], "ft-api")["topologySpreadConstraints"] == []
    assert deployment(charts["everything"]["objects"], "ft-api")["topologySpreadConstraints"] != []


def test_openshift_may_choose_the_numbers(charts: dict[str, dict[str, Any]]) -> None:
    for name, pod in pods_in(charts["openshift"]["objects"]):
        assert pod["securityContext"].keys() == {
            "runAsNonRoot",
            "fsGroupChangePolicy",
            "seccompProfile",
        }, name


def test_a_change_of_settings_or_profile_replaces_the_pods() -> None:
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "config": {"config": {"FT_LOG_LEVEL": "debug"}},
        "profile": {"podProfile": {"slots": 9}},
    }
    sums = set()
    for rendered in helm.render(changes).values():
        for item in rendered["objects"]:
            if item["kind"] == "Deployment" and item["metadata"]["name"] == "ft-reconciler":
                sums.add(item["spec"]["template"]["metadata"]["annotations"]["checksum/config"])
    assert len(sums) == len(changes)


def test_the_values_that_make_overlays_are_those_of_the_folder() -> None:
    assert {path.stem for path in VALUES.iterdir()} == set(OVERLAYS)


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    """Objects of a kind, by name; the last one of several namespaces."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def test_what_an_operator_says_of_a_key_counts_once(charts: dict[str, dict[str, Any]]) -> None:
    """Rather than standing there beside the chart's, which is no YAML."""
    own = charts["own"]["objects"]
    plain = charts["default"]["objects"]
    notes = named(own, "Deployment")["ft-api"]["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/scrape"], notes["mine"]) == ("false", "1")
    assert notes["prometheus.io/port"] == "8000"
    assert deployment(own, "ft-reconciler")["terminationGracePeriodSeconds"] == 90
    assert deployment(plain, "ft-reconciler")["terminationGracePeriodSeconds"] == 30
    assert deployment(own, "ft-reconciler")["serviceAccountName"] == "ft-reconciler"
    ingress = named(own, "Ingress")["ft-api"]
    proxy = "nginx.ingress.kubernetes.io/proxy-"
    assert ingress["metadata"]["annotations"][f"{proxy}body-size"] == "2100m"
    assert ingress["metadata"]["annotations"][f"{proxy}read-timeout"] == "3600"
    assert ingress["spec"]["tls"] == [{"hosts": ["ft.example.com"]}]


def test_every_pod_pulls_with_the_secrets_that_are_given(
    charts: dict[str, dict[str, Any]],
) -> None:
    pods = dict(pods_in(charts["own"]["objects"]))
    assert len(pods) == 4
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    images = {c["image"] for pod in pods.values() for c in pod["containers"]}
    assert "reg.example/postgres:17" in images


def test_prometheus_has_a_key_where_metrics_are_not_open(
    charts: dict[str, dict[str, Any]],
) -> None:
    monitors = {
        case: named(charts[case]["objects"], "PodMonitor")["ft"] for case in ("own", "everything")
    }
    given = {
        case: [end.get("authorization") for end in found["spec"]["podMetricsEndpoints"]]
        for case, found in monitors.items()
    }
    key = {"credentials": {"name": "ft-metrics", "key": "key"}}
    assert given == {"own": [key, key], "everything": [None, None]}


def test_policies_can_be_left_out_whole_and_let_more_out(
    charts: dict[str, dict[str, Any]],
) -> None:
    off = charts["no policies"]["objects"]
    assert named(off, "NetworkPolicy") == {}
    assert profile_of(off)["network_policy"] is False
    assert "network_policy" not in profile_of(charts["default"]["objects"])
    own, plain = (
        named(charts[case]["objects"], "NetworkPolicy")["ft-workers"]["spec"]["egress"]
        for case in ("own", "default")
    )
    assert own == [*plain, *CASES["own"]["workerEgress"]]


@pytest.mark.parametrize("case", CASES)
def test_the_service_takes_every_profile_that_the_chart_renders(
    charts: dict[str, dict[str, Any]], case: str, tmp_path: Path
) -> None:
    path = tmp_path / "pod-profile.yaml"
    path.write_text(yaml.safe_dump(profile_of(charts[case]["objects"])))
    loaded = load_profiles(path)
    if case == "research":
        assert loaded.first.queue_class_of(12) == "high"
        assert loaded.first.class_of(4) is None


def test_a_namespace_of_workers_has_its_queue(charts: dict[str, dict[str, Any]]) -> None:
    queues = [o for o in charts["research"]["objects"] if o["kind"] == "LocalQueue"]
    assert {(o["metadata"]["namespace"], o["spec"]["clusterQueue"]) for o in queues} == {
        ("ft", "training"),
        ("ft-research", "training"),
    }


def test_objects_of_the_operators_are_there_with_values_filled_in(
    charts: dict[str, dict[str, Any]],
) -> None:
    assert named(charts["own"]["objects"], "ConfigMap")["mine"]["metadata"]["namespace"] == "ft"
