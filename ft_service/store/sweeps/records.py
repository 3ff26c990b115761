"""A sweep as the store keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert

from ft_service.store.database import Direct, database_time, storable_json
from ft_service.store.sweeps.tables import sweeps

_NEW = ("id", "project_id", "request", "settings")
CREATE_SWEEP = Direct(insert(sweeps).values(created_at=database_time()), _NEW)


@dataclass(frozen=True, kw_only=True)
class NewSweep:
    """A sweep about to be stored with its jobs."""

    id: str
    project_id: str
    request: dict[str, Any]
    settings: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """As the drivers take it."""
        texts = {"request": storable_json(self.request)[1], "settings": storable_json(self.settings)[1]}
        return {"id": self.id, "project_id": self.project_id, **texts}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Jobs that differ in a few options, under one id."""

    id: str
    project_id: str
    created_at: float
    request: dict[str, Any]
    """The create body as received."""
    settings: dict[str, Any]
    """How values were chosen and hopeless jobs are stopped: a SweepSettings."""
    cancelled_at: float | None = None
    """When its user ended it."""
    finished_at: float | None = None
    """Once all its jobs are over."""
    best_job: str | None = None
    """Once finished; None: no job has succeeded with a validation loss."""
    deleted_at: float | None = None
    """From then on it is hidden."""
