"""The cluster that tests run on: our own, or the one that KUBECONFIG names, in a namespace of the test run's own."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.client import Client

from ft_service.launcher.kubernetes.cluster import Cluster
from ft_service.launcher.kubernetes.launcher import KubernetesLauncher
from ft_service.launcher.kubernetes.manifests import JOB_NAME, Site
from ft_service.launcher.kubernetes.profile import PodProfile
from tests.attempts import wait_for
from tests.cluster.apiserver import ApiServer, Object, State
from tests.cluster.controllers import Controllers
from tests.cluster.kubelet import Kubelet

ROLE_FILE = Path(__file__).parents[2] / "deploy/kubernetes/base/rbac.yaml"
LAUNCHER_TOKEN = "launcher"
NAMESPACE = "ft"


@dataclass
class HarnessCluster:
    """A namespace with a service account for workers, and a node that runs pods as processes."""

    namespace: str
    config: KubeConfig
    """Of the launcher: on our own cluster with the rights of `deploy/` and no other."""
    http: httpx2.Client
    """With all rights."""
    kubelet: Kubelet
    fake: ApiServer | None
    """None: a real control plane."""
    clients: list[Cluster] = field(default_factory=list)

    def launcher(self, profile: PodProfile, home: Path, *, storage: str = "", grace: float = 20.0) -> KubernetesLauncher:
        site = Site(self.namespace, home, storage, grace)
        return KubernetesLauncher(self.client(), profile, site, watch=False)

    def client(self) -> Cluster:
        """The launcher's, closed with this."""
        self.clients.append(Cluster(self.namespace, self.config))
        return self.clients[-1]

    def get(self, plural: str, name: str = "") -> Any:
        groups = {"jobs": "/apis/batch/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}
        group = groups.get(plural, "/api/v1")
        answer = self.http.get(f"{group}/namespaces/{self.namespace}/{plural}/{name}".rstrip("/"))
        return None if answer.status_code == 404 else answer.json()

    def items(self, plural: str) -> list[Object]:
        return self.get(plural)["items"]

    def pod(self, job: str, index: int) -> str | None:
        """Name of the running pod of an index."""
        for item in self.items("pods"):
            labels, status = item["metadata"]["labels"], item["status"]
            mine = (labels.get(JOB_NAME), labels.get("batch.kubernetes.io/job-completion-index")) == (job, str(index))
            if mine and status.get("phase") == "Running":
                return item["metadata"]["name"]
        return None

    def evict(self, pod: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        self.http.post(path, json=body).raise_for_status()

    def patch_job(self, name: str, body: Object) -> None:
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"
        self.http.patch(path, json=body, headers={"Content-Type": "application/merge-patch+json"}).raise_for_status()

    def nothing_left(self, job: str) -> bool:
        """Neither Job, nor Service, nor NetworkPolicy, nor pods."""
        if any(self.get(plural, job) for plural in ("jobs", "services", "networkpolicies")):
            return False
        return not [pod for pod in self.items("pods") if pod["metadata"]["labels"].get(JOB_NAME) == job]


@contextmanager
def open_cluster(*, mounts: bool = False) -> Iterator[HarnessCluster]:
    """The cluster of KUBECONFIG if that is set, else our own."""
    make = _real(mounts) if os.environ.get("KUBECONFIG") else _fake(mounts)
    with make as cluster:
        yield cluster
        for client in cluster.clients:
            client.close()


@contextmanager
def _fake(mounts: bool) -> Iterator[HarnessCluster]:
    server = ApiServer(State())
    server.roles[LAUNCHER_TOKEN] = role_rules()
    server.start()
    controllers = Controllers(server.state)
    controllers.start()
    http = _plain_http(server.url)
    nodes_http = _plain_http(server.url)
    kubelet = Kubelet(nodes_http, NAMESPACE, mounts=mounts)
    kubelet.start()
    try:
        wait_for(lambda: bool(server.state.list("nodes")))
        yield HarnessCluster(NAMESPACE, config_of(server.url, LAUNCHER_TOKEN), http, kubelet, server)
    finally:
        kubelet.stop()
        controllers.stop()
        server.stop()
        http.close()
        nodes_http.close()


@contextmanager
def _real(mounts: bool) -> Iterator[HarnessCluster]:
    config = KubeConfig.from_file(os.environ["KUBECONFIG"])
    http: Any = Client(config, trust_env=False)._client._client  # with the credentials that the file holds
    namespace = f"ft-test-{secrets.token_hex(3)}"
    metadata = {"metadata": {"name": namespace}}
    http.post("/api/v1/namespaces", json={"apiVersion": "v1", "kind": "Namespace", **metadata}).raise_for_status()
    apply_rights(http, namespace)
    kubelet = Kubelet(http, namespace, f"ft-test-{secrets.token_hex(3)}", mounts=mounts)
    kubelet.start()
    try:
        wait_for(lambda: _schedulable(http, kubelet.name), 120)
        yield HarnessCluster(namespace, _reconcilers_config(http, namespace) or config, http, kubelet, None)
    finally:
        with suppress(httpx2.HTTPError):
            http.delete(f"/apis/batch/v1/namespaces/{namespace}/jobs", params={"propagationPolicy": "Background"})
            deadline = time.monotonic() + 30
            while http.get(f"/api/v1/namespaces/{namespace}/pods").json()["items"] and time.monotonic() < deadline:
                time.sleep(0.2)
            http.delete(f"/api/v1/namespaces/{namespace}")
        kubelet.stop()
        http.close()


def apply_rights(http: Any, namespace: str) -> None:
    """`rbac.yaml` of deploy/, in this namespace."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    folders = {"ServiceAccount": "/api/v1", "Role": rbac, "RoleBinding": rbac}
    for document in yaml.safe_load_all(ROLE_FILE.read_text()):
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
        kind = document["kind"]
        answer = http.post(f"{folders[kind]}/namespaces/{namespace}/{kind.lower()}s", json=document)
        assert answer.is_success or kind != "ServiceAccount", answer.text


def _reconcilers_config(http: Any, namespace: str) -> KubeConfig | None:
    """The reconciler's own credentials, so that the launcher has the rights of `deploy/` there too; None: it gives out none."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/ft-reconciler/token"
    answer = http.post(path, json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    token = answer.json().get("status", {}).get("token") if answer.is_success else None
    if not token:
        return None
    whole = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    current = next(c["context"] for c in whole["contexts"] if c["name"] == whole["current-context"])
    current["user"] = "reconciler"
    whole["users"] = [{"name": "reconciler", "user": {"token": token}}]
    return KubeConfig.from_dict(whole, fname=os.environ["KUBECONFIG"])


def _plain_http(url: str) -> httpx2.Client:
    """One connection a request: those to a server that was stopped meanwhile would be dead."""
    return httpx2.Client(base_url=url, timeout=5, trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0))


def _schedulable(http: Any, node: str) -> bool:
    answer = http.get(f"/api/v1/nodes/{node}")
    taints = answer.json().get("spec", {}).get("taints") if answer.is_success else ["unknown"]
    return not taints


def config_of(url: str, token: str) -> KubeConfig:
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
    documents = yaml.safe_load_all(ROLE_FILE.read_text())
    return [rule for document in documents if document["kind"] == "Role" for rule in document["rules"]]
