from __future__ import annotations

import csv
import errno
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ft_service.jobs.decisions import SILENCE_LIMIT_SECONDS
from ft_service.rundir import directory
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Evaluation, evaluation_key
from ft_service.rundir.events import Event, Metrics, SettledOption, read_segments
from tests.support.attempts import wait_for
from workers.output import report
from workers.output.report import (
    HEARTBEAT_SECONDS,
    Reporter,
    metrics_csv,
    metrics_of_all_attempts,
    with_evaluations,
)


def row(step: int, loss: float) -> Metrics:
    return Metrics(step=step, total_steps=9, train_loss=loss, train_mean_token_accuracy=0.5)


def test_events_arrive_in_order_in_immutable_segments(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Reporter(run, 1, active=True, clock=lambda: 12.0) as reporter:
        reporter.message("hello")
        for step in range(1, 4):
            reporter.metrics(row(step, 1.0))
        reporter.checkpoint("step-3-a1", row(3, 1.0))
        reporter.metrics(row(4, 1.0))
        reporter.begin("again", {"distributed.compile": SettledOption(value=True, why="fast")})
    segments = read_segments(run, 1)
    assert [segment.seq for segment in segments] == list(range(len(segments)))
    events = [event for segment in segments for event in segment.events]
    assert [e.kind for e in events] == [
        "message",
        "metrics",
        "metrics",
        "metrics",
        "checkpoint",
        "metrics",
        "message",
    ]
    assert [
        e.settled and e.settled["distributed.compile"].value for e in events if e.kind == "message"
    ] == [None, True]
    assert {e.time for e in events} == {12.0}
    assert len(segments) < len(events), "metrics wait for company"
    assert read_segments(run, 1, after=segments[-2].seq) == segments[-1:]


def test_an_attempt_that_waits_sends_heartbeats_between_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    with Reporter(run, 1, active=True) as reporter:
        reporter.message("first")
        reporter.heartbeat()
        assert len(read_segments(run, 1)) == 1, "an event was written just now"
        monkeypatch.setattr(report, "HEARTBEAT_SECONDS", 0.0)
        reporter.heartbeat()
        reporter.message("second")
    assert [[event.message for event in segment.events] for segment in read_segments(run, 1)] == [
        ["first"],
        [],
        ["second"],
    ]
    Reporter(run, 2, active=False).heartbeat()
    assert read_segments(run, 2) == []
    assert HEARTBEAT_SECONDS <= SILENCE_LIMIT_SECONDS / 3, (
        "one that comes late is no reason to end an attempt"
    )


def test_a_segment_whose_folder_cannot_be_synchronised_is_written_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Reporter(run, 1, active=True) as reporter:
        with patch.object(
            directory, "sync_folder", side_effect=OSError(errno.ENOSPC, "No space left on device")
        ):
            reporter.message("first")
            reporter.message("second")
        reporter.message("third")
    assert [[event.message for event in segment.events] for segment in read_segments(run, 1)] == [
        ["first"],
        ["second"],
        ["third"],
    ]


def test_a_second_writer_of_one_attempt_is_refused(tmp_path: Path) -> None:
    Reporter(RunDir(tmp_path), 1, active=True).message("first")
    with pytest.raises(FileExistsError, match="two writers"):
        Reporter(RunDir(tmp_path), 1, active=True).message("second")


def test_events_that_the_disk_refuses_wait_for_the_next_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    in_the_way = tmp_path / "attempts"
    in_the_way.write_text("no folder")
    with Reporter(run, 1, active=True) as reporter:
        reporter.message("first")
        reporter.metrics(row(1, 1.0))
        with pytest.raises(NotADirectoryError):
            reporter.flush()
        in_the_way.unlink()
        reporter.message("second")
    assert [e.message for segment in read_segments(run, 1) for e in segment.events] == [
        "first",
        "Step 1/9: training loss=1.0000",
        "second",
    ]


def test_metrics_are_written_without_another_event(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Reporter(run, 1, active=True) as reporter:
        reporter.metrics(row(1, 1.0))
        wait_for(lambda: read_segments(run, 1) or None)


def test_a_step_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = report.write_segment
    stuck = threading.Event()
    freed = threading.Event()

    def slow(*arguments: Any) -> None:
        stuck.set()
        assert freed.wait(60)
        write(*arguments)

    monkeypatch.setattr(report, "write_segment", slow)
    with Reporter(RunDir(tmp_path), 1, active=True) as reporter:
        reporter.metrics(row(1, 3.0))
        assert stuck.wait(60)
        reporter.metrics(row(2, 2.0))
        reporter.metrics(row(3, 1.0))
        assert not read_segments(RunDir(tmp_path), 1)
        freed.set()
    assert [
        e.metrics.step
        for segment in read_segments(RunDir(tmp_path), 1)
        for e in segment.events
        if e.metrics
    ] == [1, 2, 3]


def test_what_ends_the_writing_ends_training(tmp_path: Path) -> None:
    Reporter(RunDir(tmp_path), 1, active=True).message("first")
    reporter = Reporter(RunDir(tmp_path), 1, active=True)
    reporter.__enter__()
    reporter.metrics(row(1, 1.0))
    wait_for(lambda: reporter._crash)
    with pytest.raises(FileExistsError, match="two writers"):
        reporter.metrics(row(2, 1.0))
    assert reporter._thread is not None
    reporter._thread.join()


def test_a_checkpoint_adds_its_times_to_its_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Reporter(run, 1, active=True) as reporter:
        reporter.metrics(row(1, 2.0))
        reporter.metrics(row(2, 1.0))
        reporter.checkpoint(
            "step-1-a1", row(1, 2.0).model_copy(update={"checkpoint_stall_seconds": 0.5})
        )
    assert [
        (m.train_loss, m.checkpoint_stall_seconds) for m in metrics_of_all_attempts(run, 1)
    ] == [(2.0, 0.5), (1.0, None)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Reporter(RunDir(tmp_path), 1, active=False) as reporter:
        reporter.message("hello")
    assert not list(tmp_path.iterdir())


def test_a_step_belongs_to_its_newest_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt, losses in [(1, {1: 9.0, 2: 8.0, 3: 7.0}), (2, {2: 6.0, 3: 5.0, 4: 4.0})]:
        with Reporter(run, attempt, active=True) as reporter:
            for step, loss in losses.items():
                reporter.metrics(row(step, loss))
    rows = metrics_of_all_attempts(run, 2)
    assert [(m.step, m.train_loss) for m in rows] == [(1, 9.0), (2, 6.0), (3, 5.0), (4, 4.0)]
    assert [m.train_loss for m in metrics_of_all_attempts(run, 1)] == [9.0, 8.0, 7.0]


def test_result_file_begins_with_the_columns_that_scripts_read() -> None:
    text = metrics_csv(
        [row(1, 2.5), Metrics(step=2, total_steps=9, train_loss=2.0, valid_loss=3.0)]
    )
    lines = text.splitlines()
    assert lines[0].startswith(
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy,"
    )
    assert lines[1].startswith("1,2.5,0.5,,,")
    assert lines[2].startswith("2,2.0,,3.0,,")


def test_the_result_file_has_full_validations_and_what_answers_scored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    scored = Evaluation(step=2, time=0, metrics={"exact_match": 0.5}, base_metrics={}, samples=[])
    run.write(evaluation_key(2, 1), scored)
    rows = [
        row(1, 2.5),
        row(2, 2.0).model_copy(update={"valid_loss": 3.0, "valid_mean_token_accuracy": 0.25}),
    ]
    events = with_evaluations(
        [Event(kind="metrics", time=0, message="", metrics=each) for each in rows], run
    )
    text = metrics_csv([event.metrics for event in events if event.metrics is not None])
    first, second = csv.DictReader(text.splitlines())
    assert (first["full_valid_loss"], first["evaluation/exact_match"]) == ("", "")
    assert (second["full_valid_loss"], second["full_valid_mean_token_accuracy"]) == ("3.0", "0.25")
    assert second["evaluation/exact_match"] == "0.5"


def test_rank_0_prints_how_training_goes_without_a_line_for_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = iter([0.0, *(step / 2 for step in range(1, 10)), 5.0])
    with Reporter(RunDir(tmp_path), 1, active=True, clock=lambda: next(moments)) as reporter:
        reporter.message("Training starts.")
        for step in range(1, 10):
            reporter.metrics(row(step, 1.0))
        reporter.message("Nearly out of disk.", "warn")
    Reporter(RunDir(tmp_path), 1, active=False).message("said by another rank")
    begin, step, left_out, last, warning = capsys.readouterr().out.splitlines()
    assert (begin, step) == ("Training starts.", "Step 1/9: training loss=1.0000")
    assert "left out here" in left_out
    assert (last, warning) == ("Step 9/9: training loss=1.0000", "warn: Nearly out of disk.")
