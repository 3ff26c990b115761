"""What was used, summed up as people ask for it: by day, by project, by key. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Use:
    """Sums."""

    tokens: int = 0
    gpu_seconds: float = 0.0
    bytes: int = 0
    jobs: int = 0

    def add(self, result: Mapping[str, Any]) -> None:
        self.tokens += result["trained_tokens"]
        self.gpu_seconds += result["gpu_seconds"]
        self.bytes += result["uploaded_bytes"]
        self.jobs += result["num_jobs"]


AMOUNTS: Mapping[str, str] = {
    "gpu_seconds": "GPU hours",
    "tokens": "Trained tokens",
    "bytes": "Uploaded bytes",
    "jobs": "Jobs",
}
"""Amounts of `Use` → what they are called."""


@dataclass
class Summary:
    """Use over some days."""

    total: Use = field(default_factory=Use)
    days: dict[int, Use] = field(default_factory=dict)
    """Beginning of a day, in seconds since the epoch → its use; days without any too."""
    projects: dict[str, Use] = field(default_factory=dict)
    keys: dict[tuple[str, str], Use] = field(default_factory=dict)
    """Project and key → use; the key is empty where nobody's was used."""


def summed(buckets: Sequence[Mapping[str, Any]]) -> Summary:
    """Buckets of the API, grouped by project and key. Projects, and keys of a project, that used most come first."""
    found = Summary()
    for bucket in buckets:
        day = found.days.setdefault(bucket["start_time"], Use())
        for result in bucket["results"]:
            project, key = result["project_id"] or "", result["api_key_id"] or ""
            sums = (found.total, day, found.projects.setdefault(project, Use()), found.keys.setdefault((project, key), Use()))
            for use in sums:
                use.add(result)
    found.projects = dict(sorted(found.projects.items(), key=lambda one: -one[1].gpu_seconds))
    found.keys = dict(sorted(found.keys.items(), key=lambda one: -one[1].gpu_seconds))
    return found


def bars(days: Mapping[int, Use], amount: str) -> list[dict[str, Any]]:
    """Each day's amount, and its share of the largest."""
    values = {day: getattr(use, amount) for day, use in days.items()}
    most = max(values.values(), default=0)
    return [{"day": day, "value": value, "share": value / most if most else 0.0} for day, value in values.items()]
