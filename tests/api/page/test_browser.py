"""The page in a real browser: a job's whole life by mouse and keyboard, and what else is done by
clicking.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from api.page import formatting
from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission.job_admission import AdmissionContext
from ft_service.control.admission.sweep_admission import create_sweep
from ft_service.rundir.documents import Export, ExportFormat, state_key
from ft_service.serving import preview_process
from ft_service.store.records import NewKey
from tests.support.describing import at_once
from tests.support.image_bases import drawn, encoded
from tests.support.page.browser import (
    attribute,
    axe_faults,
    click,
    confirm,
    double_click,
    drop,
    find,
    press,
    sized,
    tab_to,
    text_of,
    told,
    until,
)
from tests.support.page.hostile import HOSTILE, sign_in
from tests.support.page.inner_requests import requests_of_page
from tests.support.page.place import Place
from tests.support.page.seeded import DATA, NOW, seed_files, seed_job, seed_log, seed_steps
from tests.support.page.teams import seed_sweep

LOSS = ".curve-card.large .plot"


def test_the_life_of_a_job(driver: webdriver.Chrome, place: Place, downloads: Path) -> None:
    files = seed_files(place.settings, place.store, "default")
    other = seed_job(
        *(
            place.settings,
            place.store,
            place.holder,
            {"model": "tiny-llama", "training_file": files["train"]},
        ),
        **{"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW},
    )
    seed_steps(place.store, other, 30, total=30)
    sized(driver, 1400, "light")
    sign_in(driver, place)

    # Upload, plan, submit
    click(driver, "a.new")
    find(driver, "#upload").send_keys(str(DATA / "train.jsonl"))
    until(
        lambda: Select(
            driver.find_element(By.ID, "training_file")
        ).first_selected_option.text.startswith("train.jsonl")
    )
    find(driver, "#suffix").send_keys("by-hand")
    click(driver, ".advanced > summary")
    find(driver, "[name='lora.r']").send_keys("8")
    until(lambda: all(word in text_of(driver, "#plan") for word in ("Fits", "Steps", "Time")))
    until(lambda: "'lora': {'r': 8}" in attribute(driver, "#as-python", "textContent"))
    find(driver, "#suffix").send_keys(Keys.ENTER)
    until(lambda: "/jobs/ftjob-" in driver.current_url)
    job = place.begun(driver.current_url.rpartition("/")[2], 1)
    assert (job.request["suffix"], job.request.get("metadata")) == ("by-hand", None), (
        "one name, which ft get finds"
    )

    # The curve grows, over a restart of the server too
    place.train(job, 1, range(1, 6))
    until(lambda: "from 3.2 to 0.8" in attribute(driver, LOSS, "aria-label"))
    place.stop()
    until(lambda: "continues by itself" in text_of(driver, "#toasts"))
    until(lambda: any("/metrics" in line for line in told(driver)))  # the curve has asked in vain
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
    click(driver, ".tabs a[href$='/logs']")
    click(driver, "#verb-resume")
    seed_log(place.settings, place.begun(job.id, 2), ["goes on"])
    until(lambda: "attempt 2" in text_of(driver, "#log") and "goes on" in text_of(driver, "#log"))
    click(driver, ".tabs a:first-child")
    place.train(job, 2, range(11, 41))
    place.succeed(job, 2)
    until(lambda: "Succeeded" in text_of(driver, "#job-head .state"))

    # Its samples as the model sees them; checkpoints, exports, and a comparison with another job
    click(driver, ".tabs a[href$='/samples']")
    assert '{"intent"' in text_of(driver, ".sample .tokens")
    driver.back()
    click(driver, "#job-head .verbs a[href$='/adapter']")
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
    until(lambda: "by-hand: from 3.2" in attribute(driver, LOSS, "aria-label"))

    # Away
    click(driver, "[hx-post='/sign-out']")
    until(lambda: driver.current_url.endswith("/sign-in"))
    driver.get(f"{place.url}/jobs/{job.id}")
    assert "/sign-in?to=" in driver.current_url


def test_a_link_signs_in_by_a_button_and_the_api_is_described(
    driver: webdriver.Chrome, place: Place
) -> None:
    """With the policies that the answers carry: a script or form that they forbid would do
    nothing.
    """
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    told(driver)
    link = place.store.sessions.new_link(place.holder)
    driver.get(f"{place.url}/sign-in?link={link}&to=/models")
    assert axe_faults(driver) == []
    click(driver, "button.primary")
    until(lambda: driver.current_url.endswith("/models"))
    driver.get(f"data:text/html,<a href='{place.url}/data'>a link on another site</a>")
    click(driver, "a")
    until(lambda: text_of(driver, "h1") == "Data")
    driver.get(f"{place.url}/docs")
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, ".opblock")) > 50)
    assert told(driver) == []


def test_a_model_is_talked_to_beside_another(
    driver: webdriver.Chrome, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_process, "RETRY_SECONDS", 1)
    files = seed_files(place.settings, place.store, "default")
    asked = {
        "model": "tiny-llama",
        "training_file": files["train"],
        "suffix": "talks",
        "precision": {"default": "nf4"},
    }
    ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    job = seed_job(place.settings, place.store, place.holder, asked, **ended)
    place.run_of(job).put("adapter/adapter_config.json", b"{}")
    sized(driver, 1400, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/jobs/{job.id}")
    click(driver, "#job-head .verbs .primary")
    assert text_of(driver, "#who").count("tiny-llama") >= 2

    def answers(turn: int) -> list[str]:
        return [
            one.text
            for one in driver.find_elements(
                By.CSS_SELECTOR, f".turn:nth-of-type({turn}) .answer .text"
            )
        ]

    def whole(turn: int) -> bool:
        return all(
            "tokens in" in one.text
            for one in driver.find_elements(By.CSS_SELECTOR, f".turn:nth-of-type({turn}) .sub")
        )

    press(driver, "Who are you?", Keys.ENTER)
    until(lambda: len(answers(1)) == 2 and whole(1))
    tuned, base = answers(1)
    assert re.fullmatch("tiny-llama nf4 .*/adapter", tuned), (
        "its adapter, in the formats of the job"
    )
    assert base == "tiny-llama nf4 None", "its base, in the same process"

    press(driver, f"say {HOSTILE[0]}", Keys.ENTER)
    until(lambda: answers(2) == [HOSTILE[0]] * 2 and whole(2))
    assert driver.execute_script("return window.hacked") is None
    assert axe_faults(driver) == []

    # Training takes the slot while one waits
    press(driver, "hang", Keys.ENTER)
    until(lambda: len(answers(3)) == 2 and not whole(3))
    assert place.preview is not None
    place.preview.release_slots(range(8))
    until(lambda: "made way for a training job" in text_of(driver, ".turn:nth-of-type(3) .sub"))
    Select(find(driver, "#who [name=beside]")).select_by_value("")
    click(driver, "#words")
    press(driver, "say again", Keys.ENTER)
    until(lambda: answers(4) == ["again"] and whole(4))
    press(driver, "hang", Keys.ENTER)
    click(driver, "[data-stop]")
    until(lambda: "Stopped." in text_of(driver, ".turn:nth-of-type(5) .sub"))

    driver.refresh()
    until(lambda: answers(4) == ["again"])
    assert "beside" not in driver.current_url

    # The session is over, as after a day, and somebody else signs in
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.refresh()
    find(driver, "#key").send_keys(place.key, Keys.ENTER)
    until(lambda: answers(4) == ["again"])
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.refresh()
    _, key = place.store.keys.create_key(
        NewKey(project_id="default", name="somebody else", scope="submit")
    )
    find(driver, "#key").send_keys(key, Keys.ENTER)
    until(lambda: driver.find_element(By.CSS_SELECTOR, "[data-nothing]").is_displayed())
    assert not driver.find_elements(By.CSS_SELECTOR, ".turn")
    press(driver, "say hello", Keys.ENTER)
    until(lambda: answers(1) == ["hello"])
    click(driver, "[data-restart]")
    assert not driver.find_elements(By.CSS_SELECTOR, ".turn")

    # Images
    files = [tmp_path / name for name in ("first.png", "second.png")]
    for seed, file in enumerate(files):
        file.write_bytes(encoded(drawn(seed=seed)))
    driver.find_element(By.ID, "picture").send_keys("\n".join(map(str, files)))
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#shown img")) == 2)
    assert axe_faults(driver) == []
    click(driver, "[aria-label='Remove first.png']")
    press(driver, "say what", Keys.ENTER)
    until(lambda: "the base sees no images here" in text_of(driver, ".turn .sub"))
    assert attribute(driver, ".turn .message img", "alt") == "second.png"
    assert not driver.find_elements(By.CSS_SELECTOR, "#shown img")


def test_files_are_dropped_and_refused_ones_say_why(driver: webdriver.Chrome, place: Place) -> None:
    sign_in(driver, place)
    driver.get(f"{place.url}/new")
    assert ".parquet" in attribute(driver, "#upload", "accept")
    # What the browser tells of an upload under way, each time it does
    driver.execute_script(
        "window.seen = [];"
        "new MutationObserver(() => "
        "seen.push(document.querySelector('[data-upload-status]').textContent))"
        ".observe(document.querySelector('[data-upload-status]'), { childList: true })"
    )
    drop(driver, "[data-drop]", {"dropped.csv": "prompt,completion\nHi,Hello\n" * 2})
    until(
        lambda: Select(find(driver, "#training_file")).first_selected_option.text.startswith(
            "dropped.csv"
        )
    )
    assert "dropped.csv: 100 %" in driver.execute_script("return window.seen")
    assert "as training data" in text_of(driver, "[data-upload-status]")
    drop(driver, "[data-drop]", {"picture.png": "no data"})
    until(lambda: "picture.png" in text_of(driver, "#toasts"))
    drop(driver, "[data-drop]", {"more.jsonl": "{}", "and more.jsonl": "{}"})
    until(
        lambda: Select(find(driver, "#validation_file")).first_selected_option.text.startswith(
            ("more", "and more")
        )
    )
    until(
        lambda: (
            "and more.jsonl" in text_of(driver, "#training_file")
            and "\nmore.jsonl" in text_of(driver, "#training_file")
        )
    )


def test_an_unusable_file_is_judged_beside_the_form_and_nothing_is_said_to_fit(
    driver: webdriver.Chrome, place: Place
) -> None:
    sized(driver, 1400, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/new")
    drop(driver, "[data-drop]", {"cap.csv": "Prompt,Completion\nhi,there\n"})
    until(lambda: "1 of 1 row cannot be trained on" in text_of(driver, "#check-training_file"))
    assert "its columns are 'Prompt', 'Completion'" in text_of(driver, "#check-training_file")
    until(lambda: "training file cannot be trained on" in text_of(driver, "#plan"))
    assert "Fits" not in text_of(driver, "#plan")
    assert axe_faults(driver) == []

    # What the message says helps
    find(driver, "#data").send_keys("{prompt: Prompt, completion: Completion}")
    until(lambda: attribute(driver, "#check-training_file [data-usable]", "data-usable") == "yes")
    assert "prompt and completion in CSV; 1 row, and it is fine." in text_of(
        driver, "#check-training_file"
    )
    until(lambda: "Fits" in text_of(driver, "#plan"))
    assert "completion: Completion" in attribute(driver, "#as-yaml", "textContent")


@pytest.mark.slow
def test_no_label_of_the_form_and_no_name_of_an_option_leaves_its_place(
    driver: webdriver.Chrome, place: Place
) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {"model": "tiny-llama", "training_file": files["train"], "training": {"max_steps": 3}}
    ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    job = seed_job(place.settings, place.store, place.holder, asked, **ended)
    sign_in(driver, place)
    for width in (1280, 1000, 360):
        sized(driver, width, "light")
        driver.get(f"{place.url}/new")
        find(driver, "#plan .verdict")
        driver.execute_script(
            "for (const one of document.querySelectorAll('details')) one.open = true"
        )
        assert driver.execute_script(_LABELS_OUTSIDE) == [], width
    assert "ft_service/" not in attribute(driver, "#new", "textContent")
    sized(driver, 1280, "light")
    driver.get(f"{place.url}/jobs/{job.id}/settings")
    driver.execute_script("document.querySelector('details.rest').open = true")
    names = "[...document.querySelectorAll('.settings th')]"
    in_one = (
        "(one) => { const range = document.createRange(); range.selectNodeContents(one); "
        "return new Set([...range.getClientRects()].map((part) => Math.round(part.top))).size }"
    )
    assert set(driver.execute_script(f"return {names}.map({in_one})")) == {1}, (
        "each name is one line"
    )
    row = next(
        row
        for row in driver.find_elements(By.CSS_SELECTOR, ".settings tr")
        if row.text.startswith("n_epochs")
    )
    assert row.text.split("\n") == [f"n_epochs {formatting.NONE}", "not used: max_steps decides"]


_LABELS_OUTSIDE = """
const range = document.createRange();
const right = (one) => { range.selectNodeContents(one); return range.getBoundingClientRect().right };
return [...document.querySelectorAll(".field > label")]
  .filter((one) => right(one) > one.parentElement.getBoundingClientRect().right + 1).map((one) => one.textContent);
