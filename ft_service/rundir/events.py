"""Events of training: written in immutable segments, read back in order.

One attempt has one writer (rank 0). A segment is a file of JSON lines,
`attempts/<n>/events/<seq>.jsonl`, written whole; a reader that has ingested (attempt, seq) never
needs it again. Times are seconds since the epoch on the writer's clock, for display only: no
decision compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir, UnreadableDocumentError, parse_document

MOST_SEGMENT_BYTES = 8 * 1024**2
"""Largest size of a segment that is read; workers write a few kilobytes."""
MOST_SEGMENT_EVENTS = 20_000
MOST_MESSAGE_CHARACTERS = 50_000
"""Longest message of an event that is read; the rest is cut off."""

Count = Annotated[int, Field(ge=0, lt=2**62)]
"""Integer that every database can store."""
Seconds = Annotated[float, Field(ge=0, lt=1e11)]


BEFORE_VALID_LOSS = "before/valid_loss"
"""Of the first step in Metrics.more: the loss on the validation file before training, which is that
of the base or of the tuned model that the job continues.
"""


class Metrics(BaseModel):
    """Metrics of one optimizer step.

    None: not measured at this step. Accuracies are shares in [0, 1] of the target tokens.
    """

    model_config = ConfigDict(frozen=True)

    step: Count
    """Number of the optimizer step, from 1."""
    total_steps: Count
    train_loss: float | None = None
    """Mean cross entropy in nats over the target tokens of the step's global batch."""
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    """Mean cross entropy over the whole validation file."""
    valid_mean_token_accuracy: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Global 2-norm of the adapter gradients before clipping."""
    tokens: Count | None = None
    """Tokens of the step's global batch, without padding."""
    trained_tokens: int | None = None
    """Sum of `tokens` since the job's first step, over all attempts."""
    step_seconds: Seconds | None = None
    epoch: float | None = None
    """Passes over the training file so far."""
    more: dict[str, float] | None = None
    """Further metrics of the job's method by field name; those of the validation file begin with
    `valid_`. Direct preference optimisation: rewards/chosen, rewards/rejected, rewards/margins,
    rewards/accuracies, logps/chosen and logps/rejected, means over the pairs
    (workers/training/preference.py); KTO: the same without accuracies, means over the good or bad
    answers, and kl (workers/training/kto.py). Distillation: DIVERGENCE_SUMS of
    workers/model/divergence.py, and teacher/gap. Metrics of the job's evaluation begin with
    `evaluation/`. The first step has BEFORE_VALID_LOSS.
    """
    checkpoint_stall_seconds: float | None = None
    """Seconds for which training stood still for the checkpoint, including the wait for the
    previous one; with kind checkpoint.
    """
    checkpoint_seconds: float | None = None
    """Seconds from when the checkpoint was due until it was complete; with kind checkpoint."""

    @field_validator("more", mode="before")
    @classmethod
    def _measured(cls, value: Any) -> Any:
        """Without what JSON has as null: it cannot hold a number that is not finite, such as a
        validation may give.
        """
        return (
            {name: number for name, number in value.items() if number is not None}
            if isinstance(value, dict)
            else value
        )

    def flat(self) -> dict[str, int | float]:
        """Return all measured values by name, for events and tables.

        A validation reads the whole file, so its values are also OpenAI's `full_valid_` ones.
        """
        own = self.model_dump(exclude_none=True, exclude={"more"})
        full = {
            f"full_{name}": own[name]
            for name in ("valid_loss", "valid_mean_token_accuracy")
            if name in own
        }
        return {**own, **full, **(self.more or {})}

    @classmethod
    def of_flat(cls, values: Mapping[str, Any]) -> Metrics:
        """Return the metrics whose `flat` these values are. Raises ValidationError."""
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        others = {
            name: value
            for name, value in values.items()
            if name not in own and not name.startswith("full_valid_")
        }
        more = {name: value for name, value in others.items() if isinstance(value, (int, float))}
        return cls.model_validate({**own, "more": more or None})


class SettledOption(BaseModel):
    """Value that the ranks have chosen for an option that was "auto"."""

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
    """Metrics of the step; with kinds metrics and checkpoint."""
    checkpoint: str | None = None
    """Folder name of the complete checkpoint below `checkpoints/`; with kind checkpoint."""
    settled: dict[str, SettledOption] | None = None
    """Values that the ranks train with, by the option's dotted name; with the message that training
    begins.
    """


def write_segment(run: RunDir, attempt: int, seq: int, events: list[Event]) -> None:
    """Write one segment. Raises FileExistsError if (attempt, seq) exists: an attempt has one
    writer.
    """
    body = "".join(event.model_dump_json(exclude_none=True) + "\n" for event in events)
    if not run.put_if_absent(AttemptKeys(attempt).segment(seq), body.encode()):
        raise FileExistsError(
            f"event segment {seq} of attempt {attempt} exists: two writers in one attempt"
        )


@dataclass(frozen=True)
class Segment:
    """Segment as a reader gets it: its events, and a note on lines that are not events."""

    seq: int
    events: list[Event]
    fault: str | None = None
    """Sentence for the job's user on what was skipped; None: nothing."""


def read_segments(
    run: RunDir, attempt: int, after: int = -1, limit: int | None = None
) -> list[Segment]:
    """Return at most `limit` segments of an attempt with seq > `after`, in order, up to the first
    gap.

    Anything may be in a segment's place and is read within bounds: bytes that are not UTF-8 are
    replaced; lines that are not events, or a whole segment, are skipped. Raises OSError if the disk
    fails.
    """
    segments: list[Segment] = []
    seq = after + 1
    while (limit is None or len(segments) < limit) and (
        segment := _read_segment(run, attempt, seq)
    ) is not None:
        segments.append(segment)
        seq += 1
    return segments


def _read_segment(run: RunDir, attempt: int, seq: int) -> Segment | None:
    key = AttemptKeys(attempt).segment(seq)
    try:
        body = run.get(key, MOST_SEGMENT_BYTES)
    except UnreadableDocumentError as error:
        return Segment(seq, [], f"{error.message} Its events are lost.")
    if body is None:
        return None
    events, skipped = parse_events(key, body)
    fault = (
        f"{key}: {skipped} of its lines cannot be read as events and are skipped."
        if skipped
        else None
    )
    return Segment(seq, events, fault)


def parse_events(key: str, body: bytes) -> tuple[list[Event], int]:
    """Return the events of a segment and the number of skipped lines, including those beyond
    MOST_SEGMENT_EVENTS.
    """
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
            event = event.model_copy(
                update={"message": f"{event.message[:MOST_MESSAGE_CHARACTERS]} …"}
            )
        events.append(event)
    return events, skipped
