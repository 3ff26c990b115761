"""The page in a real browser: a job's whole life by mouse and keyboard, and every view with the worst that users can write."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.support.page.browser import attribute, axe_faults, browsing, click, find, sized, text_of, until
from tests.support.page.place import Place
from tests.support.page.seeded import DATA, NOW, seed_checkpoints, seed_files, seed_job, seed_log, seed_steps

HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>',
    "'\"><svg onload=window.hacked=1>",
    "{{7*7}}${7*7}</script></textarea></pre><b>hi",
)

LOSS = ".curve-card.large .plot"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("home"))
    yield place
    place.close()


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def driver(downloads: Path, place: Place) -> Iterator[webdriver.Chrome]:
    with browsing(downloads) as driver:
        yield driver


def sign_in(driver: webdriver.Chrome, place: Place) -> None:
    driver.get(place.url)
    find(driver, "#key").send_keys(place.key, Keys.ENTER)
    until(lambda: driver.current_url.endswith("/jobs"))


def told(driver: webdriver.Chrome) -> list[str]:
    """What a browser's console says is wrong."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]


def test_the_life_of_a_job(driver: webdriver.Chrome, place: Place, downloads: Path) -> None:
    files = seed_files(place.settings, place.store, "default")
    other = seed_job(
        *(place.settings, place.store, place.holder, {"model": "tiny-llama", "training_file": files["train"]}),
        **{"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW},
    )
    seed_steps(place.store, other, 30, total=30)
    sized(driver, 1400, "light")
    sign_in(driver, place)

    # Upload, plan, submit
    click(driver, "a.new")
    find(driver, "#upload").send_keys(str(DATA / "train.jsonl"))
    until(lambda: Select(driver.find_element(By.ID, "training_file")).first_selected_option.text.startswith("train.jsonl"))
    find(driver, "#name").send_keys("by hand")
    find(driver, "[name='lora.r']").send_keys("8")
    until(lambda: all(word in text_of(driver, "#plan") for word in ("Fits", "Steps", "Time")))
    until(lambda: "'lora': {'r': 8}" in attribute(driver, "#as-python", "textContent"))
    find(driver, "#name").send_keys(Keys.ENTER)
    until(lambda: "/jobs/ftjob-" in driver.current_url)
    job = place.begun(driver.current_url.rpartition("/")[2], 1)

    # The curve grows, over a restart of the server too
    place.train(job, 1, range(1, 6))
    until(lambda: "from 3.2 to 0.8" in attribute(driver, LOSS, "aria-label"))
    place.stop()
    until(lambda: "goes on by itself" in text_of(driver, "#toasts"))
    place.start()
    place.train(job, 1, range(6, 11))
    until(lambda: "from 3.2 to 0.5" in attribute(driver, LOSS, "aria-label"))
    until(lambda: text_of(driver, "#job-head .figures dd").startswith("10"))

    # Pause, reload, resume
    place.save(job, 1, 10)
    click(driver, "#verb-pause")
    until(lambda: place.launcher.signals)
    place.rest(job, 1, 10)
    until(lambda: "Paused" in text_of(driver, "#job-head .state"))
    driver.refresh()
    assert "Paused" in text_of(driver, "#job-head .state")
    click(driver, "#verb-resume")
    place.begun(job.id, 2)
    place.train(job, 2, range(11, 41))
    place.succeed(job, 2)
    until(lambda: "Succeeded" in text_of(driver, "#job-head .state"))

    # Checkpoints, what comes of it, and beside another job
    click(driver, "#job-head .verbs .primary")
    archive = until(lambda: next(downloads.glob("*.tar"), None))
    with tarfile.open(archive) as members:
        assert "adapter/adapter_config.json" in members.getnames()
    click(driver, ".tabs a[href$=checkpoints]")
    assert "Step 10" in text_of(driver, "main table")
    driver.back()
    assert driver.current_url.endswith(job.id)
    click(driver, ".side nav a[href='/jobs']")
    for one in (job, other):
        click(driver, f"input[value='{one.id}']")
    click(driver, "[data-compare]")
    assert "lora.r" in text_of(driver, ".differs")
    until(lambda: "by hand: from 3.2" in attribute(driver, LOSS, "aria-label"))

    # Away
    click(driver, "[hx-post='/sign-out']")
    until(lambda: driver.current_url.endswith("/sign-in"))
    driver.get(f"{place.url}/jobs/{job.id}")
    assert driver.current_url.endswith("/sign-in")


def hostile_views(place: Place) -> list[str]:
    """Every view, of objects whose every text is hostile."""
    files = seed_files(place.settings, place.store, "default")
    with place.store.writing() as connection:
        connection.exec_driver_sql("UPDATE files SET filename = ?", (f"{HOSTILE[0]}.jsonl",))
    place.store.create_key(project_id="default", name=HOSTILE[0], scope="user")
    metadata = {"name": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}
    asked = {"model": "tiny-llama", "training_file": files["train"], "metadata": metadata}
    error = {"code": "invalid_file", "message": HOSTILE[0], "param": "training_file"}
    ended = {"state": "failed", "reason": "invalid_file", "error": error, "attempt": 1, "finished_at": NOW}
    jobs = [seed_job(place.settings, place.store, place.holder, asked | {"lora": {"r": r}}, **ended) for r in (4, 8)]
    for job in jobs:
        seed_steps(place.store, job, 12, total=12)
        with place.store.writing() as connection:
            connection.exec_driver_sql("UPDATE events SET message = ? WHERE job_id = ?", (HOSTILE[0], job.id))
        seed_checkpoints(place.settings, place.store, job, (10,))
        seed_log(place.settings, job, HOSTILE)
    succeeded = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    seed_job(place.settings, place.store, place.holder, asked, **succeeded)
    first, second = (job.id for job in jobs)
    tabs = ("", "/logs", "/settings", "/checkpoints", "/events")
    return [
        *("/jobs", "/jobs?metadata=%3Cscript%3E%3D1", "/models", "/keys", "/data", f"/data/{files['train']}", "/compare"),
        *(f"/jobs/{first}{tab}" for tab in tabs),
        *(f"/new?again={first}", f"/compare?job={first}&job={second}", "/jobs/ftjob-%3Cimg%20onerror%3D1%3E"),
    ]


def test_every_view_is_usable_by_all_and_runs_nothing_that_users_wrote(driver: webdriver.Chrome, place: Place) -> None:
    views = hostile_views(place)
    sign_in(driver, place)
    told(driver)
    shown = 0
    for number, view in enumerate(views):
        sized(driver, *((1400, "light"), (360, "dark"))[number % 2])
        driver.get(place.url + view)
        find(driver, "main h1")
        shown += HOSTILE[0] in attribute(driver, "body", "textContent")
        assert driver.execute_script("return window.hacked") is None, view
        assert not driver.find_elements(By.CSS_SELECTOR, "main img, main svg[onload], main b:not([class]) > script"), view
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
            f"{view} is wider than its window"
        )
        assert axe_faults(driver) == [], view
    assert shown > len(views) / 2, "the hostile text is there, as text"
    assert [line for line in told(driver) if "404" not in line] == []
