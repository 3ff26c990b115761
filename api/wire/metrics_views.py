"""Curves as the wire shows them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from ft_service.jobs.curves import NAMES, Curves, Kind
from ft_service.jobs.states import Job
from ft_service.store.records import Checkpoint


class SeriesView(BaseModel):
    """One number by step: three lists of one length, in order of the steps."""

    steps: list[int]
    times: list[float]
    """Seconds since the epoch."""
    values: list[float]


class MarkView(BaseModel):
    """Something that happened on the way."""

    type: Kind
    step: int
    """The newest one by then."""
    time: float
    label: str
    """The attempt's number, or the checkpoint's id."""


class MetricsView(BaseModel):
    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    job_id: str
    status: str
    step: int
    """The newest one; 0: none yet."""
    total_steps: int
    series: dict[str, SeriesView]
    """By name; what was never reported is left out."""
    marks: list[MarkView]


class MetricsListView(BaseModel):
    object: Literal["list"] = "list"
    data: list[MetricsView]


def metrics_view(
    job: Job, curves: Curves, checkpoints: Sequence[Checkpoint], points: int, names: Sequence[str] | None
) -> MetricsView:
    """`names` None: all series that have a value."""
    found = {name: curves.series(name, points) for name in names or NAMES}
    marks = [MarkView(type=mark.kind, step=mark.step, time=mark.time, label=mark.label) for mark in curves.marks]
    marks += [
        MarkView(type="checkpoint", step=point.step, time=point.created_at, label=point.id) for point in reversed(checkpoints)
    ]
    return MetricsView(
        job_id=job.id,
        status=job.state.value,
        step=curves.step,
        total_steps=curves.total_steps,
        series={
            name: SeriesView(steps=one.steps, times=one.times, values=one.values) for name, one in found.items() if one.values
        },
        marks=marks,
    )
