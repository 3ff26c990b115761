"""Ten tasks of a newcomer, done by script: on the page with a mouse, on the page with the keyboard
alone, and in a terminal.

    python benchmarks/first_minute.py [--ways page keyboard terminal] [--only NAME …]

Each way has a server of its own that trains on this machine's processors, and a stand-in for the
hub. An act on the page is a click, a field that is filled in, a choice, a file or a confirmation;
an act in the terminal is a command line. Minutes are from the first act to the result, with what
the machine takes to train. After each task on the page axe looks at the view. A way in which every
task was done is saved. Needs Chromium, its driver and tmux.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for tests and benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from benchmarks.machine import RESULTS, machine, save
from ft_service.installation import ROOT
from tests.support.bases import SAMPLE, save_base
from tests.support.hub import hub_serving
from tests.support.page import browser
from tests.support.page.browser import attribute, browsing, press, text_of, until
from tests.support.service import Server

WAIT_SECONDS = 300.0
ROWS = 64
BEFORE: Mapping[str, str] = {
    "preferences": "a YAML box",
    "rewards": "a YAML box",
    "sweep": "not on the page",
    "fetch a base": "not on the page",
    "find": "not on the page",
    "name": "not on the page",
    "clean up": "not on the page",
}
"""Task → how the page did it before its form asked for decisions; the others went."""
AXE_ALL = """
axe.run(document, {resultTypes: ['violations']}).then((found) => arguments[0](
  found.violations.map((one) => `${one.id} (${one.impact}): ${one.nodes[0].target}`)));
"""


@dataclass
class Result:
    """One task, one way."""

    acts: int = 0
    minutes: float = 0.0
    faults: list[str] = field(default_factory=list[str])
    """What axe finds in the view in which the task ends."""
    failed: str = ""
    """What went wrong; empty: it was done."""


class Hand:
    """A person at the page, by mouse or by the keyboard alone. `acts` counts what it does."""

    def __init__(self, driver: webdriver.Chrome, url: str, *, keyboard: bool) -> None:
        self.driver = driver
        self.url = url
        self.keyboard = keyboard
        self.acts = 0
        self.faults: list[str] = []

    def click(self, css: str) -> None:
        """Follow a link, press a button, open a part or tick a box."""
        self.acts += 1
        if not self.keyboard:
            browser.click(self.driver, css)
            return
        self._focus(css)
        box = self.driver.execute_script("return document.activeElement.type === 'checkbox'")
        press(self.driver, Keys.SPACE if box else Keys.ENTER)

    def card(self, css: str) -> None:
        """Choose one of some radio buttons."""
        self.acts += 1
        if not self.keyboard:
            browser.click(self.driver, css)
            return
        self._focus(f"input[name={attribute(self.driver, css, 'name')}]")
        for _ in range(10):
            if self.driver.execute_script(
                "return document.activeElement.matches(arguments[0])", css
            ):
                return
            press(self.driver, Keys.ARROW_DOWN)
        raise AssertionError(f"{css} is not chosen by the arrows")

    def fill(self, css: str, text: str) -> None:
        self.acts += 1
        if self.keyboard:
            self._focus(css)
        else:
            browser.click(self.driver, css)
        self.driver.execute_script("document.activeElement.select()")  # as Control and A do
        press(self.driver, text)

    def choose(self, css: str, start: str) -> None:
        """Choose the option of a list whose text begins so."""
        self.acts += 1
        until(lambda: self._option(css, start))
        if self.keyboard:
            self._focus(css)
            press(self.driver, start)
        else:
            until(lambda: self._select(css, start))
        until(lambda: self._chosen(css) in ("", start) or self._chosen(css).startswith(start))

    def _select(self, css: str, start: str) -> bool:
        listed = Select(self.driver.find_element(By.CSS_SELECTOR, css))
        listed.select_by_visible_text(self._option(css, start))
        return True

    def _chosen(self, css: str) -> str:
        """The text of a list's choice; empty where the list has gone with it."""
        found = self.driver.find_elements(By.CSS_SELECTOR, css)
        return Select(found[0]).first_selected_option.text if found else ""

    def _option(self, css: str, start: str) -> str:
        texts = [one.text for one in Select(browser.find(self.driver, css)).options]
        return next((text for text in texts if text.startswith(start)), "")

    def give(self, css: str, path: Path) -> None:
        """Choose a file of this machine; the system's own dialogue is not part of the page."""
        self.acts += 1
        if self.keyboard:
            self._focus(css)
        browser.find(self.driver, css).send_keys(str(path))

    def yes(self) -> None:
        self.acts += 1
        browser.confirm(self.driver)

    def wait(self, condition: Callable[[], Any]) -> Any:
        return until(condition, seconds=WAIT_SECONDS)

    def see(self, css: str, text: str) -> None:
        self.wait(lambda: text in text_of(self.driver, css))

    def goes(self, part: str) -> None:
        self.wait(lambda: part in self.driver.current_url)

    def create(self) -> str:
        """Press Create once the plan says that the job fits, and return the address it leads to."""
        self.wait(lambda: text_of(self.driver, "#verdict").startswith("Fits"))
        self.click("#new button.primary")
        self.wait(lambda: re.search("/(jobs|sweeps)/ft", self.driver.current_url))
        return self.driver.current_url

    def _focus(self, css: str) -> None:
        """Go on with the tabulator until it is there."""
        browser.find(self.driver, css)
        browser.tab_to(self.driver, css, most=400)


