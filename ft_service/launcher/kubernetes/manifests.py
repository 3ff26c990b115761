"""Kubernetes objects of an attempt, of a job or of an engine: one Indexed Job, the headless Service
by which its pods find node 0, and the NetworkPolicy that lets them reach each other. Pure.

Only the service retries: the end of any pod ends the Job (`backoffLimit: 0`), and the service
starts the next attempt, since a pod that is replaced inside a Job could meet the one that it
replaces. podFailurePolicy only records the reason.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_service import __version__
from ft_service.host.environment import PASS_ENVIRONMENT, STORAGE, child_environment, is_named
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.launcher.kubernetes.volumes import (
    Home,
    VisibleFiles,
    base_reads,
    needs_own_home,
    pod_mounts,
)
from ft_service.supervisor import command_line

Manifest = dict[str, Any]

MANAGED_BY = {"app.kubernetes.io/name": "ft-worker", "app.kubernetes.io/managed-by": "ft-service"}
COMMON_LABELS = {
    "app.kubernetes.io/version": __version__,
    "app.kubernetes.io/component": "worker",
    "app.kubernetes.io/part-of": "ft-service",
}
INSTANCE = {"app.kubernetes.io/instance": "ft"}
"""Label as in `deploy/`; the pod profile may change it."""
DESCRIBES = {"app.kubernetes.io/name": "ft-describe", "app.kubernetes.io/managed-by": "ft-service"}
"""Labels of pods that describe bases; the launcher lists and watches only those with MANAGED_BY."""
JOB_LABEL = "ft-service/job"
ATTEMPT_LABEL = "ft-service/attempt"
JOB_NAME = "batch.kubernetes.io/job-name"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
CONTAINER = "worker"
POD_GROUP = "scheduling.x-k8s.io/pod-group"
SCHEDULERS = {
    "volcano": "volcano",
    "kai": "kai-scheduler",
    "coscheduling": "scheduler-plugins-scheduler",
}
"""Gang scheduler → its usual name."""
END_SECONDS = 30
"""Seconds of a pod's grace period after that of its ranks, for the supervisor's last work."""
SHORT_END = 0.2
"""The same as a share of a grace period that the pod profile limits, if that is less."""
_CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
SCRATCH = "/tmp"
CACHE = "/var/cache/ft"

PERMANENT_CODE = 64
STOPPED_CODE = 75
RULES: list[Manifest] = [
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [PERMANENT_CODE]},
    },
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [STOPPED_CODE]},
    },
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
"""Rules of podFailurePolicy. The Job's condition contains the index of the one that matched."""


@dataclass(frozen=True)
class AttemptShape:
    """Properties of an attempt that its objects depend on."""

    job_id: str
    attempt: int
    nodes: int
    ranks_per_node: int
    run: Path
    """Its run directory, the same path in every pod."""
    seen: VisibleFiles = field(default_factory=VisibleFiles)
    """Files and folders of the service that its pods see (`volumes.visible_reads`,
    `volumes.visible_to_engine`).
    """
    priority: int = 0
    """Priority of the job."""


@dataclass(frozen=True)
class Site:
    """Paths and times of the service, as its pods see them."""

    namespace: str
    home: Path
    """FT_HOME, the same path in every pod."""
    storage: str = ""
    """FT_STORAGE: pods download and upload their files; empty: FT_HOME is a shared volume."""
    stop_grace_seconds: float = 60.0
    models: tuple[Path, ...] = ()
    """FT_MODELS."""

    @property
    def files(self) -> Home:
        return Home(self.home, self.models, shared=not self.storage)


