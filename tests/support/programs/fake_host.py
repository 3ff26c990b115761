"""A host whose jobs train nothing: `fake_host.py URL HOME HOST SLOTS STEP_SECONDS`, until it is asked to end.

It joins as an agent does and does what the rows say, with attempts that are a few lines in this process in place of supervisors
and ranks: a job of N steps takes N times STEP_SECONDS, give or take a twentieth, on however many ranks. `starts/<attempt>` in
the run directory has one line per start, `ends/<attempt>` one per end: seconds since the epoch.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import ExitReason, Result
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from ft_service.store.fleet.hosts import HostRow, HostStore, NodeRow
from ft_service.store.sql import open_store
from ft_service.supervisor.verdict import exit_of

TURN_SECONDS = 0.05
BEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0
MEASURES = 4
"""How often a job tells how fast it is."""
TOKENS = 10
"""Of a step."""


@dataclass
class Training:
    """One that goes on: `told` of its steps were reported."""

    node: NodeRow
    attempt: Attempt
    steps: int
    step_seconds: float
    began: float
    told: int = 0
    segments: int = 0

    def step(self, now: float) -> bool:
        """Tell how far it is. True: it is done."""
        done = min(self.steps, int((now - self.began) / self.step_seconds))
        if done > self.told and (self.told == 0 or done == self.steps or done - self.told >= self.steps / MEASURES):
            self.told = done
            metrics = Metrics(
                step=done,
                total_steps=self.steps,
                train_loss=1.0,
                tokens=TOKENS,
                trained_tokens=done * TOKENS,
                step_seconds=self.step_seconds,
            )
            event = Event(time=time.time(), kind="metrics", message=f"step {done}", metrics=metrics)
            write_segment(self.attempt.run, self.attempt.number, self.segments, [event])
            self.segments += 1
        return done == self.steps

    def end(self) -> None:
        """Leave what a training leaves."""
        run = self.attempt.run
        run.put("metrics.csv", b"step,train_loss\n1,1.0\n")
        tokens = self.steps * TOKENS
        result = Result(attempt=self.attempt.number, steps=self.steps, trained_tokens=tokens, train_loss=1.0, valid_loss=None)
        run.write("result.json", result)
        note(self.attempt, "ends")
        self.attempt.write_exit(exit_of(ExitReason.SUCCEEDED, f"Training has finished after {self.steps} steps."))


def note(attempt: Attempt, what: str) -> None:
    folder = attempt.run.root / what
    folder.mkdir(exist_ok=True)
    with (folder / str(attempt.number)).open("a") as file:
        file.write(f"{time.time()}\n")


class FakeHost:
    def __init__(self, store: HostStore, places: Places, host: HostRow, step_seconds: float) -> None:
        self._store, self._places, self._host, self._step_seconds = store, places, host, step_seconds
        self._agent = store.join_host(host, LEASE_SECONDS)
        self._trainings: dict[tuple[str, int], Training] = {}
        self._beat_at = 0.0

    def turn(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_SECONDS
            assert self._store.beat(self._host.host, self._agent), "another agent speaks for this host"
        for node in self._store.nodes_on(self._host.host):
            self._tend(node)

    def _tend(self, node: NodeRow) -> None:
        key = (node.job_id, node.attempt)
        training = self._trainings.get(key)
        if node.state == "ended":
            self._trainings.pop(key, None)
        elif node.wanted == "end":
            self._store.report_node(replace(node, state="ended"), self._agent)
        elif training is None:
            self._begin(node)
        elif training.step(time.monotonic()):
            training.end()
            self._store.report_node(replace(node, state="ended"), self._agent)

    def _begin(self, node: NodeRow) -> None:
        run = self._places.run(node.job_id)
        attempt, spec = Attempt(run, node.attempt, job_id=node.job_id), run.read("spec.json", JobSpec)
        if (
            attempt.read_start() is None
            or spec is None
            or not self._store.report_node(replace(node, state="running"), self._agent)
        ):
            return
        note(attempt, "starts")
        seconds = self._step_seconds * random.Random(node.job_id).uniform(0.95, 1.05)
        steps = spec.training.max_steps
        assert steps is not None, "jobs say how many steps they take"
        self._trainings[node.job_id, node.attempt] = Training(node, attempt, steps, seconds, time.monotonic())


def main() -> None:
    url, home, name, slots, step_seconds = sys.argv[1:]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    host = HostRow(host=name, slots=int(slots), address="127.0.0.1", kind="nothing", gpus=0, memory=None)
    place = FakeHost(open_store(url), Places(Path(home)), host, float(step_seconds))
    while not over.wait(TURN_SECONDS):
        place.turn()


if __name__ == "__main__":
    main()
