"""Sharded checkpoints (DCP) of a job's training state: adapters, optimizer, position.

Never the frozen base.

A checkpoint is written from a snapshot, so that training continues meanwhile. Every rank writes its
shards, then their hashes travel to rank 0, which writes COMPLETE last; a folder without it does not
exist for any reader. The ranks agree on the outcome of each step of that, so that all of them have
the checkpoint or none. Loading reshards: the world size may have changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from ft_service.errors import SpecError
from ft_service.rundir.attempt_seal import SealedError
from ft_service.rundir.checkpoints import (
    CHECKPOINT_ADAPTER,
    checkpoint_faults,
    checkpoint_key,
    checkpoint_name,
    has_marker,
    write_marker,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker
from ft_service.rundir.file_digest import NamedFile
from ft_service.spec import JobSpec
from workers.base.frozen_weights import with_shard
from workers.base.rank_objects import by_first
from workers.job.training_state import JobState, Validations
from workers.output.publishing import explained
from workers.patches.checkpoint_writer import checkpoint_writer
from workers.quant.local_rows import local_rows
from workers.ranks.runtime import CheckpointError

Found = TypeVar("Found")

_ALIGNMENT = 64
"""Bytes: every tensor of a snapshot begins at a multiple of this."""


class Position(BaseModel):
    """`position.json`: where in training the tensors belong, and of which job."""

    job_id: str
    base: str
    seed: int
    step: int
    trained_tokens: int
    validations: Validations = Validations()
    command: int = -1
    updates: int | None = None
    """None: as many as steps."""


@dataclass(frozen=True)
class Snapshot:
    """A job's state after one step.

    `tensors`: copies in the host's memory that nothing else uses.
    """

    tensors: dict[str, Tensor]
    position: Position
    criterion: float | None
    """Of CheckpointMarker, if this very step was validated."""
    adapter: dict[str, Tensor] | None = None
    """The whole adapter matrices, by PEFT's names on disk: on rank 0 of jobs whose checkpoints hold
    the adapter.
    """

    @property
    def bytes(self) -> int:
        """Bytes over all ranks."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Stager:
    """Copies a job's tensors into one buffer of its own, which every snapshot reuses: one snapshot
    lives at a time.

    One, because pinning costs the same for a small buffer as for a large one, and a job has
    thousands of tensors. torch's DefaultStager pins each of them, and in torch 2.11 it serves for
    one snapshot only.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, job: JobState, spec: JobSpec) -> Snapshot:
        position = Position(
            job_id=spec.job_id,
            base=spec.model.name,
            seed=spec.seed,
            step=job.step,
            trained_tokens=job.trained_tokens,
            validations=job.validations,
            command=job.command,
            updates=job.updates,
        )
        tensors = job.tensors()
        locals_ = {name: local_rows(tensor) for name, tensor in tensors.items()}
        places = self._places(list(locals_.values()))
        copies: dict[str, Tensor] = {}
        for (name, tensor), local, place in zip(
            tensors.items(), locals_.values(), places, strict=True
        ):
            copy = place.copy_(local, non_blocking=True)  # on CUDA only begun
            copies[name] = with_shard(tensor, copy) if isinstance(tensor, DTensor) else copy
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Snapshot(copies, position, job.validations.loss_at(job.step))

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A part of the buffer for each tensor, in its shape and dtype.

        The buffer is pinned if any of them is on a GPU.
        """
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if self._buffer.nbytes != sum(sizes):
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, self._buffer.split(sizes), strict=True)
        ]


def write(
    snapshot: Snapshot,
    run: RunDir,
    attempt: int,
    group: dist.ProcessGroup,
    before_complete: Callable[[], None],
    export: Callable[[Path], None] | None = None,
) -> str:
    """Write a checkpoint and return its name once it is complete.

    Called by all ranks together; `group`: a gloo group of all of them.

    `before_complete`: called on rank 0 when everything but COMPLETE is there. `export`: called on
    rank 0 with the folder in which it is to write the checkpoint's adapter; None: the checkpoint
    holds no adapter. Raises CheckpointError, on all ranks, if a file could not be written; what was
    written of the checkpoint is then removed.
    """
    name = checkpoint_name(snapshot.position.step, attempt)
    folder = run.path(checkpoint_key(name))
    try:
        _save_shards(snapshot, folder, group)
        if export is not None:
            _agreed(
                lambda: export(folder / CHECKPOINT_ADAPTER) if dist.get_rank() == 0 else None, group
            )
        files = _agreed(lambda: _digests(folder), group)
        _agreed(
            lambda: _complete(
                snapshot, run, attempt, [file for own in files for file in own], before_complete
            ),
            group,
        )
    except _WriteError as error:
        if dist.get_rank(group) == 0 and not has_marker(
            folder
        ):  # a later attempt may use it by now
            shutil.rmtree(folder, ignore_errors=True)
        why = explained(error.error, folder, snapshot.bytes)
        raise CheckpointError(f"Checkpoint {name} could not be written: {why}") from error.error
    return name