class Terminal:
    """A terminal in tmux, in a folder, for a server."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.acts = 0
        self._socket = str(folder / "tmux")
        self._prompts = 1
        scripts = Path(sys.executable).parent
        (folder / "bashrc").write_text(r"PS1='[\#:$?] '" + "\n")
        start = [
            *(
                "tmux",
                "-S",
                self._socket,
                "-f",
                "/dev/null",
                "new-session",
                "-d",
                "-c",
                str(folder),
            ),
            *("-x", "120", "-y", "50", "bash --noprofile --rcfile bashrc -i"),
        ]
        subprocess.run(
            start,
            check=True,
            env={
                **os.environ,
                **environment,
                "PATH": f"{scripts}:{os.environ['PATH']}",
                "TERM": "xterm-256color",
            },
        )
        self._until_prompt()

    def run(self, command: str) -> str:
        """Type a command line, wait for its end, and return what the screen shows.

        Raises RuntimeError if it fails.
        """
        self.acts += 1
        self._tmux("send-keys", "-l", command)
        self._tmux("send-keys", "Enter")
        self._prompts += 1
        shown, status = self._until_prompt()
        if status:
            raise RuntimeError(f"{command}: exit {status}\n{shown}")
        return shown

    def close(self) -> None:
        self._tmux("kill-server")

    def _until_prompt(self) -> tuple[str, int]:
        ends = time.monotonic() + WAIT_SECONDS
        shown = ""
        while time.monotonic() < ends:
            shown = self._tmux("capture-pane", "-p", "-J", "-S", "-300").rstrip()
            if found := re.search(rf"\[{self._prompts}:(\d+)\]$", shown):
                return shown, int(found[1])
            time.sleep(0.2)
        raise TimeoutError(f"no prompt within {WAIT_SECONDS:g} seconds:\n{shown}")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


Way = Hand | Terminal


def _csv(way: Way, files: Path) -> None:
    """A CSV with columns of one's own becomes a model that is asked, and whose adapter is here."""
    question = "Where is my cotton clock, order number 26508?"
    if isinstance(way, Terminal):
        columns = "--set data.instruction=question --set data.output=answer"
        way.run(f"ft submit tickets.csv --model tiny-llama --suffix tickets {columns} --watch")
        way.run(f"ft chat tickets '{question}'")
        way.run("ft download tickets --out tickets")
        assert (files / "tickets/adapter_config.json").exists()
        return
    way.click("a.new")
    way.give("#upload", files / "tickets.csv")
    for column, role in (("question", "question"), ("answer", "answer")):
        way.choose(f"[data-column={column}]", role)
        way.wait(lambda: not way.driver.find_elements(By.CSS_SELECTOR, ".htmx-request"))
    way.fill("#suffix", "tickets")
    way.create()
    way.see("#job-head .state", "Succeeded")
    way.click("#job-head .verbs a[href*='/adapter']")
    way.wait(lambda: list(files.glob("*.tar")))
    way.click("#job-head .verbs a[href*='/try']")
    way.fill("#words", question)
    way.click("[data-send]")
    way.wait(lambda: text_of(way.driver, "#talk").count("tokens in") == 2)


