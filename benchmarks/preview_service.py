"""The preview as a server has it: many streams at once, a job that comes meanwhile, a kill, and the
way from "succeeded" to an answer. Part of `benchmarks/preview.py`.

The sample base with adapters of a job's checkpoints, on two slots. Waits are polled, so that a
figure may be 0.1 s too long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ft_service.client.client import Client
from ft_service.client.connection import find_connection
from ft_service.errors import UnavailableError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import PROBES, Probes
from tests.support.rest.fake_vllm import fake_vllm

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples/data/train.jsonl"
ASKED = [{"role": "user", "content": "Hi, I ordered the round bottle by mistake. Please stop it."}]
SECONDS = 240.0
IDLE_SECONDS = 15.0
WORKER = b"workers.serving"
Found = TypeVar("Found")


@dataclass
class Place:
    """A server with a home of its own."""

    home: Path
    client: Client
    server: subprocess.Popen[bytes]
    base: str = "tiny-llama"
    models: list[str] = field(default_factory=list)
    """Tuned ones."""

    def preview(self) -> int | None:
        """The preview's process."""
        for child in Path(f"/proc/{self.server.pid}/task").glob("*/children"):
            for pid in child.read_text().split():
                with contextlib.suppress(OSError):
                    if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
        return None

    def answer(self, model: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first text of a streamed answer, and to its end.

        One that has to wait its turn asks again.
        """
        body = {
            "model": model,
            "messages": ASKED,
            "max_tokens": tokens,
            "temperature": 1.0,
            "stream": True,
        }
        begin = time.monotonic()
        while True:
            try:
                first = None
                for _ in self.client.chat(body):
                    first = first or time.monotonic() - begin
                return first or time.monotonic() - begin, time.monotonic() - begin
            except UnavailableError:
                if time.monotonic() - begin > SECONDS:
                    raise
                time.sleep(0.1)

    def job(self, file: str, steps: int, ranks: int, **options: Any) -> str:
        body = {
            "model": self.base,
            "training_file": file,
            "training": {"max_steps": steps, "batch_size": 8, "learning_rate": 1e-2},
            "distributed": {"nproc_per_node": ranks},
            **{"precision": {"compute": "fp32"}, **options},
        }
        return self.client.create_job(body).id

    def succeeded(self, job_id: str) -> float:
        """When that was seen, on the monotonic clock."""

        def over() -> float | None:
            job = self.client.job(job_id)
            assert job.status not in ("failed", "cancelled"), job.error
            return time.monotonic() if job.status == "succeeded" else None

        return until(over)

    def first_token(self, job_id: str) -> float:
        """Seconds from "succeeded" to the first text of its model, or to the event that it was
        verified if that came later.
        """
        begin = self.succeeded(job_id)
        name = str(self.client.job(job_id).fine_tuned_model)
        asked = time.monotonic()
        answered = asked + self.answer(name, 8)[0]
        return max(answered, self.told(job_id, "In the preview: served, verified")) - begin

    def told(self, job_id: str, words: str) -> float:
        """When an event that begins with these words was seen, on the monotonic clock."""

        def seen() -> float | None:
            events = [event.message for event in self.client.events(job_id, limit=20)]
            return time.monotonic() if any(text.startswith(words) for text in events) else None

        return until(seen)


def measure(streams: int, tokens: int) -> dict[str, float]:
    """All figures, in seconds unless they say otherwise."""
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        with serving(Path(folder, "embedded"), FT_PREVIEW_IDLE_SECONDS=str(IDLE_SECONDS)) as place:
            found = embedded(place, streams, tokens)
        found["succeeded_to_verified_by_fake_vllm"] = handed_over(Path(folder, "handed"))
    return {name: round(value, 3) for name, value in found.items()}


def embedded(place: Place, streams: int, tokens: int) -> dict[str, float]:
    file = place.client.upload_file(DATA).id
    found: dict[str, float] = {}
    stop = threading.Event()
    job = place.job(file, 7, 1, checkpoint={"save_steps": 2, "save_total_limit": 3})
    warm = threading.Thread(target=_keep_warm, args=(place, place.base, stop))
    warm.start()
    found["succeeded_to_verified_first_token_warm"] = place.first_token(job)
    in_nf4 = place.job(file, 2, 1, precision={"default": "nf4", "compute": "fp32"})
    found["succeeded_to_verified_first_token_other_format"] = place.first_token(in_nf4)
    stop.set()
    warm.join()
    points = place.client.checkpoints(job)
    models = [str(point.model_dump()["fine_tuned_model_checkpoint"]) for point in points[-3:]]
    models.append(str(place.client.job(job).fine_tuned_model))
    for model in models:  # the adapter of a checkpoint is made when it is first asked for
        place.answer(model, 1)
    found |= under_load(place, models, streams, tokens, file)
    place.answer(models[0], 4)
    pid = place.preview()
    assert pid is not None, "it has just answered"
    found["preview_megabytes"] = _memory(pid) / 1e6
    os.kill(pid, signal.SIGKILL)
    found["answer_after_kill"] = place.answer(models[0], 4)[1]
    begin = time.monotonic()
    until(lambda: place.preview() is None or None)
    found["memory_back_after_idle_seconds"] = time.monotonic() - begin - IDLE_SECONDS
    return found


def under_load(
    place: Place, models: list[str], streams: int, tokens: int, file: str
) -> dict[str, float]:
    """All streams at once through all adapters; then once more, with a job that needs every slot
    meanwhile.
    """
    firsts: list[float] = []

    def ask(number: int) -> None:
        firsts.append(place.answer(models[number % len(models)], tokens)[0])

    begin = time.monotonic()
    _at_once(ask, streams)
    took = time.monotonic() - begin
    found = {
        "streams_tokens_per_second": streams * tokens / took,
        "slowest_first_token_of_streams": max(firsts),
    }
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    until(lambda: place.preview() or None)
    job = place.job(file, 2, 2)
    attempt = Attempt(RunDir(place.home / "runs" / job), 1)
    taken = until(lambda: _taken_at(place.home, job))
    until(lambda: attempt.read_start() is not None or None)
    found["job_starts_after_its_turn"] = max(0.0, time.time() - taken)
    place.succeeded(job)
    for thread in threads:
        thread.join()
    return found


def handed_over(home: Path) -> float:
    """Seconds from "succeeded" to the event that the fake server answers as the trained model
    does.
    """
    with (
        fake_vllm() as vllm,
        serving(home, FT_INFERENCE_URL=vllm.url, FT_ADAPTERS=str(home / "served")) as place,
    ):
        job = place.job(place.client.upload_file(DATA).id, 4, 1)
        known: dict[tuple[int, ...], list[float]] = {}

        def logprobs(name: str, tokens: list[int]) -> list[float]:
            if not known:
                document = RunDir(home / "runs" / job).get(PROBES)
                assert document is not None
                known.update(
                    {
                        tuple(one.tokens): one.tuned
                        for one in Probes.model_validate_json(document).probes
                    }
                )
            return known[tuple(tokens)]

        vllm.logprobs = logprobs
        begin = place.succeeded(job)

        return place.told(job, "Served, verified") - begin


@contextlib.contextmanager
def serving(home: Path, **environment: str) -> Iterator[Place]:
    home.mkdir(parents=True)
    given = {
        **os.environ,
        "FT_HOME": str(home),
        "FT_MODELS": str(ROOT / "examples/models"),
        "FT_PORT": "0",
        "FT_SLOTS": "2",
    }
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "ft_service.cli", "serve"]
        server = subprocess.Popen(
            command, env={**given, **environment}, stdout=log, stderr=log, cwd=ROOT
        )
    try:
        until(lambda: (home / "server.json").exists() or None)
        with Client(find_connection({}, home)) as client:
            yield Place(home, client, server)
    finally:
        server.terminate()
        server.wait(60)


def until(what: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + SECONDS
    while (found := what()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)
    return found


def _keep_warm(place: Place, model: str, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(UnavailableError):
            place.answer(model, 1)
        stop.wait(1.0)


def _at_once(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _taken_at(home: Path, job: str) -> float | None:
    with contextlib.closing(sqlite3.connect(home / "ft.db", timeout=10)) as database:
        row = database.execute(
            "SELECT min(taken_at) FROM slots WHERE job_id = ?", (job,)
        ).fetchone()
    return row[0]


def _memory(pid: int) -> int:
    """Bytes of its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
