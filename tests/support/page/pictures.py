"""Pictures of every view, at two widths and in both themes: `python -m tests.support.page.pictures [FOLDER]`.

They are what docs/page.md shows (docs/pictures/). Needs Chromium, its driver, and Pillow, which the examples bring.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.support.page.browser import browsing, find, sized, until
from tests.support.page.place import Place
from tests.support.page.seeded import seed_all

ROOT = Path(__file__).parents[3]
WIDTHS = {"wide": 1600, "narrow": 360}
THEMES = ("light", "dark")
COLOURS = 96
"""Of a picture: a page has few, and a small file loads fast."""
_SETTLED_SECONDS = 1.5


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        place = Place(Path(home))
        try:
            made = seed_all(place.settings, place.store, place.holder)
            with browsing(Path(home)) as driver:
                _take_all(driver, place, made, folder)
        finally:
            place.close()


def _take_all(driver: webdriver.Chrome, place: Place, made: dict[str, str], folder: Path) -> None:
    driver.get(f"{place.url}/sign-in")
    _take(driver, folder, "sign-in")
    find(driver, "#key").send_keys(place.key, Keys.ENTER)
    until(lambda: driver.current_url.endswith("/jobs"))
    for name, path in views(made).items():
        driver.get(place.url + path)
        _take(driver, folder, name)


def views(made: dict[str, str]) -> dict[str, str]:
    """Name → path of every view."""
    done, compared = made["succeeded"], ("sweep 0", "sweep 1", "sweep 2", "succeeded")
    return {
        "jobs": "/jobs",
        "job": f"/jobs/{made['running']}?smooth=0.6",
        "logs": f"/jobs/{done}/logs",
        "settings": f"/jobs/{done}/settings",
        "checkpoints": f"/jobs/{done}/checkpoints",
        "events": f"/jobs/{done}/events",
        "new-job": f"/new?again={done}",
        "compare": "/compare?" + "&".join(f"job={made[name]}" for name in compared),
        "models": "/models",
        "data": "/data",
        "file": f"/data/{made['file train']}",
        "keys": "/keys",
    }


def _take(driver: webdriver.Chrome, folder: Path, name: str) -> None:
    """The view as it is at the top, in all four ways."""
    for size, width in WIDTHS.items():
        for theme in THEMES:
            sized(driver, width, theme)
            time.sleep(_SETTLED_SECONDS)
            taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
            with Image.open(io.BytesIO(base64.b64decode(taken))) as picture:
                small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(folder / f"{name}-{size}-{theme}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/pictures")
