"""Event files as TensorBoard reads them: framed protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - made at import


def records(path: Path) -> Iterator[Any]:
    """Every record: its length (8 bytes), a checksum of that (4), the message, a checksum of it
    (4).
    """
    body = path.read_bytes()
    while body:
        (length,) = struct.unpack("<Q", body[:8])
        yield Event.FromString(body[12 : 12 + length])
        body = body[16 + length :]


def curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value), in the order of the file."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in records(path):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def session_starts(path: Path) -> list[int]:
    """Steps from which on what earlier files hold counts no more."""
    return [event.step for event in records(path) if event.HasField("session_log")]
