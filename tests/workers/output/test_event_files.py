from __future__ import annotations

import resource
import threading
from pathlib import Path

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.rundir.events import Event, Metrics
from tests.support.attempts import HANG_SECONDS
from tests.support.event_files import curves, session_starts
from workers.output.event_files import EventFile, write_event_file
from workers.output.report import Reporter, metrics_of_all_attempts, steps_of_all_attempts


def row(step: int, loss: float) -> Metrics:
    return Metrics(
        step=step, total_steps=4, train_loss=loss, learning_rate=0.1, more={"rewards/margins": 2.0}
    )


def attempt(run: RunDir, number: int, checkpoint: str | None, *steps: int) -> None:
    run.write(
        f"attempts/{number}/start.json",
        Start(job_id="ftjob-1", attempt=number, world_size=1, generation=1, checkpoint=checkpoint),
    )
    first = steps[0]
    file = EventFile(run.path("tensorboard"), f"attempt-{number}", first_step=first)
    with Reporter(
        run, number, active=True, clock=lambda: 100.0 * number, event_file=file
    ) as reporter:
        reporter.message("A sentence.")
        for step in steps:
            reporter.metrics(row(step, 10.0 * number + step))
        reporter.checkpoint(f"step-{steps[-1]}-a{number}", row(steps[-1], 0.0))


def test_what_is_trained_again_counts_as_the_newest_attempt_saw_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    attempt(run, 1, None, 1, 2, 3)
    attempt(run, 2, "step-2-a1", 3, 4)

    first, second = sorted(run.path("tensorboard").iterdir(), key=lambda path: path.name[-1])
    assert curves(first)["train/loss"] == [(1, 11.0), (2, 12.0), (3, 13.0)]
    assert curves(second)["train/loss"] == [(3, 23.0), (4, 24.0)]
    assert (session_starts(first), session_starts(second)) == ([], [3]), (
        "TensorBoard forgets step 3 of the first file"
    )

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_event_file(adapter, "ftjob-1", steps_of_all_attempts(run, 2))
    (whole,) = adapter.iterdir()
    assert whole.name == "events.out.tfevents.100.ftjob-1", "which names no host"
    assert [step for step, _ in curves(whole)["train/loss"]] == [1, 2, 3, 4]
    assert curves(whole).keys() == {"train/loss", "train/learning_rate", "rewards/margins"}


def test_a_job_without_a_step_leaves_a_file_without_curves(tmp_path: Path) -> None:
    write_event_file(tmp_path, "ftjob-1", [Event(time=1.0, message="Nothing was trained.")])
    (file,) = tmp_path.iterdir()
    assert curves(file) == {}


def test_a_full_disk_holds_up_no_job_and_what_it_did_not_take_follows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    more = {f"rewards/{number:0100}": 1.0 for number in range(50)}

    def report() -> None:
        file = EventFile(run.path("tensorboard"), "attempt-1")
        with Reporter(run, 1, active=True, event_file=file) as reporter:
            for step in range(1, 31):
                if step == 30:
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                reporter.metrics(
                    Metrics(step=step, total_steps=30, train_loss=float(step), more=more)
                )
                reporter.flush()

    training = threading.Thread(target=report, daemon=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Enough for a segment, which is a file of its own.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        training.start()
        training.join(HANG_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not training.is_alive(), "a job that waits for its TensorBoard file trains no more"
    (written,) = run.path("tensorboard").iterdir()
    assert curves(written)["train/loss"] == [(step, float(step)) for step in range(1, 31)]
    assert [row.step for row in metrics_of_all_attempts(run, 1)] == list(range(1, 31))
