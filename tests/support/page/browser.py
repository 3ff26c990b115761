"""A headless browser, where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    NoAlertPresentException,
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.attempts import HANG_SECONDS, wait_for

Found = TypeVar("Found")

AXE = Path(__file__).parent / "axe/axe.min.js"
SERIOUS = ("serious", "critical")
_NOT_YET = (
    ElementClickInterceptedException,
    NoAlertPresentException,
    NoSuchElementException,
    StaleElementReferenceException,
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-breakpad",
    "--no-first-run",
    # What goes on beside the page, and every picture of what moves, takes processor time from the
    # tests.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--force-prefers-reduced-motion",
)


@contextmanager
def browsing(downloads: Path) -> Iterator[webdriver.Chrome]:
    """A browser that keeps what it downloads in a folder. Skips the test where there is none."""
    chromium = next((path for name in _NAMES if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no browser: install the packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        driver.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
        )
        yield driver
    finally:
        driver.quit()


def until(condition: Callable[[], Found], seconds: float = HANG_SECONDS) -> Found:
    """Return a condition's value once it is true; elements that are replaced or moved meanwhile are
    found again.
    """

    @wraps(condition)
    def found() -> Found | None:
        try:
            return condition()
        except _NOT_YET:
            return None

    return wait_for(found, seconds, every=0.1)


def find(driver: webdriver.Chrome, css: str) -> WebElement:
    return until(lambda: driver.find_element(By.CSS_SELECTOR, css))


def click(driver: webdriver.Chrome, css: str) -> None:
    """Click what is there and stays there: parts of the page refresh themselves."""

    def clicked() -> bool:
        found = driver.find_element(By.CSS_SELECTOR, css)
        # Not at the edge of the window, where a bar that stays in view may lie over it.
        driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", found)
        found.click()
        return True

    until(clicked)


def double_click(driver: webdriver.Chrome, css: str) -> None:
    webdriver.ActionChains(driver, duration=0).double_click(find(driver, css)).perform()


def text_of(driver: webdriver.Chrome, css: str) -> str:
    return until(lambda: driver.find_element(By.CSS_SELECTOR, css).text or " ")


def attribute(driver: webdriver.Chrome, css: str, name: str) -> str:
    """Of an element that is there; empty while it has none."""
    return find(driver, css).get_attribute(name) or ""


def sized(driver: webdriver.Chrome, width: int, theme: str) -> None:
    """Look at the page in a window of a width, in a theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": theme}]},
    )


def told(driver: webdriver.Chrome) -> list[str]:
    """What a browser's console has said is wrong since this was last asked."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]


def confirm(driver: webdriver.Chrome, text: str | None = None) -> None:
    """Say yes to what the page asks before it changes something, with `text` where it wants a
    word.
    """
    question = until(lambda: driver.switch_to.alert)
    if text is not None:
        question.send_keys(text)
    question.accept()


def tab_to(driver: webdriver.Chrome, css: str, most: int = 80) -> None:
    """Go on with the tabulator until an element has the focus, which must be seen to have it."""
    for _ in range(most):
        webdriver.ActionChains(driver, duration=0).send_keys(Keys.TAB).perform()
        if driver.execute_script("return document.activeElement.matches(arguments[0])", css):
            outline = driver.execute_script(
                "return getComputedStyle(document.activeElement).outlineStyle"
            )
            assert outline != "none", f"{css} has the focus, and does not show it"
            return
    raise AssertionError(f"{css} cannot be reached with the keyboard")


def walked(driver: webdriver.Chrome) -> tuple[list[str], list[str]]:
    """What can be worked in the page as it is, in its order; and what has the focus, one after the
    other, from the first press of the tabulator until the page's beginning comes round. What does
    not show that it has the focus says so.
    """
    expected: list[str] = driver.execute_script(_WALK)
    keys = [Keys.TAB] * (len(expected) + 1)
    webdriver.ActionChains(driver, duration=0).send_keys(*keys).perform()
    return expected, driver.execute_script("return window.walked")


_WALK = """
for (const closed of document.querySelectorAll("details:not([open])")) closed.open = true;
document.addEventListener("htmx:beforeRequest", (event) => event.preventDefault(), true);
const inputs = "input:not([type=hidden]):not(:disabled), select:not(:disabled), textarea:not(:disabled)";
const workable = `a[href], button:not(:disabled), ${inputs}, summary, [tabindex]:not([tabindex="-1"])`;
// Of a group of radio buttons the chosen one has the focus; arrows choose another.
const others = (one) => one.type === "radio" && !one.checked && document.querySelector(`[name="${one.name}"]:checked`);
const all = [...document.querySelectorAll(workable)].filter(
  (one) => one.checkVisibility({ visibilityProperty: true }) && !others(one));
const name = (one) => `${all.indexOf(one)} ${one.outerHTML.slice(0, 90)}`;
const shown = (one) => {
  const style = getComputedStyle(one);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
};
window.walked = [];
document.addEventListener("focusin", ({ target }) => {
  const seen = target.matches(".sr") ? target.labels[0] : target;
  window.walked.push(name(target) + (shown(seen) ? "" : " has the focus, and does not show it"));
});
const start = document.createElement("span");
start.tabIndex = -1;
document.body.prepend(start);
start.focus();
window.walked.length = 0;
start.remove();
return all.map(name);
"""


def unworkable(driver: webdriver.Chrome) -> list[str]:
    """What does something by a click and is nothing that a keyboard works."""
    return driver.execute_script(_UNWORKABLE)


_UNWORKABLE = """
const asks = ["get", "post", "put", "delete"].map((verb) => `[hx-${verb}]:not([hx-trigger])`).join(", ");
const own = ["copy", "copy-from", "apply", "compare", "theme-toggle", "stop"].map((name) => `[data-${name}]`).join(", ");
return [...document.querySelectorAll(`${asks}, ${own}, [role=button]`)]
  .filter((one) => !one.matches("a[href], button, form, input, select"))
  .map((one) => one.outerHTML.slice(0, 120));
"""


def press(driver: webdriver.Chrome, *keys: str) -> None:
    """Press keys where the focus is."""
    webdriver.ActionChains(driver, duration=0).send_keys(*keys).perform()


def drop(driver: webdriver.Chrome, css: str, files: Mapping[str, str]) -> None:
    """Drop files, of which name and contents are given, onto an element, as a hand would."""
    driver.execute_script(_DROP, find(driver, css), dict(files))


_DROP = """
const data = new DataTransfer();
for (const [name, text] of Object.entries(arguments[1])) data.items.add(new File([text], name));
for (const type of ["dragenter", "dragover", "drop"])
  arguments[0].dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: data }));
"""


def axe_faults(driver: webdriver.Chrome) -> list[str]:
    """What axe finds serious or critical in the page as it is."""
    driver.execute_script(AXE.read_text())
    run = (
        "axe.run(document, {resultTypes: ['violations']}).then((found) => "
        "arguments[0](found.violations))"
    )
    found: list[dict[str, Any]] = driver.execute_async_script(run)
    return [
        f"{one['id']}: {one['nodes'][0]['target']}" for one in found if one["impact"] in SERIOUS
    ]
