"""Jobs of a machine that is no more: its service was restored from a backup on this one, or its
container was replaced.

A job that has begun belongs to the machine that runs its processes, and a paused one to the machine
that ran them. A machine that no service has announced for a while, and of whose attempts no process
holds a lock, is a former one: its jobs go on here.
"""

from __future__ import annotations

import logging
import threading

from ft_service.engines.engine_directory import EngineDirectory
from ft_service.host.lifetime import RANKS_LOCK, is_locked
from ft_service.host.loops import every, log_errors
from ft_service.launcher.local_launcher import host_id
from ft_service.launcher.slurm.slurm_launcher import PLACE
from ft_service.meters import Meters
from ft_service.rundir.attempt import Attempt
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Take over the jobs of former machines until `stop` is set.

    Returns at once where jobs run in a cluster.
    """
    if settings.launcher == "local":
        places = Places.of(settings)
        every(
            LOOK_SECONDS,
            lambda: take_over(store, places, host_id()),
            stop,
            "looking for former hosts",
        )


def take_over(store: Store, places: Places, here: str) -> None:
    """Give the jobs, slots and engines of former machines to the host `here`.

    Raises UnavailableError.
    """
    for host in store.queue.silent_hosts():
        with log_errors(f"looking for processes of the host {host}"):
            if host != here and _is_machine(host) and _has_ended(store, places, host):
                store.leases.move_host(host, here)
                log.warning("the host %s is gone: its jobs go on here, on %s", host, here)


def _is_machine(host: str) -> bool:
    """Whether a host is a machine, not a cluster or one of its pod profiles."""
    return host != PLACE and "/" not in host


def _has_ended(store: Store, places: Places, host: str) -> bool:
    """Whether no process of a host's attempts lives, wherever: locks are those of the shared file
    system. One of whose attempts none has a run directory here uses another FT_HOME, and is not
    known to have ended.
    """
    attempts = [
        Attempt(places.run(job_id), number, job_id=job_id)
        for job_id, number in store.leases.attempts_of(host)
    ]
    engines = store.engines.live_engines(host=host)
    attempts += [EngineDirectory(places, engine.id).attempt for engine in engines]
    if attempts and not any(attempt.run.root.is_dir() for attempt in attempts):
        return False
    locks = [
        lock for attempt in attempts for lock in (*attempt.locks(), attempt.run.path(RANKS_LOCK))
    ]
    return not any(map(is_locked, locks))