def object_name(job_id: str, attempt: int) -> str:
    """Return the name of an attempt's Job and Service, in lower case; no two random ids differ only
    in case. `job_id`: also the id of an engine.
    """
    tail = job_id.removeprefix("ftjob-").lower()
    if not re.fullmatch(r"(engine-)?[a-z0-9]{1,40}", tail):
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
            "metadata": {
                "labels": labels,
                **({"annotations": profile.annotations} if profile.annotations else {}),
            },
            "spec": _pod(name, attempt, profile, site),
        },
    }
    if profile.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = profile.active_deadline_seconds
    metadata: Manifest = {"name": name, "namespace": site.namespace, "labels": dict(labels)}
    if profile.gang is not None:
        _group(metadata, spec["template"]["metadata"], name, attempt.nodes, profile)
    if profile.queue is not None:
        spec["suspend"] = True  # Kueue resumes it
        metadata["labels"][QUEUE_NAME] = profile.queue
        if (priority_class := profile.queue_class_of(attempt.priority)) is not None:
            metadata["labels"]["kueue.x-k8s.io/priority-class"] = priority_class
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def describe_manifest(
    name: str, folder: Path, profile: PodProfile, site: Site, *, memory: int, seconds: int
) -> Manifest:
    """Return a Job of one pod that describes a base: it reads the models and prints the document.

    `memory`: limit in bytes. `seconds`: deadline, including the wait for a node.
    """
    labels = {**INSTANCE, **profile.labels, **COMMON_LABELS, **DESCRIBES}
    shown = pod_mounts(
        profile, site.files, None, VisibleFiles(tuple(base_reads(folder, site.files, profile)))
    )
    own = {
        "tmp": SCRATCH,
        **({"home": str(site.home)} if needs_own_home(profile, site.files) else {}),
    }
    volumes = [*({"name": name, "emptyDir": {}} for name in own), *profile.volumes]
    container: Manifest = {
        "name": CONTAINER,
        "image": profile.image,
        "imagePullPolicy": profile.image_pull_policy,
        "command": [*profile.command, "-P", "-m", "ft_service.bases.describing"],
        "args": [str(folder)],
        "env": [{"name": key, "value": SCRATCH} for key in ("HOME", "TMPDIR")],
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"},
            "limits": {"memory": str(memory)},
        },
        "volumeMounts": [
            *({"name": name, "mountPath": path} for name, path in own.items()),
            *shown,
        ],
        "workingDir": SCRATCH,
        "securityContext": _CONFINED | {"capabilities": {"drop": ["ALL"]}},
    }
    pod = _placed(
        {"restartPolicy": "Never", "containers": [container], "volumes": volumes},
        profile,
        profile.priority_class,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": site.namespace, "labels": dict(labels)},
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "activeDeadlineSeconds": seconds,
            "ttlSecondsAfterFinished": profile.ttl_seconds_after_finished,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _group(job: Manifest, pods: Manifest, name: str, nodes: int, profile: PodProfile) -> None:
    """Say to the profile's gang scheduler, in the metadata of a Job and of its pods, that these are
    placed together.

    Sources: Volcano's controller of PodGroups for plain workloads; KAI's docs/batch;
    scheduler-plugins' coscheduling.
    """
    queue = profile.scheduler_queue
    match profile.gang:
        case "volcano":
            notes = {"scheduling.volcano.sh/group-min-member": str(nodes)}
            notes |= {"scheduling.volcano.sh/queue-name": queue} if queue else {}
            for metadata in (job, pods):
                metadata["annotations"] = {**metadata.get("annotations", {}), **notes}
        case "kai":
            job["annotations"] = {"kai.scheduler/batch-min-member": str(nodes)}
            for metadata in (job, pods):
                metadata["labels"] = {
                    **metadata["labels"],
                    **({"kai.scheduler/queue": queue} if queue else {}),
                }
        case "coscheduling":
            pods["labels"] = {**pods["labels"], POD_GROUP: name}


def owned_manifests(job: Manifest, profile: PodProfile) -> list[Manifest]:
    """Return the Service and NetworkPolicy of a created Job, which owns them: they are deleted with
    the Job. With coscheduling also the PodGroup, until which its pods wait; without the profile's
    `network_policy` no policy.
    """
    group = [_pod_group(job)] if profile.gang == "coscheduling" else []
    policy = [_policy(job)] if profile.network_policy else []
    return [*group, _service(job, profile.rendezvous_port), *policy]


def _pod_group(job: Manifest) -> Manifest:
    return {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": _owned(job),
        "spec": {"minMember": job["spec"]["parallelism"]},
    }


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
    """Let a Job's pods reach each other only: rendezvous, gloo and NCCL have no authentication.

    `deploy/` has the rules for all other traffic of workers.
    """
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
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    labels = {
        key: value for key, value in metadata["labels"].items() if not key.startswith("kueue.")
    }
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
    """Return the label that differs between installations in one namespace."""
    return {key: profile.labels.get(key, value) for key, value in INSTANCE.items()}


def grace_periods(profile: PodProfile, site: Site) -> tuple[float, int]:
    """Return the seconds that the ranks may take to stop, and those that the pod may take to
    end.
    """
    longest = profile.termination_grace_seconds
    if longest is None:
        return site.stop_grace_seconds, math.ceil(site.stop_grace_seconds) + END_SECONDS
    return min(site.stop_grace_seconds, longest - min(END_SECONDS, SHORT_END * longest)), longest


def _pod(name: str, attempt: AttemptShape, profile: PodProfile, site: Site) -> Manifest:
    volumes, mounts = _volumes(attempt, profile, site)
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": grace_periods(profile, site)[1],
        "containers": [_container(name, attempt, profile, site, mounts)],
        "volumes": volumes,
    }
    optional: Manifest = {
        "schedulerName": profile.scheduler_name or SCHEDULERS.get(profile.gang or ""),
        "resourceClaims": profile.resource_claims,
        "initContainers": [_confined(container) for container in profile.init_containers],
        "hostNetwork": profile.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if profile.host_network else None,
    }
    pod |= {key: value for key, value in optional.items() if value}
    return _placed(pod, profile, profile.class_of(attempt.priority))


