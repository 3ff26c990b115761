"""What a worker tells the world while it trains: events, written in immutable segments, read back in order.

One attempt has one writer (rank 0). A segment is a file of JSON lines, `attempts/<n>/events/<seq>.jsonl`, put whole; a reader
that has ingested (attempt, seq) never needs it again. Times are seconds since the epoch on the writer's clock and only for
people: no decision compares them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir


class Metrics(BaseModel):
    """Numbers of one optimizer step. None: not measured at this step. Accuracies are shares in [0, 1] of the target tokens."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Optimizer steps done, from 1."""
    total_steps: int
    train_loss: float | None = None
    """Mean cross entropy in nats over the target tokens of the step's global batch."""
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    """The same over the whole validation file."""
    valid_mean_token_accuracy: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Global 2-norm of the adapter gradients before clipping."""
    tokens: int | None = None
    """Tokens of the step's global batch, padding not counted."""
    trained_tokens: int | None = None
    """Sum of `tokens` since the job's first step, over all attempts."""
    step_seconds: float | None = None
    epoch: float | None = None
    """Passes over the training file so far."""
    more: dict[str, float] | None = None
    """What the job's method measures besides, by the field's names; of the validation file with `valid_` in front. Direct
    preference optimisation: rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies, logps/chosen and
    logps/rejected, means over the pairs (workers/training/preference.py). Where the model was asked the prompts of the job's
    evaluation, `evaluation/` and a metric of it."""
    checkpoint_stall_seconds: float | None = None
    """With kind checkpoint: for how long training stood still for it, waiting for the one before it included."""
    checkpoint_seconds: float | None = None
    """With kind checkpoint: from when it was due to when it was complete."""

    def flat(self) -> dict[str, int | float]:
        """All that was measured by one name each, as events and tables show it. A validation reads the whole file, so its
        numbers are OpenAI's `full_valid_` ones as well."""
        own = self.model_dump(exclude_none=True, exclude={"more"})
        full = {f"full_{name}": own[name] for name in ("valid_loss", "valid_mean_token_accuracy") if name in own}
        return {**own, **full, **(self.more or {})}


class SettledOption(BaseModel):
    """What the ranks have chosen for an option that was "auto"."""

    model_config = ConfigDict(frozen=True)

    value: bool | int | str
    why: str


class Event(BaseModel):
    """One line of a segment."""

    model_config = ConfigDict(frozen=True)

    time: float
    kind: Literal["message", "metrics", "checkpoint"] = "message"
    level: Literal["info", "warn", "error"] = "info"
    message: str
    metrics: Metrics | None = None
    """With kind metrics and checkpoint."""
    checkpoint: str | None = None
    """With kind checkpoint: its folder name below `checkpoints/`; the checkpoint is complete."""
    settled: dict[str, SettledOption] | None = None
    """With the message that training begins: what the ranks train with, by the option's dotted name."""


def write_segment(run: RunDir, attempt: int, seq: int, events: list[Event]) -> None:
    """Put one segment. Raises FileExistsError if (attempt, seq) was written before: an attempt has one writer."""
    body = "".join(event.model_dump_json(exclude_none=True) + "\n" for event in events)
    if not run.put_if_absent(AttemptKeys(attempt).segment(seq), body.encode()):
        raise FileExistsError(f"event segment {seq} of attempt {attempt} exists: two writers in one attempt")


def read_segments(run: RunDir, attempt: int, after: int = -1, limit: int | None = None) -> list[tuple[int, list[Event]]]:
    """At most `limit` segments of an attempt with seq > `after`, in order, up to the first gap; later ones wait."""
    found: list[tuple[int, list[Event]]] = []
    seq = after + 1
    while (limit is None or len(found) < limit) and (body := run.get(AttemptKeys(attempt).segment(seq))) is not None:
        found.append((seq, [parse_event(line) for line in body.decode().splitlines() if line]))
        seq += 1
    return found


def parse_event(line: str) -> Event:
    """A line as an Event; what a newer writer says in another shape becomes a plain message rather than an error."""
    try:
        return Event.model_validate_json(line)
    except ValidationError:
        return Event(time=0.0, level="warn", message=line[:2000])
