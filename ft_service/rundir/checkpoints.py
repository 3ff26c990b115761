"""Checkpoints of a run directory: which are complete, and whether their files are intact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import CheckpointMarker, Damage, Start

CHECKPOINTS = "checkpoints"
"""Folder of all checkpoints."""
CHECKPOINT_NAME = re.compile(r"step-(\d{1,9})-a(\d{1,9})")
CHECKPOINT_ADAPTER = "adapter"
"""Folder of a checkpoint with its adapter in PEFT's layout, if the workers write it
(FT_CHECKPOINT_ADAPTERS).
"""
MARKER = "COMPLETE"
"""File of a checkpoint, written last: readers ignore a checkpoint without it."""
DAMAGED = "DAMAGED"
"""File that marks a complete checkpoint as damaged."""


def checkpoint_name(step: int, attempt: int) -> str:
    return f"step-{step}-a{attempt}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    return int(name.split("-")[1])


def attempt_of(name: str) -> int:
    """Return the number of the attempt that wrote a checkpoint, by its name."""
    return int(name.split("-a")[1])


def checkpoint_key(name: str) -> str:
    """Return the key of a checkpoint's folder."""
    return f"{CHECKPOINTS}/{name}"


def marker_key(name: str) -> str:
    return f"{checkpoint_key(name)}/{MARKER}"


def damage_key(name: str) -> str:
    return f"{checkpoint_key(name)}/{DAMAGED}"


def is_marker(key: str) -> bool:
    """Return whether a key below a checkpoint is its marker."""
    return key.endswith(f"/{MARKER}")


def is_damage(key: str) -> bool:
    """Return whether a key below a checkpoint marks it as damaged."""
    return key.endswith(f"/{DAMAGED}")


def read_marker(run: RunDir, name: str) -> CheckpointMarker | None:
    """Read a checkpoint's marker; None: there is no such complete checkpoint.

    Raises UnreadableDocumentError.
    """
    return run.read(marker_key(name), CheckpointMarker)


def write_marker(run: RunDir, name: str, marker: CheckpointMarker) -> None:
    """Write the marker, the last file of a checkpoint, which makes it exist."""
    run.write(marker_key(name), marker)


def has_marker(folder: Path) -> bool:
    """Return whether a checkpoint's folder contains its marker."""
    return (folder / MARKER).is_file()


def remove_marker(folder: Path) -> None:
    """Remove the marker, the first step of removing a checkpoint's folder: no reader sees half a
    checkpoint. Raises OSError.
    """
    (folder / MARKER).unlink(missing_ok=True)


def mark_damaged(run: RunDir, name: str, faults: list[str]) -> None:
    """Mark a checkpoint as damaged for good, unless it is already."""
    run.write_if_absent(damage_key(name), Damage(faults=faults))


def complete_checkpoints(run: RunDir) -> list[str]:
    """Return the names of the complete checkpoints, oldest first: by step, then by attempt.

    Left out are damaged ones, and those that an attempt completed after a later attempt had begun,
    which trains their steps again.
    """
    marked = _marked_checkpoints(run)
    resumed = _resumed_checkpoints(run, min(attempt for _, attempt in marked)) if marked else {}
    return [
        checkpoint_name(*checkpoint) for checkpoint in marked if not is_late(checkpoint, resumed)
    ]


def is_late(checkpoint: tuple[int, int], resumed: Mapping[int, tuple[int, int]]) -> bool:
    """Return whether a checkpoint was completed after a later attempt had begun. Pure.

    `checkpoint`: step, attempt. `resumed`: attempt → checkpoint that it resumed from, the newest at
    that time; (-1, 0): none.
    """
    return any(
        attempt > checkpoint[1] and checkpoint > newest for attempt, newest in resumed.items()
    )


def _resumed_checkpoints(run: RunDir, number: int) -> dict[int, tuple[int, int]]:
    """Return what each attempt after `number` resumed from.

    Attempts without a readable start.json are left out.
    """
    resumed: dict[int, tuple[int, int]] = {}
    while True:
        number += 1
        attempt = Attempt(run, number)
        start = attempt.readable_start()
        if start is not None:
            match = CHECKPOINT_NAME.fullmatch(start.checkpoint or "")
            resumed[number] = (int(match[1]), int(match[2])) if match else (-1, 0)
        elif not attempt.has_exit() and not attempt.has_start():
            return resumed


def _marked_checkpoints(run: RunDir) -> list[tuple[int, int]]:
    """Return (step, attempt) of the checkpoints with a marker that are not damaged, oldest
    first.
    """
    checkpoints: list[tuple[int, int]] = []
    keys = set(run.list(CHECKPOINTS))
    for key in keys:
        _, name, file = key.split("/", 2)
        match = CHECKPOINT_NAME.fullmatch(name)
        if match and file == MARKER and damage_key(name) not in keys:
            checkpoints.append((int(match[1]), int(match[2])))
    return sorted(checkpoints)


def obtainable_checkpoints(run: RunDir) -> set[str]:
    """Return the names of checkpoints with an available adapter: complete ones, and removed ones
    whose adapter was made before.
    """
    made = {name for _, name, *inside in (key.split("/") for key in run.list("adapters")) if inside}
    return {*complete_checkpoints(run), *filter(CHECKPOINT_NAME.fullmatch, made)}


def newest_step(run: RunDir) -> int:
    """Return the step of the newest complete checkpoint without reading its files; -1: there is
    none.
    """
    names = complete_checkpoints(run)
    return step_of(names[-1]) if names else -1


def newest_checkpoint(run: RunDir) -> str | None:
    """Return the newest complete checkpoint whose files match its marker (sizes and SHA-256); None:
    there is none.
    """
    return next(
        (name for name in reversed(complete_checkpoints(run)) if not checkpoint_faults(run, name)),
        None,
    )


def checkpoint_faults(run: RunDir, name: str) -> list[str]:
    """Return the faults of a complete checkpoint's files; empty: none."""
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
    """Mark the damaged checkpoints of earlier attempts that are newer than the one an attempt
    resumes from. Returns name → faults.
    """
    names = [
        checkpoint_name(step, attempt)
        for step, attempt in _marked_checkpoints(run)
        if attempt < start.attempt
    ]
    newer = names[names.index(start.checkpoint) + 1 :] if start.checkpoint in names else names
    damaged = {name: faults for name in newer if (faults := checkpoint_faults(run, name))}
    for name, faults in damaged.items():
        mark_damaged(run, name, faults)
    return damaged
