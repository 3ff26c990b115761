"""Speed of the page, and what an open one costs the server: 500 jobs, one of 10,000 steps, in a
headless Chromium.

    python benchmarks/page.py [--jobs 500] [--repeats 5] [--watch-seconds 20] [--viewers 100]

Paint is the browser's own `first-contentful-paint`, curves are there once their canvas is drawn;
both from the navigation's beginning, with a warm HTTP cache. Cost is CPU time of the server's
process while one tab is open and the running jobs report a step every second, less what it takes
with no tab open. Viewers ask what open pages ask, at their pace, from a process of their own, while
jobs are submitted at the same time; the same submits without them are the peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for tests and benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx2
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.machine import machine, save
from ft_service.host.running_servers import living_servers
from ft_service.store.records import NewKey
from ft_service.store.sql import Store, migrate, open_store
from tests.support.page.browser import browsing, find, until
from tests.support.page.seeded import (
    NOW,
    new_settings,
    seed_event,
    seed_files,
    seed_job,
    seed_steps,
)
from tests.support.rest.process import SERVE
from tests.support.rest.service import wait_until

TARGETS = {"list": 300, "job": 500, "compare": 500}
"""Milliseconds to the first paint."""
LONG = 10_000
RUNNING = 8
SUBMITS = 200
MOST_CORE_SHARE = 0.01
"""Of one core, for an open page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--watch-seconds", type=float, default=20.0)
    parser.add_argument("--viewers", type=int, default=100)
    options = parser.parse_args()
    result = machine() | {"jobs": options.jobs, "target_ms": TARGETS}
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(Path(folder), options.jobs) as (url, key, ids, process),
    ):
        with browsing(Path(folder)) as driver:
            driver.get(url)
            find(driver, "#key").send_keys(key, Keys.ENTER)
            until(lambda: driver.current_url.endswith("/jobs"))
            compared = "&".join(f"job={one}" for one in ids[:8])
            paths = {"list": "/jobs", "job": f"/jobs/{ids[0]}", "compare": f"/compare?{compared}"}
            result["milliseconds"] = {
                name: _paints(driver, url + path, options.repeats) for name, path in paths.items()
            }
            with _stepping(Path(folder), ids[:RUNNING]):
                idle = _cost(driver, "about:blank", process, options.watch_seconds)
                shares = {
                    name: round(
                        _cost(driver, url + paths[name], process, options.watch_seconds) - idle, 4
                    )
                    for name in ("list", "job")
                }
            result["server_core_share"] = {"target": MOST_CORE_SHARE, "no tab": idle, **shares}
            driver.get("about:blank")
        result["submit_ms"] = {
            "alone": _submits(url, key, ids[-1]),
            f"beside {options.viewers} open pages": _beside(
                url, key, ids, options.viewers, lambda: _submits(url, key, ids[-1])
            ),
        }
    for name, value in result.items():
        print(f"{name}: {value}")
    save("page", result)


@contextmanager
def _stepping(home: Path, job_ids: list[str]) -> Iterator[None]:
    """Let jobs report a step every second, as the reconciler would note it."""
    store = open_store(new_settings(home).resolved_database_url())
    stop = threading.Event()
    jobs = [store.jobs.get_job("default", job_id) for job_id in job_ids]
    newest = {job.id: store.jobs.latest_metrics(job.id) for job in jobs}

    def report() -> None:
        step = 0
        while not stop.wait(1.0):
            step += 1
            for job in jobs:
                known = newest[job.id]
                assert known is not None
                now = {
                    "step": known.step + step,
                    "train_loss": 1.0 + 1.0 / step,
                    "total_steps": known.step + 10_000,
                }
                seed_event(store, job, f"Step {known.step + step}", known.flat() | now)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        store.close()


