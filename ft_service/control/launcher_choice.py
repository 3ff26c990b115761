"""The launcher that the settings ask for."""

from __future__ import annotations

import logging

from ft_service.errors import SpecError
from ft_service.host.hardware import default_slots
from ft_service.launcher.agents import AgentsLauncher
from ft_service.launcher.base import Launcher
from ft_service.launcher.kubernetes.manifests import Site
from ft_service.launcher.kubernetes.profile import load_profile, own_namespace
from ft_service.launcher.local import LocalLauncher
from ft_service.settings import Settings
from ft_service.store.sql import Store
from ft_service.supervisor.warm_start import Standby

log = logging.getLogger(__name__)

SERVICE_STORAGE_SECRET = "ft-storage"
"""What `deploy/` calls the Secret with which API and reconciler use FT_STORAGE."""


def new_launcher(settings: Settings, store: Store) -> Launcher:
    """Raises SpecError if the cluster cannot be used as the pod profile asks for it."""
    if settings.launcher == "local":
        grace = settings.stop_grace_seconds
        standby = Standby(grace) if settings.warm_start else None  # it ends with this process
        return LocalLauncher(settings.slots or default_slots(), stop_grace_seconds=grace, standby=standby)
    if settings.launcher == "agents":
        return AgentsLauncher(store, settings.host_lease_seconds)
    return _kubernetes(settings)


def _kubernetes(settings: Settings) -> Launcher:
    try:
        from ft_service.launcher.kubernetes.cluster import Cluster
        from ft_service.launcher.kubernetes.launcher import KubernetesLauncher
    except ModuleNotFoundError as error:
        message = f"FT_LAUNCHER = kubernetes: {error.name} is not installed: pip install 'ft-service[kubernetes]'."
        raise SpecError(message, param="FT_LAUNCHER") from None
    assert settings.pod_profile is not None, "the settings demand one"
    profile = load_profile(settings.pod_profile)
    namespace = profile.namespace or own_namespace()
    if namespace is None:
        raise SpecError("FT_POD_PROFILE: outside a cluster it must name a namespace.", param="FT_POD_PROFILE")
    if not settings.storage and not profile.mounts(settings.home):
        raise SpecError(
            f"FT_POD_PROFILE: no volume_mounts entry holds FT_HOME = {settings.home}, and FT_STORAGE is not set: pods would "
            "have no run directory. Mount the shared volume there, or set FT_STORAGE.",
            param="FT_POD_PROFILE",
        )
    if settings.storage and SERVICE_STORAGE_SECRET in profile.secrets():
        log.warning(
            "FT_POD_PROFILE: worker pods have the storage credentials of the service itself (Secret %s): whoever breaks into "
            "one can remove every file. Give workers their own (Secret ft-worker-storage, docs/kubernetes.md).",
            SERVICE_STORAGE_SECRET,
        )
    models = tuple(settings.model_folders())
    site = Site(namespace, settings.home, settings.storage, settings.stop_grace_seconds, models)
    return KubernetesLauncher(Cluster(namespace), profile, site)
