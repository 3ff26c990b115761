"""A job's metrics as TensorBoard reads them: event files, where the job's integrations ask for them.

tensorboard/events.out.tfevents.…    one an attempt, written while it trains
adapter/events.out.tfevents.…        with the outcome: every step once, as in metrics.csv
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from ft_service.rundir.events import Event

FOLDER = "tensorboard"
NAME = "events.out.tfevents"
_FLUSH_SECONDS = 5
_PLACES = ("step", "total_steps")
"""Metrics that are not curves."""


class EventFile:
    """Writer of one event file. Its thread brings what was added to the disk."""

    def __init__(self, folder: Path, suffix: str, first_step: int = 1) -> None:
        """`first_step`: of those that are added; what earlier files of the folder hold from it on counts no more."""
        from tensorboardX import SummaryWriter  # only jobs that ask for it need it

        purge = first_step if first_step > 1 else None
        self._writer = SummaryWriter(
            str(folder), purge_step=purge, flush_secs=_FLUSH_SECONDS, filename_suffix=f".{suffix}", write_to_disk=True
        )

    def add(self, event: Event) -> None:
        """Add the numbers of a step."""
        if event.metrics is None or event.kind != "metrics":
            return
        for name, value in event.metrics.flat().items():
            if name not in _PLACES:
                self._writer.add_scalar(_tag(name), value, event.metrics.step, event.time)

    def close(self) -> None:
        self._writer.close()


def write_event_file(folder: Path, name: str, steps: Iterable[Event]) -> None:
    """Write the steps of a whole job as one file. `name`: behind the time of its first step; no host's name is in it."""
    events = [event for event in steps if event.metrics is not None]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = EventFile(Path(temporary), name)
        for event in events:
            file.add(event.model_copy(update={"kind": "metrics"}))
        file.close()
        (made,) = Path(temporary).iterdir()
        began = int(events[0].time) if events else 0
        made.rename(folder / f"{NAME}.{began}.{name}")


def _tag(name: str) -> str:
    """Tag by which TensorBoard groups curves: train/loss, valid/loss, rewards/margins."""
    for group in ("train", "valid"):
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return name if "/" in name else f"train/{name}"