"""


def test_the_losses_of_an_export_appear_once_it_is_made(
    driver: webdriver.Chrome, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {"model": "tiny-llama", "training_file": files["train"]}
    ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    job = seed_job(place.settings, place.store, place.holder, asked, **ended)
    export = Export(format=ExportFormat.MERGED, status="running", created_at=NOW)
    run = place.run_of(job)
    run.write(state_key(export.format), export)
    paths = requests_of_page(monkeypatch)
    sign_in(driver, place)
    driver.get(f"{place.url}/jobs/{job.id}/exports?where=transformers")
    looked_at = [f"/v1/fine_tuning/jobs/{job.id}/{part}" for part in ("exports", "evaluation")]
    until(lambda: paths.count(looked_at[0]) == 3)
    assert paths.count(looked_at[1]) == 1, "nothing is new while it is made"
    losses = {"adapter_on_base_as_trained": 1.25, "adapter_on_bf16_base": 1.5, "merged": 1.26}
    made = {"status": "succeeded", "report": {"validation_loss": losses}}
    run.write(state_key(export.format), export.model_copy(update=made))
    until(lambda: "+0.0100" in text_of(driver, "#served"))
    assert "succeeded" in text_of(driver, "#exports")
    assert paths.count(looked_at[1]) == 2


def test_models_keys_and_projects_by_click(
    driver: webdriver.Chrome, place: Place, downloads: Path
) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {"model": "tiny-llama", "training_file": files["train"], "suffix": "clicked"}
    ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW + 1}
    job = seed_job(place.settings, place.store, place.holder, asked, **ended)
    run = place.run_of(job)
    run.put("adapter/adapter_config.json", b"{}")
    sign_in(driver, place)

    # A model: verified, downloaded, shared with a project and no more, deleted
    driver.get(f"{place.url}/projects")
    find(driver, "#project-name").send_keys("Friends")
    double_click(driver, "form.panel button")
    until(lambda: "/projects/proj_" in driver.current_url)
    friends = driver.current_url.rpartition("/")[2]
    made = place.store.projects.list_projects(organization="local", limit=100).data
    assert [one.id for one in made if one.name == "Friends"] == [friends], "one, by two clicks"
    driver.get(f"{place.url}/models")
    row = f"tr:has(a[href='/jobs/{job.id}'])"
    click(driver, f"{row} .menu summary")
    click(driver, f"{row} [hx-post*=verify]")
    assert "adapter" in text_of(driver, f"{row} .notice")
    before = set(downloads.glob("*.tar"))
    click(driver, f"{row} a[download]")
    until(lambda: set(downloads.glob("*.tar")) - before)
    click(driver, f"{row} [hx-get*=shares]")
    click(driver, f"{row} [hx-post*='/share']")
    confirm(driver, friends)
    until(lambda: f"Shared with {friends}" in text_of(driver, f"{row} .notice"))
    name = str(job.spec.tuned_name)
    assert [one.grantee for one in place.store.models.list_permissions("default", name).data] == [
        friends
    ]
    click(driver, f"{row} [hx-post*=unshare]")
    until(lambda: "Not shared." in text_of(driver, f"{row} .notice"))
    assert place.store.models.list_permissions("default", name).data == []
    click(driver, f"{row} [hx-post*=delete]")
    confirm(driver)
    until(lambda: not driver.find_elements(By.CSS_SELECTOR, row))

    # A key: made, which is shown once, replaced, revoked
    driver.get(f"{place.url}/keys")
    find(driver, "#key-name").send_keys("by click")
    double_click(driver, "form.panel button")
    secret = text_of(driver, "#secret")
    assert place.store.keys.authenticate(secret) is not None
    driver.refresh()
    assert secret not in attribute(driver, "body", "textContent")
    # One, by two clicks: the secret of the first would have been replaced by the second's
    (key,) = [one for one in place.store.keys.list_keys("default") if one.name == "by click"]
    click(driver, f"#rotate-{key.id}")
    confirm(driver)
    other = text_of(driver, "#secret")
    assert place.store.keys.authenticate(other) is not None
    assert place.store.keys.authenticate(secret) is not None, "for a day"
    click(driver, f"#revoke-{key.id}")
    confirm(driver)
    until(lambda: not driver.find_elements(By.ID, f"revoke-{key.id}"))
    assert place.store.keys.authenticate(secret) is None
    assert place.store.keys.authenticate(other) is not None

    # A file
    driver.get(f"{place.url}/data/{files['heldout']}")
    click(driver, "[hx-post$='/delete']")
    confirm(driver)
    until(lambda: driver.current_url.endswith("/data"))
    assert files["heldout"] not in attribute(driver, "main", "textContent")


@pytest.mark.slow
def test_who_goes_back_to_a_long_list_stands_where_he_stood(
    driver: webdriver.Chrome, place: Place
) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {"model": "tiny-llama", "training_file": files["train"], "metadata": {"list": "long"}}
    ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
    for _ in range(40):
        seed_job(place.settings, place.store, place.holder, asked, **ended)
    sized(driver, 1400, "light")
    sign_in(driver, place)
    driver.get(f"{place.url}/jobs?metadata=list%3Dlong")
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#jobs tbody tr")) == 40)
    click(driver, "#jobs tbody tr:last-child a")
    until(lambda: "/jobs/ftjob-" in driver.current_url)
    driver.back()
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#jobs tbody tr")) == 40)
    until(lambda: driver.execute_script("return scrollY > 1000"))


def test_a_sweep_by_click(driver: webdriver.Chrome, place: Place) -> None:
    files = seed_files(place.settings, place.store, "default")
    asked = {
        "model": "tiny-llama",
        "training_file": files["train"],
        "metadata": {"name": HOSTILE[0]},
    }
    over = seed_sweep(place.settings, place.store, place.holder, asked)
    sized(driver, 1400, "light")
    sign_in(driver, place)
    click(driver, "a[href='/sweeps']")
    click(driver, f"a[href='/sweeps/{over}']")
    assert text_of(driver, ".side nav [aria-current]") == "Sweeps"
    losses = [
        cell.text for cell in driver.find_elements(By.CSS_SELECTOR, "#sweep td[data-label^=Valid]")
    ]
    assert losses == ["0.37", "0.44", "0.61", "0.92"], "best first"
    first = driver.find_elements(By.CSS_SELECTOR, "#sweep td:first-child")
    assert [cell.text for cell in first] == ["0.001", "3e-4", "1e-4", "0.003"]
    assert len(driver.find_elements(By.CSS_SELECTOR, ".scatter circle")) == 4
    ranked = [one.text for one in driver.find_elements(By.CSS_SELECTOR, "#sweep td.name a")]
    click(driver, "#sweep .actions a")
    assert re.findall(r"ftjob-\w+", driver.current_url) == ranked

    # One that is under way: the page follows it to its end
    mine = asked | {"validation_split": 0.5, "sweep": {"lora.r": [4, 8]}}
    catalogue = Catalogue.from_settings(place.settings, at_once())
    running = create_sweep(
        mine, AdmissionContext(place.holder, place.store, place.settings, catalogue)
    )
    driver.get(f"{place.url}/sweeps/{running.id}")
    click(driver, "#cancel-sweep")
    confirm(driver)
    until(lambda: "2 cancelled" in text_of(driver, "#sweep"))
    states = {
        job.state.value for job in place.store.sweeps.jobs_of_sweeps([running.id])[running.id]
    }
    assert states == {"cancelled"}
    assert driver.execute_script("return window.hacked") is None


@pytest.mark.slow
def test_all_of_it_by_keyboard(driver: webdriver.Chrome, place: Place) -> None:
    files = seed_files(place.settings, place.store, "default")
    sized(driver, 1400, "dark")
    sign_in(driver, place)
    tab_to(driver, ".skip")
    press(driver, Keys.ENTER)
    assert driver.execute_script("return document.activeElement.id") == "main"
    driver.get(f"{place.url}/jobs")
    tab_to(driver, "a.new")
    press(driver, Keys.ENTER)
    tab_to(driver, "#suffix")
    press(driver, "by-keyboard")
    tab_to(driver, "#training_file")
    press(driver, "train.jsonl")
    until(lambda: driver.execute_script("return document.activeElement.value").startswith("file-"))
    tab_to(driver, "#upload")
    tab_to(driver, "summary")
    press(driver, Keys.ENTER)
    assert driver.find_elements(By.CSS_SELECTOR, "details[open]")
    tab_to(driver, "#new button[type=submit]", most=200)
    press(driver, Keys.ENTER)
    until(lambda: "/jobs/ftjob-" in driver.current_url)
    job = place.begun(driver.current_url.rpartition("/")[2], 1)
    assert job.request["training_file"] in files.values() or job.request[
        "training_file"
    ].startswith("file-")
    place.train(job, 1, range(1, 8))
    until(lambda: "from 3.2" in attribute(driver, LOSS, "aria-label"))

    # The focus outlives what refreshes itself under it
    tab_to(driver, "#verb-pause")
    place.train(job, 1, range(8, 10))
    until(lambda: text_of(driver, "#job-head .figures dd").startswith("9"))
    assert driver.execute_script("return document.activeElement.id") == "verb-pause"
    tab_to(driver, "#job-head a[href*='/new?again']")
    place.train(job, 1, range(10, 12))
    until(lambda: text_of(driver, "#job-head .figures dd").startswith("11"))
    assert driver.execute_script("return document.activeElement.textContent") == "Run again"
    tab_to(driver, "[data-log]")
    press(driver, Keys.SPACE)
    assert "log=1" in driver.current_url
    tab_to(driver, LOSS)
    press(driver, Keys.ARROW_LEFT)
    until(lambda: "step 10" in text_of(driver, ".curve-card.large .key"))
    driver.get(driver.current_url)
    assert attribute(driver, "[data-log]", "aria-pressed") == "true", "the address remembers"
    tab_to(driver, "[hx-post='/sign-out']")
    press(driver, Keys.ENTER)
    until(lambda: driver.current_url.endswith("/sign-in"))
