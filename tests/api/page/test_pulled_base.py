"""A base comes from a hub, on the page alone: looked up, judged, fetched, and chosen for a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.support.select import Select

from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Described
from ft_service.control.bases.base_pulls import PullFolder
from ft_service.control.bases.pull_runner import Puller
from tests.support.attempts import wait_for
from tests.support.bases import save_base
from tests.support.describing import small_document
from tests.support.hub import hub_serving
from tests.support.page.browser import axe_faults, click, confirm, find, text_of, until
from tests.support.page.hostile import sign_in
from tests.support.page.place import Place

LARGE = "model-00002-of-00002.safetensors"


def test_a_base_is_looked_up_fetched_stopped_and_gone_on_with(
    driver: webdriver.Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base(tmp_path / "published")
    (tmp_path / "published" / LARGE).write_bytes(bytes(30 * 2**20))
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    (tmp_path / "home").mkdir()
    place = Place(tmp_path / "home", moves=False, more_settings={"models": [tmp_path / "models"]})
    ends = threading.Event()

    def described(folder: Path, stop: Callable[[], bool]) -> Described:
        return small_document(folder)

    puller = Puller(PullFolder(tmp_path / "models"), Descriptions(None, None, described))

    def pull() -> None:
        while not ends.wait(0.1):
            puller.fetch_all(ends.is_set)

    with hub_serving(tmp_path / "published") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        thread = threading.Thread(target=pull)
        thread.start()
        try:
            sign_in(driver, place)
            driver.get(f"{place.url}/new")
            click(driver, "a[href='/models?show=bases#fetch']")
            find(driver, "#hub-name").send_keys("org/tiny")
            click(driver, "form[hx-post='/models/pulls'] button")
            until(lambda: "licence: apache-2.0" in text_of(driver, "#pulls"))
            until(lambda: "can be tuned" in text_of(driver, "#pulls"))
            assert LARGE not in {name for name, _ in hub.asked}, "nothing large comes unasked"
            assert axe_faults(driver) == []

            hub.holds_after = 12 * 2**20
            click(driver, "#pulls [id^=fetch-]")
            part = puller.folder.path
            wait_for(lambda: any(one.stat().st_size for one in part.rglob(f"{LARGE}.part")))
            click(driver, "#pulls [id^=stop-]")
            until(lambda: "stopped" in text_of(driver, "#pulls .tag"))
            hub.holds_after = None
            click(driver, "#pulls [id^=fetch-]")
            until(lambda: text_of(driver, "#pulls .tag.good") == "here")
            assert any(asked for name, asked in hub.asked if name == LARGE), "from where it was"

            click(driver, "#pulls a.button")
            until(lambda: "/new?model=" in driver.current_url)
            chosen = Select(find(driver, "#model")).first_selected_option
            assert chosen.text.startswith("org/tiny")
            driver.get(f"{place.url}/models?show=bases")
            find(driver, "#hub-name").send_keys("org/absent")
            click(driver, "form[hx-post='/models/pulls'] button")
            until(lambda: "failed" in text_of(driver, "#pulls"))
            click(driver, "#pulls button.danger")
            confirm(driver)
            until(lambda: "org/absent" not in text_of(driver, "#pulls"))
        finally:
            ends.set()
            thread.join()
            place.close()