@contextmanager
def _served(
    home: Path, count: int
) -> Iterator[tuple[str, str, list[str], subprocess.Popen[bytes]]]:
    """A server over many jobs: its address, a key, ids of jobs with curves (the long one first) and
    of a file, its process.
    """
    settings = new_settings(home)
    migrate(settings.resolved_database_url())
    store = open_store(settings.resolved_database_url())
    store.projects.ensure_project("default", "local")
    _, key = store.keys.create_key(NewKey(project_id="default", name="benchmark", scope="admin"))
    ids = _seeded(store, key, settings, count)
    store.close()
    environment = os.environ | {
        "FT_HOME": str(home),
        "FT_PORT": "0",
        "FT_MODELS": str(settings.models[0]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: bool(living_servers(home)))
        yield living_servers(home)[0].url, key, ids, process
    finally:
        process.terminate()
        process.wait()


def _seeded(store: Store, key: str, settings: Any, count: int) -> list[str]:
    holder = store.keys.authenticate(key)
    assert holder is not None
    files = seed_files(settings, store, "default")
    body = {
        "model": "tiny-llama",
        "training_file": files["train"],
        "metadata": {"team": "benchmark"},
    }
    ids = []
    for number in range(count):
        running = number >= count - RUNNING
        state = {"state": "running", "phase": "training", "attempt": 1, "host": "h"}
        ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
        one = seed_job(
            settings, store, holder, body | {"seed": number}, **(state if running else ended)
        )
        steps = LONG if number == count - 1 else 300
        seed_steps(store, one, steps if not running else steps - 1, total=steps, seed=number)
        ids.insert(0, one.id)
    return [*ids, files["train"]]


def _paints(driver: webdriver.Chrome, address: str, repeats: int) -> dict[str, float]:
    """Medians of milliseconds: until something is painted, and until curves are drawn."""
    paints = []
    curves = []
    for _ in range(repeats + 1):
        driver.get(address)
        paints.append(until(lambda: driver.execute_script(_PAINT)))
        if driver.find_elements(By.ID, "curves"):
            curves.append(until(lambda: driver.execute_script(_CURVES)))
    found = {"paint": round(statistics.median(paints[1:]), 1)}
    return found | ({"curves": round(statistics.median(curves[1:]), 1)} if curves else {})


_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_CURVES = "return performance.getEntriesByName('curves')[0]?.startTime"


def _cost(
    driver: webdriver.Chrome, address: str, process: subprocess.Popen[bytes], seconds: float
) -> float:
    """Share of one core that the server takes for an open page."""
    driver.get(address)
    time.sleep(2)
    before = _cpu_seconds(process.pid)
    time.sleep(seconds)
    return round((_cpu_seconds(process.pid) - before) / seconds, 4)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _submits(url: str, key: str, file_id: str) -> float:
    """Median milliseconds of submits, one after the other."""
    taken = []
    with httpx2.Client(
        base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60
    ) as client:
        for number in range(SUBMITS):
            began = time.perf_counter()
            answer = client.post(
                "/v1/fine_tuning/jobs",
                json={"model": "tiny-llama", "training_file": file_id, "seed": number},
            )
            taken.append(1000 * (time.perf_counter() - began))
            answer.raise_for_status()
    return round(statistics.median(taken), 2)


def _beside(url: str, key: str, ids: list[str], viewers: int, work: Callable[[], float]) -> float:
    """What `work` gives while so many open pages ask for what is new: half of them the list, half a
    job.
    """
    spawning = multiprocessing.get_context("spawn")
    stop = spawning.Event()
    begun = spawning.Event()
    process = spawning.Process(target=_view, args=(url, key, ids[:RUNNING], viewers, begun, stop))
    process.start()
    try:
        begun.wait(60)
        time.sleep(max(PACES.values()))
        return work()
    finally:
        stop.set()
        process.join()


def _asked(client: httpx2.Client, path: str, tag: str) -> httpx2.Response:
    """An answer; like a browser, it asks again if the server has just closed a connection that was
    idle for long.
    """
    try:
        return client.get(path, headers={"if-none-match": tag})
    except (httpx2.ReadError, httpx2.RemoteProtocolError):
        return client.get(path, headers={"if-none-match": tag})


PACES = {
    "/page/live/jobs?": 5.0,
    "/page/live/jobs/{}": 3.0,
    "/v1/fine_tuning/jobs/{}/metrics?points=500": 4.0,
}
PACES |= {"/page/live/jobs/{}/events": 6.0}
"""What pages ask while they are open, and every how many seconds: the list the first, a job the
others.
"""


def _view(url: str, key: str, ids: list[str], viewers: int, begun: Event, stop: Event) -> None:
    """Be so many open pages until `stop`. `begun`: set once all are signed in."""

    def look(number: int) -> None:
        job = ids[number % len(ids)]
        asked = {
            path.format(job): pace
            for path, pace in PACES.items()
            if ("{}" in path) == bool(number % 2)
        }
        due = {path: time.monotonic() + pace * number / viewers for path, pace in asked.items()}
        tags: dict[str, str] = {}
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
            client.cookies.update(cookies)
            while not stop.is_set():
                path = min(due, key=lambda one: due[one])
                if stop.wait(max(0.0, due[path] - time.monotonic())):
                    return
                due[path] += asked[path]
                answer = _asked(client, path, tags.get(path, ""))
                tags[path] = answer.headers.get("etag", tags.get(path, ""))

    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
        client.post("/sign-in", data={"key": key})
        cookies = dict(client.cookies)
    threads = [threading.Thread(target=look, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
