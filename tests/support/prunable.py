"""Jobs that ended some days ago, with what they left, for tests of what may go."""

from __future__ import annotations

from typing import Any

from ft_service.control.cleanup.pruning import DAY_SECONDS
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, State
from ft_service.rundir.directory import RunDir
from ft_service.settings import Settings
from ft_service.spec import StoredSpec, TunedName
from ft_service.store.sql import Store
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, spec_of


def model_of(job_id: str, step: int | None = None) -> str:
    return str(TunedName("tiny", "local", "", job_id.removeprefix("ftjob-"), step))


def add_with_files(
    store: Store, settings: Settings, job_id: str, state: State, days: float = 0.0, **changes: Any
) -> RunDir:
    """A job that ended some days ago, its outcome, and two checkpoints of which one was asked for
    as an adapter.
    """
    ended = state in (State.SUCCEEDED, State.FAILED, State.CANCELLED)
    job = Job(
        id=job_id,
        project_id=PROJECT,
        created_at=0.0,
        request={"training_file": changes.pop("training_file", "file-x")},
        stored_spec=StoredSpec.of(
            spec_of(job_id, parent=changes.pop("parent", None), tuned_name=model_of(job_id))
        ),
        state=state,
        reason=Reason.SUCCEEDED if ended else None,
        finished_at=store.now() - days * DAY_SECONDS if ended else None,
        **changes,
    )
    create_job(store, job)
    run = RunDir(settings.runs_dir / job_id)
    for key in (
        "adapter/a",
        "checkpoints/step-3-a1/COMPLETE",
        "checkpoints/step-6-a1/COMPLETE",
        "adapters/step-3-a1/a",
    ):
        run.put(key, b"12345")
    return run
