"""The cluster that tests run on: our own, or the one that KUBECONFIG names, in a namespace of the
test run's own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from lightkube.config.kubeconfig import KubeConfig

from ft_service.launcher.kubernetes.cluster import Cluster
from ft_service.launcher.kubernetes.kubernetes_launcher import KubernetesLauncher
from ft_service.launcher.kubernetes.manifests import JOB_NAME, Site
from ft_service.launcher.kubernetes.profile import PodProfile
from tests.cluster import plane
from tests.cluster.apiserver import ApiServer, Object, State
from tests.cluster.controllers import Controllers
from tests.cluster.kubelet import Kubelet
from tests.support.attempts import wait_for

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
ROLE_FILES = tuple(
    KUBERNETES / path
    for path in ("base/rbac.yaml", "base/workers/rbac.yaml", "overlays/kueue/rights/rbac.yaml")
)
ACCOUNT = "ft-reconciler"
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}
"""Pods share folders of the host with the tests, which a stricter default would refuse."""


@dataclass
class HarnessCluster:
    """A namespace with a service account for workers, and a node that runs pods as processes."""

    namespace: str
    config: KubeConfig
    """Of the launcher: with the rights of `deploy/` and no other, where the control plane gives out
    tokens.
    """
    http: httpx2.Client
    """With all rights."""
    kubelet: Kubelet
    fake: ApiServer | None
    """None: a real control plane."""
    clients: list[Cluster] = field(default_factory=list)

    @property
    def node_selector(self) -> dict[str, str]:
        """Of pods that are to run here: a real cluster has other nodes, and those of other
        tests.
        """
        return dict(self.kubelet.labels)

    def launcher(
        self,
        profile: PodProfile,
        home: Path,
        *,
        storage: str = "",
        grace: float = 20.0,
        models: tuple[Path, ...] = (),
    ) -> KubernetesLauncher:
        site = Site(self.namespace, home, storage, grace, models)
        return KubernetesLauncher(self.client(), profile, site, watch=False)

    def client(self) -> Cluster:
        """The launcher's, closed with this."""
        self.clients.append(Cluster(self.namespace, self.config))
        return self.clients[-1]

    def get(self, plural: str, name: str = "") -> Any:
        groups = {"jobs": "/apis/batch/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}
        group = groups.get(plural, "/api/v1")
        answer = self.http.get(f"{group}/namespaces/{self.namespace}/{plural}/{name}".rstrip("/"))
        return None if answer.status_code == 404 else answer.raise_for_status().json()

    def items(self, plural: str) -> list[Object]:
        return self.get(plural)["items"]

    def pod(self, job: str, index: int) -> str | None:
        """Name of the running pod of an index."""
        for item in self.items("pods"):
            labels = item["metadata"].get("labels", {})
            status = item["status"]
            mine = (
                labels.get(JOB_NAME),
                labels.get("batch.kubernetes.io/job-completion-index"),
            ) == (job, str(index))
            if mine and status.get("phase") == "Running":
                return item["metadata"]["name"]
        return None

    def evict(self, pod: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        self.http.post(path, json=body).raise_for_status()

    def patch_job(self, name: str, body: Object) -> None:
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"
        self.http.patch(
            path, json=body, headers={"Content-Type": "application/merge-patch+json"}
        ).raise_for_status()

    def delete_job(self, name: str) -> None:
        """A Job, unless it is gone, and sooner or later what it owns."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"
        answer = self.http.delete(path, params={"propagationPolicy": "Background"})
        assert answer.is_success or answer.status_code == 404, answer.text

    @contextmanager
    def quota_used_up(self, counted: str = "pods", *, room: int = 0) -> Iterator[None]:
        """No more than `room` of this kind can be created meanwhile."""
        quotas = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        body = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": {counted: str(room)}},
        }
        self.http.post(quotas, json=body).raise_for_status()
        wait_for(
            lambda: "hard" in self.http.get(f"{quotas}/none").json().get("status", {}),
            plane.SECONDS,
        )
        try:
            yield
        finally:
            self.http.delete(f"{quotas}/none").raise_for_status()

    def nothing_left(self, job: str) -> bool:
        """Neither Job, nor Service, nor NetworkPolicy, nor pods."""
        if any(self.get(plural, job) for plural in ("jobs", "services", "networkpolicies")):
            return False
        return not [
            pod
            for pod in self.items("pods")
            if pod["metadata"].get("labels", {}).get(JOB_NAME) == job
        ]


@contextmanager
def open_cluster(*, mounts: bool = False) -> Iterator[HarnessCluster]:
    """A namespace and a node on the control plane of KUBECONFIG if that is set, else on our own."""
    named = os.environ.get("KUBECONFIG")
    if named:
        config = plane.credentials(named)
        with plane.connect(config) as http, place(config, http, mounts=mounts) as cluster:
            yield cluster
        return
    with our_plane() as server:
        config = config_of(server.url)
        with _fresh(server.url) as http, place(config, http, server, mounts=mounts) as cluster:
            yield cluster


@contextmanager
def our_plane(*, schedules: bool = True) -> Iterator[ApiServer]:
    """`schedules`: False: without a scheduler."""
    server = ApiServer(State())
    server.start()
    controllers = Controllers(server.state, schedules=schedules)
    controllers.start()
    try:
        yield server
    finally:
        controllers.stop()
        server.stop()


@contextmanager
def place(
    config: KubeConfig, http: httpx2.Client, fake: ApiServer | None = None, *, mounts: bool = False
) -> Iterator[HarnessCluster]:
    """A namespace of its own, and a node for it, on a control plane; both are gone afterwards."""
    name = f"ft-test-{secrets.token_hex(3)}"
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": PRIVILEGED},
    }
    answer = http.post("/api/v1/namespaces", json=body)
    assert answer.is_success, f"no namespace can be made here: {answer.text}"
    kubelet = Kubelet(http, name, f"{name}-node", mounts=mounts)
    if fake is not None:
        fake.state.log_of = kubelet.output
    try:
        apply_rights(http, name)
        kubelet.start()
        with plane.working(http, name, kubelet.name, kubelet.labels):
            cluster = HarnessCluster(
                name, plane.as_account(http, config, name, ACCOUNT), http, kubelet, fake
            )
            yield cluster
            for client in cluster.clients:
                client.close()
    except BaseException:
        with suppress(AssertionError, httpx2.HTTPError):  # the first fault is the one to tell
            plane.remove_namespace(http, name, kubelet.stop)
        raise
    plane.remove_namespace(http, name, kubelet.stop)


def apply_rights(http: httpx2.Client, namespace: str) -> None:
    """All of `deploy/`, in this namespace."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    folders = {"ServiceAccount": "/api/v1", "Role": rbac, "RoleBinding": rbac}
    for document in _rights():
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
        kind = document["kind"]
        answer = http.post(f"{folders[kind]}/namespaces/{namespace}/{kind.lower()}s", json=document)
        assert answer.is_success, f"{kind} {document['metadata']['name']}: {answer.text}"


def _fresh(url: str) -> httpx2.Client:
    """One connection a request: those to a server that was stopped meanwhile would be dead."""
    return httpx2.Client(
        base_url=url, timeout=5, trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
    )


def config_of(url: str, token: str = "admin") -> KubeConfig:
    """What a kubeconfig file would say."""
    return KubeConfig.from_dict(
        {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )


def role_rules() -> list[Object]:
    """What `deploy/` grants the launcher."""
    return [
        rule for document in _rights() if document["kind"] == "Role" for rule in document["rules"]
    ]


def _rights() -> list[Object]:
    return [document for path in ROLE_FILES for document in yaml.safe_load_all(path.read_text())]
