"""An attempt as Kubernetes objects: one Indexed Job, the headless Service by which its pods find node 0, and the NetworkPolicy
that admits them to each other. Pure.

One retry layer: any pod's end ends the Job (`backoffLimit: 0`), and the service starts the next attempt, since a pod that is
replaced inside a Job cannot be kept from meeting the one that it replaces. podFailurePolicy only tells why.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_service import __version__
from ft_service.host.environment import PASS_ENVIRONMENT, STORAGE, child_environment, is_named
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.launcher.kubernetes.volumes import Home, needs_own_home, pod_mounts
from ft_service.supervisor import command_line

Manifest = dict[str, Any]

MANAGED_BY = {"app.kubernetes.io/name": "ft-worker", "app.kubernetes.io/managed-by": "ft-service"}
COMMON_LABELS = {
    "app.kubernetes.io/version": __version__,
    "app.kubernetes.io/component": "worker",
    "app.kubernetes.io/part-of": "ft-service",
}
INSTANCE = {"app.kubernetes.io/instance": "ft"}
"""As `deploy/` calls it; the pod profile may call it otherwise."""
SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
JOB_LABEL = "ft-service/job"
ATTEMPT_LABEL = "ft-service/attempt"
JOB_NAME = "batch.kubernetes.io/job-name"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
CONTAINER = "worker"
END_SECONDS = 30
"""Part of a pod's grace beyond what its ranks may take to stop: for what the supervisor still does then."""
SHORT_END = 0.2
"""The same as a share of a grace that the pod profile limits, where that is less."""
SCRATCH = "/tmp"
CACHE = "/var/cache/ft"

PERMANENT_CODE, STOPPED_CODE = 64, 75
RULES: list[Manifest] = [
    {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [PERMANENT_CODE]}},
    {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [STOPPED_CODE]}},
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
"""Rules of podFailurePolicy. The number of the one that matched is in the Job's condition."""


@dataclass(frozen=True)
class AttemptShape:
    """What of an attempt its objects depend on."""

    job_id: str
    attempt: int
    nodes: int
    ranks_per_node: int
    reads: tuple[Path, ...] = ()
    """Files and folders that the job names, as its pods are to see them (`volumes.reads_of`)."""
    priority: int = 0
    """The job's."""


@dataclass(frozen=True)
class Site:
    """Where pods find the service's files."""

    namespace: str
    home: Path
    """FT_HOME, the same path in every pod."""
    storage: str = ""
    """FT_STORAGE: pods fetch and bring their files; empty: FT_HOME is a shared volume."""
    stop_grace_seconds: float = 60.0
    models: tuple[Path, ...] = ()
    """FT_MODELS."""

    @property
    def files(self) -> Home:
        return Home(self.home, self.models, shared=not self.storage)


def object_name(job_id: str, attempt: int) -> str:
    """Name of an attempt's Job and Service. Names have no upper case; no two random ids differ in nothing else."""
    tail = job_id.removeprefix("ftjob-").lower()
    if not re.fullmatch(r"[a-z0-9]{1,40}", tail):
        tail = hashlib.sha256(job_id.encode()).hexdigest()[:24]
    return f"ft-{tail}-{attempt}"


def job_manifest(attempt: AttemptShape, profile: PodProfile, site: Site) -> Manifest:
    name = object_name(attempt.job_id, attempt.attempt)
    labels = _labels(attempt, profile)
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": attempt.nodes,
        "parallelism": attempt.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": RULES},
        "ttlSecondsAfterFinished": profile.ttl_seconds_after_finished,
        "template": {
            "metadata": {"labels": labels, **({"annotations": profile.annotations} if profile.annotations else {})},
            "spec": _pod(name, attempt, profile, site),
        },
    }
    if profile.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = profile.active_deadline_seconds
    metadata: Manifest = {"name": name, "namespace": site.namespace, "labels": dict(labels)}
    if profile.queue is not None:
        spec["suspend"] = True  # Kueue unsuspends it
        metadata["labels"][QUEUE_NAME] = profile.queue
        if (priority_class := profile.queue_class_of(attempt.priority)) is not None:
            metadata["labels"]["kueue.x-k8s.io/priority-class"] = priority_class
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def owned_manifests(job: Manifest, port: int) -> list[Manifest]:
    """Service and NetworkPolicy of a Job that was created, which owns them: when the Job goes, they go too."""
    return [_service(job, port), _policy(job)]


def _service(job: Manifest, port: int) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the ranks meet before any of them is ready
            "selector": {JOB_NAME: job["metadata"]["name"]},
            "ports": [{"name": "rendezvous", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def _policy(job: Manifest) -> Manifest:
    """Rendezvous, gloo and NCCL know no passwords. What else workers may reach, `deploy/` says for all of them."""
    pods = {"matchLabels": {JOB_NAME: job["metadata"]["name"]}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _owned(job),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
            "egress": [{"to": [{"podSelector": pods}]}],
        },
    }


def _owned(job: Manifest) -> Manifest:
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    labels = {key: value for key, value in metadata["labels"].items() if not key.startswith("kueue.")}
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "labels": labels,
        "ownerReferences": [owner],
    }


