"""Indexed Jobs of a cluster, made without a launcher."""

from __future__ import annotations

import secrets
from typing import Any

import httpx2

from tests.cluster.harness import HarnessCluster
from tests.cluster.kubelet import TOLERATION
from tests.support.attempts import wait_for

SECONDS = 120.0
RULES = [
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [64]},
    }
]


class Jobs:
    """Indexed Jobs whose pods run a line of shell, in which INDEX is the pod's."""

    def __init__(self, cluster: HarnessCluster) -> None:
        self.cluster = cluster
        self.folder = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs"

    def post(self, shell: str, name: str = "", **spec: Any) -> httpx2.Response:
        name = name or f"t-{secrets.token_hex(3)}"
        field = {
            "fieldRef": {
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            }
        }
        worker = {
            "name": "worker",
            "image": "x:1",
            "command": ["sh", "-c", shell],
            "env": [{"name": "INDEX", "valueFrom": field}],
        }
        pod = {
            "restartPolicy": "Never",
            "nodeSelector": self.cluster.node_selector,
            "tolerations": [TOLERATION],
            "containers": [worker],
            "serviceAccountName": "ft-worker",
        }
        pod["terminationGracePeriodSeconds"] = 5
        whole = {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
        whole |= {"podFailurePolicy": {"rules": RULES}, "podReplacementPolicy": "Failed", **spec}
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": whole}
        return self.cluster.http.post(self.folder, json=body)

    def create(self, shell: str, **spec: Any) -> str:
        answer = self.post(shell, **spec)
        assert answer.is_success, answer.text
        return answer.json()["metadata"]["name"]

    def conditions(self, name: str) -> dict[str, dict[str, Any]]:
        job = self.cluster.get("jobs", name)
        return {c["type"]: c for c in job["status"].get("conditions", []) if c["status"] == "True"}

    def wait_for(self, name: str, condition: str) -> dict[str, Any]:
        return wait_for(lambda: self.conditions(name).get(condition), SECONDS)

    def pods(self, name: str) -> list[dict[str, Any]]:
        return [
            p
            for p in self.cluster.items("pods")
            if p["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name") == name
        ]
