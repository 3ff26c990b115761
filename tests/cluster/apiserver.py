"""The API server: as much of Kubernetes' API as the launcher and a node use, with its own rules
about versions and deletion.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.ports import free_port

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace ("" for what has none), name."""

HISTORY = 2000
TRACKING = "batch.kubernetes.io/job-tracking"
"""Finalizer of a Job's pods: they stay until the Job controller has counted them."""
NEW_NODE = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
ACCOUNT = "system:serviceaccount"
KINDS = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "events": ("v1", "Event"),
}
KINDS |= {"workloads": ("kueue.x-k8s.io/v1beta2", "Workload")}
KINDS |= {"resourcequotas": ("v1", "ResourceQuota")}
KINDS |= {"networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy")}
KINDS |= {
    name: ("rbac.authorization.k8s.io/v1", kind)
    for name, kind in (("roles", "Role"), ("rolebindings", "RoleBinding"))
}
KINDS |= {
    "nodes": ("v1", "Node"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "namespaces": ("v1", "Namespace"),
}
COUNTED = {
    "pods": ("pods", "pods"),
    "jobs": ("jobs.batch", "count/jobs.batch"),
    "services": ("services", "services"),
}
"""What quotas may limit the number of: as errors call it, and as quotas do."""
TERMINAL = ("Succeeded", "Failed")
"""Phases of pods that have ended."""
_WITH_STATUS = frozenset({"jobs", "pods", "nodes"})
"""Kinds whose status is written at `…/status`, and nowhere else."""
_KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
"""Metadata fields that clients may not write."""
_KEPT_BY_STATUS = (*_KEPT, "ownerReferences")
_WITHOUT_STATUS = frozenset({"jobs", "pods"})
"""Of them those that are created without one, whatever was sent. Nodes keep theirs."""
_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[a-z0-9.-]+)/(?P<version>v1|v1beta2))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)


