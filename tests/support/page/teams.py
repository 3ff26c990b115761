"""Projects, keys and what they used, and what a job's evaluation says: what is seeded beside jobs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sqlalchemy import insert, update

from ft_service.ids import new_id
from ft_service.jobs.states import Job
from ft_service.rundir.evaluations import Answered, Evaluation, evaluation_key
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import Limits
from ft_service.store.sql import Store
from ft_service.store.tables import events, projects
from ft_service.store.tenants.audit import Actor, acting
from ft_service.store.tenants.usage import DAY_SECONDS, add_use
from tests.support.page.seeded import NOW


def seed_use(store: Store, project: str, key_id: str, days: int, scale: float, seed: int = 0) -> None:
    """Use on each of the last days, weekends excepted."""
    noise = random.Random(seed)
    with store.writing() as connection:
        for ago in range(days):
            moment = NOW - ago * DAY_SECONDS
            if int(moment // DAY_SECONDS + 3) % 7 < 5:
                hours = scale * noise.uniform(0.4, 1.6)
                amounts = {"slot_seconds": round(3600 * hours), "tokens": round(9e6 * hours), "bytes": round(2e6 * hours)}
                add_use(connection, project, key_id, moment, jobs=noise.randint(1, 6), **amounts)


def seed_teams(store: Store, organization: str = "local") -> dict[str, str]:
    """Two more projects with limits, keys and use. Returns their names → ids."""
    found = {}
    for number, (name, limits) in enumerate(
        {
            "Customer support": Limits(max_slots=4, max_queued=20, max_bytes=50 * 2**30),
            "Research": Limits(max_slots=2, max_priority=0, bases=("tiny-llama",)),
        }.items()
    ):
        project = store.create_project(name=name, organization=organization, limits=limits)
        found[name] = project.id
        for place, person in enumerate(("ci", "maria", "tom")):
            scope = "read" if person == "tom" else "submit"
            key, _ = store.create_key(
                project_id=project.id, name=f"{person}, {name.lower()}", scope=scope, expires_at=NOW + 7e6
            )
            if scope == "submit":
                seed_use(store, project.id, key.id, 30, (2.5 - number) / (place + 1), seed=10 * number + place)
        with store.writing() as connection:
            used = {"used": 3600.0 * (9 - 6 * number), "used_at": NOW}
            connection.execute(update(projects).where(projects.c.id == project.id).values(**used))
    with acting(Actor(None, "10.0.3.17")):
        old, _ = store.create_key(project_id="default", name="laptop of before", scope="submit")
        store.revoke_key("default", old.id)
    return found


def seed_messages(store: Store, job: Job, messages: Sequence[str]) -> None:
    """Events of a job without numbers, at its end."""
    row = {"project_id": job.project_id, "job_id": job.id, "created_at": NOW, "level": "info", "metrics": None}
    with store.writing() as connection:
        connection.execute(insert(events), [{**row, "id": new_id("ftevent-"), "message": text} for text in messages])


def seed_evaluation(settings: Settings, job: Job, answers: Sequence[tuple[str, str, str, str]], step: int) -> None:
    """What the workers leave of prompts, expected answers, and answers before and after."""
    run = Places.of(settings).run(job.id)
    before, after = {"exact_match": 0.0, "json_valid": 0.17}, {"exact_match": 0.83, "json_valid": 1.0}
    for number in (0, step):
        samples = [
            Answered(
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
        evaluation = Evaluation(step=number, time=NOW, metrics=scores, base_metrics=before, samples=samples)
        run.write(evaluation_key(number, 1), evaluation)


def evaluation_messages(answers: Sequence[tuple[str, str, str, str]], step: int) -> list[str]:
    """What the workers of earlier versions say of prompts, expected answers, and answers before and after."""
    scores = "exact_match 0.83 (before: 0.00), json_valid 1.00 (before: 0.17)"
    told = [f"Evaluation after step {step}, {len(answers)} prompts: {scores}."]
    return told + [f"Asked: {a}\nExpected: {b}\nBefore: {c}\nAfter: {d}" for a, b, c, d in answers]
