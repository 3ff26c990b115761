"""A node whose pods are processes of this host: what the container asks for is run as it stands,
with signals and exit codes.

It speaks HTTP only, so a real control plane without nodes takes it for one. Volumes are folders of
this host: a hostPath is used as it is, an emptyDir is a new folder, put in place of its mount path
in arguments and environment. With `mounts` pods have a mount namespace of their own instead, in
which every volume lies where the pod expects it, sub-paths and what is read-only as the pod says,
and of a hostPath nothing else (needs `unshare`, see `can_mount`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2

from tests.cluster.apiserver import Object, now

POLL_SECONDS = 0.2
HEARTBEAT_SECONDS = 10.0
CONFIRM_SECONDS = 1.0
"""Between two words that a pod is gone: the cluster may have reasons of its own to keep it for a
while.
"""
ROOT = Path(__file__).parents[2]
IN_IMAGE = (str(ROOT), sys.prefix)
"""What a real image would hold: it is where it is, also if that lies below a path that a pod
mounts, such as /tmp.
"""
POD_IP = "127.0.0.1"
TOLD_IP = "192.0.2.1"
"""A pod's address as the cluster hears it: it takes no loopback address for an endpoint of a
Service.
"""
MERGE = {"Content-Type": "application/merge-patch+json"}
TAINT = {"key": "ft-service/tests", "effect": "NoSchedule"}
"""Of the node from its creation: a shared cluster must not place anybody else's pods on it."""
TOLERATION = {**TAINT, "operator": "Exists"}
"""Of pods that are to run on it."""
MISSING_IMAGE = "missing:latest"
"""An image that no pod of this node can get."""