def _preferences(way: Way, files: Path) -> None:
    """Pairs of answers, of which one is better."""
    if isinstance(way, Terminal):
        way.run(
            "ft submit pairs.jsonl --model tiny-llama --suffix pairs --set method.type=dpo --watch"
        )
        return
    way.click("a.new")
    way.card("[name=method][value=dpo]")
    way.give("#upload", files / "pairs.jsonl")
    way.fill("#suffix", "pairs")
    way.create()
    way.see("#job-head .state", "Succeeded")


def _rewards(way: Way, files: Path) -> None:
    """Questions whose answers a grader rewards, for two steps."""
    if isinstance(way, Terminal):
        spec = json.dumps(
            {
                "model": "tiny-llama",
                "training_file": "sums.jsonl",
                "suffix": "sums",
                "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER}},
                "training": {"max_steps": 2},
            }
        )
        way.run(f"echo '{spec}' > sums.yaml")
        way.run("ft submit sums.yaml --watch")
        return
    way.click("a.new")
    way.card("[name=method][value=reinforcement]")
    way.give("#upload", files / "sums.jsonl")
    way.fill("#suffix", "sums")
    way.click(".advanced > summary")
    way.fill("#find-option", "max_steps")
    way.fill("[name='training.max_steps']", "2")
    way.create()
    way.see("#job-head .state", "Succeeded")


def _sweep(way: Way, files: Path) -> None:
    """Two learning rates are tried, and the better one is named."""
    if isinstance(way, Terminal):
        spec = {
            "model": "tiny-llama",
            "training_file": "tickets.jsonl",
            "validation_split": 0.2,
            "suffix": "rates",
            "sweep": {"training.learning_rate": [1e-3, 4e-3]},
        }
        way.run(f"echo '{json.dumps(spec)}' > sweep.yaml")
        way.run("ft sweep submit sweep.yaml --watch")
        assert "0.00" in way.run("ft sweep show last")
        return
    way.click("nav a[href='/sweeps']")
    way.click("main a[href='/new#sweep']")
    way.fill("#sweep", "training.learning_rate: [1e-3, 4e-3]")
    way.give("#upload", files / "tickets.jsonl")
    way.wait(lambda: attribute(way.driver, "#training_file", "value"))
    way.fill("#validation_split", "0.2")
    way.fill("#suffix", "rates")
    way.create()
    way.see("#sweep .state", "Succeeded")
    way.see("#sweep", "Best:")


def _fetch(way: Way, files: Path) -> None:
    """A base comes from the hub, after its size and licence were told."""
    if isinstance(way, Terminal):
        way.run("ft pull org/tiny")
        assert "org/tiny" in way.run("ft models")
        return
    way.click("nav a[href='/models']")
    way.click(".tabs a[href='/models?show=bases']")
    way.fill("#hub-name", "org/tiny")
    way.click("form[hx-post='/models/pulls'] button")
    way.see("#pulls", "licence: apache-2.0")
    way.click("#pulls [id^=fetch-]")
    way.see("#pulls .tag.good", "here")
    way.see("#bases", "org/tiny")


def _find(way: Way, files: Path) -> None:
    """A job by a part of its name, among those that succeeded."""
    if isinstance(way, Terminal):
        assert "pairs" in way.run("ft jobs --state succeeded --name PAIR")
        return
    way.click("nav a[href='/jobs']")
    way.fill("[name=suffix]", "PAIR")
    press(way.driver, Keys.ENTER)
    way.goes("suffix=PAIR")
    way.choose("[name=status]", "Succeeded")
    way.goes("status=succeeded")
    way.wait(lambda: len(way.driver.find_elements(By.CSS_SELECTOR, "#jobs tr:has(.name)")) == 1)


