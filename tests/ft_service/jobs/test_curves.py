"""Curves over attempts, and fewer points of them."""

from __future__ import annotations

import math
from array import array

from ft_service.jobs.curves import GPU_NAMES, Curves, Series, gpu_series, kept_places
from ft_service.rundir.documents import GpuLoad


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


def test_what_gpus_did_is_told_at_the_newest_step_before_it() -> None:
    curves = Curves()
    for step in (1, 2):
        curves.add(1, 10.0 * step, {"step": step, "total_steps": 2, "train_loss": 1.0})
    loads = [
        GpuLoad(time=time, memory=2**30, busy=0.5, watts=time) for time in (5.0, 10.0, 19.0, 25.0)
    ]
    found = gpu_series(curves, loads, 100)
    assert set(found) == set(GPU_NAMES)
    assert found["gpu/watts"] == Series([0, 1, 1, 2], [5.0, 10.0, 19.0, 25.0], [5, 10, 19, 25])
    assert found["gpu/memory"].values == [float(2**30)] * 4
    assert gpu_series(curves, [], 100) == {}
    assert len(gpu_series(curves, loads * 20, 8)["gpu/busy"].values) <= 8


def test_what_was_not_measured_is_left_out() -> None:
    curves = Curves()
    curves.add(
        1, 1.0, {"step": 1, "total_steps": 2, "train_loss": 1.0, "tokens": 100, "step_seconds": 0.5}
    )
    curves.add(1, 2.0, {"step": 2, "total_steps": 2, "train_loss": 1.0, "valid_loss": 3.0})
    assert curves.series("valid_loss", 10).steps == [2]
    assert curves.series("tokens_per_second", 10).values == [200.0]
    assert curves.series("grad_norm", 10).steps == []


def test_fewer_points_keep_ends_and_extremes() -> None:
    values = array("d", [float(place % 7) for place in range(10_000)])
    values[4321], values[8765], values[17] = 99.0, -99.0, math.inf
    few = kept_places(values, 1000)
    assert len(few) <= 1000
    assert (few[0], few[-1]) == (0, 9999)
    assert {4321, 8765, 17} <= set(few)
    assert list(few) == sorted(set(few))
    assert list(kept_places(values[:4], 4)) == [0, 1, 2, 3]


def test_fewer_points_of_a_series_with_gaps() -> None:
    values = array("d", [place if place % 3 == 0 else math.nan for place in range(300)])
    values[150] = -5.0
    few = kept_places(values, 20)
    assert len(few) <= 20
    assert all(place % 3 == 0 for place in few)
    assert {0, 150, 297} <= set(few)
    assert list(kept_places(array("d", [math.nan]), 20)) == []
