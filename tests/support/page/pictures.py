"""Pictures of every view, at two widths and in both themes: `python -m tests.support.page.pictures
[FOLDER] [--run DIR] [--only NAME …]`.

They are what docs/page.md shows (docs/pictures/). Needs Chromium, its driver, and Pillow, which the
examples bring. Adapter and answers are those of a job that is trained for it (some minutes), or of
one that was before: its run directory.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import yaml
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from ft_service.rundir.evaluations import EVALUATIONS
from ft_service.serving.preview import WORKER
from tests.support.page.browser import attribute, browsing, find, press, sized, until
from tests.support.page.place import Place
from tests.support.page.seeded import DATA, seed_all
from tests.support.page.teams import seed_host, seed_sweep, seed_teams

ROOT = Path(__file__).parents[3]
WIDTHS = {"wide": 1600, "narrow": 360}
THEMES = ("light", "dark")
COLOURS = 256
"""Of a picture: a page has few, and a small file loads fast."""
FREQUENT = 176
"""The most frequent ones come first; then those that none of the others is near to, such as a red
button's.
"""
NEAR = 60
"""Sum of the differences of red, green and blue, of 255 each."""
READING = ("Reading the file", "Counting", "The plan appears here")
"""What stands where samples, statistics and the plan are still to come."""
_SETTLED_SECONDS = 1.5


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line. Ends the process for a name that is no view's, such as the folder's, which
    has to stand first.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/pictures")
    parser.add_argument(
        "--run", type=Path, help="a run directory that this program has trained before"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of views, after the folder")
    options = parser.parse_args(arguments)
    known = sorted(["sign-in", *views(defaultdict(str))])
    if unknown := [name for name in options.only if name not in known]:
        parser.error(
            f"--only {' '.join(unknown)}: give names of views after FOLDER. There are "
            f"{', '.join(known)}."
        )
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        run = options.run or _trained(Path(home) / "trained")
        place = Place(Path(home), preview_command=WORKER, moves=False)
        try:
            made = seed_all(place.settings, place.store, place.holder, seed_sweep)
            for part in ("adapter", EVALUATIONS):
                there = place.settings.runs_dir / made["succeeded"] / part
                shutil.copytree(run / part, there, dirs_exist_ok=True)
            made |= seed_teams(place.store, place.holder.key_id)
            seed_host(place.store, made["running"])
            with browsing(Path(home)) as driver:
                _take_all(driver, place, made, options.folder, options.only)
        finally:
            place.close()


def _trained(folder: Path) -> Path:
    """The run directory of a job that has learned what the sample data teach."""
    folder.mkdir()
    spec = yaml.safe_load((ROOT / "deploy/examples/quickstart.yaml").read_text()) | {
        "training_file": str(DATA / "train.jsonl"),
        "validation_file": str(DATA / "validation.jsonl"),
        "distributed": {"nproc_per_node": 1},
        "evaluation": {"prompts": 6, "metrics": ["exact_match", "json_valid", "rouge_l"]},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    command = [
        str(Path(sys.executable).with_name("ft")),
        "run",
        str(folder / "job.yaml"),
        "--run-dir",
        str(folder / "run"),
    ]
    subprocess.run(command, check=True)
    return folder / "run"


def _take_all(
    driver: webdriver.Chrome, place: Place, made: dict[str, str], folder: Path, only: list[str]
) -> None:
    driver.get(f"{place.url}/sign-in")
    _take(driver, folder, "sign-in")
    find(driver, "#key").send_keys(place.key, Keys.ENTER)
    until(lambda: driver.current_url.endswith("/jobs"))
    for name, path in views(made).items():
        if only and name not in only:
            continue
        driver.get(place.url + path)
        until(
            lambda: not any(text in attribute(driver, "main", "textContent") for text in READING),
            seconds=120,
        )
        if name == "try":
            _talk(driver)
        _take(driver, folder, name)


def _talk(driver: webdriver.Chrome) -> None:
    for number, message in enumerate(
        (
            "I want to cancel order 30220, the grey helmet.",
            "Where is my folding printer? This is urgent!",
        )
    ):
        press(driver, message, Keys.ENTER)
        until(
            lambda number=number: (
                attribute(driver, "#talk", "textContent").count("tokens in") == 2 * (number + 1)
            ),
            seconds=180,
        )


def views(made: Mapping[str, str]) -> dict[str, str]:
    """Name → path of every view."""
    done = made["succeeded"]
    compared = ("sweep 0", "sweep 1", "sweep 2", "succeeded")
    return {
        "jobs": "/jobs",
        "job": f"/jobs/{made['running']}?smooth=0.6",
        "logs": f"/jobs/{done}/logs",
        "settings": f"/jobs/{done}/settings",
        "samples": f"/jobs/{done}/samples",
        "answers": f"/jobs/{done}/answers",
        "checkpoints": f"/jobs/{done}/checkpoints",
        "exports": f"/jobs/{done}/exports?where=laptop",
        "events": f"/jobs/{done}/events",
        "new-job": f"/new?again={done}",
        "compare": "/compare?" + "&".join(f"job={made[name]}" for name in compared),
        "sweep": f"/sweeps/{made['sweep']}",
        "sweeps": "/sweeps",
        "engines": "/engines",
        "models": "/models",
        "data": "/data",
        "file": f"/data/{made['file train']}",
        "try": f"/try?model={quote(made['succeeded model'])}&beside=tiny-llama",
        "usage": "/usage",
        "projects": "/projects",
        "project": f"/projects/{made['Customer support']}",
        "changes": "/changes",
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
                small = _of_few_colours(picture.convert("RGB"))
            small.save(folder / f"{name}-{size}-{theme}.png", optimize=True)


def _of_few_colours(picture: Image.Image) -> Image.Image:
    """Its most frequent colours as they are, and the nearest of them for every other one; rare ones
    that are near to none are kept too.
    """
    counted = picture.getcolors(picture.width * picture.height) or []
    colours = np.array([colour for _, colour in sorted(counted, reverse=True)], dtype=np.int32)
    kept = colours[:FREQUENT]
    for colour in colours[FREQUENT:]:
        if len(kept) < COLOURS and np.abs(kept - colour).sum(axis=1).min() > NEAR:
            kept = np.vstack([kept, colour])
    palette = Image.new("P", (1, 1))
    palette.putpalette(kept.flatten().tolist())
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
