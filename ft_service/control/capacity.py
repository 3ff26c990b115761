"""What jobs of this service can have: as processes of this host, or as pods of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_service.errors import SpecError, UnavailableError
from ft_service.host import hardware
from ft_service.launcher.kubernetes.profile import QUEUE_SLOTS, PodProfile, load_profile
from ft_service.plan.machines import Machine, find_machine, host_cpu, machine_of_gpu, machine_of_model, this_host
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.store.fleet.hosts import HostRow, HostStore

MOST_NODES = 512
"""Of a job in a cluster."""


@dataclass(frozen=True)
class Capacity:
    place: str
    """In a refusal: "this host", or "a pod of this cluster"."""
    slots: int
    """Ranks that run at once, of all jobs."""
    ranks_per_node: int
    gpus: int
    """Of one node: what `nproc_per_node: auto` takes; 0: it has none."""
    machine: Machine | None
    """Of the nodes; None: this host's."""
    several_nodes: bool
    nodes: int = 1
    """Of a job, at most."""
    ignores_priority: bool = False
    """Whose turn it is a cluster says, which is told of no priorities."""
    machines: tuple[Machine, ...] = ()
    """All kinds of nodes, the commonest first; empty: there is one."""


def capacity_now(settings: Settings, store: HostStore) -> Capacity:
    """The same, asking which hosts there are where agents tell of them. Raises UnavailableError if none ever has."""
    return capacity_of(settings, store.fleet() if settings.launcher == "agents" else ())


def machines_now(settings: Settings, store: HostStore) -> tuple[Machine, ...]:
    """All kinds of nodes that may train, the commonest first. Raises as `capacity_now`."""
    capacity = capacity_now(settings, store)
    return capacity.machines or (capacity.machine or this_host(),)


def capacity_of(settings: Settings, fleet: Sequence[HostRow] = ()) -> Capacity:
    """`fleet`: all hosts with agents. Raises SpecError if the pod profile cannot be used, UnavailableError if there should be
    hosts with agents and none is."""
    if settings.launcher == "agents":
        return _of_fleet(fleet)
    if settings.launcher == "kubernetes":
        assert settings.pod_profile is not None, "the settings demand one"
        return _of_profile(load_profile(settings.pod_profile))
    slots = settings.slots or hardware.default_slots()
    return Capacity("this host", slots, slots, min(hardware.gpu_count(), slots), None, several_nodes=False)


def _of_fleet(fleet: Sequence[HostRow]) -> Capacity:
    """Those that are drained or do not answer now count too: they may be back before the job's turn."""
    if not fleet:
        raise UnavailableError("No host has joined this service yet (FT_LAUNCHER = agents): start `ft agent` on each host.")
    kinds: Counter[tuple[str, int, int | None]] = Counter()
    for host in fleet:
        kinds[host.kind, host.gpus, host.memory] += host.slots
    machines = tuple(dict.fromkeys(_machine(*kind) for kind, _ in kinds.most_common()))
    gpus = Counter(host.gpus for host in fleet).most_common(1)[0][0]
    most, slots = max(host.slots for host in fleet), sum(host.slots for host in fleet)
    return Capacity(
        "a host of this service", slots, most, gpus, machines[0], several_nodes=True, nodes=len(fleet), machines=machines
    )


def _machine(kind: str, gpus: int, memory: int | None) -> Machine:
    if not gpus:
        return replace(host_cpu(), memory=memory)
    return machine_of_model(kind) if memory is None else machine_of_gpu(kind, memory)


def _of_profile(profile: PodProfile) -> Capacity:
    machine = find_machine(profile.hardware) if profile.hardware else Machine("a node of this cluster", None)
    if machine.shared_memory:  # a pod's, not that of the pod that this runs in
        machine = replace(machine, memory=profile.memory_limit)
    slots = profile.slots if profile.queue is None else QUEUE_SLOTS
    gpus = profile.ranks_per_node if profile.gpu_resource else 0
    return Capacity(
        "a pod of this cluster",
        slots,
        profile.ranks_per_node,
        gpus,
        machine,
        several_nodes=True,
        nodes=MOST_NODES,
        ignores_priority=profile.queue is not None and not profile.queue_priority_classes,
    )


def refuse_too_many(spec: JobSpec, capacity: Capacity) -> None:
    """Raises SpecError for a job that could never get the ranks that it asks for."""
    nodes, ranks = spec.distributed.nnodes, spec.world_size // spec.distributed.nnodes
    if nodes > 1 and not capacity.several_nodes:
        raise SpecError(
            f"distributed.nnodes = {nodes}: this service runs jobs on its own host. Leave it out; or run the job without the "
            "service, with `ft run` on each host, or on several hosts (FT_LAUNCHER = agents or kubernetes).",
            param="distributed.nnodes",
        )
    if ranks > capacity.ranks_per_node:
        raise SpecError(
            f"distributed.nproc_per_node = {ranks}: {capacity.place} runs at most {capacity.ranks_per_node} ranks at once. "
            f"Ask for fewer{', on more nodes (distributed.nnodes)' if capacity.several_nodes else ''}.",
            param="distributed.nproc_per_node",
        )
    if spec.world_size > capacity.slots:
        raise SpecError(
            f"distributed.nnodes = {nodes}: with {ranks} ranks each these are {spec.world_size} ranks; this service runs at "
            f"most {capacity.slots} at once. Ask for fewer nodes.",
            param="distributed.nnodes",
        )