def restore(job: JobState, run: RunDir, name: str, spec: JobSpec) -> None:
    """Fill the job's state from a complete checkpoint.

    Raises SpecError if it belongs to another job.
    """
    position = read_position(run, name)
    if (position.job_id, position.base, position.seed) != (spec.job_id, spec.model.name, spec.seed):
        raise SpecError(
            f"Checkpoint {name} belongs to job {position.job_id} on base {position.base} with "
            f"seed {position.seed}, "
            f"not to {spec.job_id} on {spec.model.name} with seed {spec.seed}."
        )
    load(job.tensors(), checkpoint_id=run.path(checkpoint_key(name)))
    job.command = position.command
    updates = position.step if position.updates is None else position.updates
    job.resume_at(position.step, position.trained_tokens, position.validations, updates=updates)


def take_weights(job: JobState, run: RunDir, name: str, *, with_optimizer: bool) -> None:
    """Continue a job with the adapter of a complete checkpoint, which may be another job's, and
    with its optimizer's moments or none. Called by all ranks together.

    Raises SpecError if it is gone, damaged or holds other adapters; nothing is changed then.
    """
    folder = run.path(checkpoint_key(name))
    if not has_marker(folder):
        raise SpecError(
            f"The checkpoint {name} of the saved weights is gone: it was deleted, or its job was."
        )
    if faults := by_first(lambda: checkpoint_faults(run, name)):
        raise SpecError(
            f"The checkpoint {name} of the saved weights is damaged on the disk: {faults[0]}. "
            "Load another one."
        )
    stored = cast("dict[str, Any]", FileSystemReader(folder).read_metadata().state_dict_metadata)
    wanted = {
        key: tensor
        for key, tensor in job.tensors().items()
        if with_optimizer or key.startswith("adapter/")
    }
    for key, tensor in wanted.items():
        size = getattr(stored.get(key), "size", None)
        if size != tensor.shape:
            there = "no such adapter" if size is None else f"the shape {list(size)}"
            raise SpecError(
                f"The saved weights fit another model: {key.removeprefix('adapter/')} has the "
                f"shape {list(tensor.shape)} here, "
                f"and there is {there} in them. Create the model with the same rank and the same "
                "modules."
            )
    load(wanted, checkpoint_id=folder)
    position = read_position(run, name)
    updates = position.step if position.updates is None else position.updates
    job.take_loaded(updates if with_optimizer else 0)


def read_position(run: RunDir, name: str) -> Position:
    """The position of a complete checkpoint."""
    position = run.read(f"{checkpoint_key(name)}/position.json", Position)
    assert position is not None, f"checkpoint {name} is complete and has no position.json"
    return position


class _WriteError(Exception):
    """The error of the first rank that failed."""

    def __init__(self, error: OSError) -> None:
        self.error = error


def _save_shards(snapshot: Snapshot, folder: Path, group: dist.ProcessGroup) -> None:
    writer = checkpoint_writer(folder)
    try:
        save_shards(
            cast("dict[str, Any]", snapshot.tensors), storage_writer=writer, process_group=group
        )
    except CheckpointException as failed:  # the same on all ranks
        errors = [error for error, _ in failed.failures.values()]
        of_disk = next((error for error in errors if isinstance(error, OSError)), None)
        if of_disk is None:
            raise errors[0] from None
        raise _WriteError(of_disk) from None


def _agreed(act: Callable[[], Found], group: dist.ProcessGroup) -> list[Found]:
    """The results of `act` on all ranks, in order.

    Raises _WriteError on all of them if it raised OSError on one, and SealedError if it raised
    that.
    """
    try:
        mine: Found | OSError | SealedError = act()
    except (OSError, SealedError) as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for failed in everyone:
        if isinstance(failed, SealedError):
            raise failed
        if isinstance(failed, OSError):
            raise _WriteError(failed)
    return everyone


def _digests(folder: Path) -> list[NamedFile]:
    """Name, size and SHA-256 of the files that this rank wrote."""
    rank = dist.get_rank()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    mine = [
        p for p in files if p.name.startswith(f"__{rank}_") or (rank == 0 and p.suffix != ".distcp")
    ]
    return [NamedFile.below(folder, path) for path in mine]


def _complete(
    snapshot: Snapshot,
    run: RunDir,
    attempt: int,
    files: list[NamedFile],
    before_complete: Callable[[], None],
) -> None:
    if dist.get_rank() != 0:
        return
    position = snapshot.position
    name = checkpoint_name(position.step, attempt)
    run.write(f"{checkpoint_key(name)}/position.json", position)
    path = run.path(f"{checkpoint_key(name)}/position.json")
    files = [*files, NamedFile.below(path.parent, path)]
    before_complete()
    marker = CheckpointMarker(
        step=position.step,
        attempt=attempt,
        world_size=dist.get_world_size(),
        files=sorted(files, key=lambda file: file.name),
        criterion=snapshot.criterion,
    )
    write_marker(run, name, marker)