def can_mount() -> bool:
    """Whether this user may make a mount namespace here."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@dataclass(frozen=True)
class _Place:
    """What a mount shows."""

    folder: Path
    """Of this host; or a file."""
    read_only: bool


@dataclass
class _Pod:
    """A pod of this node, and its process."""

    name: str
    namespace: str
    process: subprocess.Popen[bytes] | None
    folder: Path
    kill_at: float | None = None
    reason: str | None = None
    """Of its end, where the exit code does not say it: OOMKilled."""
    status: Object = field(default_factory=dict)
    """What the cluster is to know of it."""
    told: bool = False
    """Whether the cluster knows that."""
    confirmed: float = float("-inf")
    """When the cluster was told last that nothing of it runs any more."""

    @property
    def ended(self) -> bool:
        return self.status.get("phase") in ("Succeeded", "Failed")

    def say(self, phase: str, state: Object | None = None, **more: object) -> None:
        statuses = {"containerStatuses": [_container(state)]} if state is not None else {}
        self.status = {"phase": phase, **statuses, **more}
        self.told = False


class Kubelet:
    """Runs what is scheduled to the node `name`."""

    def __init__(
        self, http: httpx2.Client, namespace: str, name: str = "test-node", *, mounts: bool = False
    ) -> None:
        """`namespace`: the only one whose pods are run: a real cluster puts pods of its own on
        every node.
        """
        self.name = name
        self.labels = {"ft-test": namespace}
        self._namespace = namespace
        self._frozen = False
        self._http = http
        self._mounts = mounts
        self._pods: dict[str, _Pod] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="kubelet-"))
        self._stopped = threading.Event()
        self._lock = threading.RLock()
        self._beat = float("-inf")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Kills what still runs, and leaves no node and no file behind."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(10)
        for pod in self._pods.values():
            _kill(pod, signal.SIGKILL)
            if pod.process is not None:
                pod.process.wait()
        with suppress(httpx2.HTTPError):
            self._http.delete(f"/api/v1/nodes/{self.name}")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def frozen(self) -> bool:
        """Whether it acts as a node that does not answer: its processes continue, unobserved."""
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        with self._lock:  # a look that has begun is over before
            self._frozen = frozen

    def out_of_memory(self, pod: str) -> None:
        """As the kernel does it: the container is gone, and the node knows why."""
        with self._lock:
            found = next(p for p in self._pods.values() if p.name == pod)
            found.reason = "OOMKilled"
            _kill(found, signal.SIGKILL)

    @contextmanager
    def stopped(self, pod: str) -> Iterator[None]:
        """Its process 1 hangs meanwhile."""
        with self._lock:
            process = next(p.process for p in self._pods.values() if p.name == pod)
            assert process is not None
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def vanish(self, pod: str) -> None:
        """The processes are gone without a word, and the pod with them: what the cluster does when
        a node is removed.
        """
        with self._lock:
            found = next(p for p in self._pods.values() if p.name == pod)
            _kill(found, signal.SIGKILL)
            lost = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "DeletionByPodGC",
                "lastTransitionTime": now(),
            }
            found.say("Failed", conditions=[{**lost, "message": "PodGC: node no longer exists"}])
            found.told = self._patch(f"{_path(found)}/status", {"status": found.status})
        self._delete(found.namespace, pod)

    def evict_under_pressure(self, pod: str) -> None:
        """The node ends a pod because it is short of memory itself; the pod stays, failed."""
        with self._lock:
            found = next(p for p in self._pods.values() if p.name == pod)
            _kill(found, signal.SIGKILL)
            taken = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "lastTransitionTime": now(),
            }
            said = "The node was low on resource: memory."
            found.say(
                "Failed", reason="Evicted", message=said, conditions=[{**taken, "message": said}]
            )
            found.told = self._patch(f"{_path(found)}/status", {"status": found.status})

    def output(self, pod: str) -> str:
        """What a pod has printed."""
        return next((p.folder / "output").read_text() for p in self._pods.values() if p.name == pod)

    def disk(self, pod: str) -> Path:
        """A pod's own FT_HOME (`needs_own_home`), as this host sees it."""
        return next(p.folder / "home" for p in self._pods.values() if p.name == pod)

    def alive(self) -> list[str]:
        """Pods whose process lives."""
        return [
            p.name
            for p in self._pods.values()
            if p.process is not None and p.process.poll() is None
        ]

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            with suppress(httpx2.HTTPError, ValueError), self._lock:  # the API server may be away
                if not self._frozen:
                    self._heartbeat()
                    self._turn()

    def _heartbeat(self) -> None:
        if time.monotonic() - self._beat < HEARTBEAT_SECONDS:
            return
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastHeartbeatTime": now(),
        }
        room = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi"}
        status = {
            "conditions": [{**ready, "lastTransitionTime": now()}],
            "capacity": room,
            "allocatable": room,
        }
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": self.labels},
        }
        node["spec"] = {"taints": [TAINT]}
        self._http.post("/api/v1/nodes", json=node)
        if self._patch(f"/api/v1/nodes/{self.name}/status", {"status": status}):
            # A new node is not ready until somebody says otherwise, and not every control plane has
            # somebody who does.
            self._http.patch(
                f"/api/v1/nodes/{self.name}", json={"spec": {"taints": [TAINT]}}, headers=MERGE
            )
            self._beat = time.monotonic()

    def _turn(self) -> None:
        where = {"fieldSelector": f"spec.nodeName={self.name}"}
        answer = self._http.get(f"/api/v1/namespaces/{self._namespace}/pods", params=where)
        answer.raise_for_status()
        there = {item["metadata"]["uid"]: item for item in answer.json()["items"]}
        for uid, item in there.items():
            if uid not in self._pods:
                folder = self._folder / uid
                folder.mkdir()
                self._pods[uid] = _Pod(
                    item["metadata"]["name"], item["metadata"]["namespace"], None, folder
                )
                if "deletionTimestamp" not in item["metadata"]:
                    self._start(self._pods[uid], item)
        for uid, pod in self._pods.items():
            self._tend(pod, there.get(uid))

    def _tend(self, pod: _Pod, item: Object | None) -> None:
        if item is None:
            _kill(pod, signal.SIGKILL)  # forced away
            return
        leaving = "deletionTimestamp" in item["metadata"]
        if leaving:
            self._end(pod, item["metadata"].get("deletionGracePeriodSeconds", 30))
        code = pod.process.poll() if pod.process is not None else None
        if code is not None and not pod.ended:
            self._say_end(pod, code)
        if leaving and pod.process is None and not pod.ended:
            pod.say("Failed", reason="Terminated", message="It was deleted before it was started.")
        if not pod.told:
            pod.told = self._patch(f"{_path(pod)}/status", {"status": pod.status})
        if (
            leaving
            and pod.ended
            and pod.told
            and time.monotonic() - pod.confirmed > CONFIRM_SECONDS
        ):
            self._delete(pod.namespace, pod.name)
            pod.confirmed = time.monotonic()

    def _end(self, pod: _Pod, grace: float) -> None:
        if pod.kill_at is None:
            _kill(pod, signal.SIGTERM)
            pod.kill_at = time.monotonic() + grace
        if time.monotonic() > pod.kill_at:
            _kill(pod, signal.SIGKILL)

    def _delete(self, namespace: str, name: str) -> None:
        """The node's word that nothing of the pod runs any more."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        self._http.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", json=options)

    def _say_end(self, pod: _Pod, code: int) -> None:
        shown = code if code >= 0 else 128 - code
        reason = pod.reason or ("Completed" if code == 0 else "Error")
        state = {
            "terminated": {
                "exitCode": shown,
                "reason": reason,
                "startedAt": now(),
                "finishedAt": now(),
            }
        }
        pod.say("Succeeded" if code == 0 else "Failed", state)

    def _start(self, pod: _Pod, item: Object) -> None:
        container = item["spec"]["containers"][0]
        if container["image"] == MISSING_IMAGE:
            pod.say(
                "Pending",
                {
                    "waiting": {
                        "reason": "ErrImagePull",
                        "message": f"no such image: {MISSING_IMAGE}",
                    }
                },
            )
            return
        try:
            command, environment = self._resolved(item, container, pod.folder)
            pod.process = _process(command, environment, pod.folder)
        except (OSError, KeyError) as error:
            pod.say(
                "Pending", {"waiting": {"reason": "CreateContainerError", "message": str(error)}}
            )
            return
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now()}
        where = {
            "hostIP": TOLD_IP,
            "hostIPs": [{"ip": TOLD_IP}],
            "podIP": TOLD_IP,
            "podIPs": [{"ip": TOLD_IP}],
        }
        pod.say(
            "Running",
            {"running": {"startedAt": now()}},
            startTime=now(),
            conditions=[ready],
            **where,
        )

    def _resolved(
        self, item: Object, container: Object, folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Command and environment, as the container runtime would make them."""
        places = self._places(item, container, folder)
        mounted = {path: place for path, place in places.items() if self._mounts and path != "/tmp"}
        others = {path: place.folder for path, place in places.items() if path not in mounted}
        moved: Callable[[str], str] = partial(_moved, places=others, mounted=list(mounted))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
        }
        for entry in container.get("env", []):
            value = entry.get("value") or _field(item, entry.get("valueFrom", {}))
            environment[entry["name"]] = moved(_found(value, item))
        words = [*container["command"], *container.get("args", [])]
        words = [
            re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], moved(_found(word, item)))
            for word in words
        ]
        hidden = [
            volume["hostPath"]["path"]
            for volume in item["spec"].get("volumes", [])
            if "hostPath" in volume
        ]
        return (
            _mounting(mounted, hidden, folder / "mounts", words) if mounted else words
        ), environment

    def _places(self, item: Object, container: Object, folder: Path) -> dict[str, _Place]:
        """Mount path → what is there."""
        places: dict[str, _Place] = {}
        volumes = {volume["name"]: volume for volume in item["spec"].get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "hostPath" in volume:
                shown = Path(volume["hostPath"]["path"]) / mount.get("subPath", "")
            elif mount["mountPath"] != "/dev/shm":
                shown = folder / mount["name"]
            else:
                continue
            if not shown.exists():
                shown.mkdir(parents=True)  # as a kubelet does it, whatever was meant to be there
            places[mount["mountPath"]] = _Place(shown, mount.get("readOnly", False))
        return places

    def _patch(self, path: str, body: Object) -> bool:
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        return self._http.patch(path, json=body, headers=kind).is_success


def _container(state: Object) -> Object:
    running = "running" in state
    return {
        "name": "worker",
        "image": "",
        "imageID": "",
        "ready": running,
        "restartCount": 0,
        "started": running,
        "state": state,
    }


def _field(item: Object, source: Object) -> str:
    path = source.get("fieldRef", {}).get("fieldPath", "")
    if path == "status.podIP":
        return POD_IP
    match = re.fullmatch(r"metadata\.(annotations|labels)\['(.+)'\]", path)
    return item["metadata"][match[1]][match[2]] if match else ""


def _found(text: str, item: Object) -> str:
    """The cluster's DNS: pods of a headless Service by their host names."""
    service = item["spec"].get("subdomain")
    return re.sub(rf"\b{service}-\d+\.{service}\b", POD_IP, text) if service else text


def _process(
    command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _moved(text: str, places: dict[str, Path], mounted: Sequence[str]) -> str:
    if any(text == path or text.startswith(f"{path}/") for path in (*IN_IMAGE, *mounted)):
        return text
    for path, folder in sorted(
        places.items(), key=lambda place: -len(place[0])
    ):  # what lies in /tmp itself may be mounted
        if text == path or text.startswith(f"{path}/"):
            return str(folder) + text[len(path) :]
    return text


def _mounting(
    places: dict[str, _Place], hidden: Sequence[str], aside: Path, words: list[str]
) -> list[str]:
    """A command in a mount namespace with the places, and an empty folder where a hostPath lies
    here.
    """
    lines = []
    for number, place in enumerate(places.values()):
        held = f"{aside}/{number}"
        lines.append(
            f'mkdir -p "{aside}"; '
            + (f'mkdir "{held}"' if place.folder.is_dir() else f'touch "{held}"')
        )
        lines.append(f'mount --bind "{place.folder}" "{held}"')
    lines += [f'mount -t tmpfs none "{path}"' for path in hidden]
    for number, (path, place) in enumerate(places.items()):
        empty = (
            f'mkdir -p "{path}"'
            if place.folder.is_dir()
            else f'mkdir -p "$(dirname "{path}")"; touch "{path}"'
        )
        lines += [empty, f'mount --bind "{aside}/{number}" "{path}"', f'umount "{aside}/{number}"']
        lines += [f'mount -o remount,bind,ro "{path}"'] if place.read_only else []
    script = "; ".join(lines) + '; cd /; exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh", *words]


def _path(pod: _Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _kill(pod: _Pod, number: int) -> None:
    if pod.process is not None and pod.process.poll() is None:
        # SIGTERM to process 1 only, as a container runtime does; SIGKILL to all, as when its PID
        # namespace ends.
        target = os.killpg if number == signal.SIGKILL else os.kill
        with suppress(ProcessLookupError):
            target(pod.process.pid, number)
