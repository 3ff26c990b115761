"""Requests for statistics of a job's files."""

from __future__ import annotations

from typing import Any

from ft_service.data.statistics import (
    Measure,
)
from ft_service.spec import DataFileRef, TrainingOptions


def asked(split: float | None = None, validation: bool = False, **training: Any) -> Measure:
    file = DataFileRef(name="a.jsonl", path="a.jsonl", sha256="a")
    other = DataFileRef(name="b.jsonl", path="b.jsonl", sha256="b")
    return Measure(file, other if validation else None, TrainingOptions(**training), split, seed=3)
