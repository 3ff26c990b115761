"""Documents of an engine: a set of ranks (one torchrun) that holds one frozen base and trains
several jobs on it at once.

An engine's directory is a run directory with exactly one attempt, number 1, in the ordinary layout
(attempt.py), and with

    engine.json                   EngineSpec (engine_spec.py), by the service, before anything runs
    seats/<job>-<attempt>.json    SeatOrder, by the service; nobody removes it there
    left/<job>-<attempt>.json     empty, by rank 0: no rank uses the seat's files any more

Where these are on object storage, the engine's node has a copy of its own
(supervisor/engine_sync.py), in which `seats/` holds only the orders whose files are there, and

    arriving/<job>-<attempt>.json SeatOrder whose files are still fetched: the engine is not idle

Where ranks see only what is mounted for them (Kubernetes), a folder beside the engine's directory
holds what they read of the service's files:

    <engine>.data/files/<id>      data files of its jobs
    <engine>.data/tokens/<key>/   their tokens

A job that an engine trains has a *seat* there. Its attempt stays in the job's own run directory,
without a supervisor: the engine's ranks write its events, checkpoints, outcome.json and, as the
last thing of the seat, exit.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

ENGINES = "engines"
"""Folder of the engines' directories, in FT_HOME."""
ENGINE = "engine.json"
SEATS = "seats"
"""Folder of the orders."""
ARRIVING = "arriving"
"""Folder of the orders whose files are still fetched from object storage."""


@dataclass(frozen=True)
class SeatSize:
    """Bytes of a job's seat on each rank, as planned (ft_service/plan/seat.py)."""

    held: int
    """What the job keeps from its first step to its last: masters, gradients, optimizer state,
    gathered adapters.
    """
    batch: int
    """What its largest micro-batch needs in addition."""
    batch_tokens: int
    """Tokens of its largest micro-batch."""
    room: int | None
    """Bytes of a rank for all seats and the micro-batches of a round, when the base is held; None:
    not known.
    """
    gain: float | None
    """Time of two such jobs one after the other, divided by that of both at once in an engine;
    None: not known.
    """
    passing: int = 0
    """The part of `batch` that is gone before the next micro-batch of a round needs its own."""

    def batch_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of a micro-batch of so many tokens, and those of them that are `passing`."""
        batch, passing = (
            -(-part * tokens // max(1, self.batch_tokens)) for part in (self.batch, self.passing)
        )
        return batch, passing


class SeatOrder(BaseModel):
    """`seats/<job>-<attempt>.json`: order to train an attempt of a job."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    attempt: Annotated[int, Field(ge=1)]
    run_dir: str
    """Absolute path of the job's run directory."""


def data_folder(engine: Path) -> Path:
    """Return the folder of what an engine's ranks read.

    `engine`: its directory, which they may write.
    """
    return engine.with_name(f"{engine.name}.data")


def is_engine(run_root: Path) -> bool:
    """Return whether a run directory is that of an engine, by its place."""
    return run_root.parent.name == ENGINES


def seat_key(job_id: str, attempt: int) -> str:
    """Return the key of a seat's order."""
    return f"{SEATS}/{job_id}-{attempt}.json"


def arriving_key(seat: str) -> str:
    """Return the key of a seat's order while its files are fetched. `seat`: key of the order."""
    return f"{ARRIVING}/{seat.removeprefix(f'{SEATS}/')}"


def left_key(seat: str) -> str:
    """Return the key of the mark that no rank uses a seat's files any more. `seat`: key of its
    order.
    """
    return f"left/{seat.removeprefix(f'{SEATS}/')}"
