"""Choice of the launcher by the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ft_service.control.places.capacity import capacity_of, host_of_profile
from ft_service.engines.engine_directory import EngineDirectory
from ft_service.engines.engine_launcher import ClusterEngineLauncher, EngineLauncher
from ft_service.errors import SpecError
from ft_service.host.hardware import default_slots
from ft_service.launcher.kubernetes.manifests import Site
from ft_service.launcher.kubernetes.profile import PodProfile, load_profiles, own_namespace
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.launcher.protocol import Launcher
from ft_service.launcher.slurm.batch_script import SlurmSite, notice_seconds
from ft_service.launcher.slurm.slurm_commands import missing_commands
from ft_service.launcher.slurm.slurm_launcher import PLACE, SlurmLauncher
from ft_service.launcher.slurm.slurm_profile import SlurmProfile, load_slurm_profiles
from ft_service.settings import Settings
from ft_service.storage.locations import Places

if TYPE_CHECKING:
    from ft_service.launcher.kubernetes.cluster import Cluster
    from ft_service.launcher.kubernetes.describe_pod import DescribePods

log = logging.getLogger(__name__)

SERVICE_STORAGE_SECRET = "ft-storage"
"""Name in `deploy/` of the Secret with the storage credentials of API and reconciler."""


def new_launchers(settings: Settings, move_host: Callable[[str, str], None]) -> list[Launcher]:
    """Return the launcher that FT_LAUNCHER names, or one for each pod profile.

    `move_host`: renames a host in the database.

    Raises SpecError if the cluster cannot be used as its profile says.
    """
    if settings.launcher == "local":
        ranks = LocalLauncher(
            settings.slots or default_slots(), stop_grace_seconds=settings.stop_grace_seconds
        )
        return [EngineLauncher(ranks, Places.of(settings))]
    if settings.launcher == "slurm":
        return _slurm(settings, move_host)
    return _kubernetes(settings, move_host)


def _slurm(settings: Settings, move_host: Callable[[str, str], None]) -> list[Launcher]:
    assert settings.slurm_profile is not None, "the settings demand one"
    if missing := missing_commands():
        raise SpecError(
            f"FT_LAUNCHER = slurm: {' and '.join(missing)} cannot be found here. Install Slurm's "
            "commands (slurm-client) and "
            "the cluster's slurm.conf, or run the service on a login node.",
            param="FT_LAUNCHER",
        )
    site = SlurmSite(settings.home, settings.stop_grace_seconds)
    launchers: list[Launcher] = []
    for name, profile in load_slurm_profiles(settings.slurm_profile).by_name.items():
        _refuse_short_time(profile, site)
        _warn_without_memory(settings, "FT_SLURM_PROFILE", name)
        host = PLACE if name is None else host_of_profile("slurm", name)
        if name is not None and not launchers:  # jobs of the time when the file was one profile
            move_host(PLACE, host)
        launcher = SlurmLauncher(profile, site, host=host, lists=not launchers)
        if (why := launcher.refusal()) is not None:  # not refused: jobs that run are to be observed
            where = "" if name is None else f" (profiles.{name})"
            log.error("FT_SLURM_PROFILE%s: Slurm refuses every job: %s", where, why)
        launchers.append(ClusterEngineLauncher(launcher, Places.of(settings)))
    return launchers


def _refuse_short_time(profile: SlurmProfile, site: SlurmSite) -> None:
    """Raise SpecError for a time limit in which an attempt would hardly train."""
    if profile.time_seconds is not None and profile.time_seconds <= 2 * notice_seconds(site):
        raise SpecError(
            f"FT_SLURM_PROFILE: time = {profile.time!r}: an attempt must stop "
            f"{notice_seconds(site)} seconds before the limit "
            "(FT_STOP_GRACE_SECONDS and a minute), and would hardly train. Give at least twice "
            "that.",
            param="FT_SLURM_PROFILE",
        )


def new_describe_pods(settings: Settings) -> DescribePods:
    """Return the pods that describe bases.

    Raises SpecError if the cluster cannot be used as the pod profile says.
    """
    assert settings.pod_profile is not None, "the settings demand one"
    profile = load_profiles(settings.pod_profile).first
    cluster, site = _cluster(settings, profile)
    from ft_service.launcher.kubernetes.describe_pod import DescribePods

    return DescribePods(cluster, profile, site)


def _kubernetes(settings: Settings, move_host: Callable[[str, str], None]) -> list[Launcher]:
    assert settings.pod_profile is not None, "the settings demand one"
    launchers: list[Launcher] = []
    listed: set[str] = set()
    for name, profile in load_profiles(settings.pod_profile).by_name.items():
        cluster, site = _cluster(settings, profile)
        from ft_service.launcher.kubernetes.kubernetes_launcher import KubernetesLauncher

        host = None if name is None else host_of_profile("kubernetes", name)
        if host is not None and not launchers:  # jobs of the time when the file was one profile
            move_host(f"kubernetes/{site.namespace}", host)
        _warn_without_kueue(cluster, profile)
        _warn_without_memory(settings, "FT_POD_PROFILE", name)
        launcher = KubernetesLauncher(
            cluster, profile, site, host=host, lists=site.namespace not in listed
        )
        listed.add(site.namespace)
        show = None if settings.storage else partial(EngineDirectory.show, home=settings.home)
        launchers.append(ClusterEngineLauncher(launcher, Places.of(settings), show))
    return launchers


def _warn_without_memory(settings: Settings, setting: str, profile: str | None) -> None:
    """Log that no engine will form by itself: where the memory of the nodes is not known, ranks
    choose what is "auto", each for its own job.
    """
    machine = capacity_of(settings, profile).machine
    if not settings.seats or machine is None or machine.memory is not None:
        return
    log.warning(
        "FT_ENGINE_JOBS = %d, and %s%s does not say how much memory a rank has: jobs that leave "
        'options at "auto" run without an engine. Set hardware; for hardware without GPUs of its '
        "own (cpu), also limits or limits_per_rank with memory.",
        settings.seats,
        setting,
        "" if profile is None else f" (profiles.{profile})",
    )


def _warn_without_kueue(cluster: Cluster, profile: PodProfile) -> None:
    """Log that no job with this profile will ever start.

    It is not refused: jobs that run are to be observed.
    """
    from ft_service.launcher.kubernetes.cluster import ClusterAwayError, RefusedError

    if profile.queue is None:
        return
    try:
        cluster.workload("none")
    except (ClusterAwayError, RefusedError) as error:
        log.warning("whether the cluster has Kueue is unknown: %s", error)
    if cluster.lacks_kueue:
        log.error(
            "FT_POD_PROFILE: queue = %r, and the cluster has no Kueue (kueue.x-k8s.io/v1beta2): "
            "jobs will wait for ever. "
            "Install Kueue 0.15 or newer, or leave out queue.",
            profile.queue,
        )


def _cluster(settings: Settings, profile: PodProfile) -> tuple[Cluster, Site]:
    try:
        from ft_service.launcher.kubernetes.cluster import Cluster
    except ModuleNotFoundError as error:
        message = (
            f"FT_LAUNCHER = kubernetes: {error.name} is not installed: pip install "
            "'ft-service[kubernetes]'."
        )
        raise SpecError(message, param="FT_LAUNCHER") from None
    namespace = profile.namespace or own_namespace()
    if namespace is None:
        raise SpecError(
            "FT_POD_PROFILE: set namespace, because the service runs outside a cluster.",
            param="FT_POD_PROFILE",
        )
    if not settings.storage and not profile.mounts(settings.home):
        raise SpecError(
            f"FT_POD_PROFILE: no volume_mounts entry contains FT_HOME = {settings.home}, and "
            "FT_STORAGE is not set: pods would "
            "have no run directory. Mount the shared volume there, or set FT_STORAGE.",
            param="FT_POD_PROFILE",
        )
    if settings.storage and SERVICE_STORAGE_SECRET in profile.secrets():
        log.warning(
            "FT_POD_PROFILE: worker pods have the storage credentials of the service itself "
            "(Secret %s): an attacker in one "
            "can remove every file. Give workers their own (Secret ft-worker-storage, "
            "docs/kubernetes.md).",
            SERVICE_STORAGE_SECRET,
        )
    models = tuple(settings.model_folders())
    site = Site(namespace, settings.home, settings.storage, settings.stop_grace_seconds, models)
    return Cluster(namespace), site