def _confined(container: Manifest) -> Manifest:
    """Give an operator's container the confinement of the workers' where it says nothing else."""
    given = container.get("securityContext", {})
    return {
        **container,
        "securityContext": {**_CONFINED, "capabilities": {"drop": ["ALL"]}, **given},
    }


def _placed(pod: Manifest, profile: PodProfile, priority_class: str | None) -> Manifest:
    """Add the service account, the security context and the scheduling fields of the profile to a
    pod.
    """
    pod |= {
        "serviceAccountName": profile.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **({"runAsUser": profile.run_as_user} if profile.run_as_user is not None else {}),
            **(
                {"runAsGroup": group, "fsGroup": group}
                if (group := profile.run_as_group) is not None
                else {}
            ),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    optional: Manifest = {
        "imagePullSecrets": [{"name": secret} for secret in profile.image_pull_secrets],
        "nodeSelector": profile.node_selector,
        "tolerations": profile.tolerations,
        "affinity": profile.affinity,
        "priorityClassName": priority_class,
        "runtimeClassName": profile.runtime_class,
        "topologySpreadConstraints": profile.topology_spread,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container(
    name: str, attempt: AttemptShape, profile: PodProfile, site: Site, mounts: list[Manifest]
) -> Manifest:
    gpus = {profile.gpu_resource: attempt.ranks_per_node} if profile.gpu_resource else {}
    resources: Manifest = profile.resources(attempt.ranks_per_node)
    resources["limits"] |= gpus
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
        "resources": resources,
        "volumeMounts": mounts,
        "workingDir": SCRATCH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _CONFINED | {"capabilities": capabilities},
    }
    if profile.resource_claims:
        resources["claims"] = [{"name": claim["name"]} for claim in profile.resource_claims]
    if attempt.nodes > 1:
        container["ports"] = [
            {"name": "rendezvous", "containerPort": profile.rendezvous_port, "protocol": "TCP"}
        ]
    if profile.env_from:
        container["envFrom"] = profile.env_from
    return container


def _arguments(name: str, attempt: AttemptShape, profile: PodProfile, site: Site) -> list[str]:
    """Return the supervisor's arguments.

    Kubernetes replaces `$(NAME)` by the value of a variable.
    """
    several = attempt.nodes > 1
    options = command_line.SupervisorOptions(
        grace_seconds=grace_periods(profile, site)[0],
        node_rank="$(JOB_COMPLETION_INDEX)",
        scratch="$(TMPDIR)",
        rdzv_endpoint=f"{name}-0.{name}:{profile.rendezvous_port}" if several else "",
        address="$(POD_IP)" if several else "",
        mirror=site.storage,
    )
    return options.arguments(attempt.run, attempt.attempt)


def _environment(profile: PodProfile, site: Site) -> list[Manifest]:
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    # The service has no torch to convert checkpoints' shards to adapters.
    fixed = {
        "FT_HOME": str(site.home),
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "FT_CHECKPOINT_ADAPTERS": "1",
    }
    return [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": key, "value": value} for key, value in fixed.items()),
        {"name": "FT_CACHE", "value": CACHE if profile.cache_volume is not None else ""},
        *(
            [{"name": PASS_ENVIRONMENT, "value": ",".join(for_ranks)}]
            if (for_ranks := _for_ranks(profile))
            else []
        ),
    ]


def _for_ranks(profile: PodProfile) -> list[str]:
    """Return the profile's variables that ranks would not get by default: those with plain values,
    except the storage's.
    """
    plain = [entry["name"] for entry in profile.env if "valueFrom" not in entry]
    if PASS_ENVIRONMENT in plain:
        return []
    return [
        name for name in plain if not is_named(name, STORAGE) and not child_environment({name: ""})
    ]


def _volumes(
    attempt: AttemptShape, profile: PodProfile, site: Site
) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes and their mounts."""
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
    shown = pod_mounts(profile, site.files, attempt.run, attempt.seen)
    return [*volumes, *profile.volumes], [*mounts, *shown]
