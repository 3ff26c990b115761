"""What the trainer's model thinks of a few token sequences, with its adapter and without: by that whoever serves it is
verified.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PROBES = "probes.json"
"""In the run directory, written with the outcome."""
MOST_PROBES = 4
MOST_TOKENS = 64


class Probe(BaseModel):
    """One sequence. Log-probabilities are in nats, of each token but the first, by the trainer."""

    model_config = ConfigDict(frozen=True)

    tokens: list[int]
    tuned: list[float]
    base: list[float]


class Probes(BaseModel):
    model_config = ConfigDict(frozen=True)

    step: int
    """Of the adapter."""
    probes: list[Probe]