class Refused(Exception):
    """An answer that is an error: HTTP status, reason, message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Request:
    """What was asked for, as roles see it."""

    user: str
    verb: str
    group: str
    resource: str
    """With its subresource: `pods/eviction`."""
    namespace: str


@dataclass
class State:
    """All objects, and what has become of them."""

    objects: dict[Key, Object] = field(default_factory=dict)
    history: list[tuple[int, str, str, Object]] = field(default_factory=list)
    """Version, ADDED | MODIFIED | DELETED, plural, object."""
    changed: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )
    version: int = 0
    log_of: Callable[[str], str] | None = None
    """What a pod has printed, as its node says."""
    queues: dict[str, int] = field(default_factory=dict)
    """Kueue's LocalQueues → pods that each has room for. Without any, Kueue is not installed."""

    def get(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def list(self, plural: str, namespace: str = "") -> list[Object]:
        """Copies, so that a controller can think about them in peace."""
        with self.changed:
            found = [
                o
                for (p, n, _), o in self.objects.items()
                if p == plural and (not namespace or n == namespace)
            ]
            return copy.deepcopy(found)

    def create(self, plural: str, namespace: str, body: Object) -> Object:
        with self.changed:
            body = copy.deepcopy(body)
            metadata = body.setdefault("metadata", {})
            if "generateName" in metadata and "name" not in metadata:
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            if namespace:
                metadata["namespace"] = namespace
            key = (plural, namespace, metadata["name"])
            if key in self.objects:
                raise Refused(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
            self._admit(plural, namespace, body)
            body["apiVersion"], body["kind"] = KINDS[plural]
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            begun = {"phase": "Pending"} if plural == "pods" else {}
            body["status"] = begun if plural in _WITHOUT_STATUS else body.get("status", begun)
            self.objects[key] = body
            return self._happened("ADDED", key)

    def _admit(self, plural: str, namespace: str, body: Object) -> None:
        """What the API server's own admission does. Raises Refused."""
        if namespace and ("namespaces", "", namespace) not in self.objects:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if namespace and self.objects["namespaces", "", namespace]["metadata"].get(
            "deletionTimestamp"
        ):
            raise Refused(403, "Forbidden", f"namespace {namespace} is being terminated")
        account = body.get("spec", {}).get("serviceAccountName", "default")
        if plural == "pods" and ("serviceaccounts", namespace, account) not in self.objects:
            text = (
                f'pods "{body["metadata"]["name"]}" is forbidden: error looking up service '
                f"account {namespace}/{account}"
            )
            raise Refused(403, "Forbidden", text)
        if plural in COUNTED:
            self._charge(plural, namespace, body)
        if plural == "jobs":
            _check_mounts(body)
        if plural == "nodes":
            body.setdefault("spec", {}).setdefault("taints", []).append(dict(NEW_NODE))

    def _charge(self, plural: str, namespace: str, body: Object) -> None:
        """To quotas of numbers of objects, of which pods that have ended are none."""
        resource, counted = COUNTED[plural]
        for quota in self.list("resourcequotas", namespace):
            there = [
                item
                for item in self.list(plural, namespace)
                if item["status"].get("phase") not in TERMINAL
            ]
            used = len(there)
            hard = quota["spec"]["hard"].get(counted)
            if hard is not None and used >= int(hard):
                counts = (
                    f"requested: {counted}=1, used: {counted}={used}, limited: {counted}={hard}"
                )
                text = f"exceeded quota: {quota['metadata']['name']}, {counts}"
                raise Refused(
                    403,
                    "Forbidden",
                    f'{resource} "{body["metadata"]["name"]}" is forbidden: {text}',
                )

    def replace(self, key: Key, body: Object, sub: str | None = None) -> Object:
        """Raises Refused if the version that the body was made from is not the newest."""
        with self.changed:
            there = self.get(key)
            version = body["metadata"].get("resourceVersion")
            if version and version != there["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", f"{key[2]}: the object has been modified")
            self.objects[key] = _replaced(key[0], sub, there, copy.deepcopy(body))
            return self._happened("MODIFIED", key)

    def change(self, key: Key, change: Callable[[Object], Any]) -> Object | None:
        """Change an object in place, if it is there."""
        with self.changed:
            if key not in self.objects:
                return None
            before = copy.deepcopy(self.objects[key])
            change(self.objects[key])
            if before == self.objects[key]:
                return self.objects[key]
            metadata = self.objects[key]["metadata"]
            if metadata.get("deletionGracePeriodSeconds") == 0 and not metadata.get("finalizers"):
                self._happened("DELETED", key)
                return self.objects.pop(key)
            return self._happened("MODIFIED", key)

    def delete(self, key: Key, grace: int | None) -> Object:
        """A pod that runs on a node is only told to end; the node deletes it with a grace of 0.

        What has finalizers stays until they are removed.
        """
        with self.changed:
            there = self.get(key)
            metadata = there["metadata"]
            seconds = self._grace(key, there, grace)
            if seconds > 0 or metadata.get("finalizers"):
                if metadata.get("deletionGracePeriodSeconds", seconds + 1) > seconds:
                    metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": seconds}
                    self._happened("MODIFIED", key)
                return copy.deepcopy(there)
            self._happened("DELETED", key)
            return self.objects.pop(key)

    def _grace(self, key: Key, there: Object, grace: int | None) -> int:
        """Seconds that a pod is given; 0 where no node must say that nothing of it runs any
        more.
        """
        if key[0] == "namespaces":
            return 1 if any(namespace == key[2] for _, namespace, _ in self.objects) else 0
        if (
            key[0] != "pods"
            or not there["spec"].get("nodeName")
            or there["status"].get("phase") in TERMINAL
        ):
            return 0
        return there["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace

    def _happened(self, kind: str, key: Key) -> Object:
        self.version += 1
        there = self.objects[key]
        there["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, key[0], copy.deepcopy(there)))
        del self.history[:-HISTORY]
        self.changed.notify_all()
        return copy.deepcopy(there)


class ApiServer:
    """`State` over HTTP on a free port of the loopback interface.

    `stop` and `start` as often as a test likes: state stays.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.requests: set[Request] = set()
        self.port = free_port()  # which is still free when it is started again
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def stop(self) -> None:
        """As when it is away: connections are refused, watches break."""
        if self._server is not None:
            self._server.closing = True
            with self.state.changed:
                self.state.changed.notify_all()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def check(self, request: Request) -> None:
        """Raises Refused if it is a service account, and its roles do not grant it.

        Everybody else may do everything.
        """
        self.requests.add(request)
        if not request.user.startswith(ACCOUNT):
            return
        rules = self._rules(request)
        granted = any(
            request.verb in rule["verbs"]
            and request.group in rule["apiGroups"]
            and request.resource in rule["resources"]
            for rule in rules
        )
        if not granted:
            words = (
                f'cannot {request.verb} resource "{request.resource}" in API group '
                f'"{request.group}"'
            )
            raise Refused(
                403, "Forbidden", f'{request.resource} is forbidden: User "{request.user}" {words}'
            )

    def _rules(self, request: Request) -> list[Object]:
        _, _, namespace, name = request.user.split(":")
        rules: list[Object] = []
        for binding in self.state.list("rolebindings", request.namespace):
            if any(
                (s["kind"], s["name"], s["namespace"]) == ("ServiceAccount", name, namespace)
                for s in binding["subjects"]
            ):
                rules += self.state.get(("roles", request.namespace, binding["roleRef"]["name"]))[
                    "rules"
                ]
        return rules


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    closing = False

    def __init__(self, address: tuple[str, int], api: ApiServer) -> None:
        super().__init__(address, _Handler)
        self.api = api

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed in the middle of a request are what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        if self.server.closing:
            self.close_connection = True
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        try:
            match = _PATH.match(url.path)
            if match is None:
                raise Refused(404, "NotFound", url.path)
            self._authorize(method, match, query)
            if match["plural"] == "workloads" and not self.server.api.state.queues:
                self._send_text(404, "404 page not found\n")
            elif match["sub"] == "log" and self.server.api.state.log_of is not None:
                self._send_text(200, self._log(str(match["name"])))
            elif query.get("watch") == "true":
                self._watch(match, query)
            else:
                with self.server.api.state.changed:
                    self._send(
                        201 if method == "POST" else 200, self._do(method, match, query, body)
                    )
        except Refused as error:
            self._send(error.code, _status(error))

    def _log(self, pod: str) -> str:
        log_of = self.server.api.state.log_of
        try:
            return log_of(pod) if log_of is not None else ""
        except (StopIteration, OSError):
            raise Refused(404, "NotFound", f'pods "{pod}" not found') from None

    def _authorize(self, method: str, match: re.Match[str], query: dict[str, str]) -> None:
        named = match["name"] is not None
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method)
        verb = verb or ("get" if named else "watch" if query.get("watch") == "true" else "list")
        resource = match["plural"] + (f"/{match['sub']}" if match["sub"] else "")
        user = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.server.api.check(
            Request(user, verb, match["group"] or "", resource, match["namespace"] or "")
        )

    def _do(self, method: str, match: re.Match[str], query: dict[str, str], body: Object) -> Object:
        state = self.server.api.state
        plural = match["plural"]
        namespace = match["namespace"] or ""
        if match["name"] is None:
            if method == "POST":
                return state.create(plural, namespace, body)
            if method == "DELETE":
                for item in state.list(plural, namespace):
                    state.delete((plural, namespace, item["metadata"]["name"]), None)
            items = [item for item in state.list(plural, namespace) if _selected(item, query)]
            version, kind = KINDS[plural]
            metadata = {"resourceVersion": str(state.version)}
            return {
                "apiVersion": version,
                "kind": f"{kind}List",
                "metadata": metadata,
                "items": items,
            }
        key = (plural, namespace, match["name"])
        if match["sub"] in _SUBRESOURCES:
            return _SUBRESOURCES[match["sub"]](state, key, body)
        if method == "PATCH":
            state.get(key)
            return (
                state.change(key, lambda there: merge(there, _part(plural, match["sub"], body)))
                or {}
            )
        if method == "PUT":
            return state.replace(key, body, match["sub"])
        if method == "DELETE":
            return state.delete(
                key, body.get("gracePeriodSeconds", _int(query.get("gracePeriodSeconds")))
            )
        return copy.deepcopy(state.get(key))

    def _watch(self, match: re.Match[str], query: dict[str, str]) -> None:
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 60)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for event in self._events(match, query, deadline):
                self._chunk(json.dumps(event).encode() + b"\n")
            if not self.server.closing:
                self._chunk(b"")
        self.close_connection = True

    def _events(
        self, match: re.Match[str], query: dict[str, str], deadline: float
    ) -> Iterator[Object]:
        state = self.server.api.state
        version = _int(query.get("resourceVersion"))
        with state.changed:
            if version is None:
                version = state.version
                start = [
                    item
                    for item in state.list(match["plural"], match["namespace"] or "")
                    if _selected(item, query)
                ]
            elif state.history and version < state.history[0][0] - 1:
                yield {
                    "type": "ERROR",
                    "object": _status(Refused(410, "Expired", "too old resource version")),
                }
                return
            else:
                start = []
        for item in start:
            yield {"type": "ADDED", "object": item}
        while time.monotonic() < deadline and not self.server.closing:
            with state.changed:
                news = [entry for entry in state.history if entry[0] > version]
                if not news:
                    state.changed.wait(0.5)
            for number, kind, plural, item in news:
                version = number
                here = plural == match["plural"] and item["metadata"].get("namespace", "") == (
                    match["namespace"] or ""
                )
                if here and _selected(item, query):
                    yield {"type": kind, "object": item}

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, code: int, body: Object) -> None:
        self._send_text(code, json.dumps(body), "application/json")

    def _send_text(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _check_mounts(job: Object) -> None:
    """Of all that the API server checks, what one test needs. Raises Refused."""
    for index, container in enumerate(job["spec"]["template"]["spec"]["containers"]):
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        for number, path in enumerate(paths):
            if path in paths[:number]:
                where = f"spec.template.spec.containers[{index}].volumeMounts[{number}].mountPath"
                text = (
                    f'Job.batch "{job["metadata"]["name"]}" is invalid: {where}: Invalid '
                    f'value: "{path}": must be unique'
                )
                raise Refused(422, "Invalid", text)


def _part(plural: str, sub: str | None, body: Object) -> Object:
    """What of a patch counts: at `…/status` all but the spec (labels too, of pods, jobs and nodes),
    elsewhere all but the status.
    """
    if plural not in _WITH_STATUS:
        return body
    ignored = "spec" if sub == "status" else "status"
    part = {name: value for name, value in body.items() if name != ignored}
    if sub == "status" and "metadata" in part:
        part["metadata"] = {
            name: value for name, value in part["metadata"].items() if name not in _KEPT_BY_STATUS
        }
    return part


def _replaced(plural: str, sub: str | None, there: Object, body: Object) -> Object:
    """What a PUT makes of an object; of what counts the same is true as for a patch."""
    body["metadata"] |= {
        name: there["metadata"][name] for name in _KEPT if name in there["metadata"]
    }
    if plural in _WITH_STATUS:
        kept = "spec" if sub == "status" else "status"
        body.pop(kept, None)
        body |= {kept: copy.deepcopy(there[kept])} if kept in there else {}
    return body


def _bind(state: State, key: Key, body: Object) -> Object:
    """As a scheduler does it. Raises Refused if the pod has a node."""
    if state.get(key)["spec"].get("nodeName"):
        raise Refused(409, "Conflict", f"pod {key[2]} is already assigned to a node")

    def assign(pod: Object) -> None:
        pod["spec"]["nodeName"] = body["target"]["name"]
        merge(pod["status"], {"conditions": [{"type": "PodScheduled", "status": "True"}]})

    state.change(key, assign)
    return {"kind": "Status", "status": "Success"}


def _token(state: State, key: Key, body: Object) -> Object:
    state.get(key)
    return {"kind": "TokenRequest", "status": {"token": f"{ACCOUNT}:{key[1]}:{key[2]}"}}


def _evict(state: State, key: Key, body: Object) -> Object:
    def mark(pod: Object) -> None:
        reason = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        merge(pod["status"], {"conditions": [{**reason, "message": "Eviction API: evicting"}]})

    state.get(key)
    state.change(key, mark)
    state.delete(key, None)
    return {"kind": "Status", "status": "Success"}


_SUBRESOURCES: dict[str, Callable[[State, Key, Object], Object]] = {
    "eviction": _evict,
    "binding": _bind,
    "token": _token,
}


def merge(there: Object, patch: Object) -> None:
    """JSON merge patch, except that conditions are merged by their type, as a strategic merge patch
    does.
    """
    for name, value in patch.items():
        if value is None:
            there.pop(name, None)
        elif name == "conditions":
            kinds = {condition["type"] for condition in value}
            there[name] = [
                c for c in there.get(name, []) if c["type"] not in kinds
            ] + copy.deepcopy(value)
        elif isinstance(value, dict) and isinstance(there.get(name), dict):
            merge(there[name], value)
        else:
            there[name] = copy.deepcopy(value)


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for pair in filter(None, (query.get("labelSelector") or "").split(",")):
        name, _, value = pair.partition("=")
        if labels.get(name) != value.lstrip("="):
            return False
    for pair in filter(None, (query.get("fieldSelector") or "").split(",")):
        path, _, value = pair.partition("=")
        found: Any = item
        for part in path.split("."):
            found = (found or {}).get(part)
        if found != value.lstrip("="):
            return False
    return True


def _status(error: Refused) -> Object:
    body = {"apiVersion": "v1", "kind": "Status", "status": "Failure"}
    return {
        **body,
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "metadata": {},
    }


def _int(value: str | None) -> int | None:
    return int(value) if value else None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
