"""Requests to a cluster, and watches: the only module that uses its client.

`deploy/` grants exactly these.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core import decoders
from lightkube.core.client import Client
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod, Service
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.types import CascadeType, OnErrorAction, OnErrorResult

from ft_service.errors import SpecError
from ft_service.launcher.kubernetes.manifests import JOB_NAME, MANAGED_BY, Manifest
from ft_service.launcher.liveness import Outage

PodGroup = create_namespaced_resource("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups")
"""The coscheduling plugin's group of pods."""
KINDS: dict[str, Any] = {
    "Job": Job,
    "Pod": Pod,
    "Service": Service,
    "NetworkPolicy": NetworkPolicy,
    "PodGroup": PodGroup,
}
Workload = create_namespaced_resource("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
"""Kueue's resource for a Job."""
_LABELS: dict[str, Any] = dict(MANAGED_BY)
JOB_UID = "kueue.x-k8s.io/job-uid"
REQUEST_SECONDS = 10.0
WATCH_SECONDS = 60
"""Length of one watch before it is opened again."""
BREAK_SECONDS = 1.0
"""Pause before a failed watch is opened again; doubled each time, up to MAX_BREAK_SECONDS."""
MAX_BREAK_SECONDS = 30.0
_PASSING = frozenset({401, 408, 429, 500, 502, 503, 504})
"""Status codes that say nothing about the request.

401: the API server does not know the service, whose token it cannot check now.
"""
_QUOTA = ("exceeded quota: ", "status unknown for quota: ")
"""Messages of the API server's admission by ResourceQuota, whose status and reason are those of any
refusal.
"""
_BEFORE_A_NODE = "FailedScheduling"
"""Reason of the scheduler's events, which stay for an hour: a pod's conditions say what counts
now.
"""
_UNPREPARED = re.compile(r' cannot [a-z]+ resource "|^namespaces "[^"]*" not found')
"""Messages of the API server's authorizer, and about a namespace that does not exist: about no
object in particular.
"""


def _learn_kinds() -> None:
    """Decode every kind once, as an object and as a list, and the objects of watches.

    msgspec builds the decoder of a type, and of the types within it, at the first use. If two
    threads do so at once for types that share a part (a Job contains a pod's spec), the process
    ends by SIGSEGV.
    """
    empty = b'{"metadata": {}, "involvedObject": {}}'
    for kind in (*KINDS.values(), Event, Workload):
        decoders.decode_object(empty, kind)
        decoders.decode_list(b'{"items": [%b], "metadata": {}}' % empty, kind)
    decoders.decode_watch_event(b'{"type": "", "object": {}}')
    decoders.decode_status(b"{}")


_learn_kinds()  # on import, which one thread does before any Cluster exists


class ClusterAwayError(Exception):
    """The API server does not answer, or is overloaded."""


class RefusedError(Exception):
    """The API server refuses the request for good, unless it is a PostponedError."""


class PostponedError(RefusedError):
    """The API server refuses the request for now, whatever it is about."""


class QuotaError(PostponedError):
    """A ResourceQuota of the namespace is exhausted, or not counted yet."""


class UnpreparedError(PostponedError):
    """The operator has to do something first: the service lacks a right, or the namespace does not
    exist.
    """


class ExpiredError(Exception):
    """The version to watch from is too old: list all objects again."""


class Cluster:
    """One namespace of a cluster.

    Methods raise ClusterAwayError, and RefusedError where their docstring says so; objects are
    plain dicts.
    """

    def __init__(self, namespace: str, config: KubeConfig | None = None) -> None:
        """`config`: None: the pod's, or KUBECONFIG's. Raises SpecError if there is none."""
        self.namespace = namespace
        self.closed = False
        self.lacks_kueue = False
        """Whether the cluster had no resource Workload of Kueue when it was last asked for one."""
        self._awake = threading.Condition()
        try:
            # `httpx2` would take proxies from the environment, and a cluster's API server is not
            # behind one.
            self._client = Client(
                config or KubeConfig.from_env(),
                namespace=namespace,
                timeout=httpx2.Timeout(REQUEST_SECONDS),
                field_manager="ft-service",
                trust_env=False,
            )
        except ConfigError as error:
            raise SpecError(
                f"FT_LAUNCHER = kubernetes: no configuration of a cluster: {error}",
                param="FT_LAUNCHER",
            ) from None

    def close(self) -> None:
        """Close the connection and end all watches."""
        self.closed = True
        self.wake()
        self._client.close()

    def rest(self, seconds: float) -> None:
        """Block for `seconds`, or until `wake`, before a failed watch is opened again."""
        with self._awake:
            self._awake.wait(seconds)

    def wake(self) -> None:
        """End every `rest`, since the cluster answers again."""
        with self._awake:
            self._awake.notify_all()

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object, or return the existing one of its name.

        Raises RefusedError, or its subclass PostponedError.
        """
        kind = KINDS[manifest["kind"]]
        with _errors():
            try:
                return _plain(self._client.create(kind.from_dict(manifest)))
            except (ApiError, httpx2.HTTPStatusError) as error:
                if kind is PodGroup and _code(error) == 404:
                    raise RefusedError(
                        "it has no PodGroup (scheduling.x-k8s.io): install scheduler-plugins, or "
                        "set gang"
                    ) from None
                if _code(error) != 409:
                    raise
                if (
                    isinstance(error, ApiError) and error.status.reason == "Conflict"
                ):  # of a quota, with other creations
                    raise ClusterAwayError(f"409 {error.status.message}") from error
            return _plain(self._client.get(kind, manifest["metadata"]["name"]))

    def job(self, name: str) -> Manifest | None:
        with _errors():
            try:
                return _plain(self._client.get(Job, name))
            except ApiError as error:
                if error.status.code == 404:
                    return None
                raise

    def jobs(self) -> list[Manifest]:
        """Return all Jobs of the service in the namespace."""
        with _errors():
            return [_plain(job) for job in self._client.list(Job, labels=_LABELS)]

    def pods(self, job: str) -> list[Manifest]:
        """Return the pods of a Job, which may be deleted."""
        with _errors():
            return [_plain(pod) for pod in self._client.list(Pod, labels={JOB_NAME: job})]

    def log(self, pod: str) -> str:
        """Return the output of a pod that has ended."""
        with _errors():
            return "\n".join(line.rstrip("\n") for line in self._client.log(pod))

    def warnings(self, name: str, kind: str = "Job") -> list[str]:
        """Return the messages of a Job's warning events, such as an exhausted quota or a rejected
        pod, or of those of a pod that has a node (`kind`: "Pod"), such as a volume that cannot be
        mounted; the oldest first.
        """
        fields: dict[str, Any] = {
            "involvedObject.kind": kind,
            "involvedObject.name": name,
            "type": "Warning",
        }
        with _errors():
            events = [_plain(event) for event in self._client.list(Event, fields=fields)]
        events.sort(
            key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
        )
        return [
            event.get("message", "") for event in events if event.get("reason") != _BEFORE_A_NODE
        ]

    def workload(self, job_uid: str) -> Manifest | None:
        """Return Kueue's Workload of a Job; None: not created yet, or Kueue is missing, or the Role
        of its overlay is not applied.
        """
        with _errors():
            try:
                found = next(
                    (
                        _plain(item)
                        for item in self._client.list(Workload, labels={JOB_UID: job_uid})
                    ),
                    None,
                )
            except (ApiError, httpx2.HTTPStatusError) as error:
                if _code(error) in (403, 404):
                    self.lacks_kueue = _code(error) == 404
                    return None
                raise
            self.lacks_kueue = False
            return found

    def delete_job(self, name: str) -> None:
        """Delete a Job and what it owns, if it exists."""
        with _errors():
            try:
                self._client.delete(Job, name, cascade=CascadeType.BACKGROUND)
            except ApiError as error:
                if error.status.code != 404:
                    raise

    def watch(self, kind: str) -> Iterator[str]:
        """Yield names of Jobs of the service that have changed, or whose pods have: first all that
        exist, then each change, for ever. Raises ExpiredError after too long an interruption.

        A broken connection may look silent, so callers must also ask the cluster from time to time.
        """
        with _errors():
            changes = self._client.watch(
                KINDS[kind], labels=_LABELS, server_timeout=WATCH_SECONDS, on_error=self._again
            )
            for _, item in changes:
                labels = item.metadata.labels or {}
                yield item.metadata.name if kind == "Job" else labels.get(JOB_NAME, "")

    def _again(self, error: Exception, count: int) -> OnErrorResult:
        """Resume a watch from its last version; from the beginning if the server has dropped that
        version.
        """
        if self.closed:
            return OnErrorResult(OnErrorAction.STOP)
        if _code(error) == 410:
            raise ExpiredError from error
        # Not in the client, whose sleep cannot be interrupted.
        self.rest(min(0.5 * 2**count, MAX_BREAK_SECONDS))
        return OnErrorResult(OnErrorAction.RETRY, sleep=0)


def _code(error: Exception) -> int | None:
    if isinstance(error, ApiError):
        return error.status.code
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else None


def _plain(item: Any) -> Manifest:
    return item.to_dict()


def _refusal(message: str) -> type[RefusedError]:
    if any(words in message for words in _QUOTA):
        return QuotaError
    return UnpreparedError if _UNPREPARED.search(message) else RefusedError


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Convert the client's errors to ClusterAwayError or RefusedError."""
    try:
        yield
    except ApiError as error:
        code = error.status.code or 0
        if code in _PASSING:
            raise ClusterAwayError(f"{code} {error.status.message}") from error
        raise _refusal(error.status.message or "")(
            f"{error.status.reason or code}: {error.status.message}"
        ) from error
    except httpx2.HTTPStatusError as error:
        raise ClusterAwayError(
            f"{error.response.status_code} from a proxy before the API server"
        ) from error
    except (
        httpx2.TransportError,
        KeyError,
        ValueError,
    ) as error:  # the latter two: not an API server's answer
        raise ClusterAwayError(f"{type(error).__name__}: {error}") from error


class JobChanges:
    """Names of Jobs that have changed, or whose pods have, watched by threads that end with the
    process.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        for kind in ("Job", "Pod"):
            threading.Thread(
                target=self._watch, args=(kind,), name=f"watch-{kind}", daemon=True
            ).start()

    def take(self, job: str) -> bool:
        """Return whether a Job or its pods have changed since the last call."""
        with self._lock:
            changed = job in self._changed
            self._changed.discard(job)
            return changed

    def _watch(self, kind: str) -> None:
        outage = Outage(f"{kind}s cannot be watched")
        rest = BREAK_SECONDS
        while not self._cluster.closed:
            try:
                for job in self._cluster.watch(
                    kind
                ):  # begins with all objects, so that no change is lost
                    outage.over()
                    rest = BREAK_SECONDS
                    with self._lock:
                        self._changed.add(job)
            except ExpiredError:
                continue
            except (ClusterAwayError, RefusedError) as error:
                outage.failed(error)
            except RuntimeError:  # the client was closed meanwhile
                if not self._cluster.closed:
                    raise
            self._cluster.rest(rest)
            rest = min(2 * rest, MAX_BREAK_SECONDS)
