"""A host whose jobs train nothing: `played_host.py HOME STEP_SECONDS`, until it is asked to end.

It plays the attempts that `played_reconciler.py` orders, a few lines in this process in place of
supervisors and ranks: a job of N steps takes N times STEP_SECONDS, give or take a twentieth, on
however many ranks. `starts/<attempt>` in the run directory has one line per start, `ends/<attempt>`
one per end: seconds since the epoch.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import ExitReason, Result
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places

TURN_SECONDS = 0.05
MEASURES = 4
"""How often a job tells how fast it is."""
TOKENS = 10
"""Of a step."""


@dataclass
class Training:
    """One that continues: `told` of its steps were reported."""

    attempt: Attempt
    steps: int
    step_seconds: float
    began: float
    told: int = 0
    segments: int = 0

    def step(self, now: float) -> bool:
        """Tell how far it is. True: it is done."""
        done = min(self.steps, int((now - self.began) / self.step_seconds))
        if done > self.told and (
            self.told == 0 or done == self.steps or done - self.told >= self.steps / MEASURES
        ):
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
        result = Result(
            attempt=self.attempt.number,
            steps=self.steps,
            trained_tokens=tokens,
            train_loss=1.0,
            valid_loss=None,
        )
        run.write("result.json", result)
        note(self.attempt, "ends")
        self.attempt.write_exit(
            exit_of(ExitReason.SUCCEEDED, f"Training has finished after {self.steps} steps.")
        )


def note(attempt: Attempt, what: str) -> None:
    folder = attempt.run.root / what
    folder.mkdir(exist_ok=True)
    with (folder / str(attempt.number)).open("a") as file:
        file.write(f"{time.time()}\n")


class PlayedHost:
    """For one thread."""

    def __init__(self, home: Path, step_seconds: float) -> None:
        self._orders, self._places, self._step_seconds = home / "orders", Places(home), step_seconds
        self._trainings: dict[str, Training] = {}

    def turn(self) -> None:
        for order in [*self._orders.iterdir()]:
            training = self._trainings.get(order.name)
            if training is None:
                self._begin(order.name)
            elif not training.attempt.has_exit() and training.step(time.monotonic()):
                training.end()

    def _begin(self, order: str) -> None:
        job_id, _, number = order.rpartition(".")
        run = self._places.run(job_id)
        attempt = Attempt(run, int(number), job_id=job_id)
        spec = run.read("spec.json", JobSpec)
        if attempt.read_start() is None or spec is None or attempt.has_exit():
            return
        note(attempt, "starts")
        seconds = self._step_seconds * random.Random(job_id).uniform(0.95, 1.05)
        steps = spec.training.max_steps
        assert steps is not None, "jobs say how many steps they take"
        self._trainings[order] = Training(attempt, steps, seconds, time.monotonic())


def main() -> None:
    home, step_seconds = sys.argv[1:]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    host = PlayedHost(Path(home), float(step_seconds))
    while not over.wait(TURN_SECONDS):
        host.turn()


if __name__ == "__main__":
    main()
