"""How fast the page is, and what an open one costs the server: 500 jobs, one of 10,000 steps, in a headless Chromium.

    python benchmarks/page.py [--jobs 500] [--repeats 5] [--watch-seconds 20] [--viewers 100]

Paint is the browser's own `first-contentful-paint`, curves are there once their canvas is drawn; both from the navigation's
beginning, with a warm HTTP cache. Cost is CPU time of the server's process while tabs are open. Viewers ask what open pages
ask, at their pace, while jobs are submitted beside them; the same submits without them are the peer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for tests and benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx2
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.machine import machine, save
from ft_service.host.servers import living_servers
from ft_service.store.sql import Store, migrate, open_store
from tests.support.page.browser import browsing, find, until
from tests.support.page.seeded import NOW, new_settings, seed_files, seed_job, seed_steps
from tests.support.rest.process import SERVE
from tests.support.rest.service import wait_until

TARGETS = {"list": 300, "job": 500, "compare": 500}
"""Milliseconds to the first paint."""
LONG = 10_000
EVERY_SECONDS = 3.0
SUBMITS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--watch-seconds", type=float, default=20.0)
    parser.add_argument("--viewers", type=int, default=100)
    options = parser.parse_args()
    result = machine() | {"jobs": options.jobs, "target_ms": TARGETS}
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder), options.jobs) as (url, key, ids, process):
        with browsing(Path(folder)) as driver:
            driver.get(url)
            find(driver, "#key").send_keys(key, Keys.ENTER)
            until(lambda: driver.current_url.endswith("/jobs"))
            compared = "&".join(f"job={one}" for one in ids[:8])
            paths = {"list": "/jobs", "job": f"/jobs/{ids[0]}", "compare": f"/compare?{compared}"}
            result["milliseconds"] = {name: _paints(driver, url + path, options.repeats) for name, path in paths.items()}
            result["server_core_share"] = {
                name: _cost(driver, url + paths[name], process, options.watch_seconds) for name in ("list", "job")
            }
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
def _served(home: Path, count: int) -> Iterator[tuple[str, str, list[str], subprocess.Popen[bytes]]]:
    """A server over many jobs: its address, a key, ids of jobs with curves (the long one first) and of a file, its process."""
    settings = new_settings(home)
    migrate(settings.resolved_database_url())
    store = open_store(settings.resolved_database_url())
    store.ensure_project("default", "local")
    _, key = store.create_key(project_id="default", name="benchmark", scope="admin")
    ids = _seeded(store, key, settings, count)
    store.close()
    environment = os.environ | {"FT_HOME": str(home), "FT_PORT": "0", "FT_MODELS": str(settings.models[0])}
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
    holder = store.authenticate(key)
    assert holder is not None
    files = seed_files(settings, store, "default")
    body = {"model": "tiny-llama", "training_file": files["train"], "metadata": {"team": "benchmark"}}
    ids = []
    for number in range(count):
        running = number >= count - 8
        state = {"state": "running", "phase": "training", "attempt": 1, "host": "h"}
        ended = {"state": "succeeded", "reason": "succeeded", "attempt": 1, "finished_at": NOW}
        one = seed_job(settings, store, holder, body | {"seed": number}, **(state if running else ended))
        steps = LONG if number == count - 1 else 300
        seed_steps(store, one, steps if not running else steps - 1, total=steps, seed=number)
        ids.insert(0, one.id)
    return [*ids, files["train"]]


def _paints(driver: webdriver.Chrome, address: str, repeats: int) -> dict[str, float]:
    """Medians of milliseconds: until something is painted, and until curves are drawn."""
    paints, curves = [], []
    for _ in range(repeats + 1):
        driver.get(address)
        paints.append(until(lambda: driver.execute_script(_PAINT)))
        if driver.find_elements(By.ID, "curves"):
            curves.append(until(lambda: driver.execute_script(_CURVES)))
    found = {"paint": round(statistics.median(paints[1:]), 1)}
    return found | ({"curves": round(statistics.median(curves[1:]), 1)} if curves else {})


_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_CURVES = "return performance.getEntriesByName('curves')[0]?.startTime"


def _cost(driver: webdriver.Chrome, address: str, process: subprocess.Popen[bytes], seconds: float) -> float:
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
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False) as client:
        for number in range(SUBMITS):
            began = time.perf_counter()
            answer = client.post("/v1/fine_tuning/jobs", json={"model": "tiny-llama", "training_file": file_id, "seed": number})
            taken.append(1000 * (time.perf_counter() - began))
            answer.raise_for_status()
    return round(statistics.median(taken), 2)


def _beside(url: str, key: str, ids: list[str], viewers: int, work: Callable[[], float]) -> float:
    """What `work` gives while so many open pages ask for what is new: half of them the list, half a job and its curves."""
    stop = threading.Event()

    def view(number: int) -> None:
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
            client.post("/sign-in", data={"key": key})
            job, tag = ids[number % 8], ""
            while not stop.wait(EVERY_SECONDS):
                if number % 2:
                    client.get("/page/live/jobs?")
                else:
                    client.get(f"/page/live/jobs/{job}")
                    answer = client.get(f"/v1/fine_tuning/jobs/{job}/metrics?points=600", headers={"if-none-match": tag})
                    tag = answer.headers.get("etag", "")

    threads = [threading.Thread(target=view, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(EVERY_SECONDS)
    try:
        return work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
