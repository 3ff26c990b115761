"""Curves of a job in a real browser: values at the crosshair, its parent's line, and files of them."""

from __future__ import annotations

import csv
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import Energy, GpuLoad
from tests.support.page.browser import (
    attribute,
    axe_faults,
    click,
    find,
    press,
    sized,
    tab_to,
    text_of,
    until,
)
from tests.support.page.hostile import sign_in
from tests.support.page.place import Place
from tests.support.page.seeded import NOW, seed_event, seed_files, seed_job, seed_steps

LOSS = ".curve-card.large .plot"
KEY = ".curve-card.large .key"


def test_a_jobs_curve_beside_its_parents_is_read_and_saved(
    driver: webdriver.Chrome, place: Place, downloads: Path
) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {"model": "tiny-llama", "training_file": files["train"]}
    over = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    seeded = place.settings, place.store, place.holder
    parent = seed_job(*seeded, asked | {"suffix": "first"}, **over)
    seed_steps(place.store, parent, 30, total=30)
    (place.settings.runs_dir / parent.id / "adapter").mkdir(parents=True)
    job = seed_job(*seeded, asked | {"model": str(parent.spec.tuned_name)}, **over)
    seed_steps(place.store, job, 20, total=20, seed=1)
    first = {"step": 1, "total_steps": 20, "train_loss": 4.0, "before/valid_loss": 4.25}
    fresh = seed_job(*seeded, asked, **over)
    seed_event(place.store, fresh, "Step 1/20", first)
    seed_event(place.store, fresh, "Step 2/20", first | {"step": 2, "train_loss": 3.0})
    sized(driver, 1400, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/jobs/{job.id}")
    until(lambda: "first, training: from" in attribute(driver, LOSS, "aria-label"))
    assert axe_faults(driver) == []

    # The values at the crosshair, by keyboard and by mouse
    tab_to(driver, LOSS)
    press(driver, *[Keys.ARROW_LEFT] * (30 - 12))
    until(lambda: "step 12" in text_of(driver, KEY))
    by_key = text_of(driver, KEY)
    ActionChains(driver, duration=0).move_to_element_with_offset(
        find(driver, f"{LOSS} .u-over"), -300, 0
    ).perform()
    until(lambda: text_of(driver, KEY) != by_key)

    # What was measured, as a file: of both jobs, then of one without its parent's line
    click(driver, "[aria-label='Loss as CSV']")
    saved = downloads / f"{job.id}-loss.csv"
    until(saved.exists)
    with saved.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["job"] for row in rows] == [job.id] * 20 + [parent.id] * 30
    assert [int(row["step"]) for row in rows[:20]] == list(range(1, 21))
    ends = [f"{float(rows[place]['train_loss']):.4g}" for place in (0, 19)]
    assert f"Training: from {ends[0]} to {ends[1]}." in attribute(driver, LOSS, "aria-label")
    click(driver, "[aria-label='Loss as PNG']")
    picture = downloads / f"{job.id}-loss.png"
    until(picture.exists)
    until(lambda: picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n")
    click(driver, "[data-overlay]")
    assert "first" not in attribute(driver, LOSS, "aria-label")
    assert "parent=off" in driver.current_url

    # The validation loss before training is a level, and GPUs have curves where they were read
    loads = [
        GpuLoad(time=NOW + second, memory=3 * 2**30, busy=0.9, watts=350.0) for second in (0, 60)
    ]
    energy = Energy(joules=1.0, source="nvml", loads=loads)
    Attempt(place.run_of(fresh), 1).node(0, 1).write_energy(energy)
    driver.get(f"{place.url}/jobs/{fresh.id}")
    level = "Before training: from 4.25 to 4.25."
    until(lambda: level in attribute(driver, LOSS, "aria-label") + ".")
    assert text_of(driver, KEY).split("\n")[-2:] == ["Before training", "4.25"]
    shown = [card.text for card in driver.find_elements(By.CSS_SELECTOR, ".curve-card")]
    assert [text.split("\n")[0] for text in shown if text.startswith("GPU")] == [
        *("GPU memory", "GPU utilisation", "GPU power (W)"),
    ]
    assert "3 GiB" in "".join(shown)
    assert axe_faults(driver) == []
    driver.get(f"{place.url}/jobs/{job.id}")
    until(lambda: attribute(driver, LOSS, "aria-label"))
    cards = driver.find_elements(By.CSS_SELECTOR, ".curve-card")
    assert not any(card.text.startswith("GPU") for card in cards), "hidden where none were read"
