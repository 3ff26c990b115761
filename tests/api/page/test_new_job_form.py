"""The form of a new job, in a real browser: what is learned, the data as the base reads them, and
settings by search.
"""

from __future__ import annotations

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from api.page.sample_job import sample_base
from tests.support.page.browser import (
    attribute,
    axe_faults,
    click,
    drop,
    find,
    sized,
    text_of,
    until,
)
from tests.support.page.hostile import sign_in
from tests.support.page.place import Place

UNKNOWN = "Kundenfrage,Antwort des Supports\nWo ist mein Paket?,Unterwegs.\n"
PROMPTS = '{"messages": [{"role": "user", "content": "2 + 2?"}], "reference_answer": "4"}\n' * 2


def test_columns_are_mapped_by_choosing_and_the_samples_follow(
    driver: webdriver.Chrome, place: Place
) -> None:
    sized(driver, 1440, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/new")
    drop(driver, "[data-drop]", {"fragen.csv": UNKNOWN})
    until(lambda: attribute(driver, "#check-training_file [data-usable]", "data-usable") == "no")
    assert text_of(driver, "#verdict").startswith("Not ready")
    for column, role in (("Kundenfrage", "instruction"), ("Antwort des Supports", "output")):
        until(lambda column=column: find(driver, f"[data-column='{column}']").is_displayed())
        Select(find(driver, f"[data-column='{column}']")).select_by_value(role)
    until(lambda: attribute(driver, "#check-training_file [data-usable]", "data-usable") == "yes")
    written = '{instruction: "Kundenfrage", output: "Antwort des Supports"}'
    assert attribute(driver, "#data", "value") == written
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#preview .sample")) == 1)
    learned = [
        span.text for span in driver.find_elements(By.CSS_SELECTOR, "#preview .tokens .t-learned")
    ]
    assert "".join(learned).startswith("Unterwegs.")
    until(lambda: text_of(driver, "#verdict").startswith("Fits"))
    assert axe_faults(driver) == []


def test_the_card_decides_the_method_and_shows_its_own_fields(
    driver: webdriver.Chrome, place: Place
) -> None:
    sign_in(driver, place)
    driver.get(f"{place.url}/new")
    assert not find(driver, "#grader").is_displayed()
    click(driver, "#new [value=reinforcement]")
    assert find(driver, "#grader").is_displayed()
    drop(driver, "[data-drop]", {"sums.jsonl": PROMPTS})
    until(lambda: attribute(driver, "#check-training_file [data-usable]", "data-usable") == "yes")
    until(lambda: "string_check" in attribute(driver, "#as-yaml", "textContent"))
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#preview .sample")) == 2)
    click(driver, "#new [value=dpo]")
    find(driver, "#beta").send_keys("0.3")
    until(lambda: "beta: 0.3" in attribute(driver, "#as-yaml", "textContent"))
    Select(find(driver, "#pairs")).select_by_value("simpo")
    until(lambda: "simpo" in attribute(driver, "#as-yaml", "textContent"))
    click(driver, "#new [value=kto]")
    assert find(driver, "#beta").is_displayed()
    assert not find(driver, "#pairs").is_displayed()
    assert "string_check" not in attribute(driver, "#as-yaml", "textContent")


def test_settings_are_found_and_create_stays_in_view(
    driver: webdriver.Chrome, place: Place
) -> None:
    sign_in(driver, place)
    for width in (1440, 1024, 390):
        sized(driver, width, "light")
        driver.get(f"{place.url}/new")
        bar = "const box = document.querySelector('.action-bar').getBoundingClientRect();"
        assert driver.execute_script(
            f"{bar} return box.bottom <= innerHeight + 1 && box.top > 0"
        ), width
    click(driver, ".advanced > summary")
    find(driver, "#find-option").send_keys("lora_dropout")
    until(lambda: text_of(driver, "[data-found]").endswith(" found"))
    assert find(driver, "[name='lora.lora_dropout']").is_displayed()
    assert not find(driver, "[name='training.warmup_steps']").is_displayed()


def test_a_sample_job_is_one_click_where_there_is_none(
    driver: webdriver.Chrome, place: Place
) -> None:
    sized(driver, 1440, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/jobs")
    click(driver, "[hx-post='/new/sample']")
    until(lambda: "/jobs/ftjob-" in driver.current_url)
    job = place.begun(driver.current_url.rpartition("/")[2], 1)
    assert (job.request["model"], job.request["suffix"]) == (sample_base(), "quickstart")
    assert job.request["training_file"] != job.request["validation_file"]
    driver.get(f"{place.url}/jobs")
    assert not driver.find_elements(By.CSS_SELECTOR, "[hx-post='/new/sample']")


def test_a_sweep_and_a_file_without_a_job_and_a_name_for_what_came_of_it(
    driver: webdriver.Chrome, place: Place
) -> None:
    sized(driver, 1440, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/data")
    drop(driver, "[data-drop]", {"pairs.csv": "prompt,completion\n" + "Hi,Hello\n" * 20})
    until(lambda: "/data/file-" in driver.current_url)
    assert text_of(driver, "h1") == "pairs.csv"
    uploaded = driver.current_url.rpartition("/")[2]

    driver.get(f"{place.url}/sweeps")
    click(driver, "main a[href='/new#sweep']")
    until(lambda: find(driver, "#sweep").is_displayed())
    find(driver, "#sweep").send_keys("lora.r: [4, 8]")
    Select(find(driver, "#training_file")).select_by_value(uploaded)
    find(driver, "#validation_split").send_keys("0.2")
    until(lambda: "each · 2 jobs" in text_of(driver, "#verdict"))
    assert axe_faults(driver) == []
    click(driver, "#new button.primary")
    until(lambda: "/sweeps/ftsweep-" in driver.current_url)
    click(driver, "#sweep td.name a")
    click(driver, ".naming > summary")
    find(driver, "#job-name").send_keys("small")
    find(driver, "#job-note").send_keys("rank 4 for the phone")
    assert axe_faults(driver) == []
    click(driver, ".naming button")
    until(lambda: text_of(driver, "#note") == "rank 4 for the phone")
    assert text_of(driver, "h1") == "small"
    driver.get(f"{place.url}/jobs?suffix=SMALL")
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#jobs td.name a")) == 1)
