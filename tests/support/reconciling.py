"""A store with jobs, and a reconciler over it, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.launcher.protocol import Launcher
from ft_service.spec import (
    BaseModelRef,
    CheckpointOptions,
    DataFileRef,
    DistributedOptions,
    JobSpec,
    LoraOptions,
    PrecisionOptions,
    StoredSpec,
    TrainingOptions,
)
from ft_service.storage.locations import Places
from ft_service.store.sql import Store, open_store
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.databases import new_sqlite_database

PROJECT = "proj"


def new_store(folder: Path) -> Store:
    """An empty SQLite store with one project."""
    store = open_store(new_sqlite_database(folder / "ft.db"))
    store.projects.ensure_project(PROJECT, "local")
    return store


def spec_of(job_id: str, **changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "model": BaseModelRef(name="tiny", path="/models/tiny"),
        "training_data": DataFileRef(name="train.jsonl", path="/nowhere/train.jsonl", sha256="0"),
        "validation_data": None,
        "seed": 1,
        "tuned_name": f"ft:tiny:local::{job_id}",
        "lora": LoraOptions(),
        "precision": PrecisionOptions(),
        "training": TrainingOptions(),
        "distributed": DistributedOptions(nproc_per_node=2),
        "checkpoint": CheckpointOptions(),
    }
    return JobSpec(job_id=job_id, **{**values, **changes})


def add_job(
    store: Store,
    job_id: str = "ftjob-1",
    slots: int = 2,
    priority: int = 0,
    max_seconds: int | None = None,
    nodes: int | None = None,
    host: str | None = None,
    project_id: str = PROJECT,
    **changes: Any,
) -> Job:
    spec = spec_of(job_id, **changes)
    job = Job(
        id=job_id,
        project_id=project_id,
        created_at=0.0,
        request={},
        stored_spec=StoredSpec.of(spec),
        state=State.VALIDATING,
        slots=slots,
        nodes=nodes or spec.distributed.nnodes,
        priority=priority,
        max_seconds=max_seconds,
        host=host,
    )
    return create_job(store, job)


def new_reconciler(folder: Path, store: Store, launcher: Launcher, **options: Any) -> Reconciler:
    """A reconciler that takes every data file to be fine, unless told otherwise."""
    options = {"check": lambda job, examiner, tell: Checked(), "idle_seconds": 0.0, **options}
    places = options.pop("places", Places(folder))
    return Reconciler(store, launcher, places, ReconcilerOptions(**options))


def get(store: Store, job_id: str = "ftjob-1", project_id: str = PROJECT) -> Job:
    return store.jobs.get_job(project_id, job_id)


def messages(store: Store, job_id: str = "ftjob-1") -> list[str]:
    """The job's events, oldest first."""
    return [
        event.message for event in reversed(store.jobs.list_events(PROJECT, job_id, limit=100).data)
    ]


def step_until(
    reconciler: Reconciler, store: Store, *states: State, job_id: str = "ftjob-1"
) -> Job:
    """Give jobs their turns until this one is in one of the states (none given: a final one) and
    has no phase but running's.
    """

    def there() -> Job | None:
        reconciler.step()
        job = get(store, job_id)
        settled = job.phase is None or job.state is State.RUNNING
        return job if settled and job.state in (states or TERMINAL) else None

    return wait_for(there)
