"""Seeded data besides jobs: projects, keys and their usage, and a job's evaluation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import insert, update

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission.job_admission import AdmissionContext
from ft_service.control.admission.sweep_admission import create_sweep
from ft_service.ids import new_id
from ft_service.jobs.states import Job
from ft_service.rundir.evaluations import EvaluatedPrompt, Evaluation, evaluation_key
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey, Principal, TenantLimits
from ft_service.store.sql import Store
from ft_service.store.tables import events, jobs, projects, slots, sweeps
from ft_service.store.tenants.audit import Actor, acting
from ft_service.store.tenants.usage import DAY_SECONDS, add_use
from tests.support.describing import at_once
from tests.support.page.seeded import NOW, OUT_OF_REACH

STOPPED = {
    "state": "cancelled",
    "reason": "sweep_stopped",
    "stopped": "stopped by the sweep: after 25 % of its steps its validation loss was 0.9200, and "
    "3 of 4 jobs were better "
    "there; 2 go on",
}
"""Columns of a job in which its sweep saw no hope."""


def seed_use(
    store: Store, project: str, key_id: str, days: int, scale: float, seed: int = 0
) -> None:
    """Use on each of the last days, weekends excepted."""
    noise = random.Random(seed)
    with store.writing() as connection:
        for ago in range(days):
            moment = NOW - ago * DAY_SECONDS
            if int(moment // DAY_SECONDS + 3) % 7 < 5:
                hours = scale * noise.uniform(0.4, 1.6)
                add_use(
                    connection,
                    project,
                    key_id,
                    moment,
                    jobs=noise.randint(1, 6),
                    slot_seconds=round(3600 * hours),
                    tokens=round(9e6 * hours),
                    bytes=round(2e6 * hours),
                )


def seed_teams(store: Store, admin: str, organization: str = "local") -> dict[str, str]:
    """Two more projects with limits, keys and use, made by the key `admin`.

    Returns their names → ids.
    """
    with acting(Actor(admin, "10.0.3.17")):
        return _seed_teams(store, organization)


def _seed_teams(store: Store, organization: str) -> dict[str, str]:
    found = {}
    for number, (name, limits) in enumerate(
        {
            "Customer support": TenantLimits(max_slots=4, max_queued=20, max_bytes=50 * 2**30),
            "Research": TenantLimits(max_slots=2, max_priority=0, bases=("tiny-llama",)),
        }.items()
    ):
        project = store.projects.create_project(name=name, organization=organization, limits=limits)
        found[name] = project.id
        for place, person in enumerate(("ci", "maria", "tom")):
            scope = "read" if person == "tom" else "submit"
            key, _ = store.keys.create_key(
                NewKey(
                    project_id=project.id,
                    name=f"{person}, {name.lower()}",
                    scope=scope,
                    expires_at=NOW + 7e6,
                )
            )
            if scope == "submit":
                seed_use(
                    store,
                    project.id,
                    key.id,
                    30,
                    (2.5 - number) / (place + 1),
                    seed=10 * number + place,
                )
        with store.writing() as connection:
            used = {"used": 3600.0 * (9 - 6 * number), "used_at": NOW}
            connection.execute(update(projects).where(projects.c.id == project.id).values(**used))
    old, _ = store.keys.create_key(
        NewKey(project_id="default", name="laptop of before", scope="submit")
    )
    store.keys.revoke_key("default", old.id)
    return found


def seed_host(store: Store, job_id: str) -> None:
    """A host of one slot, which a job holds: queued jobs wait for it."""
    store.queue.announce_host("h", 1)
    with store.writing() as connection:
        held = {
            "host": "h",
            "slot": 0,
            "job_id": job_id,
            "project_id": "default",
            "attempt": 1,
            "taken_at": NOW,
        }
        connection.execute(insert(slots).values(held))


def seed_sweep(settings: Settings, store: Store, holder: Principal, body: Mapping[str, Any]) -> str:
    """A sweep over learning rates that is over: three jobs to their end, one stopped on the way.

    Returns its id.
    """
    rates = (1e-4, 3e-4, 1e-3, 3e-3)
    asked = {
        **body,
        "validation_file": body["training_file"],
        "sweep": {"training.learning_rate": list(rates)},
    }
    catalogue = Catalogue.from_settings(settings, at_once())
    sweep = create_sweep(asked, AdmissionContext(holder, store, settings, catalogue))
    made = store.sweeps.jobs_of_sweeps([sweep.id])[sweep.id]
    with store.writing() as connection:
        ended = {"finished_at": NOW - 3000, "created_at": NOW - 5400, "best_job": made[2].id}
        connection.execute(update(sweeps).where(sweeps.c.id == sweep.id).values(**ended))
        for number, job in enumerate(made):
            loss = (0.61, 0.44, 0.37, 0.92)[number]
            step = 75 if number == 3 else 300
            course = {
                "step": step,
                "total_steps": 300,
                "valid_loss": loss,
                "best_loss": loss,
                "best_step": step,
                "rungs": {},
            }
            over = {
                "state": "succeeded",
                "reason": "succeeded",
                "attempt": 1,
                "created_at": NOW - 5400,
                "finished_at": NOW - 3000,
            }
            ended_so = STOPPED if number == 3 else {}
            values = {**over, **ended_so, "sweep_course": course, **OUT_OF_REACH}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))
    return sweep.id


def seed_messages(store: Store, job: Job, messages: Sequence[str]) -> None:
    """Events of a job without numbers, at its end."""
    row = {
        "project_id": job.project_id,
        "job_id": job.id,
        "created_at": NOW,
        "level": "info",
        "metrics": None,
    }
    with store.writing() as connection:
        connection.execute(
            insert(events),
            [{**row, "id": new_id("ftevent-"), "message": text} for text in messages],
        )


def seed_evaluation(
    settings: Settings, job: Job, answers: Sequence[tuple[str, str, str, str]], step: int
) -> None:
    """What the workers leave of prompts, expected answers, and answers before and after."""
    run = Places.of(settings).run(job.id)
    before = {"exact_match": 0.0, "json_valid": 0.17}
    after = {"exact_match": 0.83, "json_valid": 1.0}
    for number in (0, step):
        samples = [
            EvaluatedPrompt(
                prompt=prompt,
                messages=[{"role": "user", "content": prompt}],
                reference=reference,
                base=base,
                tuned=tuned if number else None,
                scores={},
                base_scores={},
            )
            for prompt, reference, base, tuned in answers
        ]
        scores = after if number else before
        evaluation = Evaluation(
            step=number, time=NOW, metrics=scores, base_metrics=before, samples=samples
        )
        run.write(evaluation_key(number, 1), evaluation)
