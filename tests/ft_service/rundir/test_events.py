from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Literal

import pytest

from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir
from ft_service.rundir.events import Event, Metrics, Segment, read_segments, write_segment
from tests.support.unreadable import put_in_place


def test_segments_are_read_in_order_and_up_to_the_first_gap(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for seq in (0, 1, 3):
        write_segment(
            run, 1, seq, [Event(time=float(seq), message=f"{seq}/{line}") for line in range(2)]
        )
    found = read_segments(run, 1)
    assert [(s.seq, [event.message for event in s.events]) for s in found] == [
        (0, ["0/0", "0/1"]),
        (1, ["1/0", "1/1"]),
    ]
    assert read_segments(run, 1, after=1) == []
    assert [segment.seq for segment in read_segments(run, 1, limit=1)] == [0]
    write_segment(run, 1, 2, [Event(time=2.0, message="late")])
    assert [segment.seq for segment in read_segments(run, 1, after=1)] == [2, 3]
    assert read_segments(run, 2) == []


def test_a_segment_is_never_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_segment(run, 1, 0, [Event(time=0.0, message="first")])
    with pytest.raises(FileExistsError, match="two writers in one attempt"):
        write_segment(run, 1, 0, [Event(time=0.0, message="second")])


def test_metrics_survive_the_way_through_a_segment(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    event = Event(
        time=1.0,
        kind="metrics",
        message="m",
        metrics=Metrics(step=1, total_steps=2, train_loss=0.1 + 0.2),
    )
    write_segment(run, 1, 0, [event])
    assert read_segments(run, 1) == [Segment(0, [event])]


def test_metrics_are_read_back_from_what_an_event_shows() -> None:
    """The API shows a method's own metrics beside the others: `ft watch` and `ft compare` read
    rewards there.
    """
    more = {"train_mean_reward": 0.5, "valid_rewards/accuracies": 1.0}
    metrics = Metrics(step=1, total_steps=2, train_loss=0.5, valid_loss=0.6, more=more)
    assert Metrics.of_flat(metrics.flat()) == metrics
    assert Metrics.of_flat({"step": 1, "total_steps": 2, "of a newer server": "text"}).more is None


def test_a_metric_that_is_not_finite_takes_no_other_with_it(tmp_path: Path) -> None:
    """Of a validation that overflows: the checkpoint of its step is an event with the same
    metrics.
    """
    run = RunDir(tmp_path)
    more = {"rewards/margins": 0.1, "valid_rewards/margins": nan}
    odd = Metrics(step=1, total_steps=2, train_loss=0.5, valid_loss=nan, more=more)
    kinds: tuple[Literal["metrics", "checkpoint"], ...] = ("metrics", "checkpoint")
    write_segment(
        run, 1, 0, [Event(time=1.0, kind=kind, message="m", metrics=odd) for kind in kinds]
    )
    (segment,) = read_segments(run, 1)
    assert segment.fault is None
    kept = Metrics(step=1, total_steps=2, train_loss=0.5, more={"rewards/margins": 0.1})
    assert [event.metrics for event in segment.events] == [kept, kept]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"kind": "of tomorrow", "time": 1, "message": "x"}',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"time": 1e999, "message": "never"}',
        b'{"time": 1, "message": "m", "metrics": {"step": 1%s, "total_steps": 2}}' % (b"0" * 30),
    ],
)
def test_a_line_that_is_no_event_is_skipped_and_said(tmp_path: Path, line: bytes) -> None:
    run = RunDir(tmp_path)
    after = Event(time=2.0, message="what comes behind it, in two\u2028lines")
    run.put(AttemptKeys(1).segment(0), line + b"\n" + after.model_dump_json().encode() + b"\n")
    fault = (
        "attempts/1/events/00000000.jsonl: 1 of its lines cannot be read as events and are skipped."
    )
    assert read_segments(run, 1) == [Segment(0, [after], fault)]


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.put(AttemptKeys(1).segment(0), b'{"time": 1, "message": "a\xffb"}\n')
    assert [event.message for event in read_segments(run, 1)[0].events] == ["a\ufffdb"]


@pytest.mark.parametrize("place", ["pipe", "folder", "link", "large"])
def test_what_is_no_segment_is_skipped_whole(tmp_path: Path, place: str) -> None:
    run = RunDir(tmp_path)
    put_in_place(run.path(AttemptKeys(1).segment(0)), place)
    write_segment(run, 1, 1, [Event(time=1.0, message="next")])
    first, second = read_segments(run, 1)
    assert first.events == []
    assert (first.fault or "").startswith("attempts/1/events/00000000.jsonl cannot be read: it ")
    assert [event.message for event in second.events] == ["next"]
