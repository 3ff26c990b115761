"""What kustomize makes of deploy/kubernetes: valid for every supported Kubernetes, with no right and no secret too many."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ft_service import __version__
from ft_service.launcher.kubernetes.manifests import Attempt, Site, job_manifest
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.settings import Settings
from tests.cluster.versions import KUBERNETES_VERSIONS

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
NOT_KUBERNETES = ("kustomize.config.k8s.io/", "kueue.x-k8s.io/")
"""API groups whose schemas are not Kubernetes' own."""

Object = dict[str, Any]


def documents_of(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    """Overlay → its objects."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and with it kustomize")
    found = {}
    for name in OVERLAYS:
        command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / name)]
        found[name] = documents_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def pods_of(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield f"{item['kind']} {item['metadata']['name']}", item["spec"]["template"]["spec"]


def config_of(objects: list[Object], name: str) -> dict[str, str]:
    return next(o["data"] for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith(f"{name}-"))


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
def test_every_overlay_fits_every_supported_version(rendered: dict[str, list[Object]], overlay: str, version: str) -> None:
    for item in rendered[overlay]:
        if not item["apiVersion"].startswith(NOT_KUBERNETES):
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_runs_as_root_or_may_become_it(rendered: dict[str, list[Object]], overlay: str) -> None:
    for name, pod in pods_of(rendered[overlay]):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is (name == "Deployment ft-reconciler"), name
        for container in pod["containers"]:
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
def test_only_the_reconciler_has_rights_and_only_in_its_namespace(rendered: dict[str, list[Object]], overlay: str) -> None:
    kinds = {item["kind"] for item in rendered[overlay]}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "PodDisruptionBudget"}
    bindings = {item["metadata"]["name"]: item["subjects"] for item in rendered[overlay] if item["kind"] == "RoleBinding"}
    assert set(bindings) == {"ft-launcher", *(("ft-launcher-kueue",) if overlay == "kueue" else ())}
    assert {subject["name"] for subjects in bindings.values() for subject in subjects} == {"ft-reconciler"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_services_parts_agree(rendered: dict[str, list[Object]], overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings are settings, the profile is a profile, and pods find FT_HOME and the models where the service has them."""
    for name, value in config_of(rendered[overlay], "ft-config").items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    profile = PodProfile.model_validate(yaml.safe_load(config_of(rendered[overlay], "ft-pod-profile")["pod-profile.yaml"]))
    assert settings.launcher == "kubernetes"
    assert bool(settings.storage) is (overlay == "s3")
    assert bool(profile.queue) is (overlay == "kueue")
    assert settings.storage or profile.mounts(settings.home)
    assert all(profile.mounts(folder) for folder in settings.model_folders())
    claims = {item["metadata"]["name"] for item in rendered[overlay] if item["kind"] == "PersistentVolumeClaim"}
    site = Site("default", settings.home, settings.storage, settings.stop_grace_seconds)
    worker = job_manifest(Attempt("ftjob-1", 1, 2, profile.ranks_per_node), profile, site)
    pods = [*pods_of(rendered[overlay]), *pods_of([worker])]
    wanted = {
        v["persistentVolumeClaim"]["claimName"] for _, pod in pods for v in pod["volumes"] if "persistentVolumeClaim" in v
    }
    assert wanted <= claims
    accounts = {item["metadata"]["name"] for item in rendered[overlay] if item["kind"] == "ServiceAccount"}
    assert {pod["serviceAccountName"] for name, pod in pods if "postgres" not in name} <= accounts
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(worker, version, strict=True)


def test_the_migration_is_named_by_the_version() -> None:
    (job,) = documents_of((KUBERNETES / "base/migrate.yaml").read_text())
    assert job["metadata"]["name"] == "ft-migrate-" + __version__.replace(".", "-")
    base = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())
    assert [image["newTag"] for image in base["images"]] == [__version__]
