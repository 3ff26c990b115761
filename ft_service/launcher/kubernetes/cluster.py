"""The requests that are made to a cluster: the only module that knows its client. `deploy/` grants exactly these."""

from __future__ import annotations

import contextlib
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
from ft_service.launcher.kubernetes.manifests import JOB_NAME, SELECTOR, Manifest

KINDS: dict[str, Any] = {"Job": Job, "Pod": Pod, "Service": Service, "NetworkPolicy": NetworkPolicy}
Workload = create_namespaced_resource("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
"""Kueue's view of a Job."""
JOB_UID = "kueue.x-k8s.io/job-uid"
REQUEST_SECONDS = 10.0
WATCH_SECONDS = 60
"""How long one watch lasts before it is opened anew."""
MAX_BREAK_SECONDS = 30.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_QUOTA = ("exceeded quota: ", "status unknown for quota: ")
"""Words of the API server's admission by ResourceQuota, whose status and reason are those of any refusal."""


def _learn_kinds() -> None:
    """Decode every kind once, as an object and as a list, and what watches are made of.

    msgspec learns a type when it first decodes it, and the types within it too. A second thread that comes upon one of those
    meanwhile (a pod's spec is in Jobs as well) takes it half learnt, and the process ends by SIGSEGV.
    """
    empty = b'{"metadata": {}, "involvedObject": {}}'
    for kind in (*KINDS.values(), Event, Workload):
        decoders.decode_object(empty, kind)
        decoders.decode_list(b'{"items": [%b], "metadata": {}}' % empty, kind)
    decoders.decode_watch_event(b'{"type": "", "object": {}}')
    decoders.decode_status(b"{}")


_learn_kinds()  # with the import, which one thread makes: whoever has a Cluster has done it


class ClusterAwayError(Exception):
    """The API server does not answer, or says that it cannot now."""


class RefusedError(Exception):
    """The API server does not want this, and will not want it the next time; but for QuotaError."""


class QuotaError(RefusedError):
    """The API server does not want this now: a ResourceQuota of the namespace is used up, or is not counted yet."""


class ExpiredError(Exception):
    """The version to watch from is too old: begin again."""


class Cluster:
    """One namespace of a cluster. Methods raise ClusterAwayError, and RefusedError where it says so; objects are plain data."""

    def __init__(self, namespace: str, config: KubeConfig | None = None) -> None:
        """`config`: None: that of the pod, or of KUBECONFIG. Raises SpecError if there is none."""
        self.namespace = namespace
        self.closed = False
        self._awake = threading.Condition()
        try:
            # `httpx2` would take proxies from the environment, and a cluster's API server is not behind one.
            self._client = Client(
                config or KubeConfig.from_env(),
                namespace=namespace,
                timeout=httpx2.Timeout(REQUEST_SECONDS),
                field_manager="ft-service",
                trust_env=False,
            )
        except ConfigError as error:
            raise SpecError(f"FT_LAUNCHER = kubernetes: no cluster to talk to: {error}", param="FT_LAUNCHER") from None

    def close(self) -> None:
        """Make no further request; watches end."""
        self.closed = True
        self.wake()
        self._client.close()

    def rest(self, seconds: float) -> None:
        """Block for so long, or until `wake`: between two tries of a watch that failed."""
        with self._awake:
            self._awake.wait(seconds)

    def wake(self) -> None:
        """End every `rest`: the cluster answers again, so that nothing needs to wait out its break."""
        with self._awake:
            self._awake.notify_all()

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object, or find the one that has its name. Raises RefusedError, and of its kind QuotaError."""
        kind = KINDS[manifest["kind"]]
        with _spoken():
            try:
                return _plain(self._client.create(kind.from_dict(manifest)))
            except ApiError as error:
                if error.status.code != 409:
                    raise
            return _plain(self._client.get(kind, manifest["metadata"]["name"]))

    def job(self, name: str) -> Manifest | None:
        with _spoken():
            try:
                return _plain(self._client.get(Job, name))
            except ApiError as error:
                if error.status.code == 404:
                    return None
                raise

    def jobs(self) -> list[Manifest]:
        """Every Job of ours in the namespace."""
        with _spoken():
            return [_plain(job) for job in self._client.list(Job, labels=_LABELS)]

    def pods(self, job: str) -> list[Manifest]:
        """Of a Job, which may be gone."""
        with _spoken():
            return [_plain(pod) for pod in self._client.list(Pod, labels={JOB_NAME: job})]

    def warnings(self, job: str) -> list[str]:
        """What the cluster complains about a Job, oldest first: a quota that is used up, an admission that refuses its pods."""
        fields: dict[str, Any] = {"involvedObject.kind": "Job", "involvedObject.name": job, "type": "Warning"}
        with _spoken():
            found = [_plain(event) for event in self._client.list(Event, fields=fields)]
        found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
        return [event.get("message", "") for event in found]

    def workload(self, job_uid: str) -> Manifest | None:
        """What Kueue has made of a Job. None: nothing yet, or there is no Kueue, or the Role of its overlay is not applied."""
        with _spoken():
            try:
                found = [_plain(item) for item in self._client.list(Workload, labels={JOB_UID: job_uid})]
            except (ApiError, httpx2.HTTPStatusError) as error:
                if _code(error) in (403, 404):
                    return None
                raise
        return found[0] if found else None

    def delete_job(self, name: str) -> None:
        """A Job and what it owns. Without effect if there is none."""
        with _spoken():
            try:
                self._client.delete(Job, name, cascade=CascadeType.BACKGROUND)
            except ApiError as error:
                if error.status.code != 404:
                    raise

    def watch(self, kind: str) -> Iterator[str]:
        """Names of the Jobs of ours of which the Job, or a pod, has changed: first of all that exist, then of each change, for
        ever. Raises ExpiredError after a break that was too long.

        Silence says nothing: a connection that is half dead is silent too. Look at what matters now and then all the same.
        """
        with _spoken():
            changes = self._client.watch(KINDS[kind], labels=_LABELS, server_timeout=WATCH_SECONDS, on_error=self._again)
            for _, item in changes:
                labels = item.metadata.labels or {}
                yield item.metadata.name if kind == "Job" else labels.get(JOB_NAME, "")

    def _again(self, error: Exception, count: int) -> OnErrorResult:
        """After a break go on from the last version; from the beginning if the server has forgotten it."""
        if self.closed:
            return OnErrorResult(OnErrorAction.STOP)
        if _code(error) == 410:
            raise ExpiredError from error
        self.rest(min(0.5 * 2**count, MAX_BREAK_SECONDS))  # not in the client, whose sleep nothing can end
        return OnErrorResult(OnErrorAction.RETRY, sleep=0)


def _code(error: Exception) -> int | None:
    if isinstance(error, ApiError):
        return error.status.code
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else None


_LABELS: dict[str, Any] = dict(pair.split("=") for pair in SELECTOR.split(","))


def _plain(item: Any) -> Manifest:
    return item.to_dict()


@contextlib.contextmanager
def _spoken() -> Iterator[None]:
    """The client's errors as the two that matter: away for now, or refused."""
    try:
        yield
    except ApiError as error:
        code = error.status.code or 0
        if code in _PASSING:
            raise ClusterAwayError(f"{code} {error.status.message}") from error
        kind = QuotaError if any(words in (error.status.message or "") for words in _QUOTA) else RefusedError
        raise kind(f"{error.status.reason or code}: {error.status.message}") from error
    except httpx2.HTTPStatusError as error:
        raise ClusterAwayError(f"{error.response.status_code} from something before the API server") from error
    except (httpx2.TransportError, KeyError, ValueError) as error:  # the latter two: an answer that no API server gives
        raise ClusterAwayError(f"{type(error).__name__}: {error}") from error
