"""Engines for tests: jobs that may share one, and a launcher whose engines follow scripts
(`programs/scripted_engine.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ft_service.control.jobs.reconciler import Reconciler
from ft_service.engines.engine_launcher import EngineLauncher
from ft_service.engines.tending import EngineOptions
from ft_service.jobs.states import Job
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.spec import DistributedOptions, JobSpec, TrainingOptions
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.reconciling import add_job, new_reconciler, spec_of

ENGINE_PROGRAM = Path(__file__).parent / "programs/scripted_engine.py"
SETTLED = {
    "training": TrainingOptions(tokens_per_micro_batch=256),
    "distributed": DistributedOptions(
        nproc_per_node=2, replicate=1, activation_checkpointing="none", compile=False
    ),
}
"""Options of a job that may share an engine: its ranks choose nothing."""


def sharing_spec(job_id: str = "ftjob-1", **changes: Any) -> JobSpec:
    return spec_of(job_id, **{**SETTLED, **changes})


def add_sharing_job(store: Store, job_id: str, **changes: Any) -> Job:
    return add_job(store, job_id, **{**SETTLED, **changes})


def engine_launcher(folder: Path, scripts: str, slots: int = 2) -> EngineLauncher:
    """A launcher for the home `folder`. `scripts`: as scripted_engine.py takes them."""
    command = [sys.executable, str(ENGINE_PROGRAM), scripts]
    return EngineLauncher(
        LocalLauncher(slots, worker_command=command, stop_grace_seconds=20.0), Places(folder)
    )


def engine_reconciler(folder: Path, store: Store, scripts: str, **options: Any) -> Reconciler:
    """A reconciler with engines of up to eight jobs, which end after half a second without one
    unless told otherwise.
    """
    slots = options.pop("slots", 2)
    engines = EngineOptions(
        most_seats=options.pop("most_seats", 8), idle_seconds=options.pop("idle_seconds", 0.5)
    )
    return new_reconciler(
        folder, store, engine_launcher(folder, scripts, slots), engines=engines, **options
    )
