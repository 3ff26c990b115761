"""A job that kills its rank whenever it trains, among eight that share real engines of one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ft_service.engines.engine_launcher import EngineLauncher
from ft_service.engines.tending import EngineOptions
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, new_reconciler, new_store
from tests.support.training.models import save_chat_base, save_chats, spec_for

PROGRAM = Path(__file__).parents[2] / "support/programs/poisoned_rank.py"


@pytest.mark.slow
def test_of_eight_jobs_the_one_that_kills_its_rank_fails_and_seven_succeed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)
    base = save_chat_base(folder / "base")
    data = save_chats(folder / "train.jsonl", 8)
    training = {
        "max_steps": 4,
        "batch_size": 2,
        "per_device_train_batch_size": 2,
        "tokens_per_micro_batch": 256,
    }
    store = new_store(folder)
    for number in range(8):
        lora = {"r": 2 + number}
        precision = {"default": "nf4", "compute": "fp32"}
        spec = spec_for(
            base,
            data,
            training=training,
            lora=lora,
            precision=precision,
            checkpoint={"save_steps": 1},
        )
        spec = spec.model_copy(update={"job_id": f"ftjob-{number}", "seed": number})
        times: dict[str, Any] = {
            "created_at": 0.0,
            "request": {},
            "state": State.VALIDATING,
            "slots": 1,
        }
        create_job(
            store, Job(id=spec.job_id, project_id=PROJECT, stored_spec=StoredSpec.of(spec), **times)
        )
    program = [sys.executable, str(PROGRAM), "ftjob-5"]
    launcher = EngineLauncher(
        LocalLauncher(1, worker_command=program, stop_grace_seconds=20.0), Places(folder)
    )
    options = EngineOptions(most_seats=8, idle_seconds=0.3)
    reconciler = new_reconciler(folder, store, launcher, engines=options)
    jobs = wait_for(lambda: (reconciler.step() or True) and ended_jobs(store), seconds=900)
    reasons = {job.id: (job.state, job.reason, job.failures) for job in jobs}
    assert reasons.pop("ftjob-5") == (State.FAILED, Reason.WORKER_KILLED, decisions.MAX_FAILURES)
    assert set(reasons.values()) == {(State.SUCCEEDED, Reason.SUCCEEDED, 0)}
    lost = [
        engine for engine in (folder / "engines").iterdir() if (engine / "losses.json").exists()
    ]
    assert 1 <= len(lost) <= 4
    store.close()


def ended_jobs(store: Store) -> list[Job] | None:
    """All eight, once they have ended."""
    jobs = store.jobs.list_jobs(PROJECT, limit=8).data
    return jobs if all(job.state in TERMINAL and job.phase is None for job in jobs) else None