def _labels(attempt: AttemptShape, profile: PodProfile) -> dict[str, str]:
    ours = {**MANAGED_BY, JOB_LABEL: attempt.job_id, ATTEMPT_LABEL: str(attempt.attempt)}
    return {**INSTANCE, **profile.labels, **COMMON_LABELS, **ours}


def instance_labels(profile: PodProfile) -> dict[str, str]:
    """The label by which the objects of this installation differ from those of another one in the same namespace."""
    return {key: profile.labels.get(key, value) for key, value in INSTANCE.items()}


def graces(profile: PodProfile, site: Site) -> tuple[float, int]:
    """Seconds that the ranks may take to stop, and that the pod may take to end."""
    longest = profile.termination_grace_seconds
    if longest is None:
        return site.stop_grace_seconds, math.ceil(site.stop_grace_seconds) + END_SECONDS
    return min(site.stop_grace_seconds, longest - min(END_SECONDS, SHORT_END * longest)), longest


def _pod(name: str, attempt: AttemptShape, profile: PodProfile, site: Site) -> Manifest:
    volumes, mounts = _volumes(attempt, profile, site)
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": name,
        "serviceAccountName": profile.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": graces(profile, site)[1],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": profile.run_as_user,
            "runAsGroup": profile.run_as_group,
            "fsGroup": profile.run_as_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(name, attempt, profile, site, mounts)],
        "volumes": volumes,
    }
    optional: Manifest = {
        "imagePullSecrets": [{"name": secret} for secret in profile.image_pull_secrets],
        "nodeSelector": profile.node_selector,
        "tolerations": profile.tolerations,
        "affinity": profile.affinity,
        "priorityClassName": profile.class_of(attempt.priority),
        "runtimeClassName": profile.runtime_class,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container(name: str, attempt: AttemptShape, profile: PodProfile, site: Site, mounts: list[Manifest]) -> Manifest:
    gpus = {profile.gpu_resource: attempt.ranks_per_node} if profile.gpu_resource else {}
    capabilities: Manifest = {"drop": ["ALL"]}
    if profile.add_capabilities:
        capabilities["add"] = profile.add_capabilities
    container: Manifest = {
        "name": CONTAINER,
        "image": profile.image,
        "imagePullPolicy": profile.image_pull_policy,
        "command": command_line.program(profile.command),
        "args": _arguments(name, attempt, profile, site),
        "env": [*_environment(profile, site), *profile.env],
        "resources": {"requests": profile.requests, "limits": {**profile.limits, **gpus}},
        "volumeMounts": mounts,
        "workingDir": SCRATCH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
    }
    if attempt.nodes > 1:
        container["ports"] = [{"name": "rendezvous", "containerPort": profile.rendezvous_port, "protocol": "TCP"}]
    if profile.env_from:
        container["envFrom"] = profile.env_from
    return container


def _arguments(name: str, attempt: AttemptShape, profile: PodProfile, site: Site) -> list[str]:
    """Kubernetes puts the value of a variable in place of `$(NAME)`."""
    several = attempt.nodes > 1
    return command_line.arguments(
        f"{site.home}/runs/{attempt.job_id}",
        attempt.attempt,
        grace_seconds=graces(profile, site)[0],
        node_rank="$(JOB_COMPLETION_INDEX)",
        scratch="$(TMPDIR)",
        rdzv_endpoint=f"{name}-0.{name}:{profile.rendezvous_port}" if several else "",
        address="$(POD_IP)" if several else "",
        mirror=site.storage,
    )


def _environment(profile: PodProfile, site: Site) -> list[Manifest]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    # The service has no torch here with which it could make adapters of checkpoints' shards.
    fixed = {"FT_HOME": str(site.home), "HOME": SCRATCH, "TMPDIR": SCRATCH, "FT_CHECKPOINT_ADAPTERS": "1"}
    return [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": key, "value": value} for key, value in fixed.items()),
        {"name": "FT_CACHE", "value": CACHE if profile.cache_volume is not None else ""},
        *([{"name": PASS_ENVIRONMENT, "value": ",".join(for_ranks)}] if (for_ranks := _for_ranks(profile)) else []),
    ]


def _for_ranks(profile: PodProfile) -> list[str]:
    """Names of the profile's variables that ranks would not get otherwise: those with plain values, except the storage's."""
    plain = [entry["name"] for entry in profile.env if "valueFrom" not in entry]
    if PASS_ENVIRONMENT in plain:
        return []
    return [name for name in plain if not is_named(name, STORAGE) and not child_environment({name: ""})]


def _volumes(attempt: AttemptShape, profile: PodProfile, site: Site) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes, and where they are mounted."""
    limit = {"sizeLimit": profile.scratch_size} if profile.scratch_size else {}
    own: list[tuple[str, str, Manifest]] = [
        ("tmp", SCRATCH, {"emptyDir": dict(limit)}),
        ("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": profile.shm_size}}),
    ]
    if needs_own_home(profile, site.files):
        own.append(("home", str(site.home), {"emptyDir": dict(limit)}))
    if profile.cache_volume is not None:
        own.append(("cache", CACHE, profile.cache_volume))
    volumes = [{"name": name, **source} for name, _, source in own]
    mounts = [{"name": name, "mountPath": path} for name, path, _ in own]
    shown = pod_mounts(profile, site.files, attempt.job_id, attempt.reads)
    return [*volumes, *profile.volumes], [*mounts, *shown]
