"""Resources that a job can get: as processes of this host, as pods or as batch jobs of a
cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ft_service.bases.description import Description
from ft_service.errors import SpecError
from ft_service.host import hardware
from ft_service.launcher.kubernetes.profile import QUEUE_SLOTS, PodProfile, load_profiles
from ft_service.launcher.slurm.slurm_profile import SlurmProfile, load_slurm_profiles
from ft_service.plan.machines import Machine, find_machine, measured, this_host
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.wording import counted

MOST_NODES = 512
"""Limit of a job's nodes in a cluster."""
KUEUE_DECIDES = (
    "Kueue admits jobs here, and the operator has given it no class for priorities "
    "(queue_priority_classes of the pod profile)."
)
SLURM_DECIDES = (
    "Slurm orders the jobs here, by the priorities that its operator gives to "
    "accounts and qualities of service."
)


@dataclass(frozen=True)
class Capacity:
    """Resources of the place where jobs run."""

    place: str
    """Its name in a refusal: "this host", "a pod of this cluster", "a node of this cluster"."""
    slots: int
    """Ranks of all jobs that run at once."""
    ranks_per_node: int
    gpus: int
    """GPUs of one node, all of which `nproc_per_node: auto` takes."""
    machine: Machine | None
    """Machine type of the nodes; None: that of this host."""
    several_nodes: bool
    nodes: int = 1
    """Limit of a job's nodes."""
    ignores_priority: str = ""
    """Why a job's priority has no effect, if the cluster orders jobs without it; empty: it has an
    effect.
    """
    profile: str | None = None
    """Name of the cluster's profile; None: there is only one kind of place."""
    host: str | None = None
    """The only host (`Launcher.host`) that may start a job with this profile; None: any."""

    def most_per_node(self, nodes: int, max_slots: int | None) -> int:
        """Ranks that each of a job's nodes may have.

        `max_slots`: limit of the job's project; None: none.
        """
        return min(self.ranks_per_node, min(self.slots, max_slots or self.slots) // nodes)

    def machine_for(self, base: Description) -> Machine:
        """The machine that ranks run on: this host's with what was measured when the base was
        described.
        """
        return self.machine or measured(this_host(), base.products)


def host_of_profile(launcher: Literal["kubernetes", "slurm"], profile: str) -> str:
    """Name of the host that runs the jobs of a cluster's profile."""
    return f"{launcher}/{profile}"


def total_slots(settings: Settings) -> int:
    """The slots of all places. Raises as `capacity_of`."""
    if settings.launcher != "kubernetes" or settings.pod_profile is None:
        return capacity_of(settings).slots  # of Slurm's profiles each is a way into one queue
    return sum(
        _of_profile(profile).slots
        for profile in load_profiles(settings.pod_profile).by_name.values()
    )


def capacity_of(
    settings: Settings, profile: str | None = None, project: str | None = None
) -> Capacity:
    """The capacity for a job that asks for a pod profile (None: for none), of a project (None: of
    any).

    Raises SpecError if there is no such profile for the project, or if the profile of the cluster
    cannot be used.
    """
    if settings.launcher == "kubernetes":
        assert settings.pod_profile is not None, "the settings demand one"
        profiles = load_profiles(settings.pod_profile)
        name = profiles.choose(profile, project)
        return _named(_of_profile(profiles.by_name[name]), "kubernetes", name, "pod")
    if settings.launcher == "slurm":
        assert settings.slurm_profile is not None, "the settings demand one"
        several = load_slurm_profiles(settings.slurm_profile)
        name = several.choose(profile, project)
        return _named(_of_slurm(several.by_name[name]), "slurm", name, "node")
    if profile is not None:
        raise SpecError(
            f"distributed.profile = {profile!r}: this service does not run jobs in a cluster, and "
            "has no profiles. Leave it out.",
            param="distributed.profile",
        )
    slots = settings.slots or hardware.default_slots()
    return Capacity(
        "this host", slots, slots, min(hardware.gpu_count(), slots), None, several_nodes=False
    )


def _named(
    capacity: Capacity, launcher: Literal["kubernetes", "slurm"], name: str | None, unit: str
) -> Capacity:
    """The capacity with the name of its profile, if it has one. `unit`: where its ranks are."""
    if name is None:
        return capacity
    return replace(
        capacity,
        place=f"a {unit} of the profile {name}",
        profile=name,
        host=host_of_profile(launcher, name),
    )


def _of_profile(profile: PodProfile) -> Capacity:
    machine = (
        find_machine(profile.hardware)
        if profile.hardware
        else Machine("a node of this cluster", None)
    )
    shared, own = profile.memory_limit or (None, 0)
    if machine.shared_memory:  # of the worker pod, not of the pod that this process runs in
        machine = replace(machine, memory=shared, rank_memory=own)
    else:
        machine = replace(machine, host_memory=shared, rank_memory=own)
    slots = profile.slots if profile.queue is None else QUEUE_SLOTS
    gpus = profile.ranks_per_node if profile.has_gpus else 0
    return Capacity(
        "a pod of this cluster",
        slots,
        profile.ranks_per_node,
        gpus,
        machine,
        several_nodes=True,
        nodes=MOST_NODES,
        ignores_priority=KUEUE_DECIDES
        if profile.queue is not None and not profile.queue_priority_classes
        else "",
    )


def _of_slurm(profile: SlurmProfile) -> Capacity:
    machine = (
        find_machine(profile.hardware)
        if profile.hardware
        else Machine("a node of this cluster", None)
    )
    if machine.shared_memory:  # of the node, not of this host
        machine = replace(machine, memory=None)
    return Capacity(
        "a node of this cluster",
        QUEUE_SLOTS,
        profile.ranks_per_node,
        profile.ranks_per_node if profile.gres else 0,
        machine,
        several_nodes=True,
        nodes=MOST_NODES,
        ignores_priority=SLURM_DECIDES,
    )


def refuse_too_many(spec: JobSpec, capacity: Capacity) -> None:
    """Raise SpecError for a job that needs more ranks than this place has."""
    nodes = spec.distributed.nnodes
    ranks = spec.world_size // spec.distributed.nnodes
    if nodes > 1 and not capacity.several_nodes:
        raise SpecError(
            f"distributed.nnodes = {nodes}: this service runs jobs on its own host. Leave it out; "
            "or run the job without the "
            "service, with `ft run` on each host, or on a cluster (FT_LAUNCHER = slurm or "
            "kubernetes).",
            param="distributed.nnodes",
        )
    if ranks > capacity.ranks_per_node:
        raise SpecError(
            f"distributed.nproc_per_node = {ranks}: {capacity.place} runs at most "
            f"{counted(capacity.ranks_per_node, 'rank')} at once. "
            f"Ask for fewer{', on more nodes (distributed.nnodes)' if capacity.several_nodes else ''}.",
            param="distributed.nproc_per_node",
        )
    if spec.world_size > capacity.slots:
        raise SpecError(
            f"distributed.nnodes = {nodes}: with {ranks} ranks each these are {spec.world_size} "
            "ranks; this service runs at "
            f"most {capacity.slots} at once. Ask for fewer nodes.",
            param="distributed.nnodes",
        )
