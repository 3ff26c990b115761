"""A job's metrics as TensorBoard reads them: event files, where the job's integrations ask for
them.

tensorboard/events.out.tfevents.…    one an attempt, written while it trains
adapter/events.out.tfevents.…        with the outcome: every step once, as in metrics.csv
"""

from __future__ import annotations

import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ft_service.rundir.events import Event

FOLDER = "tensorboard"
NAME = "events.out.tfevents"
_VERSION = "brain.Event:2"
_PLACES = ("step", "total_steps")
"""Metrics that are not curves."""


class EventFile:
    """Writer of one event file, in the calling thread.

    What the disk does not take waits for the next `flush`.

    Not tensorboardX's own writer: its thread ends at the first error of the disk, and whoever adds
    ten numbers more then waits for ever.
    """

    def __init__(self, folder: Path, suffix: str, first_step: int = 1) -> None:
        """`first_step`: of those that are added; what earlier files of the folder hold from it on
        counts no more.
        """
        from tensorboardX.proto import event_pb2  # only jobs that ask for it need it

        self._messages: Any = event_pb2
        self._waiting = bytearray()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{NAME}.{int(time.time())}.{socket.gethostname()}.{suffix}").open(
            "wb", buffering=0
        )
        self._put(wall_time=time.time(), file_version=_VERSION)
        if first_step > 1:
            start = self._messages.SessionLog.START
            self._put(step=first_step, session_log=self._messages.SessionLog(status=start))

    def add(self, event: Event) -> None:
        """Add the numbers of a step; `flush` brings them to the disk."""
        from tensorboardX.summary import scalar

        if event.metrics is None or event.kind != "metrics":
            return
        for name, value in event.metrics.flat().items():
            if name not in _PLACES:
                self._put(
                    wall_time=event.time, step=event.metrics.step, summary=scalar(_tag(name), value)
                )

    def flush(self) -> None:
        """Write what waits. Raises OSError; what is not written then goes on waiting."""
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting) or 0]  # a disk may take a part

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _put(self, **fields: Any) -> None:
        """Add a record: its length, a checksum of that, the message, a checksum of it."""
        from tensorboardX.record_writer import masked_crc32c

        body = self._messages.Event(**fields).SerializeToString()
        length = struct.pack("<Q", len(body))
        for part in (length, body):
            self._waiting += part + struct.pack("<I", masked_crc32c(part))


def write_event_file(folder: Path, name: str, steps: Iterable[Event]) -> None:
    """Write the steps of a whole job as one file.

    `name`: behind the time of its first step; no host's name is in it. Raises OSError.
    """
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
