"""What a worker tells the world while it trains: events, written in immutable segments, read back in order.

One attempt has one writer (rank 0). A segment is a file of JSON lines, `attempts/<n>/events/<seq>.jsonl`, put whole; a reader
that has ingested (attempt, seq) never needs it again. Times are seconds since the epoch on the writer's clock and only for
people: no decision compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir, UnreadableDocumentError, parse_document

MOST_SEGMENT_BYTES = 8 * 1024**2
"""Of a segment that is read; workers write some kilobytes."""
MOST_SEGMENT_EVENTS = 20_000
MOST_MESSAGE_CHARACTERS = 50_000
"""Of an event that is read; the rest of its message is cut off."""

Count = Annotated[int, Field(ge=0, lt=2**62)]
"""As every database keeps it."""
Seconds = Annotated[float, Field(ge=0, lt=1e11)]


class Metrics(BaseModel):
    """Numbers of one optimizer step. None: not measured at this step. Accuracies are shares in [0, 1] of the target tokens."""

    model_config = ConfigDict(frozen=True)

    step: Count
    """Optimizer steps done, from 1."""
    total_steps: Count
    train_loss: float | None = None
    """Mean cross entropy in nats over the target tokens of the step's global batch."""
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    """The same over the whole validation file."""
    valid_mean_token_accuracy: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Global 2-norm of the adapter gradients before clipping."""
    tokens: Count | None = None
    """Tokens of the step's global batch, padding not counted."""
    trained_tokens: int | None = None
    """Sum of `tokens` since the job's first step, over all attempts."""
    step_seconds: Seconds | None = None
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

    time: Seconds
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


@dataclass(frozen=True)
class Segment:
    """What a reader gets of a segment: its events, and what else lies there."""

    seq: int
    events: list[Event]
    fault: str | None = None
    """What of it is no event and was skipped, for the job's user; None: nothing."""


def read_segments(run: RunDir, attempt: int, after: int = -1, limit: int | None = None) -> list[Segment]:
    """At most `limit` segments of an attempt with seq > `after`, in order, up to the first gap; later ones wait.

    Whatever lies there is read within bounds: bytes that are no UTF-8 are replaced, and what is no event is skipped, a whole
    segment if need be. Raises OSError if the disk does not give it.
    """
    found: list[Segment] = []
    seq = after + 1
    while (limit is None or len(found) < limit) and (segment := _read_segment(run, attempt, seq)) is not None:
        found.append(segment)
        seq += 1
    return found


def _read_segment(run: RunDir, attempt: int, seq: int) -> Segment | None:
    key = AttemptKeys(attempt).segment(seq)
    try:
        body = run.get(key, MOST_SEGMENT_BYTES)
    except UnreadableDocumentError as error:
        return Segment(seq, [], f"{error.message} What it tells is lost.")
    if body is None:
        return None
    events, skipped = parse_events(key, body)
    fault = f"{key}: {skipped} of its lines cannot be read as events and are skipped." if skipped else None
    return Segment(seq, events, fault)


def parse_events(key: str, body: bytes) -> tuple[list[Event], int]:
    """The events of a segment, and how many lines of it are none, those beyond MOST_SEGMENT_EVENTS among them."""
    events: list[Event] = []
    skipped = 0
    for line in body.decode(errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            if len(events) >= MOST_SEGMENT_EVENTS:
                raise UnreadableDocumentError(key, "it has too many lines")
            event = parse_document(key, line.encode(), Event)
        except UnreadableDocumentError:
            skipped += 1
            continue
        if len(event.message) > MOST_MESSAGE_CHARACTERS:
            event = event.model_copy(update={"message": f"{event.message[:MOST_MESSAGE_CHARACTERS]} …"})
        events.append(event)
    return events, skipped
