"""A control plane that KUBECONFIG names: who may speak to it, what it has and lacks, and how it is
left as it was.

Of a control plane are needed an API server, and of kube-controller-manager the controllers of Jobs,
of what has lost its owner, of time to live and of namespaces. A scheduler is stood in for where
there is none; nodes are brought along.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User

from tests.cluster.apiserver import Object
from tests.cluster.kubelet import MERGE, TAINT, TOLERATION
from tests.support.attempts import wait_for

SECONDS = 60.0
NODE_SECONDS = 60.0
"""How long a node of ours may take to be there."""
SCHEDULER_SECONDS = 5.0
"""How long a pod of a control plane with a scheduler is without a word of it."""
POLL_SECONDS = 0.2
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
PROBE = "ft-probe"


def credentials(kubeconfig: str) -> KubeConfig:
    """The current context of the file, or of the first of several that exists.

    A context without a user has no credentials.
    """
    paths = [Path(path).expanduser() for path in kubeconfig.split(os.pathsep) if path]
    found = next((path for path in paths if path.is_file()), None)
    assert found is not None, f"KUBECONFIG = {kubeconfig}: there is no such file"
    single = KubeConfig.from_file(found.absolute()).get()
    assert single is not None
    return KubeConfig.from_one(
        cluster=single.cluster, user=single.user or User(), fname=single.fname
    )


def connect(config: KubeConfig) -> httpx2.Client:
    single = config.get()
    assert single is not None
    return httpx2.Client(
        **ConnectionParams(timeout=httpx2.Timeout(30), trust_env=False).httpx_params(single)
    )


def as_account(http: httpx2.Client, config: KubeConfig, namespace: str, account: str) -> KubeConfig:
    """The credentials of a service account; those of `config` where the control plane gives out
    none, or takes none.
    """
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    answer = http.post(
        path, json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    )
    token = answer.json().get("status", {}).get("token") if answer.is_success else None
    single = config.get()
    assert single is not None
    if not token:
        return config
    own = KubeConfig.from_one(cluster=single.cluster, user=User(token=token), fname=single.fname)
    with connect(own) as asking:

        def answered() -> int | None:
            """A role that was made just now is not known everywhere at once."""
            code = asking.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/none").status_code
            return None if code == 403 else code

        code = _within(
            answered, f"the control plane grants {account} nothing by the Role of deploy/"
        )
    return config if code == 401 else own


class Scheduler:
    """Gives the pods of a namespace its node, where the control plane has no scheduler."""

    def __init__(
        self, http: httpx2.Client, namespace: str, node: str, labels: dict[str, str]
    ) -> None:
        self._http = http
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._node = node
        self._labels = labels
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            with suppress(httpx2.HTTPError, ValueError):  # the API server may be away
                for pod in _items(self._http, self._pods):
                    if (
                        not pod["spec"].get("nodeName")
                        and "deletionTimestamp" not in pod["metadata"]
                    ):
                        self._place(pod)

    def _place(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        chosen = pod["spec"].get("nodeSelector", {}).items() <= self._labels.items()
        if chosen and any(
            one.get("key") == TAINT["key"] for one in pod["spec"].get("tolerations", ())
        ):
            target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
            body = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": target,
            }
            self._http.post(f"{self._pods}/{name}/binding", json=body)
        elif not conditions(pod):
            message = (
                "0/1 nodes are available: 1 node(s) didn't match the selector or had "
                "untolerated taints."
            )
            unable = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
            self._http.patch(
                f"{self._pods}/{name}/status",
                json={"status": {"conditions": [unable]}},
                headers=STRATEGIC,
            )


@contextmanager
def working(
    http: httpx2.Client, namespace: str, node: str, labels: dict[str, str]
) -> Iterator[None]:
    """A control plane that runs Jobs on the node.

    Fails the test with what it lacks, if it does not.
    """
    scheduler = Scheduler(http, namespace, node, labels)
    try:
        tainted = f"the node {node} was not made ready: what taints it, and who removes that?"
        _within(lambda: _schedulable(http, node), tainted, NODE_SECONDS)
        _probe(http, namespace, labels, scheduler)
        yield
    finally:
        scheduler.stop()


def _probe(
    http: httpx2.Client, namespace: str, labels: dict[str, str], scheduler: Scheduler
) -> None:
    """One Job from its creation to its end, which asks everything that the tests need of a control
    plane.
    """
    container = {"name": "worker", "image": "x:1", "command": ["true"]}
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": labels,
        "tolerations": [TOLERATION],
        "containers": [container],
    }
    pod["serviceAccountName"] = "ft-worker"
    spec = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": 0,
    }
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": PROBE}}
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    pods = f"/api/v1/namespaces/{namespace}/pods"
    answer = http.post(jobs, json={**body, "spec": {**spec, "template": {"spec": pod}}})
    assert answer.is_success, f"this control plane takes no Indexed Job: {answer.text}"

    def has_made_pods() -> bool:
        """It has some, or has had: a Job that has run to its end is gone at once, and its pods with
        it.
        """
        return bool(_items(http, pods)) or http.get(f"{jobs}/{PROBE}").status_code == 404

    _within(
        has_made_pods, "this control plane makes no pods of Jobs: has it a kube-controller-manager?"
    )
    with suppress(AssertionError):
        wait_for(lambda: all(map(_is_scheduled, _items(http, pods))), SCHEDULER_SECONDS)
    if not all(map(_is_scheduled, _items(http, pods))):
        scheduler.start()
    ended = (
        "a pod that ran to its end does not complete its Job, or the Job outlives its time to live"
    )
    _within(
        lambda: http.get(f"{jobs}/{PROBE}").status_code == 404,
        f"{ended}: has it all of kube-controller-manager?",
    )
    _within(
        lambda: not _items(http, pods),
        "pods outlive their Job: this control plane has no garbage collector",
    )


def remove_namespace(http: httpx2.Client, namespace: str, node_stops: Callable[[], None]) -> None:
    """Remove it and its contents, also pods whose end is not confirmed.

    `node_stops`: called once the node is not needed.
    """
    path = f"/api/v1/namespaces/{namespace}"
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def gone() -> bool:
        return http.get(path).status_code == 404

    def forced() -> bool:
        for pod in _items(http, pods):
            name = pod["metadata"]["name"]
            http.patch(f"{pods}/{name}", json={"metadata": {"finalizers": None}}, headers=MERGE)
            http.delete(f"{pods}/{name}", params={"gracePeriodSeconds": "0"})
        return gone()

    try:
        with suppress(AssertionError):  # while the node is there to confirm the end of pods
            http.delete(
                f"/apis/batch/v1/namespaces/{namespace}/jobs",
                params={"propagationPolicy": "Background"},
            )
            wait_for(lambda: not _items(http, pods), SECONDS / 4)
        http.delete(path)
        with suppress(AssertionError):
            wait_for(gone, SECONDS / 2)
    finally:
        node_stops()
    _within(forced, f"the namespace {namespace} is not gone")


def _schedulable(http: httpx2.Client, node: str) -> bool:
    answer = http.get(f"/api/v1/nodes/{node}")
    return answer.is_success and answer.json().get("spec", {}).get("taints") == [TAINT]


def _is_scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName") or conditions(pod))


def conditions(pod: Object) -> list[Any]:
    """What a scheduler has said of it."""
    return [c for c in pod.get("status", {}).get("conditions") or [] if c["type"] == "PodScheduled"]


def _items(http: httpx2.Client, path: str) -> list[Object]:
    answer = http.get(path)
    answer.raise_for_status()
    return answer.json()["items"]


def _within(what: Callable[[], Any], otherwise: str, seconds: float | None = None) -> Any:
    """`seconds`: None: SECONDS."""
    seconds = SECONDS if seconds is None else seconds
    try:
        return wait_for(what, seconds)
    except AssertionError:
        raise AssertionError(f"{otherwise} ({seconds:g} seconds)") from None
