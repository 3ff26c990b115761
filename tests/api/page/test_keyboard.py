"""Every control of every view is reached by the tabulator, in its order, shows it, and lets the
focus go on.
"""

from __future__ import annotations

import pytest
from selenium import webdriver

from tests.support.page.browser import find, sized, until, unworkable, walked
from tests.support.page.hostile import hostile_views, sign_in
from tests.support.page.place import Place

PAGE_HAS_MORE = 3
"""Whatever a view holds, there are the link past the navigation, the navigation and its buttons."""


_SETTLED = (
    "return document.readyState === 'complete' && !document.querySelector('.htmx-request, "
    "#jobs[hx-trigger^=load]')"
)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (360, "dark")])
def test_every_view_is_walked_by_keyboard(
    driver: webdriver.Chrome, place: Place, width: int, theme: str
) -> None:
    views = hostile_views(place)
    sized(driver, width, theme)
    driver.get(f"{place.url}/sign-in")
    expected, found = walked(driver)
    assert len(expected) == 2
    assert found[:2] == expected
    sign_in(driver, place)
    faults = {}
    for view in [*views, "/new"]:
        driver.get(place.url + view)
        find(driver, "main h1")
        until(lambda: driver.execute_script(_SETTLED))
        expected, found = walked(driver)
        assert len(expected) > PAGE_HAS_MORE
        missed = [
            f"{found[number:][:1]} in place of {one}"
            for number, one in enumerate(expected)
            if found[number:][:1] != [one]
        ]
        trapped = found[len(expected) :] not in ([], expected[:1])
        faults[view] = (
            missed[:1]
            + ["the focus does not go on to the beginning"] * trapped
            + unworkable(driver)
        )
    assert {view: told for view, told in faults.items() if told} == {}
