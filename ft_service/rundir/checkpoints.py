"""The checkpoints of a run directory: which are complete, and whether their files are what was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import (
    CheckpointMarker,
    Damage,
    Start,
)

CHECKPOINTS = "checkpoints"
"""Folder of all checkpoints."""
CHECKPOINT_NAME = re.compile(r"step-(\d{1,9})-a(\d{1,9})")
CHECKPOINT_ADAPTER = "adapter"
"""Folder in a checkpoint with its adapter as PEFT loads it, if the workers were told to write it (FT_CHECKPOINT_ADAPTERS)."""
MARKER = "COMPLETE"
"""File in a checkpoint, written last: without it the checkpoint does not exist for any reader."""
DAMAGED = "DAMAGED"
"""File in a checkpoint that was complete and is so no more."""


def checkpoint_name(step: int, attempt: int) -> str:
    return f"step-{step}-a{attempt}"


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    return int(name.split("-")[1])


def checkpoint_key(name: str) -> str:
    """The folder of a checkpoint."""
    return f"{CHECKPOINTS}/{name}"


def marker_key(name: str) -> str:
    return f"{checkpoint_key(name)}/{MARKER}"


def damage_key(name: str) -> str:
    return f"{checkpoint_key(name)}/{DAMAGED}"


def is_marker(key: str) -> bool:
    """Whether a key below a checkpoint is that of its marker."""
    return key.endswith(f"/{MARKER}")


def is_damage(key: str) -> bool:
    """Whether a key below a checkpoint says that it is damaged."""
    return key.endswith(f"/{DAMAGED}")


def read_marker(run: RunDir, name: str) -> CheckpointMarker | None:
    """None: there is no such complete checkpoint. Raises UnreadableDocumentError."""
    return run.read(marker_key(name), CheckpointMarker)


def write_marker(run: RunDir, name: str, marker: CheckpointMarker) -> None:
    """The last write of a checkpoint: from now on it exists."""
    run.write(marker_key(name), marker)


def has_marker(folder: Path) -> bool:
    """Whether a checkpoint's folder holds its marker."""
    return (folder / MARKER).is_file()


def remove_marker(folder: Path) -> None:
    """The first step of removing a checkpoint's folder, so that no checkpoint is ever seen half removed. Raises OSError."""
    (folder / MARKER).unlink(missing_ok=True)


def mark_damaged(run: RunDir, name: str, faults: list[str]) -> None:
    """Set a checkpoint aside for good, unless that was done before."""
    run.write_if_absent(damage_key(name), Damage(faults=faults))


def complete_checkpoints(run: RunDir) -> list[str]:
    """Names of the checkpoints whose marker is there, oldest first: by step, then by attempt.

    Those set aside do not count, nor those that came after a later attempt had begun: it trains their steps anew.
    """
    found = _marked_checkpoints(run)
    begun = _begun_from(run, min((attempt for _, attempt in found), default=0)) if found else {}
    return [checkpoint_name(*one) for one in found if not came_late(one, begun)]


def came_late(checkpoint: tuple[int, int], begun: Mapping[int, tuple[int, int]]) -> bool:
    """Whether a checkpoint was not there when a later attempt began. Pure.

    `checkpoint`: step, attempt. `begun`: attempt → the checkpoint that it began with, the newest of its time; (-1, 0): none.
    """
    return any(attempt > checkpoint[1] and checkpoint > newest for attempt, newest in begun.items())


def _begun_from(run: RunDir, attempt: int) -> dict[int, tuple[int, int]]:
    """What the attempts behind this one began with. One that never began has an exit record at most; of one whose start.json
    cannot be read nobody knows."""
    found: dict[int, tuple[int, int]] = {}
    while True:
        attempt += 1
        one = Attempt(run, attempt)
        start = one.readable_start()
        if start is not None:
            match = CHECKPOINT_NAME.fullmatch(start.checkpoint or "")
            found[attempt] = (int(match[1]), int(match[2])) if match else (-1, 0)
        elif not one.has_exit() and not one.has_start():
            return found


def _marked_checkpoints(run: RunDir) -> list[tuple[int, int]]:
    """Step and attempt of the checkpoints whose marker is there and that were not set aside, oldest first."""
    found: list[tuple[int, int]] = []
    keys = set(run.list(CHECKPOINTS))
    for key in keys:
        _, name, file = key.split("/", 2)
        match = CHECKPOINT_NAME.fullmatch(name)
        if match and file == MARKER and damage_key(name) not in keys:
            found.append((int(match[1]), int(match[2])))
    return sorted(found)


def obtainable_checkpoints(run: RunDir) -> set[str]:
    """Names of the checkpoints whose adapter can be had: complete ones, and those gone since whose adapter was made before."""
    made = {name for _, name, *inside in (key.split("/") for key in run.list("adapters")) if inside}
    return {*complete_checkpoints(run), *filter(CHECKPOINT_NAME.fullmatch, made)}


def newest_step(run: RunDir) -> int:
    """Step of the newest complete checkpoint, its files not looked at; -1: there is none."""
    names = complete_checkpoints(run)
    match = CHECKPOINT_NAME.fullmatch(names[-1]) if names else None
    return int(match[1]) if match else -1


def newest_checkpoint(run: RunDir) -> str | None:
    """The newest complete checkpoint whose files are what its marker says (sizes and SHA-256), or None."""
    for name in reversed(complete_checkpoints(run)):
        if not checkpoint_faults(run, name):
            return name
    return None


def checkpoint_faults(run: RunDir, name: str) -> list[str]:
    """What is wrong with a complete checkpoint's files; empty: nothing."""
    try:
        marker = read_marker(run, name)
    except UnreadableDocumentError as error:
        return [error.message.removeprefix(f"{checkpoint_key(name)}/").rstrip(".")]
    if marker is None:
        return [f"{MARKER} is missing"]
    faults = []
    for file in marker.files:
        key = f"{checkpoint_key(name)}/{file.name}"
        if fault := file.fault(run.size(key), partial(run.digest, key)):
            faults.append(f"{file.name} {fault}")
    return faults


def set_damaged_aside(run: RunDir, start: Start) -> dict[str, list[str]]:
    """Mark the damaged checkpoints of earlier attempts that are newer than the one an attempt begins with: name → what is
    wrong."""
    names = [checkpoint_name(step, attempt) for step, attempt in _marked_checkpoints(run) if attempt < start.attempt]
    newer = names[names.index(start.checkpoint) + 1 :] if start.checkpoint in names else names
    found = {name: faults for name in newer if (faults := checkpoint_faults(run, name))}
    for name, faults in found.items():
        mark_damaged(run, name, faults)
    return found
