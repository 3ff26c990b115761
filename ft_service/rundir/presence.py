"""Signs of the service for ranks that live by commands: without one for long, they write a
checkpoint and leave.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LEAVE_AFTER_SECONDS = 900.0
"""Seconds without a sign after which ranks leave, unless the service says otherwise."""
SIGNS = 10
"""Number of signs that the service gives in this time, so that a slow one is not taken to be
gone.
"""


class Presence(BaseModel):
    """`attempts/<n>/presence.json`: the newest sign, by the service, rewritten as long as it looks
    after the attempt.
    """

    model_config = ConfigDict(frozen=True)

    sign: str
    """A text that no earlier sign had."""
    leave_after_seconds: Annotated[float, Field(gt=0)]
