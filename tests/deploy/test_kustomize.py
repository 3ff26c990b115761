"""What kustomize makes of deploy/kubernetes: valid for every supported Kubernetes, with no right
and no secret too many.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ft_service import __version__
from ft_service.launcher.kubernetes.manifests import (
    AttemptShape,
    Site,
    describe_manifest,
    job_manifest,
)
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.settings import Settings
from tests.cluster.versions import KUBERNETES_VERSIONS
from tests.support.kustomize import (
    KUBERNETES,
    NOT_KUBERNETES,
    OVERLAYS,
    Object,
    documents_of,
    kustomize,
)

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    """Overlay → its objects."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and with it kustomize")
    found = {}
    for name in OVERLAYS:
        found[name] = kustomize(KUBERNETES / "overlays" / name)
    return found


def pods_of(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield f"{item['kind']} {item['metadata']['name']}", item["spec"]["template"]["spec"]


def config_of(objects: list[Object], name: str) -> dict[str, str]:
    return next(
        o["data"]
        for o in objects
        if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith(f"{name}-")
    )


def test_claim_templates_are_as_the_api_server_keeps_them() -> None:
    """What it fills in is a difference at every apply."""
    sets = [
        d
        for path in KUBERNETES.rglob("*.yaml")
        for d in documents_of(path.read_text())
        if d.get("kind") == "StatefulSet"
    ]
    claims = [claim for found in sets for claim in found["spec"]["volumeClaimTemplates"]]
    filled = {(claim["apiVersion"], claim["kind"], claim["spec"]["volumeMode"]) for claim in claims}
    assert filled == {("v1", "PersistentVolumeClaim", "Filesystem")}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_file_fits_every_supported_version(version: str) -> None:
    """As it stands: this needs no kubectl."""
    checked = 0
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for document in documents_of(path.read_text()):
            if "kind" in document and not document["apiVersion"].startswith(NOT_KUBERNETES):
                kubernetes_validate.validate(document, version, strict=True)
                checked += 1
    assert checked > 15


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_fits_every_supported_version(
    rendered: dict[str, list[Object]], overlay: str, version: str
) -> None:
    for item in rendered[overlay]:
        if not item["apiVersion"].startswith(NOT_KUBERNETES):
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_runs_as_root_or_may_become_it(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    for name, pod in pods_of(rendered[overlay]):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is (name == "Deployment ft-reconciler"), name
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name
            assert not container["image"].endswith(":latest"), name
            assert ":" in container["image"], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_never_held(rendered: dict[str, list[Object]], overlay: str) -> None:
    assert not [item for item in rendered[overlay] if item["kind"] == "Secret"]
    text = yaml.safe_dump_all(rendered[overlay])
    assert not re.search(r"(?i)(password|secret_access_key|api_key):\s*\S", text)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_reconciler_has_rights_and_only_in_its_namespace(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    kinds = {item["kind"] for item in rendered[overlay]}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "PodDisruptionBudget"}
    bindings = {
        item["metadata"]["name"]: item["subjects"]
        for item in rendered[overlay]
        if item["kind"] == "RoleBinding"
    }
    assert set(bindings) == {"ft-launcher", *(("ft-launcher-kueue",) if overlay == "kueue" else ())}
    assert {subject["name"] for subjects in bindings.values() for subject in subjects} == {
        "ft-reconciler"
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_services_parts_agree(
    rendered: dict[str, list[Object]], overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are settings, the profile is a profile, and pods find FT_HOME and the models
    where the service has them.
    """
    for name, value in config_of(rendered[overlay], "ft-config").items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    profile = PodProfile.model_validate(
        yaml.safe_load(config_of(rendered[overlay], "ft-pod-profile")["pod-profile.yaml"])
    )
    assert settings.launcher == "kubernetes"
    assert bool(settings.storage) is (overlay == "s3")
    assert bool(profile.queue) is (overlay == "kueue")
    assert settings.storage or profile.mounts(settings.home)
    assert all(profile.mounts(folder) for folder in settings.model_folders())
    claims = {
        item["metadata"]["name"]
        for item in rendered[overlay]
        if item["kind"] == "PersistentVolumeClaim"
    }
    site = Site(
        "default",
        settings.home,
        settings.storage,
        settings.stop_grace_seconds,
        tuple(settings.model_folders()),
    )
    worker = job_manifest(
        AttemptShape("ftjob-1", 1, 2, profile.ranks_per_node, site.files.run("ftjob-1")),
        profile,
        site,
    )
    pods = [*pods_of(rendered[overlay]), *pods_of([worker])]
    wanted = {
        v["persistentVolumeClaim"]["claimName"]
        for _, pod in pods
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert wanted <= claims
    accounts = {
        item["metadata"]["name"] for item in rendered[overlay] if item["kind"] == "ServiceAccount"
    }
    assert {pod["serviceAccountName"] for name, pod in pods if "postgres" not in name} <= accounts
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(worker, version, strict=True)


# Upgrades
# ------------------------------------------------------------------------------


def fixed(item: Object) -> Any:
    """What of an object can never be changed once it is there."""
    spec = item.get("spec", {})
    match item["kind"]:
        case "Job":
            return spec["template"], spec.get("completions"), spec.get("selector")
        case "Deployment":
            return spec["selector"]
        case "StatefulSet":
            free = (
                "replicas",
                "ordinals",
                "template",
                "updateStrategy",
                "minReadySeconds",
                "persistentVolumeClaimRetentionPolicy",
            )
            claims = [as_kept(claim) for claim in spec.get("volumeClaimTemplates", [])]
            return {key: value for key, value in spec.items() if key not in free} | {
                "volumeClaimTemplates": claims
            }
        case "PersistentVolumeClaim":
            return {key: value for key, value in spec.items() if key != "resources"}
        case "Service":
            return spec.get("clusterIP")
        case "RoleBinding":
            return item["roleRef"]
        case "ConfigMap" | "Secret":
            return item["data"] if item.get("immutable") else None
        case _:
            return None


def as_kept(claim: Object) -> Object:
    """A claim's template as the API server keeps it, whatever of this was left out."""
    spec = {"volumeMode": "Filesystem", **claim["spec"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": claim["metadata"],
        "spec": spec,
    }


def fixed_by_name(objects: list[Object]) -> dict[str, Any]:
    """Without those whose names hold a digest of their contents: they are others each time."""
    return {
        f"{o['kind']} {o['metadata']['name']}": fixed(o)
        for o in objects
        if o["kind"] != "ConfigMap"
    }


def refused(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Objects that a cluster which has the former would not take."""
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}


@pytest.mark.usefixtures("rendered")
def test_files_that_settings_name_are_mounted_as_the_page_says(tmp_path: Path) -> None:
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text()
    shown = re.search(r"(?m)^    configMapGenerator:\n(    .*\n)+", page)
    assert shown is not None
    overlay = tmp_path / "kubernetes/overlays/mine"
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay.mkdir()
    (overlay / "aliases.yaml").write_text("small: tiny-llama\n")
    mine = {**yaml.safe_load(shown[0]), "resources": ["../local"], "namespace": "ft"}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    objects = kustomize(overlay)
    named = config_of(objects, "ft-config")["FT_MODEL_ALIASES"]
    files = next(o["metadata"]["name"] for o in objects if "aliases.yaml" in o.get("data", {}))
    for name, pod in pods_of(objects):
        mounts = {
            mount["mountPath"]: mount["name"]
            for mount in pod["containers"][0].get("volumeMounts", [])
        }
        mounted = {
            volume["name"]: volume.get("configMap", {}).get("name") for volume in pod["volumes"]
        }
        found = mounted.get(mounts.get(str(Path(named).parent)))
        assert found == (None if "postgres" in name else files), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_other_settings_and_images_are_one_apply(
    rendered: dict[str, list[Object]], overlay: str, tmp_path: Path
) -> None:
    """Within the life of whatever the apply before has made, too; pods are replaced by it."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    base = tmp_path / "kubernetes/base/kustomization.yaml"
    changed = base.read_text().replace(
        "FT_STOP_GRACE_SECONDS=120", "FT_STOP_GRACE_SECONDS=90\n      - FT_LOG_LEVEL=debug"
    )
    changed = changed.replace(f"newTag: {__version__}", "newTag: 99.0.0").replace(
        f"version: {__version__}", "version: 99.0.0"
    )
    base.write_text(changed)
    profile = tmp_path / f"kubernetes/overlays/{overlay}/pod-profile.yaml"
    profile.write_text(profile.read_text().replace("slots:", "slots: 1 #"))
    after = kustomize(tmp_path / "kubernetes/overlays" / overlay)
    before = rendered[overlay]
    assert refused(fixed_by_name(before), fixed_by_name(after)) == set()
    assert dict(pods_of(before)).keys() == dict(pods_of(after)).keys()
    for (name, old), (_, new) in zip(pods_of(before), pods_of(after), strict=True):
        assert (old == new) is ("postgres" in name), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_first_manifests_are_upgraded_by_one_apply(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    """`released.yaml`: what cannot be changed of the objects of the first release, 0.2.0, by
    overlay.
    """
    released = yaml.safe_load((Path(__file__).parent / "released.yaml").read_text())
    found = fixed_by_name(rendered[overlay])
    assert released[overlay].keys() & found.keys() >= {
        "Deployment ft-api",
        "Deployment ft-reconciler",
    }
    assert refused(released[overlay], found) == set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_database_is_up_to_date_before_anything_uses_it(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    """By what starts with each pod, of the same image: no Job, whose template could not be
    changed.
    """
    assert not [item for item in rendered[overlay] if item["kind"] == "Job"]
    for name, pod in pods_of(rendered[overlay]):
        if name.startswith("Deployment"):
            (first,) = pod["initContainers"]
            assert first["args"] == ["migrate"], name
            assert first["image"] == pod["containers"][0]["image"], name
            assert first["envFrom"][0] == pod["containers"][0]["envFrom"][0], name
            mounted = {mount["name"] for mount in first["volumeMounts"]}
            assert mounted == {"database", "tmp"}, "neither keys nor files"


def test_the_version_is_said_in_all_places() -> None:
    base = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())
    assert [image["newTag"] for image in base["images"]] == [__version__]
    assert base["labels"][0]["pairs"]["app.kubernetes.io/version"] == __version__


# Labels, networks, probes, storage
# ------------------------------------------------------------------------------

COMMON_LABELS = {"name", "instance", "version", "component", "part-of", "managed-by"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_carry_all_common_labels_and_selectors_only_the_name(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    for item in rendered[overlay]:
        if item["kind"] in ("Deployment", "StatefulSet"):
            labels = item["spec"]["template"]["metadata"]["labels"]
            found = {
                key.partition("/")[2] for key in labels if key.startswith("app.kubernetes.io/")
            }
            assert found == COMMON_LABELS, item["metadata"]["name"]
            assert item["spec"]["selector"]["matchLabels"] == {
                "app.kubernetes.io/name": item["metadata"]["name"]
            }
        if item["kind"] == "Service":
            assert item["spec"]["selector"].keys() == {"app.kubernetes.io/name"}


def policy(objects: list[Object], name: str) -> Object:
    return next(
        o["spec"] for o in objects if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == name
    )


def test_a_pod_that_describes_bases_reaches_nothing_and_nothing_reaches_it(
    rendered: dict[str, list[Object]],
) -> None:
    """It reads a folder that a tenant may have named, with code of the workers."""
    profile = PodProfile.model_validate({"image": "w", "slots": 1, "ranks_per_node": 1})
    job = describe_manifest(
        "ft-describe-1", Path("/models/a"), profile, Site("ft", Path("/ft")), memory=1, seconds=1
    )
    labels = job["spec"]["template"]["metadata"]["labels"]
    policies = [item["spec"] for item in rendered["s3"] if item["kind"] == "NetworkPolicy"]
    mine = [
        spec for spec in policies if spec["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    assert {kind for spec in mine for kind in spec["policyTypes"]} == {"Ingress", "Egress"}
    assert not any(spec.get("ingress") or spec.get("egress") for spec in mine)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_ask_the_clusters_dns_and_no_other(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    (rule,) = policy(rendered[overlay], "ft-workers")["egress"]
    (peer,) = rule["to"]
    assert peer["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "kube-system"}
    }
    assert peer["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    assert sorted((port["protocol"], port["port"]) for port in rule["ports"]) == [
        ("TCP", 53),
        ("UDP", 53),
    ]


def test_only_the_service_reaches_its_database(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["local"]
    spec = policy(objects, "ft-postgres")
    (database,) = [o for o in objects if o["kind"] == "StatefulSet"]
    assert (
        spec["podSelector"]["matchLabels"].items()
        <= database["spec"]["template"]["metadata"]["labels"].items()
    )
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert (expression["key"], set(expression["values"])) == (
        "app.kubernetes.io/name",
        {"ft-api", "ft-reconciler", "ft-backup"},
    )
    assert rule["ports"] == [{"port": 5432, "protocol": "TCP"}]
    assert ("Egress" in spec["policyTypes"], spec.get("egress")) == (True, None)


@pytest.mark.parametrize("name", ["api", "reconciler"])
def test_a_busy_process_is_not_restarted_for_an_answer_that_is_late(name: str) -> None:
    """Kubernetes' own default is a second, three times in a row."""
    documents = documents_of((KUBERNETES / f"base/{name}.yaml").read_text())
    (container,) = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"][
        "spec"
    ]["containers"]
    alive = container["livenessProbe"]
    assert alive["timeoutSeconds"] >= 10
    assert alive["failureThreshold"] * alive.get("periodSeconds", 10) >= 60
    if "readinessProbe" in container:
        assert container["readinessProbe"]["timeoutSeconds"] >= 5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_reconciler_is_restarted_when_its_loop_hangs(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    (pod,) = [pod for name, pod in pods_of(rendered[overlay]) if name == "Deployment ft-reconciler"]
    asked = pod["containers"][0]["livenessProbe"]["httpGet"]
    (port,) = pod["containers"][0]["ports"]
    assert (asked["path"], asked["port"], port["name"]) == ("/livez", "metrics", "metrics")
    assert config_of(rendered[overlay], "ft-config")["FT_METRICS_PORT"] == str(
        port["containerPort"]
    )


def test_workers_have_storage_credentials_of_their_own(rendered: dict[str, list[Object]]) -> None:
    profile = PodProfile.model_validate(
        yaml.safe_load(config_of(rendered["s3"], "ft-pod-profile")["pod-profile.yaml"])
    )
    assert profile.secrets() == {"ft-worker-storage"}
    for name, pod in pods_of(rendered["s3"]):
        secrets = [
            s["secretRef"]["name"] for s in pod["containers"][0]["envFrom"] if "secretRef" in s
        ]
        assert secrets == ["ft-storage"], name