def _name(way: Way, files: Path) -> None:
    """A job gets another name, and a note."""
    if isinstance(way, Terminal):
        way.run("ft rename pairs tone --note 'the first with pairs'")
        assert "the first with pairs" in way.run("ft get tone")
        return
    way.click("#jobs .name a")
    way.click(".naming > summary")
    way.fill("#job-name", "tone")
    way.fill("#job-note", "the first with pairs")
    way.click(".naming button")
    way.see("#note", "the first with pairs")
    way.see("h1", "tone")


def _compare(way: Way, files: Path) -> None:
    """A job runs again with one setting changed, and what differs is read."""
    if isinstance(way, Terminal):
        changed = "--set data.instruction=question --set data.output=answer --set lora.r=4"
        way.run(f"ft submit tickets.csv --model tiny-llama --suffix four {changed} --watch")
        assert "lora.r" in way.run("ft compare tickets four")
        return
    way.click("nav a[href='/jobs']")
    first = _of(way, "tickets")
    way.click(f"#to-{first}")
    way.click("#job-head .verbs a[href*='/new?again']")
    way.fill("#suffix", "four")
    way.fill("[name='lora.r']", "4")
    second = way.create().rpartition("/")[2]
    way.see("#job-head .state", "Succeeded")
    way.click("nav a[href='/jobs']")
    way.wait(lambda: way.driver.find_elements(By.CSS_SELECTOR, f"#pick-{first}"))
    for job in (second, first):
        way.click(f"#pick-{job}")
    way.click("[data-compare]")
    way.see(".differs", "lora.r")


def _of(way: Hand, title: str) -> str:
    """The id of a job by its title in the list."""

    def found() -> str | None:
        for link in way.driver.find_elements(By.CSS_SELECTOR, "#jobs .name a"):
            if link.text == title:
                return (link.get_attribute("href") or "").rpartition("/")[2]
        return None

    return way.wait(found)


def _export(way: Way, files: Path) -> None:
    """The tuned model as a file for Ollama."""
    if isinstance(way, Terminal):
        way.run("ft export tickets --format gguf-q8_0 --out for-ollama")
        assert list((files / "for-ollama").glob("*.gguf"))
        return
    way.click("nav a[href='/jobs']")
    way.click(f"#to-{_of(way, 'tickets')}")
    way.click(".tabs a[href$='/exports']")
    way.click("a.place[href*='where=laptop']")
    way.click("#exports [hx-post*='gguf-q8_0']")
    before = len(list(files.glob("*.tar")))
    way.click("#exports a[href*='gguf-q8_0']")
    way.wait(lambda: len(list(files.glob("*.tar"))) > before)
    way.see("main", "ollama create")


def _clean(way: Way, files: Path) -> None:
    """A job goes with all that it has made, and an uploaded file goes."""
    if isinstance(way, Terminal):
        way.run("ft rm four --job --yes")
        shown = way.run("ft files")
        file = re.findall(r"(file-\w+)\s+pairs\.jsonl|pairs\.jsonl\s+(file-\w+)", shown)[0]
        way.run(f"ft rm {''.join(file)} --yes")
        return
    way.click("nav a[href='/jobs']")
    way.click(f"#to-{_of(way, 'four')}")
    way.click("#verb-delete")
    way.yes()
    way.wait(lambda: way.driver.current_url.endswith("/jobs"))
    way.click("nav a[href='/data']")
    rows = way.driver.find_elements(By.CSS_SELECTOR, "td.name a")
    file = next(row.get_attribute("href") or "" for row in rows if row.text == "pairs.jsonl")
    way.click(f"td.name a[href$='{file.rpartition('/')[2]}']")
    way.click("main button.danger")
    way.yes()
    way.wait(lambda: way.driver.current_url.endswith("/data"))


TASKS: Mapping[str, Callable[[Way, Path], None]] = {
    "csv": _csv,
    "preferences": _preferences,
    "rewards": _rewards,
    "sweep": _sweep,
    "fetch a base": _fetch,
    "find": _find,
    "name": _name,
    "compare": _compare,
    "export": _export,
    "clean up": _clean,
}
GRADER = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.reference_answer }}",
    "operation": "eq",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = ["page", "keyboard", "terminal"]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args()
    failed: list[str] = []
    for way in options.ways:
        about = machine()
        found = _walked(way, options.only)
        for task, one in found.items():
            print(f"{way:<10}{task:<14}{one.acts:>4}{one.minutes:>7}  {', '.join(one.faults)}")
        missed = [f"{task} ({way})" for task, one in found.items() if one.failed]
        failed += missed
        if not missed and options.only == list(TASKS):
            _keep(way, about, found)
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


