"""A home full of jobs that were never run: every state, curves with spikes, a pause and a second
attempt, checkpoints, logs.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission.job_admission import AdmissionContext, create_job
from ft_service.ids import new_id
from ft_service.jobs.states import Job
from ft_service.rundir.checkpoints import checkpoint_name, marker_key
from ft_service.rundir.documents import CheckpointMarker
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import File, Principal
from ft_service.store.sql import Store
from ft_service.store.tables import checkpoints, events, jobs
from tests.support.bases import SAMPLE
from tests.support.describing import at_once

DATA = Path(__file__).parents[3] / "examples/data"
NOW = time.time()
OUT_OF_REACH: dict[str, Any] = {"looked_at": NOW + 1e9, "version": jobs.c.version + 1}
"""Columns of a job that no reconciler looks at, nor writes to any more if it has it in hand."""


def new_settings(home: Path, **more: Any) -> Settings:
    """Settings of a service on `home` that knows the sample base."""
    return Settings(**{"home": home, "models": [SAMPLE.parent], "slots": 8, **more})


def seed_files(settings: Settings, store: Store, project: str) -> dict[str, str]:
    """The sample data as files. Returns name → id."""
    settings.files_dir.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in sorted(DATA.glob("*.jsonl")):
        body = path.read_bytes()
        file = File(
            id=new_id("file-"),
            project_id=project,
            filename=path.name,
            purpose="fine-tune",
            bytes=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
            created_at=0.0,
        )
        (settings.files_dir / file.id).write_bytes(body)
        store.files.add_file(file)
        found[path.stem] = file.id
    return found


def seed_job(
    settings: Settings, store: Store, holder: Principal, body: Mapping[str, Any], **row: Any
) -> Job:
    """A job by a create body, then made what the columns in `row` say."""
    catalogue = Catalogue.from_settings(settings, at_once())
    job = create_job(dict(body), AdmissionContext(holder, store, settings, catalogue))
    if row:
        with store.writing() as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job.id).values(**row, **OUT_OF_REACH)
            )
    return store.jobs.get_job(holder.project_id, job.id)


def seed_steps(
    store: Store,
    job: Job,
    steps: int,
    *,
    total: int,
    seed: int = 0,
    began: float | None = None,
    again_from: int | None = None,
) -> None:
    """What attempts reported: `steps` steps; with `again_from`, a second attempt that continues
    from there after a pause.
    """
    began = NOW - steps * 1.5 if began is None else began
    noise = random.Random(seed)
    level = 2.4 + noise.random()
    floor = 0.25 + 0.5 * noise.random()
    pace = 0.12 + 0.2 * noise.random()
    rows: list[dict[str, Any]] = []

    def add(
        attempt: int | None, when: float, message: str, metrics: dict[str, Any] | None, line: int
    ) -> None:
        own = {
            "attempt": attempt,
            "segment": 0 if attempt else None,
            "line": line if attempt else None,
        }
        rows.append(
            {
                **own,
                "id": new_id("ftevent-"),
                "project_id": job.project_id,
                "job_id": job.id,
                "created_at": when,
                "level": "info",
                "message": message,
                "metrics": metrics,
            }
        )

    def metrics(step: int) -> dict[str, Any]:
        loss = floor + (level - floor) * math.exp(-step / (pace * total)) + noise.gauss(0, 0.05)
        loss += 1.2 if step == total // 3 else 0.0
        found = {
            "step": step,
            "total_steps": total,
            "train_loss": max(0.02, loss),
            "train_mean_token_accuracy": min(0.99, max(0.1, 1.0 - loss / 4)),
            "learning_rate": 2e-4
            * min(1.0, step / max(1, 0.03 * total))
            * (1 - step / (total + 1)),
            "grad_norm": abs(noise.gauss(0.8, 0.2)) + (3 if step == total // 3 else 0),
            "tokens": 4096,
            "trained_tokens": 4096 * step,
            "step_seconds": 1.4 + 0.2 * noise.random(),
        }
        if step % max(1, total // 12) == 0:
            usual = floor + (level - floor) * math.exp(-step / (pace * total))
            found |= {
                "valid_loss": usual * 1.06 + 0.03,
                "valid_mean_token_accuracy": max(0.1, 0.97 - usual / 4),
            }
        return found

    turn = steps if again_from is None else again_from + 6
    for step in range(1, turn + 1):
        add(1, began + 1.5 * step, f"Step {step}/{total}", metrics(step), step)
    if again_from is not None:
        add(None, began + 1.5 * turn, "Pause requested.", None, 0)
        add(None, began + 1.5 * turn + 240, "Resume requested.", None, 0)
        for step in range(again_from + 1, steps + 1):
            add(2, began + 1.5 * step + 260, f"Step {step}/{total}", metrics(step), step)
    with store.writing() as connection:
        connection.execute(insert(events), rows)


def seed_event(store: Store, job: Job, message: str, metrics: Mapping[str, Any]) -> None:
    """One more step that a job reports now."""
    row = {
        "id": new_id("ftevent-"),
        "project_id": job.project_id,
        "job_id": job.id,
        "created_at": time.time(),
        "level": "info",
    }
    own = {
        "attempt": job.attempt,
        "segment": metrics["step"],
        "line": 0,
        "message": message,
        "metrics": dict(metrics),
    }
    with store.writing() as connection:
        connection.execute(insert(events), [row | own])


def seed_checkpoints(settings: Settings, store: Store, job: Job, steps: Sequence[int]) -> None:
    run = Places.of(settings).run(job.id)
    for step in steps:
        name = checkpoint_name(step, 1)
        row = {
            "id": new_id("ftckpt_"),
            "project_id": job.project_id,
            "job_id": job.id,
            "name": name,
            "step": step,
        }
        known = {
            "step": step,
            "total_steps": step,
            "train_loss": 0.91,
            "valid_loss": 0.98,
            "valid_mean_token_accuracy": 0.74,
        }
        with store.writing() as connection:
            connection.execute(
                insert(checkpoints).values(**row, attempt=1, created_at=NOW - 600, metrics=known)
            )
        run.write(marker_key(name), CheckpointMarker(step=step, attempt=1, world_size=2, files=[]))


def seed_log(settings: Settings, job: Job, lines: Sequence[str], rank: int = 0) -> None:
    folder = settings.runs_dir / job.id / f"attempts/{job.attempt}/logs/none/attempt_0/{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stdout.log").write_text("\n".join(lines) + "\n")


def seed_all(
    settings: Settings,
    store: Store,
    holder: Principal,
    sweep: Callable[[Settings, Store, Principal, dict[str, Any]], str],
) -> dict[str, str]:
    """A sweep, made by `sweep` from a body; one job of each kind, and a few more.

    Returns what it is → id.
    """
    files = seed_files(settings, store, holder.project_id)
    body = {
        "model": "tiny-llama",
        "training_file": files["train"],
        "validation_file": files["validation"],
        "training": {"n_epochs": 2},
    }

    def job(name: str, options: Mapping[str, Any], **row: Any) -> Job:
        return seed_job(
            settings,
            store,
            holder,
            body | {"suffix": name, "metadata": {"team": "support"}} | dict(options),
            **row,
        )

    made: dict[str, Job] = {}
    made["paused"] = job(
        "night-run", {"priority": -5}, state="paused", attempt=1, created_at=NOW - 9000
    )
    seed_steps(store, made["paused"], 120, total=300, seed=11, began=NOW - 8800)
    for number, (rate, rank) in enumerate(((1e-4, 8), (2e-4, 16), (4e-4, 16), (8e-4, 32))):
        ended = NOW - 7200 + 900 * number
        made[f"sweep {number}"] = one = job(
            f"sweep-lr-{rate:g}",
            {"training": {"n_epochs": 2, "learning_rate": rate}, "lora": {"r": rank}},
            state="succeeded",
            reason="succeeded",
            attempt=1,
            created_at=ended - 1500,
            finished_at=ended,
            trained_tokens=1_228_800,
        )
        seed_steps(store, one, 300, total=300, seed=number + 1, began=ended - 1200)
    swept = {"model": "tiny-llama", "training_file": files["train"], "suffix": "how-fast-to-learn"}
    ids = {"sweep": sweep(settings, store, holder, swept)}
    for number, one in enumerate(store.sweeps.jobs_of_sweeps([ids["sweep"]])[ids["sweep"]]):
        seed_steps(
            store, one, 75 if number == 3 else 300, total=300, seed=30 + number, began=NOW - 5300
        )
    made["cancelled"] = job(
        "first-try",
        {},
        state="cancelled",
        reason="user_cancelled",
        attempt=1,
        created_at=NOW - 5160,
        finished_at=NOW - 5000,
    )
    seed_steps(store, made["cancelled"], 40, total=300, seed=9, began=NOW - 5100)
    made["succeeded"] = one = job(
        "ticket-router-v3",
        {"precision": {"default": "nf4"}, "evaluation": {"prompts": 6}},
        state="succeeded",
        reason="succeeded",
        attempt=2,
        created_at=NOW - 4000,
        finished_at=NOW - 900,
        trained_tokens=1_228_800,
    )
    seed_steps(store, one, 300, total=300, seed=4, began=NOW - 3800, again_from=150)
    seed_checkpoints(settings, store, one, (100, 150, 200, 300))
    seed_log(settings, one, [f"step {n}: loss {2.5 / n + 0.4:.4f}" for n in range(1, 120)])
    made["running"] = one = job(
        "invoice-to-json",
        {"lora": {"r": 32}},
        state="running",
        phase="training",
        attempt=1,
        host="h",
        created_at=NOW - 420,
    )
    seed_steps(store, one, 187, total=300, seed=21, began=NOW - 300)
    seed_checkpoints(settings, store, one, (100, 150))
    seed_log(
        settings,
        one,
        [
            "rank 0 of 2 on cpu",
            *(json.dumps({"step": n, "loss": 2.2 / n + 0.4}) for n in range(1, 188)),
        ],
    )
    failed: dict[str, Any] = {
        "code": "invalid_training_file",
        "message": "train.jsonl, line 17: messages.1.content must be text, not a number.",
        "param": None,
    }
    made["failed"] = job(
        "orders-week-46",
        {},
        state="failed",
        reason="invalid_file",
        error=failed,
        created_at=NOW - 330,
        finished_at=NOW - 300,
    )
    made["queued"] = job("support-tone", {"priority": 3}, state="queued", queued_at=NOW - 60)
    job("support-tone-more-data", {}, state="queued", queued_at=NOW - 50)
    names = {f"{name} model": str(one.spec.tuned_name) for name, one in made.items()}
    ids |= {name: one.id for name, one in made.items()}
    return ids | names | {f"file {name}": file_id for name, file_id in files.items()}
