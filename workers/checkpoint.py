"""Sharded checkpoints (DCP) of what belongs to the job: adapters, optimizer, position. The frozen base is never in them.

Every rank writes its shards, then its hashes travel to rank 0, which writes COMPLETE last; a folder without it does not exist
for any reader. Loading reshards: the world size may have changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from ft_service.errors import SpecError
from ft_service.rundir import (
    CheckpointFile,
    CheckpointMarker,
    RunDir,
    checkpoint_name,
    complete_checkpoints,
    sha256_of,
)
from ft_service.spec import JobSpec
from workers.optim import JobState


class Position(BaseModel):
    """`position.json`: where in training the tensors belong, and of which job."""

    job_id: str
    base: str
    seed: int
    step: int
    trained_tokens: int


def save(job: JobState, run: RunDir, attempt: int, spec: JobSpec) -> str:
    """Write a checkpoint of the current step, complete when this returns, and its name. Called by all ranks together."""
    name = checkpoint_name(job.step, attempt)
    folder = run.path(f"checkpoints/{name}")
    save_shards(job.tensors(), checkpoint_id=folder)
    if dist.get_rank() == 0:
        position = Position(
            job_id=spec.job_id, base=spec.model.name, seed=spec.seed, step=job.step, trained_tokens=job.trained_tokens
        )
        run.write(f"checkpoints/{name}/position.json", position)
    files = _gather_digests(folder)
    if dist.get_rank() == 0:
        marker = CheckpointMarker(step=job.step, attempt=attempt, world_size=dist.get_world_size(), files=files)
        run.write(f"checkpoints/{name}/COMPLETE", marker)
        _remove_old(run, keep=spec.checkpoint.save_total_limit)
    dist.barrier()
    return name


def restore(job: JobState, run: RunDir, name: str, spec: JobSpec) -> None:
    """Fill the job's state from a complete checkpoint. Raises SpecError if it is another job's."""
    position = run.read(f"checkpoints/{name}/position.json", Position)
    assert position is not None, f"checkpoint {name} is complete and has no position.json"
    if (position.job_id, position.base, position.seed) != (spec.job_id, spec.model.name, spec.seed):
        raise SpecError(
            f"Checkpoint {name} belongs to job {position.job_id} on base {position.base} with seed {position.seed}, "
            f"not to {spec.job_id} on {spec.model.name} with seed {spec.seed}."
        )
    load(job.tensors(), checkpoint_id=run.path(f"checkpoints/{name}"))
    job.resume_at(position.step, position.trained_tokens)


def _gather_digests(folder: Path) -> list[CheckpointFile]:
    """Name, size and SHA-256 of every file; each rank hashes the shards that it wrote."""
    rank = dist.get_rank()
    mine = [p for p in sorted(folder.iterdir()) if p.name.startswith(f"__{rank}_") or (rank == 0 and p.suffix != ".distcp")]
    found = [CheckpointFile(name=p.name, bytes=p.stat().st_size, sha256=sha256_of(p)) for p in mine]
    everyone: list[list[CheckpointFile]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return [file for files in everyone for file in files]


def _remove_old(run: RunDir, keep: int) -> None:
    """Keep the newest complete ones; of the others the marker goes first, so that none is ever seen half removed."""
    newest = set(complete_checkpoints(run)[-keep:])
    for folder in run.path("checkpoints").iterdir():
        if folder.name not in newest:
            (folder / "COMPLETE").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
