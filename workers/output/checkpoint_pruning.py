"""Removal of old checkpoints.

What is on disk decides, so that a resumed job keeps what an uninterrupted one would have.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.rundir.attempt_seal import Fence
from ft_service.rundir.checkpoints import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    checkpoint_name,
    complete_checkpoints,
    has_marker,
    marker_key,
    remove_marker,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker
from ft_service.spec import JobSpec
from ft_service.tinker.saved_weights import saved_checkpoints


@dataclass(frozen=True)
class CheckpointEntry:
    """A complete checkpoint."""

    step: int
    attempt: int
    criterion: float | None = None
    """Of CheckpointMarker."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.attempt)


def checkpoint_entries(run: RunDir) -> list[CheckpointEntry]:
    """The complete checkpoints, oldest first."""
    markers = [
        run.readable(marker_key(name), CheckpointMarker) for name in complete_checkpoints(run)
    ]
    return [
        CheckpointEntry(marker.step, marker.attempt, marker.criterion)
        for marker in markers
        if marker is not None
    ]


def best(checkpoints: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The checkpoint with the lowest criterion, the earliest of equal ones.

    None: no step with a checkpoint was validated.
    """
    validated = [
        (c.criterion, c.step, -c.attempt, c) for c in checkpoints if c.criterion is not None
    ]
    return min(validated)[-1] if validated else None


def kept_checkpoints(checkpoints: Sequence[CheckpointEntry], spec: JobSpec) -> set[CheckpointEntry]:
    """The checkpoints that stay, of all complete ones, oldest first.

    A step belongs to its newest attempt.
    """
    options = spec.checkpoint
    newest = list({c.step: c for c in checkpoints}.values())
    stay = set(newest[-options.save_total_limit :])
    if options.keep_every is not None:
        stay |= {c for c in newest if c.step % options.keep_every == 0}
    best_one = best(newest) if keeps_best(spec) else None
    return stay | {best_one} if best_one is not None else stay


def keeps_best(spec: JobSpec) -> bool:
    return spec.checkpoint.keep_best or spec.training.load_best_model_at_end


def remove_others(run: RunDir, spec: JobSpec, fence: Fence) -> None:
    """Remove the checkpoints that do not stay, and those never completed.

    Call it after one is complete, while none is written.

    The marker goes first, so that no checkpoint is ever seen half removed. Nothing of a later
    attempt is touched, nor anything once the attempt is sealed. Raises SealedError.
    """
    names = {
        checkpoint.name for checkpoint in kept_checkpoints(checkpoint_entries(run), spec)
    } | saved_checkpoints(run)
    for folder in run.path(CHECKPOINTS).iterdir():
        match = CHECKPOINT_NAME.fullmatch(folder.name)
        if folder.name not in names and (match is None or int(match[2]) <= fence.attempt):
            fence.check()
            try:
                remove_marker(folder)
            except OSError:  # it stays whole, and is tried again behind the next checkpoint
                continue
            shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(run: RunDir, fence: Fence) -> None:
    """Remove the checkpoints that earlier attempts were killed at writing.

    Call it before the first one is written: a job that is killed at each of them would fill the
    disk. Raises SealedError.

    The attempts are over, since this one has begun. If a rank of one still writes, on another host
    or after it was suspended, that checkpoint was not there when this attempt began, and does not
    exist for any reader (`is_late`).
    """
    folder = run.path(CHECKPOINTS)
    for unfinished in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT_NAME.fullmatch(unfinished.name)
        if match is not None and int(match[2]) < fence.attempt and not has_marker(unfinished):
            fence.check()
            shutil.rmtree(unfinished, ignore_errors=True)
