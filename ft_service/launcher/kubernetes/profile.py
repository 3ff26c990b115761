"""Pod profiles: the operator's settings of worker pods, in a YAML file named by FT_POD_PROFILE. A
job cannot change them.

Fields with Kubernetes objects (tolerations, volumes, …) take them as in a pod's manifest; an
unknown field in one is refused by its path. A file may hold several profiles: types of GPUs, pools,
spot nodes, namespaces of projects (ft_service/launcher/profiles.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ft_service.launcher.profiles import Profiles, read_profiles
from ft_service.spec import Strict

ServiceAccountFolder = Path("/var/run/secrets/kubernetes.io/serviceaccount")
QUEUE_SLOTS = 4096
"""Ranks of jobs in a cluster's own queue at once."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


def _as_text(value: object) -> object:
    """A number of YAML as Kubernetes takes it too: `cpu: 0.5`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_QUANTITY = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=_QUANTITY),
    WithJsonSchema({"type": ["string", "number"], "pattern": _QUANTITY}),
]
"""A number as Kubernetes writes it: `8Gi`, `1048576Ki`, `500m`, `2e9`."""
Objects = list[dict[str, Any]]


def _numbered(value: object) -> object:
    """Keys of a map from priorities as numbers: Helm makes texts of all keys of values.

    Raises ValueError for a number that is given twice, as `0` and `"0"`.
    """
    if not isinstance(value, Mapping):
        return value
    texts = {
        key: int(key) for key in value if isinstance(key, str) and re.fullmatch(r"-?[0-9]+", key)
    }
    found = {texts.get(key, key): named for key, named in value.items()}
    if len(found) < len(value):
        raise ValueError("a priority is given twice: keep one")
    return found


Priorities = Annotated[
    dict[int, str],
    BeforeValidator(_numbered),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^-?[0-9]+$": {"type": "string"}},
            "additionalProperties": False,
        }
    ),
]
"""A map whose keys are priorities: whole numbers, or texts of them."""


@dataclass(frozen=True)
class Kind:
    """Mark of a field that holds objects as they stand in a pod's manifest."""

    name: str
    """Their type in Kubernetes' core API."""
    rest: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the service adds to each."""


class PodProfile(Strict):
    """Settings of worker pods, and their number."""

    projects: list[str] | None = None
    """Ids of the projects whose jobs may use it; None: all. [] keeps a profile for the jobs that
    have it and gives it to no new one.
    """

    image: Annotated[str, Field(min_length=1)]
    """Image of the workers; by digest, so that all attempts of a job run the same one."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: list[Name] = Field(default_factory=list)
    """Names of the Secrets."""
    command: list[str] = Field(default_factory=lambda: ["python"])
    """Python interpreter in the image."""
    namespace: Name | None = None
    """Namespace of the pods; None: the service's."""
    service_account: Name = "ft-worker"
    """Service account of the pods; they get no token of it, since they never call the API
    server.
    """

    slots: Annotated[int, Field(ge=1, le=65_536)]
    """Ranks that run at once in the whole cluster: its GPUs for this service.

    Ignored with `queue`, which counts itself.
    """
    ranks_per_node: Annotated[int, Field(ge=1, le=64)]
    """Largest number of ranks in one pod: the GPUs of a node.

    `nproc_per_node: auto` takes so many.
    """
    gpu_resource: str | None = "nvidia.com/gpu"
    """Resource of which a pod requests one per rank; None: the nodes have no GPUs."""
    hardware: str | None = None
    """The nodes' GPUs, as `ft plan --hardware` names them, to refuse jobs that cannot fit.

    None: memory is not checked.
    """
    requests: dict[str, Quantity] = Field(default_factory=dict)
    """Requests of a pod, however many ranks it has, without GPUs."""
    limits: dict[str, Quantity] = Field(default_factory=dict)
    """The same for its limits."""
    requests_per_rank: dict[str, Quantity] = Field(default_factory=dict)
    """What a pod requests besides for each of its ranks: processors, memory, network cards. With
    `{cpu: 12, memory: 128Gi}` and nodes of 8 GPUs, a job of one GPU takes an eighth of a node.
    """
    limits_per_rank: dict[str, Quantity] = Field(default_factory=dict)
    """The same for its limits."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Annotated[Objects, Kind("Toleration")] = Field(default_factory=list)
    affinity: Annotated[dict[str, Any], Kind("Affinity")] = Field(default_factory=dict)
    topology_spread: Annotated[Objects, Kind("TopologySpreadConstraint")] = Field(
        default_factory=list
    )
    """topologySpreadConstraints of the pods.

    With matchLabelKeys `batch.kubernetes.io/job-name` they, and affinities, concern the pods of one
    attempt.
    """
    scheduler_name: str | None = None
    """Scheduler of the pods; None: that of `gang`, or the cluster's."""
    gang: Literal["volcano", "kai", "coscheduling"] | None = None
    """Scheduler that places all pods of an attempt at once or none: Volcano, KAI, or the
    coscheduling plugin, whose PodGroup the service creates. None: the service gives places back
    after `placement_seconds`. Kueue admits, and needs no gang.
    """
    scheduler_queue: Name | None = None
    """Queue of `gang`: Volcano's or KAI's. Ignored with coscheduling."""
    priority_class: Name | None = None
    runtime_class: Name | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    resource_claims: Annotated[Objects, Kind("PodResourceClaim")] = Field(default_factory=list)
    """resourceClaims of the pods (dynamic resource allocation), all of which the workers' container
    gets: GPUs, network cards. With `gpu_resource: null` the GPUs are theirs, `ranks_per_node` in
    each pod.
    """
    init_containers: Annotated[Objects, Kind("Container")] = Field(default_factory=list)
    """Containers that run before the workers', confined as these unless they say otherwise."""
    host_network: bool = False
    """Use the node's network, as some RDMA set-ups demand.

    NetworkPolicies do not apply then: whoever reaches the nodes reaches the rendezvous, which has
    no authentication. Pods of jobs with several nodes do not share a node.
    """
    env: Annotated[Objects, Kind("EnvVar")] = Field(default_factory=list)
    """Variables of the workers' container: NCCL's interfaces, credentials of object storage (by
    `valueFrom`). Ranks get those with plain values; those with `valueFrom`, the storage's, and
    `env_from` stay with the supervisor (FT_PASS_ENVIRONMENT).
    """
    env_from: Annotated[Objects, Kind("EnvFromSource")] = Field(default_factory=list)
    volumes: Annotated[Objects, Kind("Volume")] = Field(default_factory=list)
    volume_mounts: Annotated[Objects, Kind("VolumeMount")] = Field(default_factory=list)
    """Mounts of the pods. One must contain FT_HOME, unless FT_STORAGE is set, and one the base
    models, both at the service's paths. Pods see only their job's sub-paths of the volume of
    FT_HOME, wherever it is mounted here (volumes.py).
    """
    cache_volume: Annotated[dict[str, Any] | None, Kind("Volume", {"name": "cache"})] = None
    """Volume source (`emptyDir`, `hostPath`, …) for quantised bases, local to the node.

    None: no cache.
    """
    scratch_size: Quantity | None = None
    """Limit on the pod's own files (with FT_STORAGE: its copy of the run directory)."""
    shm_size: Quantity = "2Gi"
    """Size of /dev/shm; counts as memory of the pod."""
    add_capabilities: list[str] = Field(default_factory=list)
    """Capabilities that the container may have; all others are dropped.

    Linux gives them to root alone, which the pods never are: for RDMA, IPC_LOCK is no substitute
    for an unlimited `memlock` of the nodes' container runtime.
    """
    run_as_user: Annotated[int, Field(ge=1)] | None = 10001
    """User of the pods; None: the cluster chooses (OpenShift), never root."""
    run_as_group: Annotated[int, Field(ge=1)] | None = 10001
    """Group of the pods and of their volumes; None: the cluster chooses."""
    rendezvous_port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Port of the rendezvous on the pod of node 0."""
    network_policy: bool = True
    """Give each attempt a NetworkPolicy: its pods reach each other, and besides only what other
    policies allow. false: where policies are not wanted, or others make them; then whoever
    reaches the pods reaches the rendezvous, which has no authentication.
    """

    termination_grace_seconds: Annotated[int, Field(ge=10, le=86_400)] | None = None
    """Longest time that a pod may take to end once it is asked to: 25 for spot nodes with a notice
    of 30 seconds. A fifth of it, at most 30 seconds, is left to the supervisor (which uploads files
    with FT_STORAGE); the ranks may take the rest to write a checkpoint, or FT_STOP_GRACE_SECONDS if
    that is less. None: FT_STOP_GRACE_SECONDS and 30 more.
    """
    active_deadline_seconds: Annotated[int, Field(ge=60)] | None = None
    """Time limit of one attempt, from the creation of its Job, or from its admission with `queue`;
    the next one resumes from its last checkpoint. The wait for nodes is part of it. An attempt that
    only waited is tried again, and is no failure. None: no limit.
    """
    placement_seconds: Annotated[int, Field(ge=1, le=900)] = 120
    """Seconds for which some pods of an attempt may hold nodes while others have none; then they
    release them, and the job tries again later. Where nodes are added on demand: the time that this
    takes. Ignored with `queue`, which admits whole Jobs.
    """
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] = 3600
    """Seconds for which a Job that has ended stays visible to kubectl."""
    queue: str | None = None
    """Kueue's LocalQueue: Jobs are created suspended, and Kueue admits them.

    None: the service counts its slots.
    """
    queue_priority_class: str | None = None
    """Kueue's WorkloadPriorityClass; ignored without `queue`."""
    queue_priority_classes: Priorities = Field(default_factory=dict)
    """A job's priority → Kueue's WorkloadPriorityClass: that of the highest number which is not
    above the job's. Lower ones get `queue_priority_class`. Empty: Kueue gets no priority, and a job
    with one says so. Only with `queue`.
    """
    priority_classes: Priorities = Field(default_factory=dict)
    """The same for the pods' PriorityClass; lower ones get `priority_class`."""

    @model_validator(mode="after")
    def _known_objects(self) -> PodProfile:
        for name, kind in _KINDS.items():
            given = getattr(self, name)
            fault = None if given is None else _fault_of(name, kind, given)
            if fault is not None:
                raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _gpus_once(self) -> PodProfile:
        for name in ("requests_per_rank", "limits_per_rank"):
            if self.gpu_resource is not None and self.gpu_resource in getattr(self, name):
                raise ValueError(
                    f"{name}: each rank has one {self.gpu_resource} by gpu_resource; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> PodProfile:
        taken = {"tmp", "shm", "home", "cache"} & {
            str(volume.get("name")) for volume in self.volumes
        }
        if taken:
            raise ValueError(
                f"volumes: the name {min(taken)!r} is used by the service; choose another"
            )
        if self.gang is not None and self.queue is not None:
            raise ValueError(
                f"gang = {self.gang!r} with queue = {self.queue!r}: Kueue admits whole Jobs; "
                "leave out one of them"
            )
        if self.scheduler_queue is not None and self.gang is None:
            raise ValueError(
                f"scheduler_queue = {self.scheduler_queue!r}: only with gang; Kueue's queue is "
                "`queue`"
            )
        return self

    @property
    def has_gpus(self) -> bool:
        """Whether pods have GPUs, one for each rank."""
        return bool(self.gpu_resource or self.resource_claims)

    def resources(self, ranks: int) -> dict[str, dict[str, str]]:
        """Return requests and limits of a pod of so many ranks, without GPUs."""
        return {
            "requests": _with_ranks(self.requests, self.requests_per_rank, ranks),
            "limits": _with_ranks(self.limits, self.limits_per_rank, ranks),
        }

    @property
    def memory_limit(self) -> tuple[int, int] | None:
        """Bytes of memory that a pod may use: for all its ranks together, and for each of them
        besides; None: no limit is set.
        """
        given = self.limits.get("memory"), self.limits_per_rank.get("memory")
        if given == (None, None):
            return None
        shared, own = (0 if quantity is None else _bytes(quantity) for quantity in given)
        return shared, own

    def class_of(self, priority: int) -> str | None:
        """Return the pods' PriorityClass for a job of this priority."""
        return _class_of(priority, self.priority_classes) or self.priority_class

    def queue_class_of(self, priority: int) -> str | None:
        """Return Kueue's WorkloadPriorityClass for a job of this priority."""
        return _class_of(priority, self.queue_priority_classes) or self.queue_priority_class

    def mounts(self, path: Path) -> bool:
        """Return whether a volume of the operator contains this path."""
        mounted = [PurePosixPath(str(mount.get("mountPath"))) for mount in self.volume_mounts]
        return any(PurePosixPath(path).is_relative_to(folder) for folder in mounted)

    def secrets(self) -> set[str]:
        """Return the names of the Secrets in the environment of worker pods."""
        whole = [source.get("secretRef", {}).get("name") for source in self.env_from]
        single = [
            entry.get("valueFrom", {}).get("secretKeyRef", {}).get("name") for entry in self.env
        ]
        return {str(name) for name in (*whole, *single) if name}


_KINDS = {
    name: mark
    for name, own in PodProfile.model_fields.items()
    for mark in own.metadata
    if isinstance(mark, Kind)
}


def _fault_of(name: str, kind: Kind, given: Any) -> str | None:
    """Return what is wrong with the objects of a field; None also if the client's package is
    missing, without which the service starts no pods.
    """
    try:
        from ft_service.launcher.kubernetes.pod_fields import fault_of
    except ModuleNotFoundError:
        return None
    return fault_of(name, kind.name, {**kind.rest, **given} if kind.rest else given)


def _class_of(priority: int, classes: Mapping[int, str]) -> str | None:
    return (
        classes[max(known)]
        if (known := [number for number in classes if number <= priority])
        else None
    )


_UNITS: Mapping[str, Decimal] = {
    **{
        unit: Decimal(1000) ** power
        for power, unit in enumerate(("n", "u", "m", "", *"kMGTPE"), start=-3)
    },
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}
"""Suffix of a quantity → its factor."""


def _bytes(quantity: str) -> int:
    """Parse a size, in bytes, rounded down."""
    number, unit = _parts(quantity)
    return int(number * _UNITS[unit])


def _parts(quantity: str) -> tuple[Decimal, str]:
    """Return the number and the unit of a quantity."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", str(quantity))
    assert match is not None, "the profile was validated"
    return Decimal(match[1]), match[2]


def _with_ranks(shared: Mapping[str, str], each: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return a pod's quantities: those that do not depend on its ranks, and those of each rank."""
    return {**shared, **{name: _sum(shared.get(name), each[name], ranks) for name in each}}


def _sum(shared: str | None, each: str, ranks: int) -> str:
    """Return `shared + ranks * each` in their unit; if they have two, in none, or in thousandths,
    rounded up.
    """
    number, unit = _parts(each)
    more, its_unit = _parts(shared) if shared is not None else (Decimal(0), unit)
    if its_unit == unit:
        return f"{more + ranks * number:f}{unit}"
    total = more * _UNITS[its_unit] + ranks * number * _UNITS[unit]
    return f"{total:.0f}" if total == int(total) else f"{math.ceil(total * 1000)}m"


PodProfiles = Profiles[PodProfile]
"""The profiles of a file; the first is also that of pods that belong to no job: they describe
bases.
"""


def load_profiles(path: Path) -> PodProfiles:
    """Read the profiles of a file.

    Raises SpecError that names the file, the profile and the field.
    """
    setting = "FT_POD_PROFILE"
    return Profiles(read_profiles(setting, path, PodProfile), setting, "kind of pods")


def own_namespace(folder: Path = ServiceAccountFolder) -> str | None:
    """Return the namespace that this process runs in; None: it is outside a cluster."""
    path = folder / "namespace"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
