"""Engines as pods of a cluster, which follow scripts (`programs/scripted_engine.py`)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from ft_service.control.jobs.reconciler import Reconciler
from ft_service.engines.engine_directory import EngineDirectory
from ft_service.engines.engine_launcher import ClusterEngineLauncher
from ft_service.engines.tending import EngineOptions
from ft_service.jobs.states import Job
from ft_service.spec import BaseModelRef, DataFileRef
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.store.sql import Store
from tests.cluster.harness import HarnessCluster
from tests.support.engines import ENGINE_PROGRAM, add_sharing_job
from tests.support.pods import profile_for
from tests.support.reconciling import new_reconciler


def pod_launcher(
    cluster: HarnessCluster, home: Path, scripts: str, storage: str = "", **changes: Any
) -> ClusterEngineLauncher:
    """A launcher of pods that share `home`, or only object storage.

    `scripts`: as scripted_engine.py takes them. `changes`: of the profile.
    """
    play = (
        f'exec "{sys.executable}" "$@" --command "{sys.executable}" "{ENGINE_PROGRAM}" "{scripts}"'
    )
    command = ["sh", "-c", play, "sh"]
    values = {"command": command, "slots": 2, "node_selector": cluster.node_selector, **changes}
    profile = profile_for(home, "", **values)
    launcher = cluster.launcher(profile, home, storage=storage, models=(home / "models",))
    show = None if storage else partial(EngineDirectory.show, home=home)
    return ClusterEngineLauncher(launcher, places_of(home, storage), show)


def places_of(home: Path, storage: str) -> Places:
    return Places(home, ObjectStore(storage) if storage else None)


def pod_reconciler(
    cluster: HarnessCluster,
    store: Store,
    home: Path,
    scripts: str,
    storage: str = "",
    **changes: Any,
) -> Reconciler:
    """A reconciler with engines of up to eight jobs, which end after a second without one unless
    told otherwise.
    """
    engines = EngineOptions(
        most_seats=8, idle_seconds=changes.pop("idle_seconds", 1.0), mounts=not storage
    )
    launcher = pod_launcher(cluster, home, scripts, storage, **changes)
    return new_reconciler(home, store, launcher, engines=engines, places=places_of(home, storage))


def add_pod_job(store: Store, home: Path, job_id: str, **changes: Any) -> Job:
    """A job that may share an engine, with a data file of its own and its tokens."""
    data = home / f"files/file-{job_id}"
    (home / "models/tiny").mkdir(parents=True, exist_ok=True)
    data.parent.mkdir(exist_ok=True)
    data.write_text(job_id)
    tokens = home / f"tokens/{job_id}.how"
    tokens.mkdir(parents=True, exist_ok=True)
    (tokens / "rows").write_text(job_id)
    named = {
        "model": BaseModelRef(name="tiny", path=str(home / "models/tiny")),
        "training_data": DataFileRef(name="train.jsonl", path=str(data), sha256=job_id),
    }
    return add_sharing_job(store, job_id, **{**named, **changes})
