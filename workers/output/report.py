"""Rank 0's reports to the service: events in immutable segments, and the table of metrics made from
them.
"""

from __future__ import annotations

import csv
import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_seal import SEAL_SECONDS, Fence
from ft_service.rundir.checkpoints import step_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import by_name, evaluated_steps, read_evaluation
from ft_service.rundir.events import Event, Metrics, SettledOption, read_segments, write_segment
from workers.output.event_files import EventFile

FLUSH_SECONDS = 0.5
"""Time for which metrics are collected before they are written; messages and checkpoints are
written at once.
"""

PRINT_SECONDS = 5.0
"""Least time between two steps that rank 0 prints; validations, messages, the first and last step
are always printed.
"""

HEARTBEAT_SECONDS = 600.0
"""Time without events after which an attempt that waits writes a segment without any: the service
ends one that is silent for SILENCE_LIMIT_SECONDS (ft_service/jobs/decisions.py).
"""

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
"""What existing scripts read from a result file, by position."""
MORE_COLUMNS = (
    *("full_valid_loss", "full_valid_mean_token_accuracy"),
    *("learning_rate", "grad_norm", "tokens", "trained_tokens", "step_seconds", "epoch"),
    *("checkpoint_stall_seconds", "checkpoint_seconds"),
)


class Reporter:
    """Writer of one attempt's events, usable from any thread.

    On other ranks than 0 it writes nothing.

    Events that the disk does not take wait for the next ones: a full disk must not end training.
    While it is entered, a thread writes the metrics, so that no step waits for the disk.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        *,
        active: bool,
        clock: Callable[[], float] = time.time,
        fence: Fence | None = None,
        event_file: EventFile | None = None,
    ) -> None:
        """`fence`: the attempt's; None: make one.

        `event_file`: takes the metrics too, and is closed with this.
        """
        self._run = run
        self._attempt = attempt
        self._active = active
        self._fence = fence or Fence(run, attempt)
        self._clock = clock
        self._event_file = event_file
        self._waiting: list[Event] = []
        self._flushed_at = float("-inf")
        self._seq = 0
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._due, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._printed_at = float("-inf")
        self._left_out = False

    def __enter__(self) -> Self:
        if self._active:
            self._thread = threading.Thread(target=self._write_metrics, name="events", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._due.set()
            self._thread.join()
            self._thread = None
        try:
            self.flush()
        finally:
            if self._event_file is not None:
                with suppress(OSError):  # every step is written again with the outcome
                    self._event_file.close()

    def message(self, text: str, level: Literal["info", "warn", "error"] = "info") -> None:
        self._add(Event(time=self._clock(), level=level, message=text), now=True)

    def warn(self, text: str) -> None:
        self.message(text, "warn")

    def begin(self, text: str, settled: Mapping[str, SettledOption]) -> None:
        """Report that training begins.

        `settled`: what it begins with where that was "auto", by the option's dotted name.
        """
        self._add(Event(time=self._clock(), message=text, settled=dict(settled) or None), now=True)

    def metrics(self, metrics: Metrics) -> None:
        loss = "" if metrics.train_loss is None else f": training loss={metrics.train_loss:.4f}"
        valid = "" if metrics.valid_loss is None else f", validation loss={metrics.valid_loss:.4f}"
        more = metrics.more or {}
        rewards = [
            f"{word} reward={more[name]:.3f}"
            for name, word in (("train_mean_reward", "mean"), ("valid_mean_reward", "validation"))
            if name in more
        ]
        reward = f"{', ' if loss else ': '}{', '.join(rewards)}" if rewards else ""
        text = f"Step {metrics.step}/{metrics.total_steps}{loss}{valid}{reward}"
        self._add(
            Event(time=self._clock(), kind="metrics", message=text, metrics=metrics), now=False
        )

    def checkpoint(self, name: str, metrics: Metrics) -> None:
        """Report a complete checkpoint. `metrics`: of its step."""
        text = f"Checkpoint created at step {metrics.step}"
        self._add(
            Event(
                time=self._clock(),
                kind="checkpoint",
                message=text,
                metrics=metrics,
                checkpoint=name,
            ),
            now=True,
        )

    def heartbeat(self) -> None:
        """Write a segment without events if none was written for a while: the attempt waits, and is
        not stuck.
        """
        if self._active and time.monotonic() - self._flushed_at >= HEARTBEAT_SECONDS:
            self._flush_or_wait(empty=True)

    def flush(self, *, empty: bool = False) -> None:
        """Write waiting events.

        Raises OSError if that fails, and they wait on; raises SealedError. `empty`: write a segment
        even if there are none.
        """
        with self._writing:
            with self._adding:
                events = list(self._waiting)
            if events or empty:
                self._fence.check(SEAL_SECONDS)
                self._write_segment(events)
                self._seq += 1
                with self._adding:
                    del self._waiting[: len(events)]
                if self._event_file is not None:
                    for event in events:
                        self._event_file.add(event)
                    with suppress(OSError):  # its numbers wait for the next events
                        self._event_file.flush()
            self._flushed_at = time.monotonic()

    def _write_segment(self, events: list[Event]) -> None:
        """Write the next segment.

        Raises FileExistsError if another writer has, and OSError if it is not there.
        """
        try:
            write_segment(self._run, self._attempt, self._seq, events)
        except FileExistsError:
            raise
        except OSError:
            # It may be there already, and only its name not yet be safe from a loss of power.
            # Written again it would be taken for that of another writer.
            if not Attempt(self._run, self._attempt).has_segment(self._seq):
                raise

    def _add(self, event: Event, *, now: bool) -> None:
        if not self._active:
            return
        if self._crash is not None:
            raise self._crash
        with self._adding:
            self._waiting.append(event)
        self._print(event)
        if now:
            self._flush_or_wait()
        else:
            self._due.set()

    def _print(self, event: Event) -> None:
        """Print the progress of training to the rank's own log."""
        metrics = event.metrics if event.kind == "metrics" else None
        if (
            metrics is not None
            and metrics.valid_loss is None
            and metrics.step != metrics.total_steps
        ):
            if event.time < self._printed_at + PRINT_SECONDS:
                if not self._left_out:
                    print(
                        "Steps that follow within seconds are left out here; the job's events "
                        "have every step.",
                        flush=True,
                    )
                self._left_out = True
                return
            self._printed_at = event.time
        print(
            event.message if event.level == "info" else f"{event.level}: {event.message}",
            flush=True,
        )

    def _flush_or_wait(self, *, empty: bool = False) -> None:
        try:
            self.flush(empty=empty)
        except FileExistsError:
            raise
        except OSError as error:
            self._flushed_at = time.monotonic()
            print(f"{len(self._waiting)} events wait: {error}", file=sys.stderr, flush=True)

    def _write_metrics(self) -> None:
        """Run in a thread of its own. Training's thread raises its error at the next event."""
        try:
            while not self._over.is_set():
                self._due.wait()
                self._over.wait(max(0.0, self._flushed_at + FLUSH_SECONDS - time.monotonic()))
                self._due.clear()
                self._flush_or_wait()
        except BaseException as error:
            self._crash = error