def _keep(way: str, about: Mapping[str, Any], found: Mapping[str, Result]) -> None:
    """Save how one way went, beside the others, which may have been walked on another day."""
    saved = RESULTS / "first_minute.json"
    ways = json.loads(saved.read_text())["ways"] if saved.exists() else {}
    walked = {
        task: {"acts": one.acts, "minutes": one.minutes}
        | ({} if way == "terminal" else {"axe": sorted(one.faults)})
        for task, one in found.items()
    }
    ways[way] = {**about, "tasks": walked}
    tasks = {
        name: {"sentence": (task.__doc__ or "").strip(), "page_before": BEFORE.get(name, "went")}
        for name, task in TASKS.items()
    }
    save("first_minute", {"rows_of_the_csv": ROWS, "tasks": tasks, "ways": ways})


def _walked(way: str, tasks: Sequence[str]) -> dict[str, Result]:
    """Do the tasks one way, on a server of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (files := folder / "files").mkdir()
        (models := folder / "models").mkdir()
        shutil.copytree(SAMPLE, models / "tiny-llama")
        (home := folder / "home").mkdir()
        _write_data(files)
        save_base(folder / "on-the-hub")
        hub = stack.enter_context(hub_serving(folder / "on-the-hub"))
        server = Server(home, models, HF_ENDPOINT=hub.url, FT_INSECURE_HTTP="1")
        server.start()
        stack.callback(server.stop)
        url = json.loads((home / "server.json").read_text())["url"]
        if way == "terminal":
            environment = {"FT_HOME": str(home), "FT_MODELS": str(models), "HF_ENDPOINT": hub.url}
            terminal = Terminal(files, environment | {"CUDA_VISIBLE_DEVICES": ""})
            stack.callback(terminal.close)
            return {task: _done(task, terminal, files) for task in tasks}
        driver = stack.enter_context(browsing(files))
        browser.sized(driver, 1440, "light")
        driver.get(f"{url}/sign-in")
        key = json.loads((home / "credentials").read_text())["api_key"]
        browser.find(driver, "#key").send_keys(key, Keys.ENTER)
        until(lambda: driver.current_url.endswith("/jobs"))
        hand = Hand(driver, url, keyboard=way == "keyboard")
        return {task: _done(task, hand, files) for task in tasks}


def _done(task: str, way: Way, files: Path) -> Result:
    acts = way.acts
    began = time.monotonic()
    faults: list[str] = []
    failed = ""
    try:
        TASKS[task](way, files)
    except Exception as error:  # the other tasks are tried all the same
        failed = f"{type(error).__name__}: {error}"
        if isinstance(way, Hand):
            way.driver.save_screenshot(f"{tempfile.gettempdir()}/first-minute-{task}.png")
    minutes = round((time.monotonic() - began) / 60, 2)
    if isinstance(way, Hand):
        way.driver.execute_script(browser.AXE.read_text())
        faults = way.driver.execute_async_script(AXE_ALL)
    done = Result(way.acts - acts, minutes, faults, failed)
    print(f"{task}: {done}", flush=True)
    return done


def _write_data(folder: Path) -> None:
    """The files that a newcomer has: tickets as CSV and as chats, pairs, and sums."""
    data = ROOT / "examples/data"
    chats = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()[:ROWS]]
    with (folder / "tickets.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        for chat in chats:
            writer.writerow([one["content"] for one in chat["messages"][1:]])
    (folder / "tickets.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    pairs = (data / "preferences.jsonl").read_text().splitlines(keepends=True)[:16]
    (folder / "pairs.jsonl").write_text("".join(pairs))
    sums = [
        {"messages": [{"role": "user", "content": f"{a} + {b} ="}], "reference_answer": str(a + b)}
        for a in range(5)
        for b in range(4)
    ]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in sums))


if __name__ == "__main__":
    main()
