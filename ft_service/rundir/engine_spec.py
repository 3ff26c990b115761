"""The document that says what an engine is; apart from `engine`, since supervisors start sooner
without the job spec.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ft_service.spec import JobSpec


class EngineSpec(BaseModel):
    """`engine.json`: what an engine holds, and for whom."""

    model_config = ConfigDict(frozen=True)

    engine_id: str
    project_id: str
    spec: JobSpec
    """Spec of the first job; its base, precision and distributed options are those of every
    seat.
    """
    most_seats: Annotated[int, Field(ge=1)]
    room: int | None = None
    """`SeatSize.room` of its jobs."""
    idle_seconds: Annotated[float, Field(gt=0)]
    """How long the engine stays without a seat, in seconds."""
