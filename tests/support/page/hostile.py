"""Every view of the page, of objects whose every text is the worst that users can write; and the
way in.
"""

from __future__ import annotations

from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from sqlalchemy import update

from ft_service.store.records import NewKey, TenantLimits
from ft_service.store.tables import jobs as jobs_table
from tests.support.page.browser import find, until
from tests.support.page.place import Place
from tests.support.page.seeded import (
    NOW,
    seed_checkpoints,
    seed_event,
    seed_files,
    seed_job,
    seed_log,
    seed_steps,
)
from tests.support.page.teams import seed_evaluation, seed_sweep, seed_use

HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>',
    "'\"><svg onload=window.hacked=1>",
    "{{7*7}}${7*7}</script></textarea></pre><b>hi",
)
LONG = "w" * 150


def sign_in(driver: webdriver.Chrome, place: Place) -> None:
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.get(place.url)
    find(driver, "#key").send_keys(place.key, Keys.ENTER)
    until(lambda: driver.current_url.endswith("/jobs"))


def hostile_views(place: Place) -> list[str]:
    """Every view, of objects whose every text is hostile."""
    files = seed_files(place.settings, place.store, "default")
    with place.store.writing() as connection:
        connection.exec_driver_sql("UPDATE files SET filename = ?", (f"{HOSTILE[0]}.jsonl",))
    place.store.keys.create_key(NewKey(project_id="default", name=HOSTILE[0] + LONG, scope="user"))
    metadata = {"name": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}
    asked = {
        "model": "tiny-llama",
        "training_file": files["train"],
        "metadata": metadata,
        "suffix": "s" * 64,
    }
    error = {"code": "invalid_file", "message": HOSTILE[0], "param": "training_file"}
    ended = {
        "state": "failed",
        "reason": "invalid_file",
        "error": error,
        "attempt": 1,
        "finished_at": NOW,
        "name": HOSTILE[0],
        "note": HOSTILE[1] + LONG,
    }
    jobs = [
        seed_job(place.settings, place.store, place.holder, asked | {"lora": {"r": r}}, **ended)
        for r in (4, 8)
    ]
    for job in jobs:
        seed_steps(place.store, job, 12, total=12)
        with place.store.writing() as connection:
            connection.exec_driver_sql(
                "UPDATE events SET message = ? WHERE job_id = ?", (HOSTILE[0], job.id)
            )
        seed_checkpoints(place.settings, place.store, job, (10,))
        seed_log(place.settings, job, HOSTILE)
    succeeded = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    done = seed_job(place.settings, place.store, place.holder, asked, **succeeded)
    seed_evaluation(place.settings, done, [(*HOSTILE, HOSTILE[0])], 12)
    seed_steps(place.store, done, 2, total=3)
    diverged = {
        "step": 3,
        "total_steps": 3,
        "train_loss": 3e301,
        "grad_norm": 3e301,
        "tokens": 1,
        "trained_tokens": 3,
    }
    seed_event(place.store, done, "Step 3/3", diverged)
    project = place.store.projects.create_project(
        name=HOSTILE[0] + LONG,
        organization="local",
        limits=TenantLimits(bases=(*HOSTILE, "tiny-llama")),
    ).id
    key, secret = place.store.keys.create_key(
        NewKey(project_id=project, name=HOSTILE[0], scope="user")
    )
    theirs = place.store.keys.authenticate(secret)
    assert theirs is not None
    own = asked | {"training_file": seed_files(place.settings, place.store, project)["train"]}
    seed_job(place.settings, place.store, theirs, own, **ended)
    seed_use(place.store, project, key.id, 9, 1.0)
    sweep = seed_sweep(place.settings, place.store, place.holder, asked)
    with place.store.writing() as connection:
        swept = update(jobs_table).where(jobs_table.c.sweep_id == sweep)
        connection.execute(
            swept.values(
                sweep_values={HOSTILE[1]: HOSTILE[0], "training.learning_rate": HOSTILE[2]}
            )
        )
        connection.execute(swept.where(jobs_table.c.state == "succeeded").values(error=error))
        connection.execute(
            swept.where(jobs_table.c.state == "cancelled").values(stopped=HOSTILE[0])
        )
    first, second = (job.id for job in jobs)
    tabs = ("", "/logs", "/settings", "/checkpoints", "/events", "/answers")
    return [
        *(
            "/jobs?metadata=%3Cscript%3E%3D1",
            "/jobs",
            "/models",
            "/keys",
            "/data",
            f"/data/{files['train']}",
            "/compare",
        ),
        *(f"/jobs/{first}{tab}" for tab in tabs),
        *(
            f"/jobs/{done.id}",
            *(
                f"/jobs/{done.id}/{tab}"
                for tab in ("answers", "samples", "exports", "exports?where=server")
            ),
            f"/jobs?project={project}",
            "/projects",
            "/project",
            f"/projects/{project}",
            "/usage",
            "/changes",
        ),
        *(
            f"/new?again={first}",
            f"/compare?job={first}&job={second}",
            "/jobs/ftjob-%3Cimg%20onerror%3D1%3E",
        ),
        *(
            "/engines",
            "/sweeps",
            f"/sweeps/{sweep}",
            "/try?model=tiny-llama&beside=tiny-llama",
            "/try?model=%3Cimg%20onerror%3D1%3E",
        ),
    ]
