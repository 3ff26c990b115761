"""Curves over attempts, and fewer points of them."""

from __future__ import annotations

from ft_service.jobs.curves import Curves, thinned


def test_a_step_is_its_newest_attempts() -> None:
    curves = Curves()
    for step in range(1, 6):
        curves.add(1, float(step), {"step": step, "total_steps": 10, "train_loss": 1.0})
    curves.note("pause", 6.0)
    for step in range(4, 8):
        curves.add(2, 10.0 + step, {"step": step, "total_steps": 10, "train_loss": 2.0})
    series = curves.series("train_loss", 100)
    assert series.steps == [1, 2, 3, 4, 5, 6, 7]
    assert series.values == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert series.times[2:4] == [3.0, 14.0]
    assert [(mark.kind, mark.step, mark.label) for mark in curves.marks] == [
        *(("attempt", 0, "1"), ("pause", 5, ""), ("attempt", 3, "2")),
    ]
    assert (curves.step, curves.total_steps) == (7, 10)


def test_what_was_not_measured_is_left_out() -> None:
    curves = Curves()
    curves.add(1, 1.0, {"step": 1, "total_steps": 2, "train_loss": 1.0, "tokens": 100, "step_seconds": 0.5})
    curves.add(1, 2.0, {"step": 2, "total_steps": 2, "train_loss": 1.0, "valid_loss": 3.0})
    assert curves.series("valid_loss", 10).steps == [2]
    assert curves.series("tokens_per_second", 10).values == [200.0]
    assert curves.series("grad_norm", 10).steps == []


def test_fewer_points_keep_ends_and_extremes() -> None:
    points = [(place, float(place % 7)) for place in range(10_000)]
    points[4321], points[8765] = (4321, 99.0), (8765, -99.0)
    few = thinned(points, 1000)
    assert len(few) <= 1000
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert {points[4321], points[8765]} <= set(few)
    assert list(few) == sorted(few)
    assert thinned(points[:4], 4) == points[:4]
