"""Every view of the page in a real browser, with the worst that users can write."""

from __future__ import annotations

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.support.page.browser import attribute, axe_faults, find, sized, told
from tests.support.page.hostile import HOSTILE, hostile_views, sign_in
from tests.support.page.place import Place


@pytest.mark.parametrize("judged", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_view_is_usable_by_all_and_runs_nothing_that_users_wrote(
    driver: webdriver.Chrome, place: Place, judged: int
) -> None:
    """`judged`: of so many views axe judges one, which takes longer than all else here."""
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
        assert not driver.find_elements(
            By.CSS_SELECTOR, "main img, main svg[onload], main b:not([class]) > script"
        ), view
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
            f"{view} is wider than its window"
        )
        assert number % judged or axe_faults(driver) == [], view
    assert shown > len(views) / 2, "the hostile text is there, as text"
    assert [line for line in told(driver) if "404" not in line] == []