def steps_of_all_attempts(run: RunDir, last_attempt: int) -> list[Event]:
    """One event with metrics for each step, in order.

    A step that was trained again after a resume counts as its newest attempt saw it.

    Steps that an attempt repeats are its own from its beginning: an earlier attempt that did not
    know its end may still report some of those steps. A step's checkpoint repeats its numbers and
    adds its own.
    """
    by_step: dict[int, Event] = {}
    for attempt in range(1, last_attempt + 1):
        start = Attempt(run, attempt).readable_start()
        if start is not None:
            resumed = step_of(start.checkpoint) if start.checkpoint else 0
            by_step = {step: row for step, row in by_step.items() if step <= resumed}
        for segment in read_segments(run, attempt):
            by_step.update(
                {event.metrics.step: event for event in segment.events if event.metrics is not None}
            )
    return [by_step[step] for step in sorted(by_step)]


def metrics_of_all_attempts(run: RunDir, last_attempt: int) -> list[Metrics]:
    """The metrics of `steps_of_all_attempts`."""
    return [
        event.metrics
        for event in steps_of_all_attempts(run, last_attempt)
        if event.metrics is not None
    ]


def with_evaluations(events: list[Event], run: RunDir) -> list[Event]:
    """The events with what the evaluations at their steps measured, `evaluation/<metric>`."""
    keys = evaluated_steps(run)
    return [_with_evaluation(event, run, keys) for event in events]


def _with_evaluation(event: Event, run: RunDir, keys: Mapping[int, str]) -> Event:
    row = event.metrics
    evaluation = (
        read_evaluation(run, keys[row.step]) if row is not None and row.step in keys else None
    )
    if row is None or evaluation is None:
        return event
    more = {**(row.more or {}), **by_name(evaluation.metrics)}
    return event.model_copy(update={"metrics": row.model_copy(update={"more": more})})


def metrics_csv(rows: list[Metrics]) -> str:
    """The result file: OpenAI's columns first, ours and the method's after them; an empty cell
    where nothing was measured.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [
        *COLUMNS,
        *MORE_COLUMNS,
        *dict.fromkeys(name for row in rows for name in row.more or ()),
    ]
    writer.writerow(columns)
    for row in rows:
        values: dict[str, Any] = row.flat() | {"train_accuracy": row.train_mean_token_accuracy}
        writer.writerow(
            ["" if values.get(column) is None else values[column] for column in columns]
        )
    return text.getvalue()
